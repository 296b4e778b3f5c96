"""MXFP4 weights: two e2m1 values a byte, the even column in the low half, and one E8M0 scale for each 32 of a row.

A scaled value is exact in bf16, so the products are those of the stored weights. On ROCm Triton unpacks and scales, one
instruction a pair on gfx950; only a scale byte of 0, 2^-127, may be read as 0 there. What Triton makes of that for
sm_90 takes 36 instructions a byte, so everywhere else values are widened here.
"""

import triton
import triton.language as tl

from glm53_mono.geometry import MXFP4_BLOCK
from glm53_mono.kernels.gemv import load_activations
from glm53_mono.kernels.layout import column_place, piece_items, row_place, scale_place

BLOCK = tl.constexpr(MXFP4_BLOCK)
PAIR, WORD = tl.constexpr(2), tl.constexpr(8)
"""Values of a byte and of 32 bits."""
LIFTED = tl.constexpr(6)
"""e2m1's bits in the place of e4m3's stand for 2^-6 of its value."""
# Triton 3.6's interpreter takes no plain strings here
ACTIVATIONS = tl.constexpr("bf16")
WEIGHTS = tl.constexpr("e2m1")


@triton.jit
def add_chunk(
    acc, x, stride, rows, matrix, scales, row, first, K: tl.constexpr, DEPTH: tl.constexpr, LAYOUT: tl.constexpr,
    BACKEND: tl.constexpr,
):  # fmt: skip
    """As `gemv.add_chunk`; matrix: uint8 [N, K / 2], scales: uint8 [N, K / 32], both in LAYOUT."""
    HALF: tl.constexpr = DEPTH // 2
    COLUMNS: tl.constexpr = row.shape[0] // 2
    activations = load_activations(x, stride, rows, first, DEPTH)
    begin = first + tl.arange(0, 2 * COLUMNS) // COLUMNS * HALF
    block = (begin // BLOCK)[:, None] + tl.arange(0, HALF // BLOCK)[None, :]
    scale_at = scales + scale_place(row[:, None], block, K // BLOCK, LAYOUT)
    if BACKEND == "hip":
        packed = load_packed(matrix, row, begin // PAIR, K // PAIR, HALF // PAIR, LAYOUT)
        return tl.dot_scaled(activations, None, ACTIVATIONS, packed.T, tl.load(scale_at), WEIGHTS, acc)
    else:
        words = matrix.to(tl.pointer_type(tl.uint32), bitcast=True)
        packed = load_packed(words, row, begin // WORD, K // WORD, HALF // WORD, LAYOUT)
        return tl.dot(activations, widened(packed, tl.load(scale_at)).T, acc)


@triton.jit
def load_packed(items, row, first, ROW: tl.constexpr, COUNT: tl.constexpr, LAYOUT: tl.constexpr):
    """COUNT items of each row from the item `first` on; ROW items a row."""
    PIECE: tl.constexpr = piece_items(items.dtype.element_ty)
    start = row_place(row, ROW, PIECE, LAYOUT) + column_place(first, 0, PIECE, LAYOUT)
    place = column_place(0, tl.arange(0, COUNT), PIECE, LAYOUT)
    return tl.load(items + start[:, None] + place[None, :], eviction_policy="evict_first")


@triton.jit
def widened(packed, scale):
    """bf16 [N, 8 J] of words uint32 [N, J] and scale bytes uint8 [N, J / 4], none above `weights.mxfp4.LARGEST_SCALE`.

    Four values at once are moved to where e4m3 has their bits, which the device then widens.
    """
    N: tl.constexpr = packed.shape[0]
    VALUES: tl.constexpr = packed.shape[1] * WORD
    even = ((packed & 0x07070707) << 2) | ((packed & 0x08080808) << 4)
    odd = ((packed & 0x70707070) >> 2) | (packed & 0x80808080)
    # the last join's side changes fastest along a row
    values = tl.reshape(tl.join(bytes_of(even), bytes_of(odd)), [N, VALUES]).to(tl.float8e4nv, bitcast=True)
    factor = ((scale.to(tl.int32) + LIFTED) << 23).to(tl.float32, bitcast=True)
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], [N, VALUES // BLOCK, BLOCK]), [N, VALUES])
    return (values.to(tl.float32) * factor).to(tl.bfloat16)


@triton.jit
def bytes_of(word):
    """uint8 [N, J, 2, 2], the bytes of words [N, J] from the lowest on."""
    first, second = word.to(tl.uint8), (word >> 8).to(tl.uint8)
    third, fourth = (word >> 16).to(tl.uint8), (word >> 24).to(tl.uint8)
    return tl.join(tl.join(first, third), tl.join(second, fourth))
