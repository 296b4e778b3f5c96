"""One descriptor a weight matrix: address, shape, format, layout, scales. The kernels ask it, never the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from torch import Tensor


class Format(IntEnum):
    """How a matrix's values are stored; each has a file of its own in this package."""

    BF16 = 0
    FP8 = 1
    MXFP4 = 2


class Layout(IntEnum):
    """In which order a matrix's values lie in memory."""

    LINEAR = 0
    """Row by row, without gaps."""

    SHUFFLED = 1
    """AITER's on ROCm: see `shuffled`; the scales of MXFP4 in an order of their own with it."""


@dataclass(frozen=True)
class Storage:
    """All that the code of a loop over a matrix depends on."""

    format: Format = Format.BF16
    layout: Layout = Layout.LINEAR

    def __str__(self) -> str:
        return self.format.name if self.layout == Layout.LINEAR else f"{self.layout.name.lower()} {self.format.name}"


class WeightError(ValueError):
    """A weight that the step cannot read; the message names the tensor, what it is and what it must be."""


@dataclass(frozen=True)
class Matrix:
    """A matrix [rows, columns], or a stack of them, summed over its columns; made by a format's own `matrix`."""

    name: str
    data: Tensor
    """The values as they are stored."""
    rows: int
    columns: int
    format: Format
    layout: Layout = Layout.LINEAR
    scales: Tensor | None = None
    """None where the format has none."""

    @property
    def storage(self) -> Storage:
        """Format and layout."""
        return Storage(self.format, self.layout)

    @property
    def address(self) -> int:
        """Device address of the first value."""
        return self.data.data_ptr()

    @property
    def bytes(self) -> int:
        """Bytes of the whole stack, its scales included."""
        return sum(part.numel() * part.element_size() for part in (self.data, self.scales) if part is not None)

    def item(self, index: int) -> Matrix:
        """One matrix of a stack."""
        return replace(
            self,
            name=f"{self.name}[{index}]",
            data=self.data[index],
            scales=None if self.scales is None else self.scales[index],
        )


ADDRESS_ALIGNMENT = 16
"""Bytes that every weight's address is a multiple of: the kernels' loads are that wide."""


def checked_address(name: str, tensor: Tensor) -> int:
    """The tensor's address, refused where 16-byte loads could not start."""
    if tensor.data_ptr() % ADDRESS_ALIGNMENT:
        raise WeightError(
            f"{name} lies at address {tensor.data_ptr():#x}, which is not a multiple of {ADDRESS_ALIGNMENT}"
        )
    return tensor.data_ptr()
