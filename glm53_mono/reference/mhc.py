"""Manifold-constrained hyper-connections: four residual streams, mixed before each branch and updated after it.

Formulas and roundings: the torch tier of SGLang's `kernels/ops/layernorm/mhc.py:1900-1960`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.reference import numerics
from glm53_mono.weights.model import MhcWeights


@dataclass(frozen=True)
class Gates:
    """How one branch reads the streams and writes them back; all fp32."""

    pre: Tensor
    """[rows, streams]: weight of each stream in the branch's input."""
    post: Tensor
    """[rows, streams]: weight of the branch's output in each new stream."""
    comb: Tensor
    """[rows, old stream, new stream]: the doubly stochastic mixing of the streams."""


def expand(embedding: Tensor, streams: int) -> Tensor:
    """The first streams of a row: its embedding [rows, hidden], repeated to [rows, streams, hidden] (mhc.py:1864)."""
    return embedding[:, None].repeat(1, streams, 1)


def mix(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """The 24 mixing logits of each row: `fn` times the RMS-normalised streams (mhc.py:1917-1919).

    Args:
        streams: [rows, streams, hidden] bf16.
        fn: [mix, streams * hidden] fp32.
        eps: added to the mean square over all streams.

    Returns:
        [rows, mix] fp32: pre, post, then comb row by row.
    """
    flat = streams.flatten(1).float()
    return numerics.linear_fp32(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def gates(logits: Tensor, weights: MhcWeights, geometry: Geometry) -> Gates:
    """Turn mixing logits [rows, mix] fp32 into gates (mhc.py:1921-1939)."""
    n = geometry.streams
    pre, post, comb = (logits * _repeated_scale(weights.scale, n) + weights.base).split((n, n, n * n), dim=-1)
    return Gates(
        pre=torch.sigmoid(pre) + geometry.hc_eps,
        post=geometry.post_multiplier * torch.sigmoid(post),
        comb=sinkhorn(comb.unflatten(-1, (n, n)), geometry.sinkhorn_iterations, geometry.hc_eps),
    )


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """A softmax over the new streams, then alternating normalisation, columns first (mhc.py:1931-1936).

    Args:
        logits: [rows, n, n] fp32.
        iterations: column normalisations; a row normalisation stands between any two of them.
        eps: added to the softmax and to every sum.

    Returns:
        [rows, n, n] fp32 whose columns add up to about 1, and whose rows nearly do.
    """
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def read(streams: Tensor, pre: Tensor) -> Tensor:
    """A branch's input before its RMSNorm: the weighted sum of the streams, [rows, hidden] bf16 (mhc.py:1938)."""
    return (pre[..., None] * streams.float()).sum(1).bfloat16()


def write(branch: Tensor, streams: Tensor, gate: Gates) -> Tensor:
    """The new streams: `post[o] * branch + sum_i comb[i, o] * streams[i]`, one rounding (mhc.py:1942-1951).

    Args:
        branch: [rows, hidden] bf16, the complete attention or FFN output.
        streams: [rows, streams, hidden] bf16, as `mix` saw them.
        gate: what `gates` made of them.

    Returns:
        [rows, streams, hidden] bf16.
    """
    mixed = (gate.comb[..., None] * streams.float()[:, :, None]).sum(1)
    return (gate.post[..., None] * branch.float()[:, None] + mixed).bfloat16()


def contract(streams: Tensor) -> Tensor:
    """The mean of the streams after the last layer, [rows, hidden] bf16 (mhc.py:1896)."""
    return streams.float().mean(1).bfloat16()


def _repeated_scale(scale: Tensor, streams: int) -> Tensor:
    return scale.repeat_interleave(torch.tensor([streams, streams, streams * streams], device=scale.device))
