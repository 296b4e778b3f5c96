"""Matrices in the formats and layouts in which SGLang keeps them once they are loaded.

SGLang marks what AITER has laid out: FP8 linear layers by `aiter_bpreshuffled` (fp8.py: Fp8LinearMethod); experts by
`is_shuffled` on the parameter (fp8.py: Fp8MoEMethod; quark_w4a4_mxfp4_moe.py); MXFP4 linear layers, which stay as they
are loaded without SGLANG_ROCM_USE_AITER_FP4_ASM_GEMM, by `use_aiter_asm_fp4_gemm` (quark_w4a4_mxfp4.py).
"""

from __future__ import annotations

from typing import Any

import torch

from glm53_mono.upstream.tensors import expect
from glm53_mono.weights import bf16, fp8, mxfp4
from glm53_mono.weights.descriptor import Layout, Matrix


def linear_matrix(linear: Any, name: str, *shape: int) -> Matrix:
    """The matrix of a linear layer; arguments and errors as of `stored_matrix`."""
    if linear.weight.dtype == torch.uint8:
        scales, shuffled = getattr(linear, "weight_scale", None), getattr(linear, "use_aiter_asm_fp4_gemm", False)
    else:
        scales, shuffled = getattr(linear, "weight_scale_inv", None), getattr(linear, "aiter_bpreshuffled", False)
    return stored_matrix(linear.weight, scales, f"{name}.weight", shape, shuffled=shuffled)


def expert_matrices(experts: Any, name: str, up_shape: tuple[int, ...], down_shape: tuple[int, ...]) -> list[Matrix]:
    """Gate and up of the experts, then their down matrices; arguments and errors as of `stored_matrix`."""
    up, down = experts.w13_weight, experts.w2_weight
    if up.dtype == torch.uint8:
        scales = getattr(experts, "w13_weight_scale", None), getattr(experts, "w2_weight_scale", None)
    else:
        scales = getattr(experts, "w13_weight_scale_inv", None), getattr(experts, "w2_weight_scale_inv", None)
    return [
        stored_matrix(weight, own_scales, f"{name}.{which}", shape, shuffled=getattr(weight, "is_shuffled", False))
        for which, weight, own_scales, shape in (
            ("w13_weight", up, scales[0], up_shape),
            ("w2_weight", down, scales[1], down_shape),
        )
    ]


def stored_matrix(
    tensor: torch.Tensor, scales: torch.Tensor | None, name: str, shape: tuple[int, ...], *, shuffled: bool
) -> Matrix:
    """A matrix or a stack of them in the format that its dtype tells.

    Args:
        tensor: the values.
        scales: what SGLang registered beside them; None where it registered nothing.
        name: how SGLang's own code reaches the values.
        shape: of the matrices that they stand for, [..., rows, columns].
        shuffled: whether AITER has laid them out.

    Raises:
        UpstreamError: another shape, dtype or stride.
        WeightError: values or scales that the kernels cannot read.
    """
    layout = Layout.SHUFFLED if shuffled else Layout.LINEAR
    if tensor.dtype == torch.float8_e4m3fn:
        return fp8.matrix(name, expect(tensor, name, shape, torch.float8_e4m3fn), scales, layout)
    if tensor.dtype == torch.uint8:
        packed = (*shape[:-1], shape[-1] // 2)
        return mxfp4.matrix(name, expect(tensor, name, packed, torch.uint8), scales, layout)
    return bf16.matrix(name, expect(tensor, name, shape, torch.bfloat16))
