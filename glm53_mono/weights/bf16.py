"""bf16 matrices, read where SGLang put them."""

from __future__ import annotations

import torch
from torch import Tensor

from glm53_mono.weights.descriptor import Format, Matrix, WeightError, checked_address


def matrix(name: str, tensor: Tensor, rows: int, columns: int, *, stack: int | None = None) -> Matrix:
    """Describes a bf16 matrix [rows, columns] or a stack of at least `stack` of them, row-major without gaps.

    Raises:
        WeightError: another dtype or shape, or gaps between rows.
    """
    if tensor.dtype != torch.bfloat16:
        raise WeightError(f"{name} is {tensor.dtype}, the step reads it as torch.bfloat16")
    return _described(name, tensor, rows, columns, stack)


def transposed_stack(name: str, tensor: Tensor, rows: int, columns: int, stack: int) -> Matrix:
    """Describes a stack that SGLang holds as [stack, columns, rows] with its columns contiguous (w_kc, w_vc).

    deepseek_weight_loader.py:780-786 lays both out so on CUDA.
    """
    return matrix(name, tensor.transpose(1, 2), rows, columns, stack=stack)


def _described(name: str, tensor: Tensor, rows: int, columns: int, stack: int | None) -> Matrix:
    shape = tuple(tensor.shape)
    wanted = (rows, columns) if stack is None else (stack, rows, columns)
    fits = shape[-2:] == (rows, columns) and (stack is None or (len(shape) == 3 and shape[0] >= stack))
    if not fits or len(shape) != len(wanted):
        raise WeightError(f"{name} has shape {shape}, the geometry wants {wanted}")
    if not tensor.is_contiguous():
        raise WeightError(f"{name} has strides {tensor.stride()}, the step reads its rows without gaps: {wanted}")
    checked_address(name, tensor)
    return Matrix(name, tensor, rows, columns, Format.BF16)
