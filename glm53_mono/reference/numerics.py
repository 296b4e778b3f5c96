"""What the parts of the reference share: contractions, rounding, Hadamard rotation, FP8 quantisation, stable choice."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_MAX = 448.0
"""Largest finite e4m3 value."""

FP8_ABSMAX_FLOOR = 1e-4
"""Least absolute maximum that a scale is taken from, so that zeros quantise to zeros (act_quant_triton.py:50)."""


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in fp32 with a single rounding: the products are accumulated in fp64.

    A GPU accumulates the same products in fp32, in an order of its own. The value here lies within that order's error,
    and does not depend on how many rows share the call, so one row gives the same bits alone and in a batch.

    Args:
        a: [..., m, k], any float type.
        b: [..., k, n], any float type.

    Returns:
        [..., m, n] fp32.
    """
    return (a.double() @ b.double()).float()


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight^T` for x [..., rows, k] and weight [..., n, k], as fp32 [..., rows, n]."""
    return matmul(x, weight.transpose(-1, -2))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight^T` rounded to bf16 as a bf16 GEMM stores it; shapes as of `linear_fp32`."""
    return linear_fp32(x, weight).bfloat16()


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Hadamard transform of the last dimension, Sylvester order, rounded to bf16.

    The butterflies run in fp32 from stride 1 upwards, then one multiplication by n^-0.5 (kpool_fp8_index.py:1106-1125).

    Args:
        x: [..., n] bf16, n a power of two.

    Returns:
        [..., n] bf16.
    """
    width = x.shape[-1]
    values = x.float()
    stride = 1
    while stride < width:
        pairs = values.unflatten(-1, (width // (2 * stride), 2, stride))
        first, second = pairs.unbind(-2)
        values = torch.stack((first + second, first - second), -2).flatten(-3)
        stride *= 2
    return (values * width**-0.5).bfloat16()


def quantise_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 values with one power-of-two scale for each last dimension.

    The scale is 2^ceil(log2(absmax / 448)), with the division done as SGLang does it, by a multiplication with
    fp32(1/448) (act_quant_triton.py:46-64; kpool_fp8_index.py:1426-1436).

    Args:
        x: [..., n] bf16.

    Returns:
        values [..., n] float8_e4m3fn and scales [...] fp32; a value times its scale approximates x.
    """
    values = x.float()
    absmax = values.abs().amax(-1).clamp(min=FP8_ABSMAX_FLOOR)
    scale = torch.exp2(torch.ceil(torch.log2(absmax * (1.0 / FP8_MAX))))
    scaled = (values / scale[..., None]).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn), scale


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)) in fp32, the form SGLang's kernels share (causal_conv1d_triton.py:991)."""
    return x / (1 + torch.exp(-x))


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` greatest values of the last dimension, greatest first, of equal ones the lower first."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]


def stack_rows(rows: list[Tensor], width: int, fill: int) -> Tensor:
    """1-D tensors side by side as [len(rows), width], the rest of each row set to `fill`."""
    return torch.stack([F.pad(row, (0, width - row.shape[0]), value=fill) for row in rows])
