"""The clamped SwiGLU network of the dense layers and of every expert."""

from __future__ import annotations

from torch import Tensor

from glm53_mono.reference import numerics
from glm53_mono.weights.model import DenseWeights


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)`: clamped in bf16, multiplied in fp32, rounded once.

    The gate has no lower clamp (kernels/jit/csrc/deepseek_v4/silu_and_mul_masked_post_quant.cuh:40-58).

    Args:
        gate_up: [..., 2 * width] bf16: gate, then up.
        limit: 10.

    Returns:
        [..., width] bf16.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return (numerics.silu(gate.clamp(max=limit).float()) * up.clamp(-limit, limit).float()).bfloat16()


def ffn(y: Tensor, weights: DenseWeights[Tensor], limit: float) -> Tensor:
    """Gate and up, SwiGLU, down, each rounded to bf16 (deepseek_v2.py:339-493).

    Args:
        y: [rows, hidden] bf16.
        weights: of the layer or of the shared expert.
        limit: of the SwiGLU.

    Returns:
        [rows, hidden] bf16.
    """
    return numerics.linear(clamped_swiglu(numerics.linear(y, weights.gate_up), limit), weights.down)
