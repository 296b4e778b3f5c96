"""MXFP4 weights: two e2m1 values a byte, the even column in the low half, and one E8M0 scale for each 32 of a row.

A scaled value is exact in bf16, so the products are those of the stored weights; only a scale byte of 0, 2^-127, is
read as 0. Triton unpacks and scales in registers: one instruction a pair on gfx950, bit tricks on sm_90.
"""

import triton
import triton.language as tl

from glm53_mono.geometry import MXFP4_BLOCK
from glm53_mono.kernels.gemv import load_activations
from glm53_mono.kernels.layout import column_place, piece_items, row_place, scale_place

BLOCK = tl.constexpr(MXFP4_BLOCK)
# Triton 3.6's interpreter takes no plain strings here
ACTIVATIONS = tl.constexpr("bf16")
WEIGHTS = tl.constexpr("e2m1")


@triton.jit
def add_chunk(
    acc, x, stride, rows, matrix, scales, row, first, K: tl.constexpr, DEPTH: tl.constexpr, LAYOUT: tl.constexpr
):
    """As `gemv.add_chunk`; matrix: uint8 [N, K / 2], scales: uint8 [N, K / 32], both in LAYOUT."""
    HALF: tl.constexpr = DEPTH // 2
    COLUMNS: tl.constexpr = row.shape[0] // 2
    activations = load_activations(x, stride, rows, first, DEPTH)
    PIECE: tl.constexpr = piece_items(matrix.dtype.element_ty)
    begin = first + tl.arange(0, 2 * COLUMNS) // COLUMNS * HALF
    start = row_place(row, K // 2, PIECE, LAYOUT) + column_place(begin // 2, 0, PIECE, LAYOUT)
    pair = column_place(0, tl.arange(0, HALF // 2), PIECE, LAYOUT)
    packed = tl.load(matrix + start[:, None] + pair[None, :], eviction_policy="evict_first")
    block = (begin // BLOCK)[:, None] + tl.arange(0, HALF // BLOCK)[None, :]
    scale = tl.load(scales + scale_place(row[:, None], block, K // BLOCK, LAYOUT))
    return tl.dot_scaled(activations, None, ACTIVATIONS, packed.T, scale, WEIGHTS, acc)
