"""AITER's order of weights and of E8M0 scales, which its matrix products on ROCm read (aiter/ops/shuffle.py).

A matrix of `bytes` a row lies in tiles of 16 rows by 16 bytes, row by row within a tile, and the tiles of 16 rows one
behind the other: byte b of row n is at

    n // 16 * 16 * bytes + b // 16 * 256 + n % 16 * 16 + b % 16

E8M0 scales lie in blocks of 32 rows by 8 columns, in which a lane of a matrix instruction finds its four scales in one
word (aiter/utility/fp4_utils.py: e8m0_shuffle); scale c of row r, of `columns` a row, is at

    (r // 32 * columns // 8 + c // 8) * 256 + c % 4 * 64 + r % 16 * 4 + c % 8 // 4 * 2 + r % 32 // 16

In a stack every matrix keeps its place, since 16 and 32 divide its rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm53_mono.weights.descriptor import WeightError

PIECE_BYTES = 16
"""Of a row that stay together."""

TILE_ROWS = 16
STEP_BYTES = 32
"""`shuffle_weight` takes rows of a multiple of this."""

SCALE_ROWS = 32
SCALE_COLUMNS = 8


def check_weights(name: str, tensor: Tensor) -> None:
    """Refuses a matrix that cannot lie in this order.

    Raises:
        WeightError: rows or bytes of a row that no whole number of tiles holds.
    """
    rows, row_bytes = tensor.shape[-2], tensor.shape[-1] * tensor.element_size()
    for size, what, unit in ((rows, "rows", TILE_ROWS), (row_bytes, "bytes a row", STEP_BYTES)):
        if size % unit:
            raise WeightError(f"{name} has {size} {what} on this rank, AITER's layout wants a multiple of {unit}")


def check_scales(name: str, scales: Tensor) -> None:
    """Refuses E8M0 scales that `e8m0_shuffle` has to pad; arguments and errors as of `check_weights`."""
    for size, what, unit in ((scales.shape[-2], "rows", SCALE_ROWS), (scales.shape[-1], "scales a row", SCALE_COLUMNS)):
        if size % unit:
            raise WeightError(f"{name} has {size} {what} on this rank, AITER's layout wants a multiple of {unit}")


def shuffled(tensor: Tensor) -> Tensor:
    """A copy of a matrix or a stack of them, row-major, in AITER's order; the same shape and dtype."""
    pieces = _rows_of_bytes(tensor).unflatten(-1, (-1, PIECE_BYTES)).unflatten(-3, (-1, TILE_ROWS))
    return _as_before(pieces.transpose(-3, -2), tensor)


def unshuffled(tensor: Tensor) -> Tensor:
    """The inverse of `shuffled`."""
    row_bytes = tensor.shape[-1] * tensor.element_size()
    tiles = (-1, row_bytes // PIECE_BYTES, TILE_ROWS, PIECE_BYTES)
    return _as_before(_rows_of_bytes(tensor).flatten(-2).unflatten(-1, tiles).transpose(-3, -2), tensor)


def shuffled_scales(scales: Tensor) -> Tensor:
    """A copy of E8M0 scales uint8 [..., rows, columns], row-major, in AITER's order; the same shape."""
    blocks = scales.unflatten(-1, (-1, 2, 4)).unflatten(-4, (-1, 2, 16))
    return _as_before(blocks.movedim((-6, -3, -1, -4, -2, -5), (-6, -5, -4, -3, -2, -1)), scales)


def unshuffled_scales(scales: Tensor) -> Tensor:
    """The inverse of `shuffled_scales`."""
    blocks = scales.flatten(-2).unflatten(-1, (-1, scales.shape[-1] // SCALE_COLUMNS, 4, 16, 2, 2))
    return _as_before(blocks.movedim((-6, -5, -4, -3, -2, -1), (-6, -3, -1, -4, -2, -5)), scales)


def _rows_of_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _as_before(moved: Tensor, tensor: Tensor) -> Tensor:
    return moved.contiguous().view(_rows_of_bytes(tensor).shape).view(tensor.dtype)
