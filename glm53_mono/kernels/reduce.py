"""The phases that add up what the ranks left: after the embedding, and at the end of every branch."""

import triton
import triton.language as tl

from glm53_mono.kernels.gemv import row_index
from glm53_mono.kernels.memory import private, region
from glm53_mono.kernels.mhc import GROUP, leave_mix_share, next_fn, stream_row, update_streams
from glm53_mono.kernels.peers import finish_reduce, sum_of_ranks
from glm53_mono.kernels.sync import program_barrier


@triton.jit
def reduce_branch(workspace, record, rows, W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, BACKEND: tl.constexpr):
    """A branch's output of all ranks into the streams. Task: one tile of columns."""
    COLUMNS: tl.constexpr = T.output_columns
    for tile in range(tl.program_id(0), W.mix_tiles, tl.num_programs(0)):
        fn = next_fn(record, tile * COLUMNS, COLUMNS, G)
        streams, post, comb = stream_row(workspace, tile, 0, rows, COLUMNS, W, G)
        keep_sum(workspace, record, tile, rows, COLUMNS, W, G)
        update_streams(workspace, tile, rows, fn, streams, post, comb, COLUMNS, W, G, BACKEND)
        # the next tile must not be stored while a thread still reads this one
        program_barrier(BACKEND)
    finish_reduce(record, W, BACKEND)


@triton.jit
def reduce_embedding(workspace, record, rows, W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, BACKEND: tl.constexpr):
    """The embedding rows, each from the rank that owns it, into the four streams. Task: one tile of columns."""
    COLUMNS: tl.constexpr = T.output_columns
    streams = region(workspace, W.streams, tl.bfloat16)
    mix = region(workspace, W.mix, tl.float32)
    kept = private(workspace, W.tile, W.tile_bytes, tl.bfloat16)
    stream = tl.arange(0, GROUP)[:, None]
    lane = tl.arange(0, COLUMNS)[None, :]
    for tile in range(tl.program_id(0), W.mix_tiles, tl.num_programs(0)):
        column = tile * COLUMNS + lane
        inside = (column < G.hidden) & (stream >= 0)
        fn = next_fn(record, tile * COLUMNS, COLUMNS, G)
        keep_sum(workspace, record, tile, rows, COLUMNS, W, G)
        program_barrier(BACKEND)
        for row in range(rows):
            x = tl.load(kept + row * COLUMNS + lane + stream * 0)
            tl.store(streams + row * G.stream_width + stream * G.hidden + column, x, mask=inside)
            leave_mix_share(mix, tile, row, tl.where(inside, x.to(tl.float32), 0.0), fn)
        program_barrier(BACKEND)
    finish_reduce(record, W, BACKEND)


@triton.jit
def keep_sum(workspace, record, tile, rows, COLUMNS: tl.constexpr, W: tl.constexpr, G: tl.constexpr):
    """A tile's sum over the ranks into this program's `tile` region, rounded to bf16 as an all-reduce rounds it."""
    kept = private(workspace, W.tile, W.tile_bytes, tl.bfloat16)
    total = sum_of_ranks(record, tile, rows, COLUMNS, W, G)
    tl.store(kept + row_index()[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], total.to(tl.bfloat16))
