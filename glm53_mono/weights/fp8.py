"""FP8 matrices: e4m3 values, one fp32 scale for each block of 128 x 128 (`weight_scale_inv` or `weight_scale`)."""

from __future__ import annotations

import torch
from torch import Tensor

from glm53_mono.geometry import FP8_BLOCK
from glm53_mono.weights import shuffled
from glm53_mono.weights.descriptor import Format, Layout, Matrix, WeightError, checked_address

E4M3_MAX = 448.0
"""Largest finite value."""


def matrix(name: str, tensor: Tensor, scales: Tensor | None, layout: Layout = Layout.LINEAR) -> Matrix:
    """Describes a matrix [rows, columns] or a stack [..., rows, columns] of e4m3 values, without gaps.

    Args:
        name: of the values, for messages.
        tensor: float8_e4m3fn.
        scales: fp32 [..., rows / 128, columns / 128], what a value is multiplied with; row-major in either layout.
        layout: of the values.

    Raises:
        WeightError: another dtype, gaps between rows, a size that no whole number of blocks fills, scales that are
            missing, of another shape or dtype, or not finite.
    """
    if tensor.dtype != torch.float8_e4m3fn:
        raise WeightError(f"{name} is {tensor.dtype}, the step reads it as torch.float8_e4m3fn")
    rows, columns = tensor.shape[-2:]
    for size, what in ((rows, "rows"), (columns, "columns")):
        if size % FP8_BLOCK:
            raise WeightError(
                f"{name} has {size} {what} on this rank, which is no multiple of its block of {FP8_BLOCK}"
            )
    if scales is None:
        raise WeightError(f"{name} is FP8 and has no scales")
    wanted = (*tensor.shape[:-2], rows // FP8_BLOCK, columns // FP8_BLOCK)
    if scales.dtype != torch.float32 or tuple(scales.shape) != wanted:
        raise WeightError(
            f"the scales of {name} are {scales.dtype} {list(scales.shape)}, not torch.float32 {list(wanted)}"
        )
    for what, part in ((name, tensor), (f"the scales' tensor of {name}", scales)):
        if not part.is_contiguous():
            raise WeightError(f"{what} has strides {part.stride()}, the step reads its rows without gaps")
    if layout == Layout.SHUFFLED:
        shuffled.check_weights(name, tensor)
    finite = scales.isfinite()
    if not bool(finite.all()):
        raise WeightError(f"the scales of {name} hold {scales[~finite][0].item()}, they must be finite")
    checked_address(name, tensor)
    return Matrix(name, tensor, rows, columns, Format.FP8, layout, scales)


def quantised(weights: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values and scales of bf16 or fp32 weights [..., rows, columns]; a block's largest value becomes 448.

    Returns:
        values float8_e4m3fn of the same shape, scales fp32 [..., rows / 128, columns / 128].
    """
    blocks = _blocks(weights.float())
    scales = blocks.abs().amax((-3, -1)).clamp(min=torch.finfo(torch.float32).tiny) / E4M3_MAX
    scaled = (blocks / scales[..., :, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).flatten(-2).flatten(-3, -2), scales


def dequantised(values: Tensor, scales: Tensor) -> Tensor:
    """The weights that values and scales stand for, fp32: value * scale.

    SGLang rounds them to bf16 where it dequantises (fp8_utils.py: block_quant_dequant); the kernels do not.
    """
    wide = _blocks(values.float()) * scales[..., :, None, :, None]
    return wide.flatten(-2).flatten(-3, -2)


def _blocks(matrix: Tensor) -> Tensor:
    """[..., row blocks, 128, column blocks, 128]."""
    return matrix.unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))
