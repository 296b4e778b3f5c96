"""The dense FFN of the first layers; its two halves also serve the shared expert."""

import triton
import triton.language as tl

from glm53_mono.kernels.gemv import (
    add_chunk,
    pair_row,
    row_index,
    split_pairs,
    unfold,
    zero_tile,
)
from glm53_mono.kernels.memory import pointer, region
from glm53_mono.kernels.numerics import clamped_swiglu
from glm53_mono.kernels.output import write_branch
from glm53_mono.kernels.record import Word, device

DENSE = device(Word.DENSE)


@triton.jit
def gate_up(
    x, matrix, out, rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, G: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """out = clamped SwiGLU of x W^T, bf16 [rows, WIDTH]; W bf16 [2 WIDTH, hidden], gates first (MODEL_MATH 4.1).

    Task: one tile of gate and up pairs.
    """
    CHUNKS: tl.constexpr = G.hidden // DEPTH
    HALF: tl.constexpr = COLUMNS // 2
    TILES: tl.constexpr = (WIDTH + HALF - 1) // HALF
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    row = row_index()[:, None]
    acc = zero_tile(COLUMNS)
    for i in tl.range(0, (TILES - pid + programs - 1) // programs * CHUNKS, num_stages=T.stages):
        tile = pid + (i // CHUNKS) * programs
        first = (i % CHUNKS) * DEPTH
        acc = add_chunk(acc, x, G.hidden, rows, matrix, pair_row(tile * HALF, COLUMNS, WIDTH), first, G.hidden, DEPTH)
        if i % CHUNKS == CHUNKS - 1:
            gate, up = split_pairs(unfold(acc, COLUMNS), COLUMNS)
            column = tile * HALF + tl.arange(0, HALF)[None, :]
            wide = clamped_swiglu(gate, up, G.swiglu_limit).to(tl.bfloat16)
            tl.store(out + row * WIDTH + column, wide, mask=(row < rows) & (column < WIDTH))
            acc = zero_tile(COLUMNS)


@triton.jit
def dense_up(workspace, record, rows, W: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """Gate and up of a dense layer. Task: one tile of pairs."""
    x = region(workspace, W.mixed, tl.bfloat16)
    out = region(workspace, W.wide, tl.bfloat16)
    gate_up(x, pointer(record, DENSE, tl.bfloat16), out, rows, G.dense_width, T.up_columns, T.up_depth, G, T)


@triton.jit
def dense_down(workspace, record, rows, W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, BACKEND: tl.constexpr):
    """f = wide W_down^T, then hc_post. Task: one whole tile of hidden columns."""
    x = region(workspace, W.wide, tl.bfloat16)
    matrix = pointer(record, DENSE, tl.bfloat16)
    write_branch(workspace, record, x, matrix, rows, G.dense_width, T.dense_depth, W, G, T, BACKEND)
