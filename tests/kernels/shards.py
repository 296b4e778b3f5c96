"""A whole model's weights and caches cut for the ranks that share it, and caches put together again.

Written from SGLang's layers (`tests/oracle/test_shards.py` holds it to them), and from none of the package's readers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.reference.state import Caches
from glm53_mono.weights.model import DenseWeights, KdaWeights, LayerWeights, MlaWeights, MoeWeights
from tests.kernels.rig import Model

BY_HEAD = {"temporal": 2, "intermediate_ssm": 3}
"""Caches of which a rank holds its heads' part, and the dimension of the heads."""

BY_CHANNEL = ("conv", "intermediate_conv")
"""Caches of which a rank holds its heads' channels of q, of k and of v."""


def shard_geometry(geometry: Geometry, ranks: int) -> Geometry:
    """The sizes of one of so many ranks."""
    shared = ("kda_heads", "mla_heads", "expert_width", "dense_width")
    return replace(geometry, tp_size=ranks, **{name: getattr(geometry, name) // ranks for name in shared})


def shard_model(model: Model, rank: int, ranks: int) -> Model:
    """A rank's part of a model; its head stays whole, for no launch reads it."""
    geometry = shard_geometry(model.geometry, ranks)
    first = rank * geometry.vocab_shard
    weights = replace(
        model.weights,
        embedding=model.weights.embedding[first : first + geometry.vocab_shard].contiguous(),
        first_token=first,
        layers=tuple(_layer(layer, geometry, rank) for layer in model.weights.layers),
    )
    return Model(geometry, weights)


def _layer(layer: LayerWeights[Tensor], geometry: Geometry, rank: int) -> LayerWeights[Tensor]:
    ranks = geometry.tp_size
    return replace(layer, attention=_cut(layer.attention, rank, ranks), ffn=_cut(layer.ffn, rank, ranks))


CUTS: dict[type, dict[str, tuple[int, int]]] = {
    KdaWeights: {
        "qkv": (0, 3),
        "beta": (0, 1),
        "decay_up": (0, 1),
        "gate_up": (0, 1),
        "taps": (0, 3),
        "a_log": (0, 1),
        "dt_bias": (0, 1),
        "output": (1, 1),
    },
    MlaWeights: {"query": (0, 1), "key_up": (0, 1), "value_up": (0, 1), "output": (1, 1)},
    DenseWeights: {"gate_up": (0, 2), "down": (1, 1)},
    MoeWeights: {"gate_up": (1, 2), "down": (2, 1)},
}
"""The dimension in which a weight is cut, and how many groups lie one behind the other in it; others are whole."""


def _cut(weights: Any, rank: int, ranks: int) -> Any:
    own = {
        name: part(getattr(weights, name), dim, rank, ranks, groups)
        for name, (dim, groups) in CUTS[type(weights)].items()
    }
    if isinstance(weights, MoeWeights) and weights.shared is not None:
        own["shared"] = _cut(weights.shared, rank, ranks)
    return replace(weights, **own)


def join_layers(models: list[Model]) -> tuple[LayerWeights[Tensor], ...]:
    """The layers of the whole model that the ranks' weights are parts of."""
    return tuple(
        replace(
            layers[0],
            attention=_joined([layer.attention for layer in layers]),
            ffn=_joined([layer.ffn for layer in layers]),
        )
        for layers in zip(*(model.weights.layers for model in models), strict=True)
    )


def _joined(parts: list[Any]) -> Any:
    whole = {
        name: torch.cat([getattr(own, name).unflatten(dim, (groups, -1)) for own in parts], dim + 1).flatten(
            dim, dim + 1
        )
        for name, (dim, groups) in CUTS[type(parts[0])].items()
    }
    if isinstance(parts[0], MoeWeights) and parts[0].shared is not None:
        whole["shared"] = _joined([own.shared for own in parts])
    return replace(parts[0], **whole)


def part(tensor: Tensor, dim: int, rank: int, ranks: int, groups: int = 1) -> Tensor:
    """A rank's share of a dimension, which holds so many groups one behind the other, each cut alike."""
    own = tensor.unflatten(dim, (groups, ranks, -1)).select(dim + 1, rank)
    return own.flatten(dim, dim + 1).contiguous().clone()


def shard_caches(caches: Caches, rank: int, ranks: int) -> Caches:
    """Copies of a rank's part; latents, index keys and rings are the same on every rank."""
    own = caches.clone()
    parts = {name: part(getattr(caches, name), dim, rank, ranks) for name, dim in BY_HEAD.items()}
    parts |= {
        name: part(getattr(caches, name), getattr(caches, name).ndim - 1, rank, ranks, groups=3) for name in BY_CHANNEL
    }
    return replace(own, **parts)


def gather_caches(into: Caches, shards: list[Caches]) -> None:
    """Fills the whole caches from the ranks' parts, what is whole on each from the first."""
    for name, dim in BY_HEAD.items():
        getattr(into, name).copy_(torch.cat([getattr(shard, name) for shard in shards], dim))
    for name in BY_CHANNEL:
        grouped = [getattr(shard, name).unflatten(-1, (3, -1)) for shard in shards]
        getattr(into, name).copy_(torch.cat(grouped, -1).flatten(-2))
    for name in ("latent", "index", "ring_key", "ring_gate"):
        for whole, own in zip(getattr(into, name), getattr(shards[0], name), strict=True):
            whole.copy_(own)
