"""Places of a stored matrix's values: row by row, or in AITER's tiles (`weights.shuffled`), read where they lie.

A place is the sum of one of the row and one of the column in either layout, so a thread's 16 bytes stay together.
"""

import triton
import triton.language as tl

from glm53_mono.kernels.record import device
from glm53_mono.weights.descriptor import Layout
from glm53_mono.weights.shuffled import PIECE_BYTES, SCALE_COLUMNS, SCALE_ROWS, TILE_ROWS

LINEAR = device(Layout.LINEAR)
ROWS = tl.constexpr(TILE_ROWS)
BLOCK_ROWS = tl.constexpr(SCALE_ROWS)
BLOCK_COLUMNS = tl.constexpr(SCALE_COLUMNS)
BLOCK_BYTES = tl.constexpr(SCALE_ROWS * SCALE_COLUMNS)


@triton.constexpr_function
def piece_items(dtype):
    """Values of a piece of a row."""
    return PIECE_BYTES * 8 // dtype.primitive_bitwidth


@triton.jit
def row_place(row, ITEMS: tl.constexpr, PIECE: tl.constexpr, LAYOUT: tl.constexpr):
    """Where a row begins; ITEMS, PIECE: values as they are stored, of a row and of a piece."""
    if LAYOUT == LINEAR:
        return row * ITEMS
    else:
        return row // ROWS * (ROWS * ITEMS) + row % ROWS * PIECE


@triton.jit
def column_place(first, column, PIECE: tl.constexpr, LAYOUT: tl.constexpr):
    """How far the values `first + column` are behind the beginning of their row; whole pieces lie before `first`."""
    if LAYOUT == LINEAR:
        return first + column
    else:
        return first * ROWS + (column // PIECE * (ROWS * PIECE) + column % PIECE)


@triton.jit
def scale_place(row, column, COLUMNS: tl.constexpr, LAYOUT: tl.constexpr):
    """Where the E8M0 scale of a block of a row is, COLUMNS scales a row."""
    if LAYOUT == LINEAR:
        return row * COLUMNS + column
    else:
        block = row // BLOCK_ROWS * (COLUMNS // BLOCK_COLUMNS) + column // BLOCK_COLUMNS
        own = column % 4 * 64 + row % 16 * 4 + column % BLOCK_COLUMNS // 4 * 2 + row % BLOCK_ROWS // 16
        return block * BLOCK_BYTES + own
