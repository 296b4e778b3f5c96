"""The last projection of a branch, and the streams' update with it where no other rank has a share of it."""

import triton
import triton.language as tl

from glm53_mono.kernels.gemv import folded_columns, row_index, unfold, zero_tile
from glm53_mono.kernels.memory import private, region
from glm53_mono.kernels.mhc import next_fn, stream_row, update_streams
from glm53_mono.kernels.peers import leave_partial
from glm53_mono.kernels.record import Word, device
from glm53_mono.kernels.stored import add_chunk, chunk_depth, matrix_in

OUTPUT = device(Word.OUTPUT)


@triton.jit
def output(
    workspace, record, rows, K: tl.constexpr, STORAGE: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """a = attended W_o^T, then hc_post. Task: one whole tile of hidden columns."""
    x = region(workspace, W.attended, tl.bfloat16)
    write_branch(workspace, record, OUTPUT, x, rows, K, T.output_depth, STORAGE, W, G, T, BACKEND)


@triton.jit
def write_branch(
    workspace, record, WORD: tl.constexpr, x, rows, K: tl.constexpr, WIDE: tl.constexpr, STORAGE: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """x W^T, a branch's output, into the streams; x bf16 [rows, K], W [hidden, K] in word WORD.

    With several ranks K is this rank's part, and the output is left for the reduce phase that follows.
    """
    COLUMNS: tl.constexpr = T.output_columns
    DEPTH: tl.constexpr = chunk_depth(WIDE, K, STORAGE)
    matrix, scales = matrix_in(record, WORD, STORAGE)
    branch = private(workspace, W.tile, W.tile_bytes, tl.bfloat16)
    lane = tl.arange(0, COLUMNS)
    for tile in range(tl.program_id(0), W.mix_tiles, tl.num_programs(0)):
        if G.tp_size == 1:
            fn = next_fn(record, tile * COLUMNS, COLUMNS, G)
            streams, post, comb = stream_row(workspace, tile, 0, rows, COLUMNS, W, G)
        weight_row = tl.minimum(tile * COLUMNS + folded_columns(COLUMNS), G.hidden - 1)
        acc = zero_tile(COLUMNS)
        for i in tl.range(0, K // DEPTH, num_stages=T.stages):
            acc = add_chunk(acc, x, K, rows, matrix, scales, weight_row, i * DEPTH, K, DEPTH, STORAGE, BACKEND)
        if G.tp_size == 1:
            tl.store(branch + row_index()[:, None] * COLUMNS + lane[None, :], unfold(acc, COLUMNS).to(tl.bfloat16))
            update_streams(workspace, tile, rows, fn, streams, post, comb, COLUMNS, W, G, BACKEND)
        else:
            leave_partial(record, tile, rows, unfold(acc, COLUMNS), COLUMNS, W, G)
