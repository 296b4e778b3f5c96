"""Sparse latent attention (MLA without RoPE): one cached latent a token, read by absorbed queries over some tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.reference import indexer, numerics
from glm53_mono.reference.norm import rms_norm
from glm53_mono.reference.state import PADDED_LOCATION, Caches, StepInputs
from glm53_mono.weights.model import MlaWeights


@dataclass(frozen=True)
class Attention:
    """A layer's stages by row; rows of padded requests select nothing and attend to nothing."""

    query_latent: Tensor
    """[rows, q_rank] bf16, normalised."""
    latent: Tensor
    """[rows, latent] bf16, normalised: what is cached."""
    index: indexer.Projections
    selection: Tensor
    """[rows, selection_width] i64: positions of the selected tokens, then -1."""
    query: Tensor
    """[rows, mla_heads, latent] bf16, absorbed."""
    mixed: Tensor
    """[rows, mla_heads, latent] bf16: the latents weighted by their probabilities."""
    value: Tensor
    """[rows, mla_heads * v_head_dim] bf16."""
    output: Tensor
    """[rows, hidden] bf16."""


def latents(y: Tensor, weights: MlaWeights[Tensor], geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The normalised query latent [rows, q_rank] and cached latent [rows, latent], bf16 (forward_mla.py:295-420).

    Args:
        y: [rows, hidden] bf16.
        weights: the layer's.
        geometry: sizes of one rank.
    """
    query, latent = numerics.linear(y, weights.query_latent).split((geometry.q_rank, geometry.latent), -1)
    return rms_norm(query, weights.query_norm, geometry.rms_eps), rms_norm(
        latent, weights.latent_norm, geometry.rms_eps
    )


def absorbed_query(query_latent: Tensor, weights: MlaWeights[Tensor], geometry: Geometry) -> Tensor:
    """Queries in the latent space: q_b, rounded, then each head's key matrix, rounded (forward_mla.py:586).

    Args:
        query_latent: [rows, q_rank] bf16.
        weights: the layer's.
        geometry: sizes of one rank.

    Returns:
        [rows, mla_heads, latent] bf16.
    """
    query = numerics.linear(query_latent, weights.query).unflatten(-1, (geometry.mla_heads, geometry.qk_head_dim))
    return numerics.linear(query.transpose(0, 1), weights.key_up).transpose(0, 1)


def sparse_attention(
    query: Tensor, cache: Tensor, slots: Tensor, scale: float, *, round_probabilities: bool = False
) -> Tensor:
    """Softmax attention over chosen cache slots, keys and values being the same latents.

    Args:
        query: [rows, heads, latent] bf16.
        cache: [cache slots, 1, latent] bf16.
        slots: [rows, width] i64; -1 stands for no token, and a row of nothing else yields zeros.
        scale: factor of the scores.
        round_probabilities: round the unnormalised probabilities exp(score - max) to bf16 before they weight the
            latents, and divide by their unrounded sum, as the GPU kernels do (tilelang_kernel.py:225-240).

    Returns:
        [rows, heads, latent] bf16.
    """
    chosen = slots >= 0
    keys = cache[slots.clamp(min=0), 0].masked_fill(~chosen[..., None], 0)
    scores = numerics.matmul(query, keys.transpose(1, 2)) * scale
    scores = scores.masked_fill(~chosen[:, None], float("-inf"))
    greatest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - greatest.masked_fill(greatest.isinf(), 0))
    total = weights.sum(-1, keepdim=True)
    if round_probabilities:
        mixed = numerics.matmul(weights.bfloat16(), keys) / total
    else:
        mixed = numerics.matmul(weights / total, keys)
    return mixed.masked_fill(total == 0, 0).bfloat16()


def values(mixed: Tensor, weights: MlaWeights[Tensor]) -> Tensor:
    """Each head's value matrix applied to its mixed latent (forward_mla.py:921-933).

    Args:
        mixed: [rows, mla_heads, latent] bf16.
        weights: the layer's.

    Returns:
        [rows, mla_heads * v_head_dim] bf16.
    """
    return numerics.linear(mixed.transpose(0, 1), weights.value_up).transpose(0, 1).flatten(1)


def attention(
    y: Tensor,
    inputs: StepInputs,
    caches: Caches,
    ordinal: int,
    weights: MlaWeights[Tensor],
    geometry: Geometry,
    *,
    round_probabilities: bool = False,
) -> Attention:
    """One MLA layer's attention: latents and pooled keys are cached first, so that draft tokens see the drafts before
    them.

    Draft tokens are cached whether they are accepted or not; the next step rewrites what was rejected.

    Args:
        y: [rows, hidden] bf16, the layer's normalised input.
        inputs: of the step.
        caches: changed in place.
        ordinal: of the layer among the MLA layers.
        weights: the layer's.
        geometry: sizes of one rank.
        round_probabilities: see `sparse_attention`.
    """
    query_latent, latent = latents(y, weights, geometry)
    written = inputs.out_cache_loc != PADDED_LOCATION
    caches.latent[ordinal][inputs.out_cache_loc[written], 0] = latent[written]

    index = indexer.project(y, query_latent, weights.indexer, geometry)
    indexer.update(index, inputs, caches, ordinal, weights.indexer, geometry)
    selection = indexer.select(index, inputs, caches, ordinal, geometry)

    query = absorbed_query(query_latent, weights, geometry)
    slots = token_slots(selection, inputs)
    mixed = sparse_attention(
        query, caches.latent[ordinal], slots, geometry.qk_head_dim**-0.5, round_probabilities=round_probabilities
    )
    value = values(mixed, weights)
    return Attention(
        query_latent=query_latent,
        latent=latent,
        index=index,
        selection=selection,
        query=query,
        mixed=mixed,
        value=value,
        output=numerics.linear(value, weights.output),
    )


def token_slots(selection: Tensor, inputs: StepInputs) -> Tensor:
    """Cache slots of selected positions [rows, width] i64; -1 stays -1."""
    rows = inputs.req_pool_indices[inputs.row_requests]
    slots = inputs.req_to_token[rows[:, None], selection.clamp(min=0)].long()
    return slots.masked_fill(selection < 0, -1)
