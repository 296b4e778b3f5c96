"""Linear attention (KDA): causal convolution, per-channel decay, gated delta rule, gated RMSNorm.

One function a stage; `attention` strings them together and touches the caches. R requests, t tokens a request, H heads,
K = V = the head dimension, C = 3 * H * K channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.reference import numerics
from glm53_mono.reference.state import Caches, StepInputs
from glm53_mono.weights.model import KdaWeights


@dataclass(frozen=True)
class Projections:
    """What a layer's input is projected to; all bf16 [rows, ...]."""

    qkv: Tensor
    """[rows, 3 * P], before the convolution."""
    beta: Tensor
    """[rows, H], before the sigmoid."""
    decay: Tensor
    """[rows, P], before bias and bound (f)."""
    gate: Tensor
    """[rows, P], the output gate before its sigmoid (z)."""


@dataclass(frozen=True)
class Inputs:
    """What the delta rule takes in; all fp32 [R, t, H, ...]."""

    query: Tensor
    """[R, t, H, K], normalised and scaled."""
    key: Tensor
    """[R, t, H, K], normalised."""
    value: Tensor
    """[R, t, H, V]."""
    log_decay: Tensor
    """[R, t, H, K]."""
    beta: Tensor
    """[R, t, H]."""


@dataclass(frozen=True)
class Attention:
    """A layer's stages by row; rows of padded requests hold zeros from `convolved` to `core`."""

    projections: Projections
    convolved: Tensor
    """[rows, 3 * P] bf16: q, k, v after convolution and SiLU."""
    core: Tensor
    """[rows, H, V] bf16: the delta rule's output."""
    normalised: Tensor
    """[rows, P] bf16: after the gated norm."""
    output: Tensor
    """[rows, hidden] bf16."""


def project(y: Tensor, weights: KdaWeights[Tensor]) -> Projections:
    """All projections of y [rows, hidden] bf16; the rank-128 intermediates are rounded (glm5_next.py:597-634)."""
    return Projections(
        qkv=numerics.linear(y, weights.qkv),
        beta=numerics.linear(y, weights.beta),
        decay=numerics.linear(numerics.linear(y, weights.decay_down), weights.decay_up),
        gate=numerics.linear(numerics.linear(y, weights.gate_down), weights.gate_up),
    )


def convolve(history: Tensor, inputs: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution and SiLU, summed in fp32 oldest tap first (causal_conv1d_triton.py:932-1003).

    Args:
        history: [R, conv_history, C] bf16, the inputs before this step, oldest first.
        inputs: [R, t, C] bf16.
        taps: [C, conv_taps] fp32.

    Returns:
        outputs [R, t, C] bf16, and windows [R, t, conv_history, C] bf16: the history as it stands after each token.
    """
    tokens, kept = inputs.shape[1], history.shape[1]
    line = torch.cat((history, inputs), 1)
    total = torch.zeros(inputs.shape, device=inputs.device)
    for tap in range(taps.shape[1]):
        total = total + line[:, tap : tap + tokens].float() * taps[:, tap]
    windows = torch.stack([line[:, token + 1 : token + 1 + kept] for token in range(tokens)], 1)
    return numerics.silu(total).bfloat16(), windows


def log_decay(decay: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """The bounded gate `lower_bound * sigmoid(exp(a_log) * (decay + dt_bias))` (fused_recurrent.py:478-489).

    Args:
        decay: [..., H, K] bf16.
        a_log: [H] fp32.
        dt_bias: [H, K] fp32.
        lower_bound: -5.

    Returns:
        [..., H, K] fp32 in (lower_bound, 0): the logarithm of a state's decay.
    """
    return lower_bound * torch.sigmoid(a_log.exp()[:, None] * (decay.float() + dt_bias))


def l2_normalise(x: Tensor, eps: float) -> Tensor:
    """`x / sqrt(sum x^2 + eps)` over the last dimension, fp32 (fused_recurrent.py:470-472).

    The verify kernel multiplies by the reciprocal instead (fused_sigmoid_gating_recurrent.py:441-445): 1e-7 away.
    """
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + eps)


def delta_inputs(
    convolved: Tensor, decay: Tensor, beta: Tensor, weights: KdaWeights[Tensor], geometry: Geometry
) -> Inputs:
    """Split, normalise and gate what the delta rule takes in.

    Args:
        convolved: [R, t, C] bf16.
        decay: [R, t, P] bf16.
        beta: [R, t, H] bf16.
        weights: the layer's.
        geometry: sizes of one rank.
    """
    heads = (geometry.kda_heads, geometry.kda_head_dim)
    query, key, value = (part.unflatten(-1, heads).float() for part in convolved.split(geometry.kda_width, -1))
    return Inputs(
        query=l2_normalise(query, geometry.l2_eps) * geometry.kda_head_dim**-0.5,
        key=l2_normalise(key, geometry.l2_eps),
        value=value,
        log_decay=log_decay(decay.unflatten(-1, heads), weights.a_log, weights.dt_bias, geometry.gate_lower_bound),
        beta=torch.sigmoid(beta.float()),
    )


def delta_rule(state: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The recurrence over t tokens: decay, correct towards the value, read with the query (fused_recurrent.py:499-511).

    Args:
        state: [R, H, V, K] fp32 before the first token.
        inputs: of all tokens.

    Returns:
        outputs [R, t, H, V] bf16, read after each token's update, and states [R, t, H, V, K] fp32 after each token.
    """
    outputs, states = [], []
    for token in range(inputs.query.shape[1]):
        key = inputs.key[:, token]
        state = state * inputs.log_decay[:, token].exp()[:, :, None, :]
        error = (inputs.value[:, token] - _read(state, key)) * inputs.beta[:, token, :, None]
        state = state + error[..., None] * key[:, :, None, :]
        outputs.append(_read(state, inputs.query[:, token]).bfloat16())
        states.append(state)
    return torch.stack(outputs, 1), torch.stack(states, 1)


def gated_norm(core: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head times the sigmoid of the output gate, one rounding (fused_norm_gate.py:70-126).

    Args:
        core: [rows, H, V] bf16.
        gate: [rows, H, V] bf16.
        weight: [V] bf16.
        eps: added to the mean square.

    Returns:
        [rows, H, V] bf16.
    """
    values = core.float()
    normalised = values / torch.sqrt(values.square().mean(-1, keepdim=True) + eps)
    return (normalised * weight.float() * torch.sigmoid(gate.float())).bfloat16()


def attention(
    y: Tensor, inputs: StepInputs, caches: Caches, ordinal: int, weights: KdaWeights[Tensor], geometry: Geometry
) -> Attention:
    """One KDA layer's attention.

    A decode step moves the convolution window and the recurrent state of each slot on (kda_backend.py:770-1024). A
    verify step reads both and writes what follows each draft token to the verify scratch (:1217-1471); SGLang's unfused
    verify also overwrites the window, which its commit then replaces, and which this step leaves alone. Padded requests
    are skipped.

    Args:
        y: [rows, hidden] bf16, the layer's normalised input.
        inputs: of the step.
        caches: changed in place.
        ordinal: of the layer among the KDA layers.
        weights: the layer's.
        geometry: sizes of one rank.
    """
    projections = project(y, weights)
    active = inputs.linear_active
    slots = inputs.mamba_slots[active].long()

    def by_request(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (inputs.requests, inputs.tokens_per_request))[active]

    convolved, windows = convolve(caches.conv[ordinal, slots], by_request(projections.qkv), weights.taps)
    rule = delta_inputs(convolved, by_request(projections.decay), by_request(projections.beta), weights, geometry)
    core, states = delta_rule(caches.temporal[ordinal, slots], rule)
    if inputs.mode == "decode":
        caches.conv[ordinal, slots] = windows[:, -1]
        caches.temporal[ordinal, slots] = states[:, -1]
    else:
        scratch = inputs.verify_rows[active].long()
        caches.intermediate_conv[ordinal, scratch] = windows
        caches.intermediate_ssm[ordinal, scratch] = states

    def by_row(values: Tensor) -> Tensor:
        whole = values.new_zeros(inputs.requests, *values.shape[1:])
        whole[active] = values
        return whole.flatten(0, 1)

    core_rows = by_row(core)
    normalised = gated_norm(
        core_rows, projections.gate.unflatten(-1, core_rows.shape[1:]), weights.output_norm, geometry.rms_eps
    ).flatten(1)
    return Attention(
        projections=projections,
        convolved=by_row(convolved),
        core=core_rows,
        normalised=normalised,
        output=numerics.linear(normalised, weights.output),
    )


def _read(state: Tensor, vector: Tensor) -> Tensor:
    """[R, H, V]: a state [R, H, V, K] applied to a vector [R, H, K]."""
    return numerics.matmul(state, vector[..., None]).squeeze(-1)
