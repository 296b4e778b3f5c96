"""The router, the routed experts and the shared expert, separate or fused."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.reference import numerics
from glm53_mono.reference.dense import clamped_swiglu
from glm53_mono.reference.dense import ffn as dense_ffn
from glm53_mono.weights.model import MoeWeights


@dataclass(frozen=True)
class Moe:
    """A layer's stages by row."""

    logits: Tensor
    """[rows, experts] fp32."""
    ids: Tensor
    """[rows, slots] i64: experts by falling score; the fused shared expert comes last."""
    weights: Tensor
    """[rows, slots] fp32, without the routed scale."""
    slots: Tensor
    """[rows, slots, hidden] bf16: each expert's output times its weight."""
    output: Tensor
    """[rows, hidden] bf16."""


def route(logits: Tensor, bias: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Choose experts by biased score, weight them by the score itself (srt/layers/moe/topk.py:1780-1847).

    Args:
        logits: [rows, experts] fp32.
        bias: [experts] fp32, for the choice alone.
        count: experts of a row.

    Returns:
        ids [rows, count] i64 by falling biased score, of equal ones the lower expert first, and weights [rows, count]
        fp32 that add up to 1.
    """
    scores = torch.sigmoid(logits)
    ids = numerics.top_indices(scores + bias, count)
    chosen = scores.gather(1, ids)
    return ids, chosen / (chosen.sum(-1, keepdim=True) + Geometry.renormalise_eps)


def append_shared(ids: Tensor, weights: Tensor, expert: int, routed_scale: float) -> tuple[Tensor, Tensor]:
    """Add the fused shared expert as every row's last slot; its weight undoes the later scaling (topk.py:2473-2481).

    Args:
        ids: [rows, count] i64.
        weights: [rows, count] fp32.
        expert: its row in the expert tensors.
        routed_scale: applied to the sum over all slots.
    """
    rows = ids.shape[0]
    return (
        torch.cat((ids, ids.new_full((rows, 1), expert)), 1),
        torch.cat((weights, weights.new_full((rows, 1), 1.0 / routed_scale)), 1),
    )


def expert_outputs(y: Tensor, ids: Tensor, weights: Tensor, moe: MoeWeights[Tensor], limit: float) -> Tensor:
    """Each slot's expert output; the down GEMM's fp32 result is weighted, then rounded
    (fused_moe_triton_kernels.py:631-634).

    Args:
        y: [rows, hidden] bf16.
        ids: [rows, slots] i64.
        weights: [rows, slots] fp32.
        moe: the layer's.
        limit: of the SwiGLU.

    Returns:
        [rows, slots, hidden] bf16.
    """
    outputs = y.new_empty(*ids.shape, y.shape[1])
    for expert in ids.unique().tolist():
        row, slot = (ids == expert).nonzero(as_tuple=True)
        hidden = clamped_swiglu(numerics.linear(y[row], moe.gate_up[expert]), limit)
        weighted = numerics.linear_fp32(hidden, moe.down[expert]) * weights[row, slot, None]
        outputs[row, slot] = weighted.bfloat16()
    return outputs


def combine(slots: Tensor, routed_scale: float) -> Tensor:
    """The scaled sum over slots, added in fp32 slot by slot, one rounding (fused_moe_triton_kernels.py:1240-1293).

    Args:
        slots: [rows, slots, hidden] bf16.
        routed_scale: 2.5.

    Returns:
        [rows, hidden] bf16.
    """
    total = torch.zeros_like(slots[:, 0], dtype=torch.float32)
    for slot in slots.unbind(1):
        total = total + slot.float()
    return (total * routed_scale).bfloat16()


def ffn(y: Tensor, weights: MoeWeights[Tensor], geometry: Geometry) -> Moe:
    """Router, routed experts and the shared expert.

    A separate shared expert is added to the rounded routed sum, with a second rounding
    (mxfp4_flashinfer_trtllm_moe.py:533-571); a fused one is a slot like any other.

    Args:
        y: [rows, hidden] bf16, the layer's normalised input.
        weights: the layer's.
        geometry: sizes of one rank.
    """
    logits = numerics.linear_fp32(y, weights.router)
    ids, slot_weights = route(logits, weights.bias, geometry.experts_per_token)
    if weights.shared is None:
        ids, slot_weights = append_shared(ids, slot_weights, geometry.experts, geometry.routed_scale)
    slots = expert_outputs(y, ids, slot_weights, weights, geometry.swiglu_limit)
    output = combine(slots, geometry.routed_scale)
    if weights.shared is not None:
        output = output + dense_ffn(y, weights.shared, geometry.swiglu_limit)
    return Moe(logits=logits, ids=ids, weights=slot_weights, slots=slots, output=output)
