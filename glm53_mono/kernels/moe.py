"""Sparse FFN: router, routing, experts and the shared expert (MODEL_MATH 4).

Routing is recomputed by every program from the router's logits: cheaper than a barrier to share it. The distinct
experts of a step's rows are listed in ascending order, and a row's experts are added in that order, so that its sum
does not depend on the other rows.
"""

import triton
import triton.language as tl

from glm53_mono.geometry import MAX_ROWS
from glm53_mono.kernels import gemv
from glm53_mono.kernels.dense import gate_up
from glm53_mono.kernels.gemv import folded_columns, pair_row, row_index, split_pairs, unfold, zero_tile
from glm53_mono.kernels.memory import address_of, pointer, private, region
from glm53_mono.kernels.mhc import next_fn, stream_row, update_streams
from glm53_mono.kernels.numerics import bf16, clamped_swiglu, sigmoid
from glm53_mono.kernels.peers import leave_partial
from glm53_mono.kernels.record import Word, device
from glm53_mono.kernels.stored import (
    SCALES,
    add_chunk,
    chunk_depth,
    matrix_bytes,
    matrix_in,
    matrix_items,
    scale_bytes,
    value_type,
)
from glm53_mono.kernels.sync import program_barrier

ROWS = tl.constexpr(MAX_ROWS)
GATE = device(Word.GATE)
SHARED_UP = device(Word.SHARED_UP)
EXPERTS_UP = device(Word.EXPERTS_UP)
GATE_BIAS = device(Word.GATE_BIAS)
EXPERTS_DOWN = device(Word.EXPERTS_DOWN)
SHARED_DOWN = device(Word.SHARED_DOWN)


@triton.jit
def router(
    workspace, record, rows,
    W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, F: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """The router's logits, a K chunk at a time, and the shared expert's gate and up.

    Tasks: from the last program down, (tile of experts, K chunk); from the first one on, one tile of pairs. The reader
    adds the chunks in order.
    """
    x = region(workspace, W.mixed, tl.bfloat16)
    logits = region(workspace, W.router, tl.float32)
    matrix = pointer(record, GATE, tl.bfloat16)
    COLUMNS: tl.constexpr = T.router_columns
    TILES: tl.constexpr = (G.experts + COLUMNS - 1) // COLUMNS
    row = row_index()[:, None]
    programs = tl.num_programs(0)
    for task in range(programs - 1 - tl.program_id(0), TILES * W.router_chunks, programs):
        chunk = task // TILES
        expert = (task % TILES) * COLUMNS + tl.arange(0, COLUMNS)
        first = chunk * T.router_depth
        weight_row = tl.minimum((task % TILES) * COLUMNS + folded_columns(COLUMNS), G.experts - 1)
        acc = zero_tile(COLUMNS)
        acc = gemv.add_chunk(acc, x, G.hidden, rows, matrix, weight_row, first, G.hidden, T.router_depth)
        place = (chunk * ROWS + row) * G.experts + expert[None, :]
        tl.store(logits + place, unfold(acc, COLUMNS), mask=(row < rows) & (expert < G.experts)[None, :])
    shared = region(workspace, W.expert_wide, tl.bfloat16)
    STORAGE: tl.constexpr = F.shared_up
    gate_up(
        x, record, SHARED_UP, shared, rows, G.expert_width, T.shared_columns, T.shared_depth, STORAGE, G, T, BACKEND
    )


@triton.jit
def route(
    workspace, record, state_slots, tokens, rows,
    W: tl.constexpr, G: tl.constexpr, F: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """The rows' experts and weights into this program's own regions; returns the count of distinct experts.

    `expert_list` has the distinct experts in ascending order, `down_address` their down matrices behind the shared
    one's, `expert_weight` every row's weight of every expert.

    Choice: the largest sigmoid + bias, ties to the lower index; weight: the sigmoids, normalised (MODEL_MATH 4.2).
    Padded rows choose none, and no expert is read for them.
    """
    logits = region(workspace, W.router, tl.float32)
    listed = private(workspace, W.expert_list, W.expert_list_bytes, tl.int32)
    weight = private(workspace, W.expert_weight, W.expert_weight_bytes, tl.float32)
    EXPERTS_PADDED: tl.constexpr = W.experts_padded
    expert = tl.arange(0, EXPERTS_PADDED)[None, :]
    row = tl.arange(0, ROWS)
    slot = tl.load(state_slots + row // tokens, mask=row < rows, other=-1)
    known = (expert < G.experts) & (row < rows)[:, None]
    logit = tl.zeros([ROWS, EXPERTS_PADDED], tl.float32)
    for chunk in range(W.router_chunks):
        logit += tl.load(logits + (chunk * ROWS + row[:, None]) * G.experts + expert, mask=known, other=0.0)
    score = sigmoid(logit)
    bias = tl.load(pointer(record, GATE_BIAS, tl.float32) + expert, mask=expert < G.experts, other=0.0)
    choice = tl.where(known, score + bias, float("-inf"))
    chosen = tl.zeros([ROWS, EXPERTS_PADDED], tl.int32)
    for _ in range(G.experts_per_token):
        best = tl.argmax(choice, 1, tie_break_left=True)
        here = expert == best[:, None]
        chosen = tl.where(here, 1, chosen)
        choice = tl.where(here, float("-inf"), choice)
    chosen = tl.where((slot > 0)[:, None], chosen, 0)
    kept = tl.where(chosen != 0, score, 0.0)
    share = kept / (tl.sum(kept, 1)[:, None] + G.renormalise_eps)
    tl.store(weight + row[:, None] * G.experts + expert, share, mask=expert < G.experts)
    distinct = tl.max(chosen, 0)
    place = tl.cumsum(distinct, 0) - 1
    tl.store(listed + place, tl.arange(0, W.experts_padded), mask=distinct != 0)
    count = tl.sum(distinct, 0)
    tl.store(listed + W.distinct_count_at, count)
    addresses = private(workspace, W.down_address, W.down_address_bytes, tl.int64)
    tl.store(addresses, tl.load(record + SHARED_DOWN))
    STORAGE: tl.constexpr = F.down
    DOWN_BYTES: tl.constexpr = matrix_bytes(G.hidden, G.expert_width, STORAGE)
    down = tl.load(record + EXPERTS_DOWN) + tl.arange(0, EXPERTS_PADDED).to(tl.int64) * DOWN_BYTES
    tl.store(addresses + 1 + place, down, mask=distinct != 0)
    program_barrier(BACKEND)
    return count


@triton.jit
def experts(
    workspace, record, step, rows,
    W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, F: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Gate and up of the distinct routed experts. Task: (expert, tile of pairs)."""
    count = route(workspace, record, step.state_slots, step.tokens, rows, W, G, F, BACKEND)
    x = region(workspace, W.mixed, tl.bfloat16)
    listed = private(workspace, W.expert_list, W.expert_list_bytes, tl.int32)
    out = region(workspace, W.expert_wide, tl.bfloat16)
    STORAGE: tl.constexpr = F.experts_up
    matrices, all_scales = matrix_in(record, EXPERTS_UP, STORAGE)
    COLUMNS: tl.constexpr = T.up_columns
    DEPTH: tl.constexpr = chunk_depth(T.up_depth, G.hidden, STORAGE)
    CHUNKS: tl.constexpr = G.hidden // DEPTH
    HALF: tl.constexpr = COLUMNS // 2
    TILES: tl.constexpr = (G.expert_width + HALF - 1) // HALF
    EXPERT: tl.constexpr = matrix_items(2 * G.expert_width, G.hidden, STORAGE)
    SCALE_BYTES: tl.constexpr = scale_bytes(2 * G.expert_width, G.hidden, STORAGE)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    row = row_index()[:, None]
    acc = zero_tile(COLUMNS)
    for i in tl.range(0, (count * TILES - pid + programs - 1) // programs * CHUNKS, num_stages=T.stages):
        task = pid + (i // CHUNKS) * programs
        tile = task % TILES
        first = (i % CHUNKS) * DEPTH
        expert = tl.load(listed + task // TILES).to(tl.int64)
        matrix = tl.multiple_of(matrices + expert * EXPERT, 16)
        scales = all_scales + expert * SCALE_BYTES
        pairs = pair_row(tile * HALF, COLUMNS, G.expert_width)
        acc = add_chunk(acc, x, G.hidden, rows, matrix, scales, pairs, first, G.hidden, DEPTH, STORAGE, BACKEND)
        if i % CHUNKS == CHUNKS - 1:
            gate, up = split_pairs(unfold(acc, COLUMNS), COLUMNS)
            column = tile * HALF + tl.arange(0, HALF)[None, :]
            wide = clamped_swiglu(gate, up, G.swiglu_limit).to(tl.bfloat16)
            place = ((1 + task // TILES) * ROWS + row) * G.expert_width + column
            tl.store(out + place, wide, mask=(row < rows) & (column < G.expert_width))
            acc = zero_tile(COLUMNS)


@triton.jit
def down(
    workspace, record, rows, FUSED: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, F: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """f of a sparse layer, then hc_post. Task: one whole tile of hidden columns over all experts and the shared one.

    Apart (FUSED false): f = bf16(bf16(scale * sum_e bf16(w_e d_e)) + bf16(d_shared)); fused, the shared expert is one
    more summand of weight 1 / scale, as SGLang runs it (MODEL_MATH 4.3). The list of experts, their addresses and
    weights are those that this program's `route` left in its own regions a phase before. With several ranks f is this
    rank's part, and is left for the reduce phase that follows.
    """
    x = region(workspace, W.expert_wide, tl.bfloat16)
    listed = private(workspace, W.expert_list, W.expert_list_bytes, tl.int32)
    addresses = private(workspace, W.down_address, W.down_address_bytes, tl.int64)
    weight = private(workspace, W.expert_weight, W.expert_weight_bytes, tl.float32)
    branch = private(workspace, W.tile, W.tile_bytes, tl.bfloat16)
    COLUMNS: tl.constexpr = T.output_columns
    WIDTH: tl.constexpr = G.expert_width
    STORAGE: tl.constexpr = F.down
    DEPTH: tl.constexpr = chunk_depth(T.down_depth, WIDTH, STORAGE)
    CHUNKS: tl.constexpr = WIDTH // DEPTH
    SCALE_BYTES: tl.constexpr = scale_bytes(G.hidden, WIDTH, STORAGE)
    shared_scales = tl.load(record + SHARED_DOWN + SCALES)
    routed_scales = tl.load(record + EXPERTS_DOWN + SCALES)
    lane = tl.arange(0, COLUMNS)
    row = row_index()
    count = tl.load(listed + W.distinct_count_at)
    for tile in range(tl.program_id(0), W.mix_tiles, tl.num_programs(0)):
        if G.tp_size == 1:
            fn = next_fn(record, tile * COLUMNS, COLUMNS, G)
            streams, post, comb = stream_row(workspace, tile, 0, rows, COLUMNS, W, G)
        weight_row = tl.minimum(tile * COLUMNS + folded_columns(COLUMNS), G.hidden - 1)
        acc = zero_tile(COLUMNS)
        shared = tl.zeros([ROWS, COLUMNS], tl.float32)
        routed = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i in tl.range(0, (count + 1) * CHUNKS, num_stages=T.stages):
            entry = i // CHUNKS
            first = (i % CHUNKS) * DEPTH
            matrix = address_of(tl.load(addresses + entry), value_type(STORAGE))
            scaled = tl.load(listed + tl.maximum(entry - 1, 0)).to(tl.int64)
            scales = tl.where(entry > 0, routed_scales + scaled * SCALE_BYTES, shared_scales)
            own = x + entry * (ROWS * WIDTH)
            acc = add_chunk(acc, own, WIDTH, rows, matrix, scales, weight_row, first, WIDTH, DEPTH, STORAGE, BACKEND)
            if i % CHUNKS == CHUNKS - 1:
                expert = tl.load(listed + tl.maximum(entry - 1, 0))
                share = tl.load(weight + row * G.experts + expert, mask=(row < rows) & (entry > 0), other=0.0)
                done = unfold(acc, COLUMNS)
                routed += tl.where(entry > 0, bf16(done * share[:, None]), 0.0)
                shared = tl.where(entry > 0, shared, done)
                acc = zero_tile(COLUMNS)
        if FUSED:
            f = G.routed_scale * (routed + bf16(shared * (1.0 / G.routed_scale)))
        else:
            f = bf16(G.routed_scale * routed) + bf16(shared)
        if G.tp_size == 1:
            tl.store(branch + row[:, None] * COLUMNS + lane[None, :], f.to(tl.bfloat16))
            update_streams(workspace, tile, rows, fn, streams, post, comb, COLUMNS, W, G, BACKEND)
        else:
            leave_partial(record, tile, rows, f, COLUMNS, W, G)
