"""The sparse indexer: pooled keys, scores and the exact selection of the best pools (MODEL_MATH 3.3 to 3.6)."""

import triton
import triton.language as tl

from glm53_mono.kernels.memory import pointer, region
from glm53_mono.kernels.numerics import bf16, fp8, fp8_scale, hadamard_signs, ordered_key
from glm53_mono.kernels.record import Word, device
from glm53_mono.kernels.sync import program_barrier

KEY_NORM_WEIGHT = device(Word.KEY_NORM_WEIGHT)
KEY_NORM_BIAS = device(Word.KEY_NORM_BIAS)
POSITION_BIAS = device(Word.POSITION_BIAS)
INDEX_POOL = device(Word.INDEX_POOL)
RING_KEY = device(Word.RING_KEY)
RING_GATE = device(Word.RING_GATE)
TILE = tl.constexpr(16)
RADIX_BITS = tl.constexpr(8)
RADIX_BINS = tl.constexpr(256)
RADIX_LEVELS = tl.constexpr(4)


@triton.jit
def row_length(step, row, VERIFY: tl.constexpr):
    """Tokens a row sees, itself included. `seq_lens` has the current token in decode, only committed ones in verify."""
    length = tl.load(step.seq_lens + row // step.tokens).to(tl.int32)
    if VERIFY:
        length += row % step.tokens + 1
    return length


@triton.jit
def key_offset(entry, channel, TILED: tl.constexpr, G: tl.constexpr):
    """Byte of a pooled key's channel within its index page; tiled 16 x 16 on ROCm (kpool_fp8_index.py:29-56)."""
    if TILED:
        tile = entry // TILE * (TILE * G.index_head_dim) + channel // TILE * (TILE * TILE)
        return tile + entry % TILE * TILE + channel % TILE
    else:
        return entry * G.index_head_dim + channel


@triton.jit
def key_scales(page, G: tl.constexpr):
    """The fp32 scales of an index page's pooled keys, which lie behind them."""
    return (page + G.page_pools * G.index_head_dim).to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def page_of(step, request_row, pool, G: tl.constexpr):
    """The index page (int64) that holds a pool of a request: pools of one token page share it."""
    first_token = pool // G.page_pools * G.page_tokens
    slot = tl.load(step.req_to_token + request_row * step.req_to_token_stride + first_token)
    return slot.to(tl.int64) // G.page_tokens


@triton.jit
def close_pools(
    workspace, record, step, request, VERIFY: tl.constexpr, TILED: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Puts a request's rows into its compress ring, then writes every pool that one of them closes.

    The ring holds unrotated keys and gate logits at position % ring length, so a pool's four entries are all in it.
    """
    key = region(workspace, W.index_key, tl.bfloat16)
    gate = region(workspace, W.index_gate, tl.bfloat16)
    ring_key = pointer(record, RING_KEY, tl.bfloat16)
    ring_gate = pointer(record, RING_GATE, tl.bfloat16)
    channel = tl.arange(0, G.index_head_dim)
    weight = tl.load(pointer(record, KEY_NORM_WEIGHT, tl.float32) + channel)
    bias = tl.load(pointer(record, KEY_NORM_BIAS, tl.float32) + channel)
    request_row = tl.load(step.request_rows + request).to(tl.int64)
    ring = request_row * step.ring_length
    for token in range(0, step.tokens):
        row = request * step.tokens + token
        live = tl.load(step.cache_slots + row) > 0
        position = row_length(step, row, VERIFY) - 1
        x = tl.load(key + row * G.index_head_dim + channel).to(tl.float32)
        centred = x - tl.sum(x, 0) / G.index_head_dim
        variance = tl.sum(centred * centred, 0) / G.index_head_dim
        normed = centred * tl.rsqrt(variance + G.layer_norm_eps) * weight + bias
        place = (ring + position % step.ring_length) * G.index_head_dim + channel
        written = live & (channel >= 0)
        tl.store(ring_key + place, normed.to(tl.bfloat16), mask=written)
        tl.store(ring_gate + place, tl.load(gate + row * G.index_head_dim + channel), mask=written)
    program_barrier(BACKEND)
    for token in range(0, step.tokens):
        row = request * step.tokens + token
        live = tl.load(step.cache_slots + row) > 0
        position = row_length(step, row, VERIFY) - 1
        if live & (position % G.pool == G.pool - 1):
            close_pool(record, step, row, ring, position, TILED, G)


@triton.jit
def close_pool(record, step, row, ring, position, TILED: tl.constexpr, G: tl.constexpr):
    """The pooled key of the four tokens that end at `position`: softmax of the gates per channel, Hadamard, fp8.

    The page is that of the row's own slot: a pool's tokens and its key share a page, and `req_to_token` may already
    belong to another request when this one has ended but is still in flight.
    """
    ring_key = pointer(record, RING_KEY, tl.bfloat16)
    ring_gate = pointer(record, RING_GATE, tl.bfloat16)
    ape = pointer(record, POSITION_BIAS, tl.float32)
    channel = tl.arange(0, G.index_head_dim)
    member = tl.arange(0, G.pool)
    entry = (position - (G.pool - 1) + member) % step.ring_length
    place = (ring + entry)[:, None] * G.index_head_dim + channel[None, :]
    logit = tl.load(ring_gate + place).to(tl.float32) + tl.load(
        ape + member[:, None] * G.index_head_dim + channel[None, :]
    )
    probability = tl.exp(logit - tl.max(logit, 0)[None, :])
    probability = probability / tl.sum(probability, 0)[None, :]
    pooled = bf16(tl.sum(probability * tl.load(ring_key + place).to(tl.float32), 0))
    signs = hadamard_signs(G.index_head_dim, G.index_head_dim)
    rotated = bf16(tl.sum(signs * pooled[None, :], 1) * (G.index_head_dim**-0.5))
    scale = fp8_scale(tl.max(tl.abs(rotated), 0))
    own_page = tl.load(step.cache_slots + row).to(tl.int64) // G.page_tokens
    page = pointer(record, INDEX_POOL, tl.uint8) + own_page * G.index_page_bytes
    slot = position // G.pool % G.page_pools
    tl.store(page + key_offset(slot, channel, TILED, G), fp8(rotated, scale).to(tl.uint8, bitcast=True))
    tl.store(key_scales(page, G) + slot, scale)


@triton.jit
def score_pages(
    workspace, record, step, rows, VERIFY: tl.constexpr, TILED: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """score_p = key_scale_p * sum_h w_h relu(q8_h . key8_p) for rows that must select. Task: (row, page)."""
    scores = region(workspace, W.scores, tl.float32)
    pages = pointer(record, INDEX_POOL, tl.uint8)
    POOLS: tl.constexpr = T.score_pools
    channel = tl.arange(0, G.index_head_dim)
    entry = tl.arange(0, POOLS)
    for row in range(rows):
        pools = row_length(step, row, VERIFY) // G.pool
        if pools > G.selected_pools:
            request_row = tl.load(step.request_rows + row // step.tokens).to(tl.int64)
            q, weight = scored_query(workspace, row, W, G)
            for tile in range(tl.program_id(0), (pools + POOLS - 1) // POOLS, tl.num_programs(0)):
                pool = tile * POOLS + entry
                page = pages + page_of(step, request_row, tile * POOLS, G) * G.index_page_bytes
                slot = pool % G.page_pools
                visible = pool < pools
                place = key_offset(slot[:, None], channel[None, :], TILED, G)
                key = tl.load(page + place, mask=visible[:, None] & (channel >= 0)[None, :], other=0)
                key = key.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
                scale = tl.load(key_scales(page, G) + slot, mask=visible, other=0.0)
                match = tl.maximum(tl.dot(q, key.T), 0.0)
                score = tl.sum(match * weight[:, None], 0) * scale
                tl.store(scores + tl.cast(row, tl.int64) * W.max_pools + pool, score, mask=visible)


@triton.jit
def scored_query(workspace, row, W: tl.constexpr, G: tl.constexpr):
    """A row's rotated fp8 index query as bf16 [heads, 128], and the head weights with its scales folded in, fp32."""
    index_query = region(workspace, W.index_query, tl.bfloat16)
    head_weights = region(workspace, W.head_weights, tl.float32)
    head = tl.arange(0, W.index_heads_padded)
    channel = tl.arange(0, G.index_head_dim)
    known = head < G.index_heads
    place = (row * G.index_heads + head[:, None]) * G.index_head_dim + channel[None, :]
    q = tl.load(index_query + place, mask=known[:, None] & (channel >= 0)[None, :], other=0.0)
    signs = hadamard_signs(G.index_head_dim, G.index_head_dim).to(tl.bfloat16)
    rotated = bf16(tl.dot(q, signs) * (G.index_head_dim**-0.5))
    scale = fp8_scale(tl.max(tl.abs(rotated), 1))
    q8 = fp8(rotated, scale[:, None]).to(tl.bfloat16)
    weight = tl.load(head_weights + row * G.index_heads + head, mask=known, other=0.0)
    return q8, weight * (G.index_heads**-0.5) * scale * (G.index_head_dim**-0.5)


@triton.jit
def must_select(step, rows, VERIFY: tl.constexpr, G: tl.constexpr):
    """Whether some row of the step sees more pools than it may attend; the same answer in every program."""
    longest = tl.full((), 0, tl.int32)
    for row in range(rows):
        longest = tl.maximum(longest, row_length(step, row, VERIFY))
    return longest // G.pool > G.selected_pools


@triton.jit
def select(workspace, step, rows, VERIFY: tl.constexpr, W: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """The best pools of a row in ascending order, exact, ties to the lower pool. Task: one row that must select.

    A radix search over all 32 bits of the score finds the last pool's key; no bin can overflow.
    """
    scores = region(workspace, W.scores, tl.float32)
    selected = region(workspace, W.selected, tl.int32)
    CHUNK: tl.constexpr = T.select_pools
    lane = tl.arange(0, CHUNK)
    digit = tl.arange(0, 2 * RADIX_BINS)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        pools = row_length(step, row, VERIFY) // G.pool
        if pools > G.selected_pools:
            own = scores + tl.cast(row, tl.int64) * W.max_pools
            wanted = tl.full((), G.selected_pools, tl.int32)
            prefix = tl.full((), 0, tl.uint32)
            decided = tl.full((), 0, tl.uint32)
            for level in range(RADIX_LEVELS):
                shift = 24 - RADIX_BITS * level
                counts = tl.zeros([2 * RADIX_BINS], tl.int32)
                for first in range(0, pools, CHUNK):
                    key, visible = pool_keys(own, first + lane, pools)
                    value = ((key >> shift) & (RADIX_BINS - 1)).to(tl.int32)
                    candidate = visible & ((key & decided) == prefix)
                    counts += tl.histogram(tl.where(candidate, value, RADIX_BINS), 2 * RADIX_BINS)
                counts = tl.where(digit < RADIX_BINS, counts, 0)
                at_least = tl.cumsum(counts, 0, reverse=True)
                last = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
                wanted -= tl.sum(tl.where(digit > last, counts, 0), 0)
                prefix |= last.to(tl.uint32) << shift
                decided |= tl.cast(RADIX_BINS - 1, tl.uint32) << shift
            emit_selected(own, selected + row * G.selected_pools, prefix, wanted, pools, CHUNK)


@triton.jit
def pool_keys(scores, pool, pools):
    """Ordered keys of some pools, and which of them exist."""
    visible = pool < pools
    score = tl.load(scores + pool, mask=visible, other=0.0)
    return ordered_key(tl.where(score == 0.0, 0.0, score)), visible


@triton.jit
def emit_selected(scores, out, threshold, ties, pools, CHUNK: tl.constexpr):
    """Writes the pools above the threshold and the first `ties` of those on it, in ascending order."""
    written = tl.full((), 0, tl.int32)
    tied = tl.full((), 0, tl.int32)
    lane = tl.arange(0, CHUNK)
    for first in range(0, pools, CHUNK):
        key, visible = pool_keys(scores, first + lane, pools)
        on = visible & (key == threshold)
        rank = tied + tl.cumsum(on.to(tl.int32), 0)
        taken = (visible & (key > threshold)) | (on & (rank <= ties))
        place = written + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(out + place, first + lane, mask=taken)
        written += tl.sum(taken.to(tl.int32), 0)
        tied += tl.sum(on.to(tl.int32), 0)
