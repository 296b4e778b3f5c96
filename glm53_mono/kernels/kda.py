"""KDA layers: the projections with the causal convolution, the delta rule with its gates, and the gated norm.

MODEL_MATH 2. A channel's history is read and advanced only by the program that owns its output tile; a head's state
only by the program that owns the head. In verify the committed history and state are read, and what follows each draft
token goes to SGLang's scratch.
"""

import triton
import triton.language as tl

from glm53_mono.kernels.gemv import add_chunk, folded_columns, row_index, unfold, zero_tile
from glm53_mono.kernels.memory import pointer, region
from glm53_mono.kernels.numerics import bf16, sigmoid, silu
from glm53_mono.kernels.record import Word, device

QKV = device(Word.QKV)
BETA = device(Word.BETA)
F_A = device(Word.F_A)
G_A = device(Word.G_A)
CONV = device(Word.CONV)
CONV_POOL = device(Word.CONV_POOL)
CONV_SCRATCH = device(Word.CONV_SCRATCH)
F_B = device(Word.F_B)
G_B = device(Word.G_B)
A_LOG = device(Word.A_LOG)
DT_BIAS = device(Word.DT_BIAS)
O_NORM = device(Word.O_NORM)
STATE_POOL = device(Word.STATE_POOL)
STATE_SCRATCH = device(Word.STATE_SCRATCH)


@triton.jit
def kda_project(workspace, record, step, rows, VERIFY: tl.constexpr, W: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """q, k, v (convolved), beta and the low-rank gate inputs. Task: one whole output tile."""
    COLUMNS: tl.constexpr = T.project_columns
    DEPTH: tl.constexpr = T.project_depth
    CHUNKS: tl.constexpr = G.hidden // DEPTH
    QKV_TILES: tl.constexpr = (G.conv_channels + COLUMNS - 1) // COLUMNS
    BETA_TILES: tl.constexpr = (G.kda_heads + COLUMNS - 1) // COLUMNS
    LOW_TILES: tl.constexpr = (G.kda_head_dim + COLUMNS - 1) // COLUMNS
    TILES: tl.constexpr = QKV_TILES + BETA_TILES + 2 * LOW_TILES
    BETA_PADDED: tl.constexpr = W.gates_width - 2 * G.kda_head_dim

    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    x = region(workspace, W.mixed, tl.bfloat16)
    gates = region(workspace, W.gates, tl.bfloat16)
    row = row_index()[:, None]
    acc = zero_tile(COLUMNS)
    steps = (TILES - pid + programs - 1) // programs * CHUNKS
    for i in tl.range(0, steps, num_stages=T.stages):
        tile = pid + (i // CHUNKS) * programs
        first = (i % CHUNKS) * DEPTH
        is_qkv = tile < QKV_TILES
        is_beta = (tile >= QKV_TILES) & (tile < QKV_TILES + BETA_TILES)
        is_f = (tile >= QKV_TILES + BETA_TILES) & (tile < QKV_TILES + BETA_TILES + LOW_TILES)
        word = tl.where(is_qkv, QKV, tl.where(is_beta, BETA, tl.where(is_f, F_A, G_A)))
        local = tile - tl.where(
            is_qkv, 0, tl.where(is_beta, QKV_TILES, tl.where(is_f, QKV_TILES + BETA_TILES, TILES - LOW_TILES))
        )
        width = tl.where(is_qkv, G.conv_channels, tl.where(is_beta, G.kda_heads, G.kda_head_dim))
        matrix = tl.multiple_of(tl.load(record + word).to(tl.pointer_type(tl.bfloat16)), 16)
        column = local * COLUMNS + tl.arange(0, COLUMNS)
        weight_row = tl.minimum(local * COLUMNS + folded_columns(COLUMNS), width - 1)
        acc = add_chunk(acc, x, G.hidden, rows, matrix, weight_row, first, G.hidden, DEPTH)
        if i % CHUNKS == CHUNKS - 1:
            if is_qkv:
                convolve(workspace, record, step, unfold(acc, COLUMNS), column, rows, VERIFY, COLUMNS, W, G)
            else:
                start = tl.where(is_beta, 0, BETA_PADDED + tl.where(is_f, 0, G.kda_head_dim))
                stored = (row < rows) & (column < width)[None, :]
                tl.store(
                    gates + row * W.gates_width + start + column[None, :],
                    unfold(acc, COLUMNS).to(tl.bfloat16),
                    mask=stored,
                )
            acc = zero_tile(COLUMNS)


@triton.jit
def convolve(
    workspace, record, step, inputs, column, rows,
    VERIFY: tl.constexpr, COLUMNS: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """SiLU of the causal convolution over a tile of channels, and the windows that follow each row (MODEL_MATH 2.2).

    Tap j of row t of a request is the input of row t - 3 + j, from the committed window where that is negative.
    """
    out = region(workspace, W.qkv, tl.bfloat16)
    row = row_index()
    u = inputs.to(tl.bfloat16)
    request = row // step.tokens
    token = row % step.tokens
    slot = tl.load(step.state_slots + request, mask=row < rows, other=-1).to(tl.int64)
    live = (slot > 0) & (row < rows)
    inside = column[None, :] < G.conv_channels
    pool = pointer(record, CONV_POOL, tl.bfloat16)
    window = pool + (slot[:, None] * G.conv_history * G.conv_channels + column[None, :])
    taps = pointer(record, CONV, tl.float32) + column * G.conv_taps
    h0 = tap_input(u, window, row, token, 0, live, inside, VERIFY, COLUMNS, G)
    h1 = tap_input(u, window, row, token, 1, live, inside, VERIFY, COLUMNS, G)
    h2 = tap_input(u, window, row, token, 2, live, inside, VERIFY, COLUMNS, G)
    in_taps = column < G.conv_channels
    w0 = tl.load(taps, mask=in_taps, other=0.0)[None, :]
    w1 = tl.load(taps + 1, mask=in_taps, other=0.0)[None, :]
    w2 = tl.load(taps + 2, mask=in_taps, other=0.0)[None, :]
    w3 = tl.load(taps + 3, mask=in_taps, other=0.0)[None, :]
    total = h0.to(tl.float32) * w0 + h1.to(tl.float32) * w1
    total = total + h2.to(tl.float32) * w2
    total = total + u.to(tl.float32) * w3
    stored = (row < rows)[:, None] & inside
    tl.store(out + row[:, None] * G.conv_channels + column[None, :], silu(total).to(tl.bfloat16), mask=stored)

    written = live[:, None] & inside
    if VERIFY:
        scratch_row = tl.load(step.scratch_rows + request, mask=row < rows, other=0).to(tl.int64)
        place = (scratch_row * step.tokens + token)[:, None] * G.conv_history * G.conv_channels + column[None, :]
        after = pointer(record, CONV_SCRATCH, tl.bfloat16) + place
        store_window(after, h1, h2, u, written, G)
    else:
        store_window(window, h1, h2, u, written, G)
        track = track_slot(step, request, live)
        tracked = pool + (track[:, None] * G.conv_history * G.conv_channels + column[None, :])
        store_window(tracked, h1, h2, u, written & (track >= 0)[:, None], G)


@triton.jit
def tap_input(
    u, window, row, token, TAP: tl.constexpr, live, inside, VERIFY: tl.constexpr, COLUMNS: tl.constexpr, G: tl.constexpr
):
    """The input that tap TAP of every row multiplies, bf16 [8, COLUMNS].

    An earlier row's input is gathered from registers: with a barrier here the weight stream would not be pipelined.
    """
    back = G.conv_history - TAP
    history = (token + TAP)[:, None] * G.conv_channels
    committed = tl.load(window + history, mask=(token < back)[:, None] & live[:, None] & inside, other=0.0)
    if VERIFY:
        source = tl.maximum(row - back, 0)[:, None] + tl.zeros([1, COLUMNS], tl.int32)
        return tl.where((token >= back)[:, None], tl.gather(u, source, 0), committed)
    else:
        return committed


@triton.jit
def store_window(window, h1, h2, u, written, G: tl.constexpr):
    """The three newest inputs, oldest first."""
    tl.store(window, h1, mask=written)
    tl.store(window + G.conv_channels, h2, mask=written)
    tl.store(window + 2 * G.conv_channels, u, mask=written)


@triton.jit
def kda_delta(workspace, record, step, rows, VERIFY: tl.constexpr, W: tl.constexpr, G: tl.constexpr):
    """The delta rule over a request's rows in order, then the gated norm. Task: (request, head) with its whole state.

    The whole head sits in one task because its norm needs all its values: no phase and no prologue of its own for it.
    """
    HEAD: tl.constexpr = G.kda_head_dim
    BETA_PADDED: tl.constexpr = W.gates_width - 2 * HEAD
    qkv = region(workspace, W.qkv, tl.bfloat16)
    gates = region(workspace, W.gates, tl.bfloat16)
    out = region(workspace, W.attended, tl.bfloat16)
    k_index = tl.arange(0, HEAD)
    v_index = tl.arange(0, HEAD)
    square = v_index[:, None] * HEAD + k_index[None, :]
    norm = tl.load(pointer(record, O_NORM, tl.bfloat16) + v_index).to(tl.float32)
    for task in range(tl.program_id(0), rows // step.tokens * G.kda_heads, tl.num_programs(0)):
        request = task // G.kda_heads
        head = task % G.kda_heads
        slot = tl.load(step.state_slots + request).to(tl.int64)
        live = slot > 0
        pool = pointer(record, STATE_POOL, tl.float32)
        place = (slot * G.kda_heads + head) * HEAD * HEAD + square
        state = tl.load(pool + place, mask=live & (square >= 0), other=0.0)
        f_b = tl.load(pointer(record, F_B, tl.bfloat16) + head * HEAD * HEAD + square)
        g_b = tl.load(pointer(record, G_B, tl.bfloat16) + head * HEAD * HEAD + square)
        rate = tl.exp(tl.load(pointer(record, A_LOG, tl.float32) + head))
        bias = tl.load(pointer(record, DT_BIAS, tl.float32) + head * HEAD + k_index)
        for token in range(0, step.tokens):
            row = request * step.tokens + token
            own = qkv + row * G.conv_channels + head * HEAD
            q = unit(tl.load(own + k_index).to(tl.float32), G) * (HEAD**-0.5)
            k = unit(tl.load(own + G.kda_width + k_index).to(tl.float32), G)
            v = tl.load(own + 2 * G.kda_width + v_index).to(tl.float32)
            low = gates + row * W.gates_width
            beta = sigmoid(tl.load(low + head).to(tl.float32))
            f_a = tl.load(low + BETA_PADDED + k_index).to(tl.float32)
            g_a = tl.load(low + BETA_PADDED + HEAD + k_index).to(tl.float32)
            f = bf16(tl.sum(f_b.to(tl.float32) * f_a[None, :], 1))
            z = bf16(tl.sum(g_b.to(tl.float32) * g_a[None, :], 1))
            decay = tl.exp(G.gate_lower_bound * sigmoid(rate * (f + bias)))
            state = state * decay[None, :]
            change = (v - tl.sum(state * k[None, :], 1)) * beta
            state = state + change[:, None] * k[None, :]
            o = bf16(tl.sum(state * q[None, :], 1))
            normed = o / tl.sqrt_rn(tl.sum(o * o, 0) / HEAD + G.rms_eps) * norm * sigmoid(z)
            normed = tl.where(live, normed, 0.0)
            tl.store(out + row * G.kda_width + head * HEAD + v_index, normed.to(tl.bfloat16))
            if VERIFY:
                scratch_row = tl.load(step.scratch_rows + request).to(tl.int64)
                after = pointer(record, STATE_SCRATCH, tl.float32)
                draft = (scratch_row * step.tokens + token) * G.kda_heads + head
                tl.store(after + draft * HEAD * HEAD + square, state, mask=live & (square >= 0))
        if not VERIFY:
            tl.store(pool + place, state, mask=live & (square >= 0))
            track = track_slot(step, request, live)
            tracked = (track * G.kda_heads + head) * HEAD * HEAD + square
            tl.store(pool + tracked, state, mask=live & (track >= 0) & (square >= 0))


@triton.jit
def track_slot(step, request, live):
    """Slot that keeps a request's state and window after this step for the prefix cache; negative for none.

    Either of mask and slot may be stale without the other (mamba_state_scatter_triton.py:
    track_mamba_state_if_needed_kernel).
    """
    wanted = tl.load(step.track_mask + request, mask=live, other=0) != 0
    slot = tl.load(step.track_slots + request, mask=live, other=-1).to(tl.int64)
    return tl.where(wanted, slot, -1)


@triton.jit
def unit(x, G: tl.constexpr):
    """x scaled to length 1, fp32; its length is kept from 0 by an epsilon."""
    return x / tl.sqrt_rn(tl.sum(x * x, 0) + G.l2_eps)
