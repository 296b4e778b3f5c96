"""Checks of the tensors that SGLang hands over, at the one place where they enter the package."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class UpstreamError(RuntimeError):
    """SGLang holds something that the step cannot read; the message names it, what it is and what it must be."""


def expect(
    tensor: torch.Tensor,
    name: str,
    shape: tuple[int | None, ...],
    *dtypes: torch.dtype,
    strides: tuple[int, ...] | None = None,
    any_outer_stride: bool = False,
) -> torch.Tensor:
    """The tensor itself, once its layout is what a kernel addresses.

    Args:
        tensor: a weight, a cache or an input of a step.
        name: how SGLang's own code reaches it.
        shape: elements; None where any size will do.
        dtypes: the ones that will do.
        strides: elements; left out, dense row-major.
        any_outer_stride: whether the first dimension's stride is read at run time instead.

    Raises:
        UpstreamError: not a tensor, or one of another shape, dtype or stride.
    """
    found_shape = getattr(tensor, "shape", None)
    if found_shape is None:
        raise UpstreamError(f"{name} is {tensor!r}, not a tensor")
    if len(found_shape) != len(shape) or not _fits(found_shape, shape):
        raise UpstreamError(f"{name} has shape {_shown(found_shape)}, not {_shown(shape)}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise UpstreamError(f"{name} is {tensor.dtype}, not {wanted}")
    wanted_strides: tuple[int | None, ...] = strides or _dense(found_shape)
    if any_outer_stride:
        wanted_strides = (None, *wanted_strides[1:])
    if not _fits(tensor.stride(), wanted_strides, sizes=found_shape):
        raise UpstreamError(f"{name} has strides {_shown(tensor.stride())}, not {_shown(wanted_strides)}")
    return tensor


def _fits(found: tuple[int, ...], wanted: tuple[int | None, ...], sizes: tuple[int, ...] | None = None) -> bool:
    """Whether every stated number is met; the stride of a dimension of size 1 says nothing."""
    return all(
        want is None or have == want or (sizes is not None and sizes[index] == 1)
        for index, (have, want) in enumerate(zip(found, wanted, strict=True))
    )


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _shown(numbers: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if number is None else str(number) for number in numbers) + "]"
