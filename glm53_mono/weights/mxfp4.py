"""MXFP4 matrices (OCP MX): two e2m1 values a byte, one E8M0 scale for each 32 of a row.

The even column of a pair is the byte's low half (SGLang's mxfp4_tensor.py:77-133).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from glm53_mono.geometry import MXFP4_BLOCK
from glm53_mono.weights import shuffled
from glm53_mono.weights.blocks import FOLDED_BLOCKS
from glm53_mono.weights.descriptor import Format, Layout, Matrix, WeightError, checked_address

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the three low bits of a value stand for; the fourth is its sign."""

SCALE_BIAS = 127
"""A scale byte e stands for 2^(e - 127)."""

NOT_A_SCALE = 255
"""E8M0's NaN."""

LARGEST_SCALE = 248
"""2^121; beside a larger one the kernels' own widening overflows, and so would any sum of such weights."""


def matrix(name: str, tensor: Tensor, scales: Tensor | None, layout: Layout = Layout.LINEAR) -> Matrix:
    """Describes a matrix [rows, columns] or a stack [..., rows, columns], without gaps.

    Args:
        name: of the values, for messages.
        tensor: uint8 [..., rows, columns / 2].
        scales: uint8 [..., rows, columns / 32].
        layout: of values and scales.

    Raises:
        WeightError: another dtype, gaps between rows, a row that no pairs of blocks fill (a chunk of K is folded),
            scales that are missing, of another shape or dtype, NaN or beyond `LARGEST_SCALE`.
    """
    if tensor.dtype != torch.uint8:
        raise WeightError(f"{name} is {tensor.dtype}, the step reads its packed values as torch.uint8")
    rows, columns = tensor.shape[-2], 2 * tensor.shape[-1]
    if columns % FOLDED_BLOCKS:
        raise WeightError(
            f"{name} has {columns} columns on this rank, which is no multiple of two blocks of {MXFP4_BLOCK}"
        )
    if scales is None:
        raise WeightError(f"{name} is MXFP4 and has no scales")
    wanted = (*tensor.shape[:-1], columns // MXFP4_BLOCK)
    if scales.dtype != torch.uint8 or tuple(scales.shape) != wanted:
        raise WeightError(
            f"the scales of {name} are {scales.dtype} {list(scales.shape)}, not torch.uint8 {list(wanted)}"
        )
    for what, part in ((name, tensor), (f"the scales' tensor of {name}", scales)):
        if not part.is_contiguous():
            raise WeightError(f"{what} has strides {part.stride()}, the step reads its rows without gaps")
    if layout == Layout.SHUFFLED:
        shuffled.check_weights(name, tensor)
        shuffled.check_scales(f"the scales' tensor of {name}", scales)
    largest = int(scales.max()) if scales.numel() else 0
    if largest == NOT_A_SCALE:
        raise WeightError(f"the scales of {name} hold the byte {NOT_A_SCALE}, which is NaN")
    if largest > LARGEST_SCALE:
        raise WeightError(
            f"the scales of {name} hold the byte {largest}, 2^{largest - SCALE_BIAS}: at most "
            f"{LARGEST_SCALE} can be read"
        )
    checked_address(name, tensor)
    checked_address(f"the scales' tensor of {name}", scales)
    return Matrix(name, tensor, rows, columns, Format.MXFP4, layout, scales)


def quantised(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Packed values and scales of weights [..., rows, columns]; a block's largest value lands in [4, 8), cut at 6.

    Returns:
        values uint8 [..., rows, columns / 2], scales uint8 [..., rows, columns / 32].
    """
    blocks = weights.float().unflatten(-1, (-1, MXFP4_BLOCK))
    absmax = blocks.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
    exponent = (torch.floor(torch.log2(absmax)) - 2).clamp(-SCALE_BIAS, SCALE_BIAS)
    scaled = blocks / torch.exp2(exponent)[..., None]
    borders = torch.tensor([(low + high) / 2 for low, high in pairwise(VALUES)])
    magnitude = torch.bucketize(scaled.abs(), borders.to(scaled.device))
    codes = (magnitude + 8 * (scaled < 0)).to(torch.uint8).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + SCALE_BIAS).to(torch.uint8)


def dequantised(values: Tensor, scales: Tensor) -> Tensor:
    """The weights that packed values and scales stand for, fp32: value * 2^(scale - 127), a byte of 255 taken for
    2^128 as SGLang does."""
    codes = torch.stack((values & 15, values >> 4), -1).flatten(-2).long()
    magnitudes = torch.tensor(VALUES, device=values.device)[codes & 7]
    signed = torch.where(codes >= 8, -magnitudes, magnitudes).unflatten(-1, (-1, MXFP4_BLOCK))
    return (signed * torch.exp2(scales.float() - SCALE_BIAS)[..., None]).flatten(-2)
