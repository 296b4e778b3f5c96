"""Hyper-connections: what a phase reads of the streams (mix) and how it updates them (post).

A mix needs sums over all columns of the streams, a post only its own column. So the program that owns an output tile
updates the streams there and leaves its columns' share of the next mix's sums; every reader adds the shares in order.
"""

import triton
import triton.language as tl

from glm53_mono.geometry import MAX_ROWS
from glm53_mono.kernels.memory import pointer, private, region
from glm53_mono.kernels.numerics import bf16, sigmoid
from glm53_mono.kernels.record import Word, device
from glm53_mono.kernels.sync import program_barrier

MIX_SLOTS = 32
"""Numbers of one row in a mix partial: pre 0..3, square sum 4, post 8..11, comb 12..27; the rest is zero."""

ROWS = tl.constexpr(MAX_ROWS)
SLOTS = tl.constexpr(MIX_SLOTS)
SQUARE = tl.constexpr(4)
GROUP = tl.constexpr(4)
COMB_GROUP = tl.constexpr(3)

MIX_SCALE = device(Word.MIX_SCALE)
MIX_BASE = device(Word.MIX_BASE)
MIX_NORM = device(Word.MIX_NORM)
UPDATE_FN = device(Word.UPDATE_FN)


@triton.jit
def fn_row(slot):
    """The row of `fn` (and of `base`) that a slot of a mix partial holds; meaningless where `has_row` is false."""
    return tl.where(slot < GROUP, slot, slot - GROUP)


@triton.jit
def has_row(slot):
    """Whether a slot holds a row of `fn`: pre, post and comb do, the square sum and the padding do not."""
    return (slot < GROUP) | ((slot >= 2 * GROUP) & (slot < 7 * GROUP))


@triton.jit
def mix_sums(mix, row, COUNT: tl.constexpr, W: tl.constexpr):
    """The first COUNT sums of one row over all columns, fp32 [COUNT]; the tiles' shares in a fixed order."""
    tile = tl.arange(0, W.mix_tiles_padded)[:, None]
    slot = tl.arange(0, COUNT)[None, :]
    shares = tl.load(mix + (tile * ROWS + row) * SLOTS + slot, mask=(tile < W.mix_tiles) & (slot >= 0), other=0.0)
    return tl.sum(shares, 0)


@triton.jit
def mix(workspace, record, rows, W: tl.constexpr, G: tl.constexpr):
    """Reads the streams for a branch. Tasks: a row's input y; from the last program down, a row's post and comb.

    The next phase waits for the inputs alone. The coefficients are for the phase after it, and the last programs, which
    have the least to do in the next one, take their time over the 20 Sinkhorn iterations.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    for row in range(pid, rows, programs):
        mix_row(workspace, record, row, W, G)
    for row in range(programs - 1 - pid, rows, programs):
        mix_coefficients(workspace, record, row, W, G)


@triton.jit
def mix_row(workspace, record, row, W: tl.constexpr, G: tl.constexpr):
    """y = RMSNorm(sum_i pre[i] x[i]) into `mixed`, bf16, rounded after the mix and after the norm (MODEL_MATH 1)."""
    out = region(workspace, W.mixed, tl.bfloat16)
    HIDDEN: tl.constexpr = G.hidden
    column = tl.arange(0, HIDDEN)
    x = region(workspace, W.streams, tl.bfloat16) + row * G.stream_width + column
    x0 = tl.load(x)
    x1 = tl.load(x + HIDDEN)
    x2 = tl.load(x + 2 * HIDDEN)
    x3 = tl.load(x + 3 * HIDDEN)
    norm = tl.load(pointer(record, MIX_NORM, tl.bfloat16) + column).to(tl.float32)
    slot = tl.arange(0, 2 * GROUP)
    base = tl.load(pointer(record, MIX_BASE, tl.float32) + slot, mask=slot < GROUP, other=0.0)
    scale = tl.load(pointer(record, MIX_SCALE, tl.float32))
    sums = mix_sums(region(workspace, W.mix, tl.float32), row, 2 * GROUP, W)
    pre = sigmoid(sums * inverse_length(sums, slot, G) * scale + base) + G.hc_eps
    y = tl.sum(tl.where(slot == 0, pre, 0.0), 0) * x0.to(tl.float32)
    y += tl.sum(tl.where(slot == 1, pre, 0.0), 0) * x1.to(tl.float32)
    y += tl.sum(tl.where(slot == 2, pre, 0.0), 0) * x2.to(tl.float32)
    y += tl.sum(tl.where(slot == 3, pre, 0.0), 0) * x3.to(tl.float32)
    y = bf16(y)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / HIDDEN + G.rms_eps) * norm
    tl.store(out + row * HIDDEN + column, y.to(tl.bfloat16))


@triton.jit
def inverse_length(sums, slot, G: tl.constexpr):
    """1 / RMS of a row's streams side by side."""
    return tl.rsqrt(tl.sum(tl.where(slot == SQUARE, sums, 0.0), 0) / G.stream_width + G.rms_eps)


@triton.jit
def mix_coefficients(workspace, record, row, W: tl.constexpr, G: tl.constexpr):
    """post [4] and comb [4, 4] of a row into `coefficients`: post at 0..3, comb[i, o] at 4 + 4 i + o (MODEL_MATH 1)."""
    slot = tl.arange(0, SLOTS)
    scales = pointer(record, MIX_SCALE, tl.float32)
    base = tl.load(pointer(record, MIX_BASE, tl.float32) + fn_row(slot), mask=has_row(slot), other=0.0)
    scale = tl.where(slot < COMB_GROUP * GROUP, tl.load(scales + 1), tl.load(scales + 2))
    group = tl.arange(0, SLOTS // GROUP)[:, None]
    is_comb = (group >= COMB_GROUP) & (group < 7)
    lane = tl.arange(0, GROUP)[None, :]
    sums = mix_sums(region(workspace, W.mix, tl.float32), row, SLOTS, W)
    logits = tl.reshape(sums * inverse_length(sums, slot, G) * scale + base, [SLOTS // GROUP, GROUP])
    post = G.post_multiplier * sigmoid(logits)
    comb = tl.exp(logits - tl.max(logits, 1)[:, None])
    comb = comb / tl.sum(comb, 1)[:, None] + G.hc_eps
    comb = tl.where(is_comb, comb, 0.0)
    comb = comb / (tl.sum(comb, 0)[None, :] + G.hc_eps)
    for _ in range(G.sinkhorn_iterations - 1):
        comb = comb / (tl.sum(comb, 1)[:, None] + G.hc_eps)
        comb = comb / (tl.sum(comb, 0)[None, :] + G.hc_eps)
    own = region(workspace, W.coefficients, tl.float32) + row * SLOTS
    tl.store(own + (group * 0 + lane), post, mask=group == 2)
    tl.store(own + GROUP + (group - COMB_GROUP) * GROUP + lane, comb, mask=is_comb)


@triton.jit
def next_fn(record, first_column, COLUMNS: tl.constexpr, G: tl.constexpr):
    """The next mix's `fn` for a tile's columns of all streams, fp32 [SLOTS, 4, COLUMNS]; zeros after the last layer."""
    slot = tl.arange(0, SLOTS)[:, None, None]
    stream = tl.arange(0, GROUP)[None, :, None]
    column = first_column + tl.arange(0, COLUMNS)[None, None, :]
    wanted = has_row(slot) & (column < G.hidden) & (tl.load(record + UPDATE_FN) != 0)
    fn = pointer(record, UPDATE_FN, tl.float32)
    return tl.load(fn + fn_row(slot) * G.stream_width + stream * G.hidden + column, mask=wanted, other=0.0)


@triton.jit
def leave_mix_share(mix, tile, row, new, fn):
    """This tile's share of a row's next mix: fn . x' and x' . x' over its columns; new fp32 [4, COLUMNS]."""
    slot = tl.arange(0, SLOTS)
    share = tl.sum(tl.sum(fn * new[None, :, :], 2), 1)
    square = tl.sum(tl.sum(new * new, 1), 0)
    tl.store(mix + (tile * ROWS + row) * SLOTS + slot, tl.where(slot == SQUARE, square, share))


@triton.jit
def stream_row(workspace, tile, row, rows, COLUMNS: tl.constexpr, W: tl.constexpr, G: tl.constexpr):
    """A row's streams in a tile, its post and its comb: what its update needs before the branch's output is there.

    Zeros beyond the last row.
    """
    streams = region(workspace, W.streams, tl.bfloat16) + row * G.stream_width
    coefficients = region(workspace, W.coefficients, tl.float32) + row * SLOTS
    stream = tl.arange(0, GROUP)
    column = (tile * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    pair = stream[:, None] * GROUP + stream[None, :]
    x = tl.load(streams + stream[:, None] * G.hidden + column, mask=(row < rows) & (column < G.hidden), other=0.0)
    post = tl.load(coefficients + stream, mask=row < rows, other=0.0)
    comb = tl.load(coefficients + GROUP + pair, mask=row < rows, other=0.0)
    return x, post, comb


@triton.jit
def update_streams(
    workspace, tile, rows, fn, x, post, comb,
    COLUMNS: tl.constexpr, W: tl.constexpr, G: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """x'[o] = bf16(post[o] a + sum_i comb[i, o] x[i]) in place for one tile of columns.

    `a` (bf16 [8, COLUMNS]) is in this program's `tile` region; `x`, `post` and `comb` are the first row's `stream_row`.
    A row's own are asked for while the row before it is computed. Also leaves the tile's mix shares.
    """
    program_barrier(BACKEND)
    streams = region(workspace, W.streams, tl.bfloat16)
    mix = region(workspace, W.mix, tl.float32)
    branch = private(workspace, W.tile, W.tile_bytes, tl.bfloat16)
    column = tl.arange(0, COLUMNS)
    inside = (tile * COLUMNS + column < G.hidden)[None, :]
    place = tl.arange(0, GROUP)[:, None] * G.hidden + (tile * COLUMNS + column)[None, :]
    for row in range(rows):
        a = tl.load(branch + row * COLUMNS + column).to(tl.float32)
        new = bf16(post[:, None] * a[None, :] + tl.sum(comb[:, :, None] * x.to(tl.float32)[:, None, :], 0))
        tl.store(streams + row * G.stream_width + place, new.to(tl.bfloat16), mask=inside)
        x, post, comb = stream_row(workspace, tile, row + 1, rows, COLUMNS, W, G)
        leave_mix_share(mix, tile, row, tl.where(inside, new, 0.0), fn)
