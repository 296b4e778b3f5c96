"""bf16 matrices, read where they lie."""

from __future__ import annotations

import torch
from torch import Tensor

from glm53_mono.weights.descriptor import Format, Matrix, WeightError, checked_address
from glm53_mono.weights.model import ModelWeights, with_matrices


def matrix(name: str, tensor: Tensor) -> Matrix:
    """Describes a matrix [rows, columns] or a stack [..., rows, columns], bf16 and row-major without gaps.

    Raises:
        WeightError: another dtype, gaps between rows, or an address at which the kernels' loads cannot start.
    """
    if tensor.dtype != torch.bfloat16:
        raise WeightError(f"{name} is {tensor.dtype}, the step reads it as torch.bfloat16")
    if not tensor.is_contiguous():
        raise WeightError(f"{name} has strides {tensor.stride()}, the step reads its rows without gaps")
    checked_address(name, tensor)
    rows, columns = tensor.shape[-2:]
    return Matrix(name, tensor, rows, columns, Format.BF16)


def described(weights: ModelWeights[Tensor]) -> ModelWeights[Matrix]:
    """The reference's weights as the kernels read them; copies none.

    Raises:
        WeightError: see `matrix`.
    """
    return with_matrices(weights, matrix)
