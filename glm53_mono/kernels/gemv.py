"""The weight stream: tiles of a matrix against up to 8 rows of activations, as one pipelined loop a phase.

A phase's loop runs over (tile, K chunk) flattened, so that the next tile's weights are in flight while a tile ends.

A matrix product takes 16 rows and a step has 8, so a chunk is folded: rows 8 to 15 carry the second half of its K, and
the tile's columns are there twice, once against each half. Of the product [16, 2 COLUMNS] the two blocks that pair a
half with itself are wanted, and their sum is the tile. Unfolded, a narrow tile gives half of the warps nothing of
their own to do, and what they read of the activations is twice what the weights bring.

Products are bf16 x bf16 summed in fp32; a row's sum has the same order whatever the other rows are. Nothing in such a
loop may hold a barrier or another loop: Triton would not pipeline it.
"""

import triton
import triton.language as tl

from glm53_mono.geometry import MAX_ROWS

ROWS = tl.constexpr(MAX_ROWS)


@triton.jit
def zero_tile(COLUMNS: tl.constexpr):
    """The folded accumulator of a tile, fp32 [16, 2 COLUMNS]."""
    return tl.zeros([2 * ROWS, 2 * COLUMNS], tl.float32)


@triton.jit
def row_index():
    """The rows of a step, [8]; those beyond its count read zeros and are never stored."""
    return tl.arange(0, ROWS)


@triton.jit
def folded_columns(COLUMNS: tl.constexpr):
    """The tile's columns as the folded product has them, [2 COLUMNS]."""
    return tl.arange(0, 2 * COLUMNS) % COLUMNS


@triton.jit
def add_chunk(acc, x, stride, rows, matrix, row, first, K: tl.constexpr, DEPTH: tl.constexpr):
    """The folded accumulator after the K chunk [first, first + DEPTH).

    x: row 0 of the activations, bf16, `stride` elements from row to row. matrix: bf16, row-major [N, K]. row: int32
    [2 COLUMNS], the weight rows of `folded_columns`.
    """
    HALF: tl.constexpr = DEPTH // 2
    activations = load_activations(x, stride, rows, first, DEPTH)
    k = first + tl.arange(0, HALF)[None, :]
    COLUMNS: tl.constexpr = row.shape[0] // 2
    half = (tl.arange(0, 2 * COLUMNS) // COLUMNS * HALF)[:, None]
    weights = tl.load(matrix + (row[:, None] * K + half) + k, eviction_policy="evict_first")
    return tl.dot(activations, weights.T, acc)


@triton.jit
def load_activations(x, stride, rows, first, DEPTH: tl.constexpr):
    """The chunk [first, first + DEPTH) of the rows, folded: bf16 [16, DEPTH / 2]; rows beyond `rows` are zero."""
    HALF: tl.constexpr = DEPTH // 2
    k = first + tl.arange(0, HALF)[None, :]
    folded_row = tl.arange(0, 2 * ROWS)[:, None]
    own = folded_row % ROWS
    place = own * stride + folded_row // ROWS * HALF + k
    return tl.load(x + place, mask=(own < rows) & (k >= 0), other=0.0)


@triton.jit
def unfold(acc, COLUMNS: tl.constexpr):
    """The tile, fp32 [8, COLUMNS]: the sums of the first half of every chunk plus those of the second."""
    blocks = tl.reshape(acc, [2, ROWS, 2, COLUMNS])
    x_half = tl.arange(0, 2)[:, None, None, None]
    w_half = tl.arange(0, 2)[None, None, :, None]
    return tl.sum(tl.sum(tl.where(x_half == w_half, blocks, 0.0), 2), 0)


@triton.jit
def pair_row(first, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Weight rows of a tile of pairs from `first` on, folded: even columns are gates, odd ones their ups."""
    column = folded_columns(COLUMNS)
    own = tl.minimum(first + column // 2, WIDTH - 1)
    return own + (column % 2) * WIDTH


@triton.jit
def split_pairs(tile, COLUMNS: tl.constexpr):
    """The gates and the ups of such a tile, each fp32 [8, COLUMNS / 2]."""
    return tl.split(tl.reshape(tile, [ROWS, COLUMNS // 2, 2]))
