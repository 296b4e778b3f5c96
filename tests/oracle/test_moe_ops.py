"""Router and experts: SGLang's routing, expert GEMM, SwiGLU and slot sum at 288 experts against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from glm53_mono.checkpoint.config import checkpoint_geometry, model_config
from glm53_mono.reference import dense, moe
from glm53_mono.reference.weights import fuse_shared_expert
from glm53_mono.weights.model import DenseWeights, MoeWeights
from tests.oracle.ops import Draw, SeededBug, assert_same_bits, bug_cases

pytestmark = pytest.mark.usefixtures("sglang_ops")

SEED = 8
ROWS = 5
GEOMETRY = checkpoint_geometry(model_config())
LIMIT = GEOMETRY.swiglu_limit
WIDTH, HIDDEN = 64, 128
"""Sizes of an expert here: the GEMM's roundings do not depend on them."""


def routing() -> tuple[Tensor, Tensor]:
    """Router logits and bias; logits at which a sigmoid is 0 and 1 among them."""
    draw = Draw(SEED)
    logits = draw.fp32(ROWS, GEOMETRY.experts)
    logits[0, :4] = torch.tensor([200.0, -200.0, 90.0, -90.0])
    return logits, draw.fp32(GEOMETRY.experts, std=0.2)


def sglang_routing(logits: Tensor, bias: Tensor, shared: int) -> tuple[Tensor, Tensor]:
    """Ids and weights in SGLang's own slot order; `shared` fused experts take slots of their own."""
    from sglang.srt.layers.moe.topk import biased_grouped_topk_impl

    weights, ids = biased_grouped_topk_impl(
        torch.zeros(ROWS, 1),
        logits,
        bias,
        GEOMETRY.experts_per_token + shared,
        True,
        1,
        1,
        shared,
        GEOMETRY.routed_scale,
    )[:2]
    return ids.long(), weights


def by_expert(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Slots in ascending order of their expert: SGLang leaves their order open."""
    order = ids.argsort(-1)
    return ids.gather(1, order), weights.gather(1, order)


def compare_routing() -> None:
    """Chosen experts and their weights, with a separate shared expert and with a fused one."""
    logits, bias = routing()
    ids, weights = moe.route(logits, bias, GEOMETRY.experts_per_token)
    found_ids, found_weights = by_expert(*sglang_routing(logits, bias, shared=0))
    own_ids, own_weights = by_expert(ids, weights)
    assert_same_bits("ids", own_ids, found_ids)
    torch.testing.assert_close(own_weights, found_weights, rtol=3e-7, atol=0)

    fused_ids, fused_weights = moe.append_shared(ids, weights, GEOMETRY.experts, GEOMETRY.routed_scale)
    found_ids, found_weights = by_expert(*sglang_routing(logits, bias, shared=1))
    own_ids, own_weights = by_expert(fused_ids, fused_weights)
    assert_same_bits("ids with the shared expert", own_ids, found_ids)
    torch.testing.assert_close(own_weights, found_weights, rtol=3e-7, atol=0)


def compare_swiglu() -> None:
    """SGLang's HIP kernel, at and around the clamp too."""
    from sglang.kernels.ops.activation.silu_and_mul_clamp_hip import silu_and_mul_clamp_triton

    gate_up = Draw(SEED).bf16(ROWS, 2 * WIDTH, std=8)
    edges = torch.tensor([LIMIT, -LIMIT, LIMIT + 0.0625, -LIMIT - 0.0625, 1e4, -1e4, 0.0, -0.0, 1e-39, 300.0])
    gate_up[0, : len(edges)] = edges
    gate_up[0, WIDTH : WIDTH + len(edges)] = edges.flip(0)
    gate_up[1] = 0
    assert_same_bits("output", dense.clamped_swiglu(gate_up, LIMIT), silu_and_mul_clamp_triton(gate_up, LIMIT))


def expert_case(*, fused: bool) -> tuple[Tensor, Tensor, Tensor, MoeWeights]:
    """Rows, their slots and six small experts."""
    draw = Draw(SEED)
    experts = 6

    def matrix(*shape: int) -> Tensor:
        return draw.bf16(*shape, std=shape[-1] ** -0.5)

    weights = MoeWeights(
        router=matrix(experts, HIDDEN),
        bias=draw.fp32(experts),
        gate_up=matrix(experts, 2 * WIDTH, HIDDEN) * 8,
        down=matrix(experts, HIDDEN, WIDTH),
        shared=DenseWeights(matrix(2 * WIDTH, HIDDEN), matrix(HIDDEN, WIDTH)),
    )
    ids, slot_weights = moe.route(draw.fp32(ROWS, experts), weights.bias, 3)
    if fused:
        weights = fuse_shared_expert(weights)
        ids, slot_weights = moe.append_shared(ids, slot_weights, experts, GEOMETRY.routed_scale)
    return draw.bf16(ROWS, HIDDEN), ids, slot_weights, weights


def expert_gemm(x: Tensor, matrices: Tensor, ids: Tensor, weights: Tensor, *, weighted: bool) -> Tensor:
    """SGLang's grouped expert GEMM: [rows, slots, n] for x [rows, k], or for x [rows * slots, k] when weighted."""
    import triton.language as tl
    from sglang.kernels.ops.moe import fused_moe_triton_kernels as kernels

    block = 16
    slots = ids.flatten()
    sorted_slots, block_experts = [], []
    for expert in slots.unique().tolist():
        own = (slots == expert).nonzero().flatten()
        blocks = -(-len(own) // block)
        sorted_slots.append(torch.nn.functional.pad(own, (0, blocks * block - len(own)), value=len(slots)))
        block_experts += [expert] * blocks
    order = torch.cat(sorted_slots).int()
    out = torch.empty(*ids.shape, matrices.shape[1], dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "is_arch_support_pdl", lambda: False)
        kernels.invoke_fused_moe_kernel(
            x,
            matrices,
            None,
            out,
            None,
            None,
            None,
            weights,
            ids.int(),
            order,
            torch.tensor(block_experts, dtype=torch.int32),
            torch.tensor([len(order)], dtype=torch.int32),
            weighted,
            1 if weighted else ids.shape[1],
            {"BLOCK_SIZE_M": block, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1},
            compute_type=tl.bfloat16,
            use_fp8_w8a8=False,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=False,
        )
    return out


def compare_experts(*, fused: bool) -> None:
    """SGLang's Triton runner: grouped GEMM, clamped SwiGLU, weighted grouped GEMM, sum over slots."""
    from sglang.kernels.ops.activation.silu_and_mul_clamp_hip import silu_and_mul_clamp_triton
    from sglang.kernels.ops.moe.fused_moe_triton_kernels import moe_sum_reduce_triton

    x, ids, slot_weights, weights = expert_case(fused=fused)
    gate_up = expert_gemm(x, weights.gate_up, ids, slot_weights, weighted=False).flatten(0, 1)
    hidden = silu_and_mul_clamp_triton(gate_up, LIMIT)
    slots = expert_gemm(hidden, weights.down, ids, slot_weights, weighted=True)
    total = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16)
    moe_sum_reduce_triton(slots, total, GEOMETRY.routed_scale)

    own_slots = moe.expert_outputs(x, ids, slot_weights, weights, LIMIT)
    assert_same_bits("slots", own_slots, slots)
    assert_same_bits("sum of SGLang's slots", moe.combine(slots, GEOMETRY.routed_scale), total)


def compare_separate() -> None:
    """Experts with the shared one apart."""
    compare_experts(fused=False)


def compare_fused() -> None:
    """Experts with the shared one as a slot, and the layer as a whole."""
    compare_experts(fused=True)
    x, _, _, weights = expert_case(fused=True)
    geometry = replace(GEOMETRY, hidden=HIDDEN, experts=6, experts_per_token=3, expert_width=WIDTH)
    layer = moe.ffn(x, weights, geometry)
    total = layer.slots.float().sum(1) * geometry.routed_scale
    assert_same_bits("layer", layer.output, total.bfloat16())
    assert (layer.ids[:, -1] == 6).all(), "the shared expert is every row's last slot"


@pytest.mark.parametrize("comparison", [compare_routing, compare_swiglu, compare_separate, compare_fused])
def test_reference_equals_sglang(comparison: Callable[[], None]) -> None:
    comparison()


def _biased_weights(logits: Tensor, bias: Tensor, count: int) -> tuple[Tensor, Tensor]:
    scores, ids = (torch.sigmoid(logits) + bias).topk(count)
    return ids, scores / scores.sum(-1, keepdim=True)


def _scaled_routing(logits: Tensor, bias: Tensor, count: int, route=moe.route) -> tuple[Tensor, Tensor]:
    """The routed scale in the weights, on top of the one in the sum."""
    ids, weights = route(logits, bias, count)
    return ids, weights * GEOMETRY.routed_scale


def _unclamped(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).bfloat16()


def _gate_clamped_below(gate_up: Tensor, limit: float, swiglu=dense.clamped_swiglu) -> Tensor:
    return swiglu(gate_up.clamp(min=-limit), limit)


def _weight_after_rounding(x: Tensor, ids: Tensor, weights: Tensor, experts: MoeWeights, limit: float) -> Tensor:
    raw = EXPERT_OUTPUTS(x, ids, torch.ones_like(weights), experts, limit)
    return (raw.float() * weights[..., None]).bfloat16()


def _shared_weight_one(ids: Tensor, weights: Tensor, expert: int, scale: float, append=moe.append_shared):
    return append(ids, weights, expert, 1.0)


EXPERT_OUTPUTS = moe.expert_outputs

SEEDED_BUGS = [
    SeededBug("bias used for the weight", moe, "route", _biased_weights, compare_routing),
    SeededBug("routed scale applied twice", moe, "route", _scaled_routing, compare_routing),
    SeededBug("clamp dropped", dense, "clamped_swiglu", _unclamped, compare_swiglu),
    SeededBug("gate clamped from below", dense, "clamped_swiglu", _gate_clamped_below, compare_swiglu),
    SeededBug("slot weighted after the rounding", moe, "expert_outputs", _weight_after_rounding, compare_separate),
    SeededBug("shared expert's scale not undone", moe, "append_shared", _shared_weight_one, compare_routing),
]


@bug_cases(SEEDED_BUGS)
def test_seeded_bug_is_seen(bug: SeededBug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.assert_seen(monkeypatch)
