"""One descriptor a weight matrix: address, shape, format, scales. The kernels ask it, never the model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class Format(IntEnum):
    """How a matrix's values are stored."""

    BF16 = 0


class WeightError(ValueError):
    """A weight that the step cannot read; the message names the tensor, what it is and what it must be."""


@dataclass(frozen=True)
class Matrix:
    """A matrix [rows, columns], or a stack of them, whose columns (the sum's direction) are contiguous in memory."""

    name: str
    data: Tensor
    rows: int
    columns: int
    format: Format
    scales: Tensor | None = None

    @property
    def address(self) -> int:
        """Device address of the first value."""
        return self.data.data_ptr()

    @property
    def bytes(self) -> int:
        """Bytes of the whole stack."""
        return self.data.numel() * self.data.element_size()


ADDRESS_ALIGNMENT = 16
"""Bytes that every weight's address is a multiple of: the kernels' loads are that wide."""


def checked_address(name: str, tensor: Tensor) -> int:
    """The tensor's address, refused where 16-byte loads could not start."""
    if tensor.data_ptr() % ADDRESS_ALIGNMENT:
        raise WeightError(
            f"{name} lies at address {tensor.data_ptr():#x}, which is not a multiple of {ADDRESS_ALIGNMENT}"
        )
    return tensor.data_ptr()
