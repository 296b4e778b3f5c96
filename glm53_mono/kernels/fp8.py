"""FP8 weights: e4m3 values, one fp32 scale for each block of 128 x 128.

A value is exact in bf16, so the products are those of the stored values; a block's scale multiplies the fp32 sum over
its 128 inputs. Nothing is rounded between the stored bytes and the accumulator.
"""

import triton
import triton.language as tl

from glm53_mono.geometry import FP8_BLOCK, MAX_ROWS
from glm53_mono.kernels.gemv import load_activations
from glm53_mono.kernels.layout import column_place, piece_items, row_place

ROWS = tl.constexpr(MAX_ROWS)
BLOCK = tl.constexpr(FP8_BLOCK)


@triton.jit
def add_chunk(
    acc, x, stride, rows, matrix, scales, row, first, K: tl.constexpr, DEPTH: tl.constexpr, LAYOUT: tl.constexpr,
    BACKEND: tl.constexpr,
):  # fmt: skip
    """As `gemv.add_chunk`; matrix: e4m3 [N, K] in LAYOUT, scales: fp32 [ceil(N / 128), K / 128], row-major.

    A chunk is folded block pair by block pair: each half of a product lies in one block of K.
    """
    PART: tl.constexpr = min(DEPTH, 2 * BLOCK)
    HALF: tl.constexpr = PART // 2
    COLUMNS: tl.constexpr = row.shape[0] // 2
    PIECE: tl.constexpr = piece_items(matrix.dtype.element_ty)
    half = tl.arange(0, 2 * COLUMNS) // COLUMNS * HALF
    row_start = row_place(row, K, PIECE, LAYOUT)
    for part in tl.static_range(DEPTH // PART):
        begin = first + part * PART
        activations = load_activations(x, stride, rows, begin, PART)
        start = row_start + column_place(begin + half, 0, PIECE, LAYOUT)
        k = column_place(0, tl.arange(0, HALF), PIECE, LAYOUT)
        weights = tl.load(matrix + start[:, None] + k[None, :], eviction_policy="evict_first")
        scale = tl.load(scales + row // BLOCK * (K // BLOCK) + (begin + half) // BLOCK)
        acc += tl.dot(activations, widened(weights, BACKEND).T) * scale[None, :]
    return acc


@triton.jit
def widened(values, BACKEND: tl.constexpr):
    """e4m3 as bf16. On sm_90 the straight way is an F2F for each value, a slow unit's; by fp32 there is none."""
    if BACKEND == "hip":
        return values.to(tl.bfloat16)
    else:
        return values.to(tl.float32).to(tl.bfloat16)
