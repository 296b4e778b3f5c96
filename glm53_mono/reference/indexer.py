"""The sparse indexer: which tokens a row attends to.

Four consecutive tokens form a pool. Its key, a gated mean of theirs, is cached in FP8 once the fourth is written; until
then the tokens wait in a ring. A row scores the finished pools of its own prefix, takes the best ones, and always the
unfinished tail.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.reference import index_cache, numerics
from glm53_mono.reference.norm import layer_norm
from glm53_mono.reference.state import Caches, StepInputs
from glm53_mono.weights.model import IndexerWeights


@dataclass(frozen=True)
class Projections:
    """What a row brings to the indexer."""

    query: Tensor
    """[rows, index_heads, index_head_dim] float8_e4m3fn, rotated."""
    query_scale: Tensor
    """[rows, index_heads] fp32."""
    head_weights: Tensor
    """[rows, index_heads] fp32, query scale and softmax scale included."""
    key: Tensor
    """[rows, index_head_dim] bf16, normalised, not rotated."""
    gate: Tensor
    """[rows, index_head_dim] bf16, without the position bias."""


def project(y: Tensor, query_latent: Tensor, weights: IndexerWeights[Tensor], geometry: Geometry) -> Projections:
    """Queries, head weights, key and pooling gate (dsa_indexer_kpool.py:241-246, 655-735).

    Args:
        y: [rows, hidden] bf16, the layer's normalised input.
        query_latent: [rows, q_rank] bf16, normalised.
        weights: the layer's.
        geometry: sizes of one rank.
    """
    heads = (geometry.index_heads, geometry.index_head_dim)
    rotated = numerics.hadamard(numerics.linear(query_latent, weights.query).unflatten(-1, heads))
    query, query_scale = numerics.quantise_fp8(rotated)
    return Projections(
        query=query,
        query_scale=query_scale,
        head_weights=head_weights(y, query_scale, weights, geometry),
        key=layer_norm(
            numerics.linear(y, weights.key), weights.key_norm_weight, weights.key_norm_bias, geometry.layer_norm_eps
        ),
        gate=numerics.linear(y, weights.pool_gate),
    )


def head_weights(y: Tensor, query_scale: Tensor, weights: IndexerWeights[Tensor], geometry: Geometry) -> Tensor:
    """Weight of each head's score, [rows, index_heads] fp32, query's scale included (dsa_indexer_kpool.py:241-246)."""
    projected = numerics.linear_fp32(y, weights.head_weights) * geometry.index_heads**-0.5
    return projected * query_scale * geometry.index_head_dim**-0.5


def pool_key(keys: Tensor, gates: Tensor, position_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The key of finished pools: a softmax-weighted mean per channel, rotated, in FP8 (kpool_fp8_index.py:1421-1436).

    Args:
        keys: [..., pool, index_head_dim] bf16.
        gates: [..., pool, index_head_dim] bf16.
        position_bias: [pool, index_head_dim] fp32.

    Returns:
        keys [..., index_head_dim] float8_e4m3fn and scales [...] fp32.
    """
    logits = gates.float() + position_bias
    weights = torch.exp(logits - logits.amax(-2, keepdim=True))
    mean = (keys.float() * weights).sum(-2) / weights.sum(-2)
    return numerics.quantise_fp8(numerics.hadamard(mean.bfloat16()))


def update(
    projections: Projections,
    inputs: StepInputs,
    caches: Caches,
    ordinal: int,
    weights: IndexerWeights[Tensor],
    geometry: Geometry,
) -> None:
    """Put every token into the ring, then cache the pools that the step finishes.

    A pool finished by a draft token holds rubbish once that draft is rejected, and is written again before any row sees
    it (kpool_fp8_index.py:1251-1418 decode, :1801-1915 target_verify). Padded requests are skipped.

    Args:
        projections: of the step's rows.
        inputs: of the step.
        caches: `ring_key`, `ring_gate` and `index` of the layer change.
        ordinal: of the layer among the MLA layers.
        weights: the layer's.
        geometry: sizes of one rank.

    Raises:
        ValueError: the ring has no room for a request's tokens beside an unfinished pool.
    """
    ring_key, ring_gate = caches.ring_key[ordinal], caches.ring_gate[ordinal]
    tokens, size = inputs.tokens_per_request, ring_key.shape[1]
    if inputs.mode == "target_verify" and tokens > size - geometry.pool:
        raise ValueError(
            f"a verify step of {tokens} tokens a request needs a ring of {tokens + geometry.pool}, not {size}"
        )
    keys, gates = (part.unflatten(0, (inputs.requests, tokens)) for part in (projections.key, projections.gate))
    for request in inputs.sparse_active.nonzero().flatten().tolist():
        row, first = int(inputs.req_pool_indices[request]), int(inputs.first_positions[request])
        places = torch.arange(first, first + tokens, device=ring_key.device) % size
        ring_key[row, places], ring_gate[row, places] = keys[request], gates[request]

        pools = torch.arange(first // geometry.pool, (first + tokens) // geometry.pool, device=ring_key.device)
        if not len(pools):
            continue
        members = (pools[:, None] * geometry.pool + torch.arange(geometry.pool, device=pools.device)) % size
        key, scale = pool_key(ring_key[row, members], ring_gate[row, members], weights.position_bias)
        pages, entries = index_cache.locate(pools, inputs.req_to_token[row], geometry)
        index_cache.write(caches.index[ordinal], pages, entries, key, scale, geometry, caches.layout)


def score(query: Tensor, weights: Tensor, keys: Tensor, scales: Tensor) -> Tensor:
    """Scores of pools: the heads' rectified products, weighted and summed, times the key's scale, fp32.

    Args:
        query: [rows, index_heads, index_head_dim] float8_e4m3fn.
        weights: [rows, index_heads] fp32, the query's scale included.
        keys: [pools, index_head_dim] float8_e4m3fn.
        scales: [pools] fp32.

    Returns:
        [rows, pools] fp32.
    """
    products = torch.relu(numerics.matmul(query.float(), keys.float().T))
    return numerics.matmul(weights[:, None], products).squeeze(1) * scales


def best_pools(scores: Tensor, visible: int, most: int) -> Tensor:
    """Ascending numbers of the pools one row attends to: all visible ones, or the `most` best of them.

    Args:
        scores: [pools] fp32; without a meaning when all visible pools fit.
        visible: finished pools of the row's prefix.
        most: pools a row attends to at most.

    Returns:
        [min(visible, most)] i64; of equal scores the lower pool wins (kpool_topk_transform.cuh:57-60).
    """
    if visible <= most:
        return torch.arange(visible, device=scores.device)
    return numerics.top_indices(scores[:visible], most).sort().values


def selected_tokens(pools: Tensor, length: int, geometry: Geometry) -> Tensor:
    """Positions a row attends to: the tokens of its pools, then the unfinished tail (kpool_fp8_index.py:530-590).

    Args:
        pools: [n] i64.
        length: tokens the row sees, itself included.
        geometry: sizes of one rank.

    Returns:
        [n * pool + length % pool] i64.
    """
    history = (pools[:, None] * geometry.pool + torch.arange(geometry.pool, device=pools.device)).flatten()
    tail = torch.arange(length // geometry.pool * geometry.pool, length, device=pools.device)
    return torch.cat((history, tail))


def select(projections: Projections, inputs: StepInputs, caches: Caches, ordinal: int, geometry: Geometry) -> Tensor:
    """Positions each row attends to, [rows, selection_width] i64 filled up with -1; padded requests select nothing.

    Args:
        projections: of the step's rows.
        inputs: of the step.
        caches: `index` of the layer is read.
        ordinal: of the layer among the MLA layers.
        geometry: sizes of one rank.
    """
    device, most = inputs.seq_lens.device, geometry.selected_pools
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    selections = [nothing] * inputs.rows
    lengths = inputs.row_lengths.tolist()
    for request in inputs.sparse_active.nonzero().flatten().tolist():
        rows = range(request * inputs.tokens_per_request, (request + 1) * inputs.tokens_per_request)
        visible = lengths[rows[-1]] // geometry.pool
        scores = torch.empty(len(rows), 0, device=device)
        if visible > most:
            slots = inputs.req_to_token[int(inputs.req_pool_indices[request])]
            pages, entries = index_cache.locate(torch.arange(visible, device=device), slots, geometry)
            keys, scales = index_cache.read(caches.index[ordinal], pages, entries, geometry, caches.layout)
            own = slice(rows[0], rows[-1] + 1)
            scores = score(projections.query[own], projections.head_weights[own], keys, scales)
        for i, row in enumerate(rows):
            pools = best_pools(scores[i], lengths[row] // geometry.pool, most)
            selections[row] = selected_tokens(pools, lengths[row], geometry)
    return numerics.stack_rows(selections, geometry.selection_width, -1)
