"""Small models with the layer kinds of the real one, cheap enough for the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from glm53_mono.cli.checkpoint_config import SCALES, model_config

KDA, DSA = "kda", "dsa"

ONE_OF_EACH = (KDA, DSA, KDA)
"""With one dense layer: the three kinds of layer that the real model has."""

TWO_OF_EACH = (KDA, DSA, KDA, DSA)
"""Two layers of either attention, so that a cache of the wrong layer shows."""


def small_config(
    attention: Sequence[str], *, dense_layers: int = 1, experts: int = 8, index_topk: int = 64
) -> dict[str, Any]:
    """The contents of a small model's config.json.

    Args:
        attention: `KDA` or `DSA` for each layer.
        dense_layers: layers at the start whose FFN is dense.
        experts: routed experts of the other layers.
        index_topk: history tokens a row attends at most; small, so that selection happens in short contexts.
    """
    layers = len(attention)
    config = model_config(layers, experts, replace(SCALES["small"], index_topk=index_topk), mtp=False)
    text = config["text_config"]
    text["linear_attn_config"]["kda_layers"] = [layer for layer, kind in enumerate(attention) if kind == KDA]
    text["linear_attn_config"]["full_attn_layers"] = [layer for layer, kind in enumerate(attention) if kind == DSA]
    text["first_k_dense_replace"] = dense_layers
    text["mlp_layer_types"] = ["dense" if layer < dense_layers else "sparse" for layer in range(layers)]
    return config
