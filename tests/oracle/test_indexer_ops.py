"""The indexer: SGLang's quantisation, pooling, cache layouts, scores, selection and tail against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from glm53_mono.checkpoint.config import checkpoint_geometry, model_config
from glm53_mono.reference import index_cache, indexer, numerics
from glm53_mono.reference.index_cache import KeyLayout
from glm53_mono.reference.state import Caches, StepInputs
from glm53_mono.weights.model import IndexerWeights
from tests.oracle.ops import Draw, SeededBug, assert_same_bits, assert_within, bug_cases

pytestmark = pytest.mark.usefixtures("sglang_ops")

SEED = 10
GEOMETRY = replace(checkpoint_geometry(model_config()), kda_layers=(), dsa_layers=(0,), kda_heads=1)
"""The published sizes, one MLA layer."""
HEADS, DIM, POOL = GEOMETRY.index_heads, GEOMETRY.index_head_dim, GEOMETRY.pool
DRAFT_TOKENS = 6
"""More than a pool: one verify step may close two."""
ROW = 2
FIRST_PAGE = 3
CONTEXT = 4 * GEOMETRY.page_tokens


def sglang_pool() -> SimpleNamespace:
    """What the pooling kernels read of SGLang's KV pool."""
    return SimpleNamespace(
        index_page_size=GEOMETRY.page_pools,
        index_head_dim=DIM,
        index_kpool=POOL,
        tail_extra_slots=DRAFT_TOKENS,
        page_size=GEOMETRY.page_tokens,
    )


def kpool() -> ModuleType:
    """SGLang's module of the pooled keys."""
    from sglang.srt.layers.attention.dsa import kpool_fp8_index

    return kpool_fp8_index


def req_to_token() -> Tensor:
    """One request on scattered pages; the other rows point at the padding page."""
    table = torch.zeros(ROW + 2, CONTEXT, dtype=torch.int32)
    pages = torch.tensor([FIRST_PAGE, 1, 4, 2])[:, None] * GEOMETRY.page_tokens
    table[ROW] = (pages + torch.arange(GEOMETRY.page_tokens)).flatten()
    return table


def page_table() -> Tensor:
    """The same as pages of 64 tokens, as SGLang's metadata has it (dsa_backend.py:1066)."""
    return req_to_token()[ROW : ROW + 1, ::64] // 64


def inputs(mode: str, first: int, tokens: int, *, padded: bool = False) -> StepInputs:
    """The next tokens of the request."""
    table = req_to_token()
    places = torch.arange(first, first + tokens)
    return StepInputs(
        mode=mode,
        tokens_per_request=tokens,
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=places,
        seq_lens=torch.tensor([first + (mode == "decode")]),
        req_pool_indices=torch.tensor([ROW]),
        out_cache_loc=torch.zeros(tokens, dtype=torch.int64) if padded else table[ROW, places].long(),
        mamba_slots=torch.zeros(1, dtype=torch.int32),
        verify_rows=torch.zeros(1, dtype=torch.int32),
        req_to_token=table,
    )


class Tokens:
    """Keys and gates of a request's tokens, and the layer's position bias; some rows are zeros, subnormal or large."""

    def __init__(self, count: int) -> None:
        draw = Draw(SEED)
        self.keys, self.gates = draw.bf16(count, DIM), draw.bf16(count, DIM)
        self.keys[:POOL] = 0
        self.keys[POOL : 2 * POOL] = 1e-39
        self.keys[2 * POOL : 3 * POOL] *= 1e4
        self.gates[3 * POOL] = 80
        # A pool of one constant rotates onto a single channel: 448 exactly, at the border between two scales.
        self.keys[4 * POOL : 5 * POOL] = 448 * DIM**-0.5
        self.position_bias = draw.fp32(POOL, DIM, std=0.5)

    @property
    def weights(self) -> IndexerWeights:
        nothing = dict.fromkeys(("query", "key", "key_norm_weight", "key_norm_bias", "head_weights", "pool_gate"))
        return IndexerWeights(**nothing, position_bias=self.position_bias)

    def projections(self, first: int, count: int) -> indexer.Projections:
        own = slice(first, first + count)
        return indexer.Projections(None, None, None, key=self.keys[own], gate=self.gates[own])


def empty_caches(layout: KeyLayout) -> Caches:
    return Caches.empty(
        GEOMETRY,
        mamba_slots=1,
        request_rows=ROW + 1,
        pages=5,
        draft_tokens=DRAFT_TOKENS,
        verify_rows=1,
        layout=layout,
    )


def compare_quantisation() -> None:
    """FP8 queries and their scales, zeros and the borders between two scales included."""
    from sglang.kernels.ops.quantization.act_quant_triton import act_quant

    x = Draw(SEED).bf16(6, HEADS, DIM, std=3)
    x[0] = 0
    x[1] = 1e-39
    x[2] *= 1e4
    x[3, :, 0] = torch.exp2(torch.arange(HEADS) - 16.0) * numerics.FP8_MAX
    x[3, :, 1:] = 0
    values, scales = act_quant(x, DIM, "ue8m0")
    own_values, own_scales = numerics.quantise_fp8(x)
    assert_same_bits("scales", own_scales, scales.reshape(own_scales.shape))
    assert_same_bits("values", own_values, values)


def compare_decode_pooling(layout: KeyLayout) -> None:
    """Token by token over a page's end: index pages and ring, byte for byte."""
    first, count = GEOMETRY.page_tokens - 8, 20
    tokens, own = Tokens(first + count), empty_caches(layout)
    found = empty_caches(layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kpool(), "_preshuffle_tile", lambda: index_cache.TILE if layout == "tiled" else 0)
        for place in range(first, first + count):
            step = inputs("decode", place, 1, padded=place == first + 1)
            kpool().kpool_decode_update_and_maybe_write_cache(
                sglang_pool(),
                found.index[0],
                found.ring_key[0],
                found.ring_gate[0],
                tokens.keys[place : place + 1],
                tokens.gates[place : place + 1],
                tokens.position_bias,
                page_table(),
                step.req_pool_indices,
                step.positions,
                step.seq_lens.int(),
                step.out_cache_loc,
                round_scale=True,
            )
            indexer.update(tokens.projections(place, 1), step, own, 0, tokens.weights, GEOMETRY)
    assert found.index[0].any()
    for (name, own_cache), (_, found_cache) in zip(own.tensors(), found.tensors(), strict=True):
        assert_same_bits(name, own_cache, found_cache)


def compare_verify_pooling(layout: KeyLayout) -> None:
    """Six drafts a step, of which a varying number stays: SGLang's write plan, index pages and ring, byte for byte."""
    tokens, own = Tokens(64), empty_caches(layout)
    found = empty_caches(layout)
    module = kpool()
    pools = module.kpool_max_closed_pools(DRAFT_TOKENS, POOL)
    first = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_preshuffle_tile", lambda: index_cache.TILE if layout == "tiled" else 0)
        for kept in (6, 1, 3, 2, 6, 5, 4, 6, 1, 6, 6):
            step = inputs("target_verify", first, DRAFT_TOKENS, padded=kept == 2)
            rows, starts, bases = torch.zeros(3, 1, dtype=torch.int32).unbind(0)
            locations = torch.zeros(1, pools, dtype=torch.int64)
            lengths, pool_lengths = torch.zeros(2, DRAFT_TOKENS, dtype=torch.int32).unbind(0)
            module.update_kpool_write_plan_cuda_graph(
                step.seq_lens.int(),
                step.req_pool_indices.int(),
                page_table().expand(DRAFT_TOKENS, -1),
                rows,
                starts,
                bases,
                locations,
                pool_lengths,
                lengths,
                kpool=POOL,
                num_draft_tokens=DRAFT_TOKENS,
                index_page_size=GEOMETRY.page_pools,
            )
            module.kpool_write_tail_and_maybe_compress(
                sglang_pool(),
                found.index[0],
                tokens.keys[first : first + DRAFT_TOKENS],
                tokens.gates[first : first + DRAFT_TOKENS],
                found.ring_key[0],
                found.ring_gate[0],
                tokens.position_bias,
                rows.long(),
                starts,
                bases,
                locations,
                step.out_cache_loc,
                DRAFT_TOKENS,
                True,
            )
            indexer.update(tokens.projections(first, DRAFT_TOKENS), step, own, 0, tokens.weights, GEOMETRY)
            assert_same_bits("row lengths", step.row_lengths.int(), lengths)
            first += kept
    assert found.index[0].any()
    for (name, own_cache), (_, found_cache) in zip(own.tensors(), found.tensors(), strict=True):
        assert_same_bits(name, own_cache, found_cache)


def compare_locations() -> None:
    """Page and entry of every pool of the request."""
    pools = torch.arange(CONTEXT // POOL)
    pages, entries = index_cache.locate(pools, req_to_token()[ROW], GEOMETRY)
    found = kpool().compute_pooled_write_locs(page_table()[0], pools, POOL)
    assert_same_bits("locations", pages * GEOMETRY.page_pools + entries, found)


def compare_scores() -> None:
    """SGLang's PyTorch logits over pages; they round each head's product to bf16, hence a distance."""
    from sglang.srt.layers.attention.dsa import utils

    draw = Draw(SEED)
    query = draw.fp32(1, HEADS, DIM).to(torch.float8_e4m3fn)
    weights = draw.fp32(1, HEADS)
    keys = draw.fp32(2 * GEOMETRY.page_pools, DIM).to(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-6, 0, (len(keys),), generator=draw.generator).float())
    cache = empty_caches("linear").index[0]
    pools = torch.arange(len(keys))
    pages, entries = index_cache.locate(pools, req_to_token()[ROW], GEOMETRY)
    index_cache.write(cache, pages, entries, keys, scales, GEOMETRY, "linear")
    found = utils._fp8_paged_mqa_logits_torch(
        query[:, None],
        cache.view(len(cache), GEOMETRY.page_pools, 1, -1),
        weights,
        torch.tensor([[len(keys)]], dtype=torch.int32),
        torch.tensor([[FIRST_PAGE, 1]], dtype=torch.int32),
        None,
        len(keys),
    )
    assert_within("scores", indexer.score(query, weights, keys, scales), found, rel=5e-3, max_abs=3e-2)


def compare_tail() -> None:
    """Selected positions of rows at 2,051 and 2,052 tokens, of short rows and of an empty one, in one batch."""
    lengths = [2051, 2052, 2055, 3000, 1, 3, 4, 5, 0]
    draw = Draw(SEED)
    most = GEOMETRY.selected_pools
    own, history = [], torch.full((len(lengths), GEOMETRY.index_topk), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        visible = length // POOL
        pools = indexer.best_pools(draw.fp32(visible), visible, most)
        own.append(indexer.selected_tokens(pools, length, GEOMETRY))
        history[row, : len(pools) * POOL] = (pools[:, None] * POOL + torch.arange(POOL)).flatten().int()
    found = kpool().append_kpool_tail_to_topk(
        history, torch.tensor(lengths, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32) // POOL, POOL
    )
    assert_same_bits("selection", numerics.stack_rows(own, GEOMETRY.selection_width, -1).int(), found)


COMPARISONS = [
    compare_quantisation,
    lambda: compare_decode_pooling("linear"),
    lambda: compare_decode_pooling("tiled"),
    lambda: compare_verify_pooling("linear"),
    lambda: compare_verify_pooling("tiled"),
    compare_locations,
    compare_scores,
    compare_tail,
]
NAMES = ["quantisation", "decode", "decode tiled", "verify", "verify tiled", "locations", "scores", "tail"]


@pytest.mark.parametrize("comparison", COMPARISONS, ids=NAMES)
def test_reference_equals_sglang(comparison: Callable[[], None]) -> None:
    comparison()


def _one_token_late(projections, step, caches, ordinal, weights, geometry, update=indexer.update) -> None:
    """Closes a pool with the token after its last one."""
    late = replace(step, seq_lens=(step.seq_lens - 1).clamp(min=0))
    update(projections, late, caches, ordinal, weights, geometry)


def _without_tail(pools: Tensor, length: int, geometry, tokens=indexer.selected_tokens) -> Tensor:
    return tokens(pools, length - length % geometry.pool, geometry)


def _unrotated(keys: Tensor, gates: Tensor, position_bias: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(gates.float() + position_bias, -2)
    return numerics.quantise_fp8((keys.float() * weights).sum(-2).bfloat16())


def _without_position_bias(keys: Tensor, gates: Tensor, position_bias: Tensor, close=indexer.pool_key):
    return close(keys, gates, torch.zeros_like(position_bias))


def _any_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1).clamp(min=numerics.FP8_ABSMAX_FLOOR) / numerics.FP8_MAX
    return (x.float() / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _linear_always(entry: Tensor, geometry, layout: KeyLayout, offsets=index_cache.key_offsets) -> Tensor:
    return offsets(entry, geometry, "linear")


def _scale_twice(query: Tensor, weights: Tensor, keys: Tensor, scales: Tensor, score=indexer.score) -> Tensor:
    return score(query, weights, keys, scales) * scales


def _not_rectified(query: Tensor, weights: Tensor, keys: Tensor, scales: Tensor) -> Tensor:
    products = numerics.matmul(query.float(), keys.float().T)
    return numerics.matmul(weights[:, None], products).squeeze(1) * scales


SEEDED_BUGS = [
    SeededBug("pool closed one token late", indexer, "update", _one_token_late, COMPARISONS[3]),
    SeededBug("tail dropped", indexer, "selected_tokens", _without_tail, compare_tail),
    SeededBug("pooled key not rotated", indexer, "pool_key", _unrotated, COMPARISONS[1]),
    SeededBug("position bias dropped", indexer, "pool_key", _without_position_bias, COMPARISONS[3]),
    SeededBug("scale not a power of two", numerics, "quantise_fp8", _any_scale, compare_quantisation),
    SeededBug("tiles ignored", index_cache, "key_offsets", _linear_always, COMPARISONS[2]),
    SeededBug("key scale applied twice", indexer, "score", _scale_twice, compare_scores),
    SeededBug("products not rectified", indexer, "score", _not_rectified, compare_scores),
]


@bug_cases(SEEDED_BUGS)
def test_seeded_bug_is_seen(bug: SeededBug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.assert_seen(monkeypatch)
