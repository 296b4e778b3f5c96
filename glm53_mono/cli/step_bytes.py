"""Bytes of device memory that a step cannot do without, by what they are: the denominator of its bandwidth.

Every weight counts once however many rows there are; of the routed experts those count that some row chose. A request's
KDA state is read once and written once a row, in decode to its slot and in verify to the scratch of each draft token.
What a step reads again is left out, and so are its activations and workspace and what it writes to the caches beside
the KDA state: they stay in the L2 cache, or are below a megabyte. The rows of a request read nearly the same latents
and the same index keys: those of its last row count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.weights.descriptor import Matrix
from glm53_mono.weights.model import MoeWeights, StepWeights

LATENT_ITEM = 2
"""Bytes of one value of the latent cache, bf16."""

STATE_ITEM = 4
"""Bytes of one value of the recurrent state, fp32."""

WINDOW_ITEM = 2
"""Bytes of one value of a convolution window, bf16."""


@dataclass(frozen=True)
class StepBytes:
    """One step's bytes.

    Attributes:
        weights: matrices, norms and gates of all layers, routed experts left out.
        experts: the routed experts that some row chose.
        embedding: a row of the table for each token.
        latents: the latents that the requests' rows attend to.
        index_keys: the pooled keys, with their scales, of requests that see more pools than they may attend to.
        state: recurrent states and convolution windows, read once a request and written once a row.
    """

    weights: int
    experts: int
    embedding: int
    latents: int
    index_keys: int
    state: int

    @property
    def total(self) -> int:
        """All of them; the head's matrix, which SGLang's LogitsProcessor reads, is not among them."""
        return sum(asdict(self).values())


def step_bytes(
    geometry: Geometry,
    weights: StepWeights,
    lengths: Sequence[int],
    distinct_experts: Sequence[int],
    tokens: int = 1,
) -> StepBytes:
    """Bytes of one decode or verify step.

    Args:
        geometry: of the rank.
        weights: of the rank; their own sizes count, not the geometry's.
        lengths: tokens that the first row of each request sees, its own included.
        distinct_experts: of each layer with routed experts, in order.
        tokens: rows of a request; each sees a token more than the one before it.

    Raises:
        ValueError: counts for another number of layers.
    """
    sparse = [layer.ffn for layer in weights.layers if isinstance(layer.ffn, MoeWeights)]
    if len(distinct_experts) != len(sparse):
        raise ValueError(f"{len(distinct_experts)} counts of experts for {len(sparse)} layers that route")
    routed = sum(_experts(ffn, geometry.experts) for ffn in sparse)
    last = [length + tokens - 1 for length in lengths]
    return StepBytes(
        weights=_size(weights.layers) - routed + _size(weights.norm),
        experts=sum(
            count * _experts(ffn, geometry.experts) // geometry.experts
            for count, ffn in zip(distinct_experts, sparse, strict=True)
        ),
        embedding=len(lengths) * tokens * weights.embedding.bytes // weights.embedding.rows,
        latents=len(geometry.dsa_layers) * sum(attended_tokens(geometry, n) for n in last) * _latent(geometry),
        index_keys=len(geometry.dsa_layers) * sum(scored_pools(geometry, n) for n in last) * _pool_key(geometry),
        state=len(geometry.kda_layers) * len(lengths) * (1 + tokens) * _state(geometry),
    )


def attended_tokens(geometry: Geometry, length: int) -> int:
    """Tokens that a row of a request of `length` tokens attends to: whole pools, then the unfinished one."""
    return min(length // geometry.pool, geometry.selected_pools) * geometry.pool + length % geometry.pool


def scored_pools(geometry: Geometry, length: int) -> int:
    """Pools whose keys a row must score: none while it may attend to all of them."""
    pools = length // geometry.pool
    return pools if pools > geometry.selected_pools else 0


def _experts(ffn: MoeWeights, experts: int) -> int:
    """Bytes of a layer's routed experts; a shared one behind them in the same stack does not count."""
    stacks = (ffn.gate_up, ffn.down)
    return sum(stack.bytes // stack.data.shape[0] * experts for stack in stacks)


def _latent(geometry: Geometry) -> int:
    return geometry.latent * LATENT_ITEM


def _pool_key(geometry: Geometry) -> int:
    return geometry.index_page_bytes // geometry.page_pools


def _state(geometry: Geometry) -> int:
    recurrent = geometry.kda_heads * geometry.kda_head_dim**2 * STATE_ITEM
    return recurrent + geometry.conv_history * geometry.conv_channels * WINDOW_ITEM


def _size(value: Any) -> int:
    """Bytes of every tensor in a value of the weights' classes."""
    if value is None:
        return 0
    if isinstance(value, Matrix):
        return value.bytes
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, tuple):
        return sum(_size(item) for item in value)
    if is_dataclass(value):
        return sum(_size(getattr(value, field.name)) for field in fields(value))
    raise TypeError(f"{type(value).__name__} is no weight")
