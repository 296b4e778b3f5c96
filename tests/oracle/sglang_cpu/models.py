"""Small models with the layer kinds of the real one, cheap enough for the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from glm53_mono.checkpoint.config import SCALES, model_config, order_layers

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
    config = model_config(len(attention), experts, replace(SCALES["small"], index_topk=index_topk), mtp=False)
    order_layers(config, [layer for layer, kind in enumerate(attention) if kind == KDA], dense_layers)
    return config
