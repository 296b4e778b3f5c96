"""KDA: SGLang's convolution, recurrence and gated norm at the real head size against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from glm53_mono.reference import kda, numerics
from glm53_mono.weights.model import KdaWeights
from tests.oracle.ops import Draw, SeededBug, assert_same_bits, assert_same_roundings, assert_within, bug_cases
from tests.unit.reference_serving import tiny_model

pytestmark = pytest.mark.usefixtures("sglang_ops")

SEED = 2
HEADS = 2
DRAFT_TOKENS = 4
SLOTS = torch.tensor([3, -1, 1], dtype=torch.int32)
"""Mamba slots of a batch whose second request is padding."""
ACTIVE = SLOTS >= 0


class Case:
    """Caches and inputs of one layer of two heads; `tokens` for each of the three requests."""

    def __init__(self, tokens: int) -> None:
        draw = Draw(SEED + tokens)
        _, tiny = tiny_model(SEED, layers=1, kda_layers=(0,))
        self.geometry = replace(tiny, kda_heads=HEADS)
        width, head = self.geometry.kda_width, self.geometry.kda_head_dim
        self.weights = KdaWeights(
            **dict.fromkeys(
                ("qkv", "beta", "decay_down", "decay_up", "gate_down", "gate_up", "output"), torch.empty(0)
            ),
            taps=draw.fp32(3 * width, self.geometry.conv_taps, std=0.5),
            a_log=draw.fp32(HEADS, std=0.4),
            dt_bias=draw.fp32(HEADS, head, std=0.5, mean=-1.0),
            output_norm=draw.bf16(head, std=0.1, mean=1.0),
        )
        self.windows = draw.bf16(5, self.geometry.conv_history, 3 * width)
        self.states = draw.fp32(5, HEADS, head, head, std=0.3)
        self.qkv = draw.bf16(len(SLOTS), tokens, 3 * width)
        self.decay = draw.bf16(len(SLOTS), tokens, width)
        self.beta = draw.bf16(len(SLOTS), tokens, HEADS)
        self.core = draw.bf16(tokens, HEADS, head)
        self.gate = draw.bf16(tokens, HEADS, head)
        # Zeros, subnormal values, large ones, and gates at both ends of their range.
        self.qkv[0, :, :8] = 0
        self.qkv[0, :, 8:16] = 1e-39
        self.qkv[0, :, 16:24] = 1e4
        self.windows[:, :, 4:12] = 0
        self.decay[0, :, :4] = torch.tensor([-300.0, 300.0, 0.0, 1e-39])
        self.beta[2, :, 0] = 80

    def convolve(self) -> tuple[Tensor, Tensor]:
        """The reference's convolution of the active requests: outputs and windows."""
        return kda.convolve(self.windows[SLOTS[ACTIVE].long()], self.qkv[ACTIVE], self.weights.taps)

    def recur(self, convolved: Tensor) -> tuple[Tensor, Tensor]:
        """The reference's recurrence of the active requests: outputs and states."""
        inputs = kda.delta_inputs(convolved, self.decay[ACTIVE], self.beta[ACTIVE], self.weights, self.geometry)
        return kda.delta_rule(self.states[SLOTS[ACTIVE].long()], inputs)


def compare_convolution_decode() -> None:
    """One token: outputs, and the windows of exactly the active slots."""
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

    case = Case(1)
    pool = case.windows.clone()
    found = causal_conv1d_update(
        case.qkv[:, 0].clone(),
        pool.transpose(-1, -2),
        case.weights.taps,
        None,
        activation="silu",
        conv_state_indices=SLOTS,
    )
    outputs, windows = case.convolve()
    moved = case.windows.clone()
    moved[SLOTS[ACTIVE].long()] = windows[:, -1]
    assert_same_bits("output", outputs[:, 0], found[ACTIVE])
    assert_same_bits("windows", moved, pool)


def compare_convolution_verify() -> None:
    """Drafts: outputs and the window after each draft token."""
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

    case = Case(DRAFT_TOKENS)
    scratch = torch.zeros(len(SLOTS) + 1, DRAFT_TOKENS, *case.windows.shape[1:]).bfloat16()
    found = causal_conv1d_update(
        case.qkv.transpose(1, 2),
        case.windows.clone().transpose(-1, -2),
        case.weights.taps,
        None,
        activation="silu",
        conv_state_indices=SLOTS,
        intermediate_conv_window=scratch.transpose(-1, -2),
        intermediate_state_indices=torch.arange(len(SLOTS), dtype=torch.int32),
    ).transpose(1, 2)
    outputs, windows = case.convolve()
    assert_same_bits("output", outputs, found[ACTIVE])
    assert_same_bits("windows", windows, scratch[: len(SLOTS)][ACTIVE])


def compare_recurrence_decode() -> None:
    """One token: outputs (zeros for padding) and the states of exactly the active slots."""
    from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_kda_packed_decode

    case = Case(1)
    convolved, _ = case.convolve()
    rows = torch.zeros(len(SLOTS), convolved.shape[-1], dtype=torch.bfloat16)
    rows[ACTIVE] = convolved[:, 0]
    states = case.states.clone()
    found = torch.empty(len(SLOTS), 1, HEADS, case.geometry.kda_head_dim, dtype=torch.bfloat16)
    fused_recurrent_kda_packed_decode(
        mixed_qkv=rows,
        a=case.decay[:, 0],
        b=case.beta[:, 0],
        A_log=case.weights.a_log,
        dt_bias=case.weights.dt_bias.flatten(),
        scale=case.geometry.kda_head_dim**-0.5,
        initial_state=states,
        out=found,
        ssm_state_indices=SLOTS,
        use_qk_l2norm_in_kernel=True,
        lower_bound=case.geometry.gate_lower_bound,
    )
    outputs, after = case.recur(convolved)
    moved = case.states.clone()
    moved[SLOTS[ACTIVE].long()] = after[:, -1]
    assert_same_roundings("output", outputs, found[ACTIVE])
    assert_same_bits("output of padding", torch.zeros_like(found[~ACTIVE]), found[~ACTIVE])
    assert_within("states", moved, states, rel=3e-7, max_abs=5e-6)


def compare_recurrence_verify() -> None:
    """Drafts: outputs, the state after each draft token, and the pool left alone."""
    from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import (
        fused_sigmoid_gating_delta_rule_update,
    )

    case = Case(DRAFT_TOKENS)
    convolved, _ = case.convolve()
    requests = int(ACTIVE.sum())
    heads = (HEADS, case.geometry.kda_head_dim)
    query, key, value = (part.reshape(1, -1, *heads) for part in convolved.split(case.geometry.kda_width, dim=-1))
    states = case.states.clone()
    scratch = torch.zeros(requests + 1, DRAFT_TOKENS, *case.states.shape[1:])
    found = fused_sigmoid_gating_delta_rule_update(
        A_log=case.weights.a_log,
        dt_bias=case.weights.dt_bias.flatten(),
        q=query,
        k=key,
        v=value,
        a=case.decay[ACTIVE].reshape(1, -1, case.geometry.kda_width),
        b=case.beta[ACTIVE].reshape(1, -1, HEADS),
        initial_state_source=states,
        initial_state_indices=SLOTS[ACTIVE],
        cu_seqlens=torch.arange(requests + 1, dtype=torch.int32) * DRAFT_TOKENS,
        use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        is_kda=True,
        lower_bound=case.geometry.gate_lower_bound,
        disable_state_update=True,
        intermediate_states_buffer=scratch,
        intermediate_state_indices=torch.arange(requests, dtype=torch.int32),
        cache_steps=DRAFT_TOKENS,
    )
    outputs, after = case.recur(convolved)
    assert_same_roundings("output", outputs.flatten(0, 1), found[0])
    assert_within("states", after, scratch[:requests], rel=3e-7, max_abs=5e-6)
    assert_same_bits("pool", states, case.states)


def compare_fused_verify() -> None:
    """SGLang's fused convolution and recurrence of drafts, which leaves the windows alone as this reference does."""
    from sglang.kernels.ops.attention.linear import fused_kda_conv_recurrent_verify as fused

    case = Case(DRAFT_TOKENS)
    requests, width = int(ACTIVE.sum()), case.geometry.kda_width
    slots = SLOTS[ACTIVE]
    windows, states = case.windows.clone(), case.states.clone()
    window_scratch = torch.zeros(requests + 1, DRAFT_TOKENS, *case.windows.shape[1:]).bfloat16()
    state_scratch = torch.zeros(requests + 1, DRAFT_TOKENS, *case.states.shape[1:])
    # One V tile a head: SGLang's own tiles give the same bits (:484) and take sixteen times as long in the interpreter.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "KDA_VERIFY_BLOCK_V", case.geometry.kda_head_dim)
        found = fused.fused_kda_conv_gating_verify(
            mixed_qkv=case.qkv[ACTIVE].reshape(-1, 3 * width),
            conv_weight=case.weights.taps,
            conv_bias=None,
            conv_state=windows.transpose(-1, -2),
            conv_state_indices=slots,
            intermediate_conv_window=window_scratch.transpose(-1, -2),
            intermediate_state_indices=torch.arange(requests, dtype=torch.int32),
            a=case.decay[ACTIVE].reshape(-1, width),
            b=case.beta[ACTIVE].reshape(-1, HEADS),
            A_log=case.weights.a_log,
            dt_bias=case.weights.dt_bias.flatten(),
            ssm_states=states,
            cache_indices=slots,
            intermediate_states_buffer=state_scratch,
            scale=case.geometry.kda_head_dim**-0.5,
            T=DRAFT_TOKENS,
            num_q_heads=HEADS,
            num_v_heads=HEADS,
            head_k_dim=case.geometry.kda_head_dim,
            head_v_dim=case.geometry.kda_head_dim,
            lower_bound=case.geometry.gate_lower_bound,
        )
    convolved, after_windows = case.convolve()
    outputs, after = case.recur(convolved)
    assert_same_roundings("output", outputs.flatten(0, 1), found.view(-1, HEADS, case.geometry.kda_head_dim))
    assert_same_bits("windows", after_windows, window_scratch[:requests])
    assert_within("states", after, state_scratch[:requests], rel=3e-7, max_abs=5e-6)
    assert_same_bits("window pool", windows, case.windows)
    assert_same_bits("state pool", states, case.states)


def compare_gated_norm() -> None:
    """RMSNorm of each head under the sigmoid gate."""
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated

    case = Case(DRAFT_TOKENS)
    case.core[0] = 0
    case.core[1, 0] = 1e-39
    norm = FusedRMSNormGated(case.geometry.kda_head_dim, eps=case.geometry.rms_eps, activation="sigmoid")
    norm.weight.data = case.weights.output_norm
    found = norm(case.core[None].clone(), case.gate)[0]
    expected = kda.gated_norm(case.core, case.gate, case.weights.output_norm, case.geometry.rms_eps)
    assert_same_bits("output", expected, found)


COMPARISONS = [
    compare_convolution_decode,
    compare_convolution_verify,
    compare_recurrence_decode,
    compare_recurrence_verify,
    compare_fused_verify,
    compare_gated_norm,
]


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_reference_equals_sglang(comparison) -> None:
    comparison()


def _taps_newest_first(history: Tensor, inputs: Tensor, taps: Tensor, convolve=kda.convolve) -> tuple[Tensor, Tensor]:
    return convolve(history, inputs, taps.flip(-1))


def _windows_one_token_late(
    history: Tensor, inputs: Tensor, taps: Tensor, convolve=kda.convolve
) -> tuple[Tensor, Tensor]:
    outputs, windows = convolve(history, inputs, taps)
    return outputs, torch.cat((history[:, None], windows[:, :-1]), 1)


def _unbounded_decay(decay: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    return -a_log.exp()[:, None] * torch.nn.functional.softplus(decay.float() + dt_bias)


def _state_with_keys_first(state: Tensor, inputs: kda.Inputs, rule=kda.delta_rule) -> tuple[Tensor, Tensor]:
    outputs, states = rule(state.transpose(-1, -2), inputs)
    return outputs, states.transpose(-1, -2)


def _read_before_update(state: Tensor, inputs: kda.Inputs, rule=kda.delta_rule) -> tuple[Tensor, Tensor]:
    _, states = rule(state, inputs)
    before = torch.cat((state[:, None], states[:, :-1]), 1)
    return numerics.matmul(before, inputs.query[..., None]).squeeze(-1).bfloat16(), states


def _silu_gate(core: Tensor, gate: Tensor, weight: Tensor, eps: float, norm=kda.gated_norm) -> Tensor:
    return (norm(core, gate, weight, eps).float() * gate.float()).bfloat16()


SEEDED_BUGS = [
    SeededBug("tap order reversed", kda, "convolve", _taps_newest_first, compare_convolution_decode),
    SeededBug("window one token late", kda, "convolve", _windows_one_token_late, compare_convolution_verify),
    SeededBug("gate bound dropped", kda, "log_decay", _unbounded_decay, compare_recurrence_decode),
    SeededBug("state keys before values", kda, "delta_rule", _state_with_keys_first, compare_recurrence_verify),
    SeededBug("output read before the update", kda, "delta_rule", _read_before_update, compare_recurrence_decode),
    SeededBug("query and key not normalised", kda, "l2_normalise", lambda x, eps: x, compare_fused_verify),
    SeededBug("output gate SiLU", kda, "gated_norm", _silu_gate, compare_gated_norm),
]


@bug_cases(SEEDED_BUGS)
def test_seeded_bug_is_seen(bug: SeededBug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.assert_seen(monkeypatch)
