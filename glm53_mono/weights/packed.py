"""bf16 weights quantised here, as a checkpoint of that format stores them: for synthetic models."""

from __future__ import annotations

import torch
from torch import Tensor

from glm53_mono.weights import bf16, fp8, mxfp4
from glm53_mono.weights.copies import relaid
from glm53_mono.weights.descriptor import Format, Layout, Matrix, Storage

QUANTISED = {Format.FP8: fp8, Format.MXFP4: mxfp4}
"""By format, who quantises, describes and dequantises."""


def packed(name: str, tensor: Tensor, storage: Storage) -> Matrix:
    """A matrix or a stack of them in this format and layout; bf16 is read in place.

    Args:
        name: for messages.
        tensor: bf16 [rows, columns] or [matrices, rows, columns]; a stack is quantised one by one, to save memory.

    Raises:
        WeightError: sizes that the format or the layout cannot hold.
    """
    if storage.format == Format.BF16:
        return bf16.matrix(name, tensor)
    module = QUANTISED[storage.format]
    if tensor.dim() == 2:
        values, scales = module.quantised(tensor)
    else:
        values, scales = map(torch.stack, zip(*map(module.quantised, tensor), strict=True))
    matrix = module.matrix(name, values, scales)
    return matrix if storage.layout == Layout.LINEAR else relaid(matrix, storage.layout)


def unpacked(matrix: Matrix) -> Tensor:
    """What a matrix stands for: itself if bf16, else fp32 of the same shape."""
    if matrix.format == Format.BF16:
        return matrix.data
    linear = matrix if matrix.layout == Layout.LINEAR else relaid(matrix, Layout.LINEAR)
    return QUANTISED[matrix.format].dequantised(linear.data, linear.scales)
