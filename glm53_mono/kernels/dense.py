"""The dense FFN of the first layers; its two halves also serve the shared expert."""

import triton
import triton.language as tl

from glm53_mono.kernels.gemv import (
    pair_row,
    row_index,
    split_pairs,
    unfold,
    zero_tile,
)
from glm53_mono.kernels.memory import region
from glm53_mono.kernels.numerics import clamped_swiglu
from glm53_mono.kernels.output import write_branch
from glm53_mono.kernels.record import Word, device
from glm53_mono.kernels.stored import add_chunk, chunk_depth, matrix_in

DENSE = device(Word.DENSE)


@triton.jit
def gate_up(
    x, record, WORD: tl.constexpr, out, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    STORAGE: tl.constexpr, G: tl.constexpr, T: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """out = clamped SwiGLU of x W^T, bf16 [rows, WIDTH]; W [2 WIDTH, hidden] in word WORD, gates first.

    Task: one tile of gate and up pairs.
    """
    DEPTH: tl.constexpr = chunk_depth(WIDE, G.hidden, STORAGE)
    CHUNKS: tl.constexpr = G.hidden // DEPTH
    HALF: tl.constexpr = COLUMNS // 2
    TILES: tl.constexpr = (WIDTH + HALF - 1) // HALF
    matrix, scales = matrix_in(record, WORD, STORAGE)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    row = row_index()[:, None]
    acc = zero_tile(COLUMNS)
    for i in tl.range(0, (TILES - pid + programs - 1) // programs * CHUNKS, num_stages=T.stages):
        tile = pid + (i // CHUNKS) * programs
        first = (i % CHUNKS) * DEPTH
        pairs = pair_row(tile * HALF, COLUMNS, WIDTH)
        acc = add_chunk(acc, x, G.hidden, rows, matrix, scales, pairs, first, G.hidden, DEPTH, STORAGE, BACKEND)
        if i % CHUNKS == CHUNKS - 1:
            gate, up = split_pairs(unfold(acc, COLUMNS), COLUMNS)
            column = tile * HALF + tl.arange(0, HALF)[None, :]
            wide = clamped_swiglu(gate, up, G.swiglu_limit).to(tl.bfloat16)
            tl.store(out + row * WIDTH + column, wide, mask=(row < rows) & (column < WIDTH))
            acc = zero_tile(COLUMNS)


@triton.jit
def dense_up(
    workspace, record, rows,
    W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, F: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Gate and up of a dense layer. Task: one tile of pairs."""
    x = region(workspace, W.mixed, tl.bfloat16)
    out = region(workspace, W.wide, tl.bfloat16)
    STORAGE: tl.constexpr = F.dense_up
    gate_up(x, record, DENSE, out, rows, G.dense_width, T.up_columns, T.up_depth, STORAGE, G, T, BACKEND)


@triton.jit
def dense_down(
    workspace, record, rows,
    W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, F: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """f = wide W_down^T, then hc_post. Task: one whole tile of hidden columns."""
    x = region(workspace, W.wide, tl.bfloat16)
    STORAGE: tl.constexpr = F.dense_down
    write_branch(workspace, record, DENSE, x, rows, G.dense_width, T.dense_depth, STORAGE, W, G, T, BACKEND)
