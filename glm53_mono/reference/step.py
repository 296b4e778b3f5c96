"""The whole model for one decode or target_verify step, and the commit after verification."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.reference import dense, head, kda, mhc, mla, moe
from glm53_mono.reference.norm import rms_norm
from glm53_mono.reference.state import PADDED_SLOT, Caches, StepInputs
from glm53_mono.weights.model import KdaWeights, LayerWeights, MhcWeights, MlaWeights, ModelWeights, MoeWeights


@dataclass(frozen=True)
class LayerTrace:
    """What went into and came out of each part of one layer, by row."""

    streams_in: Tensor
    """[rows, streams, hidden] bf16."""
    attention_gates: mhc.Gates
    attention_in: Tensor
    """[rows, hidden] bf16, normalised."""
    attention: kda.Attention | mla.Attention
    streams_between: Tensor
    """[rows, streams, hidden] bf16: after the attention's write."""
    ffn_gates: mhc.Gates
    ffn_in: Tensor
    """[rows, hidden] bf16, normalised."""
    moe: moe.Moe | None
    """None in a dense layer."""
    ffn_out: Tensor
    """[rows, hidden] bf16."""
    streams_out: Tensor
    """[rows, streams, hidden] bf16."""


def step(
    inputs: StepInputs,
    weights: ModelWeights[Tensor],
    caches: Caches,
    geometry: Geometry,
    trace: list[LayerTrace] | None = None,
    *,
    round_probabilities: bool = False,
) -> Tensor:
    """One forward of the model.

    Args:
        inputs: of the step; padded requests write no cache, and their rows of the result mean nothing.
        weights: of the model.
        caches: changed in place, as SGLang's decode or target_verify changes them.
        geometry: sizes at TP 1.
        trace: gets one LayerTrace a layer.
        round_probabilities: of the sparse attention, see `mla.sparse_attention`.

    Returns:
        [rows, hidden] bf16: hidden states after the final norm.

    Raises:
        ValueError: a verify step with more tokens a request than the caches hold drafts.
    """
    drafts = caches.intermediate_ssm.shape[2]
    if inputs.mode == "target_verify" and inputs.tokens_per_request > drafts:
        raise ValueError(f"a verify step of {inputs.tokens_per_request} tokens a request, on caches for {drafts}")
    ids = inputs.input_ids.clamp(0, geometry.vocab - 1)
    streams = mhc.expand(weights.embedding[ids], geometry.streams)
    for index, layer_weights in enumerate(weights.layers):
        done = layer(streams, index, inputs, layer_weights, caches, geometry, round_probabilities=round_probabilities)
        streams = done.streams_out
        if trace is not None:
            trace.append(done)
    return head.hidden_states(streams, weights.norm, geometry)


def layer(
    streams: Tensor,
    index: int,
    inputs: StepInputs,
    weights: LayerWeights[Tensor],
    caches: Caches,
    geometry: Geometry,
    *,
    round_probabilities: bool = False,
) -> LayerTrace:
    """One decoder layer: attention and FFN, each read from and written to the streams (models/glm5_next.py:951-1004).

    Args:
        streams: [rows, streams, hidden] bf16.
        index: of the layer in the model.
        inputs: of the step.
        weights: the layer's.
        caches: changed in place.
        geometry: sizes at TP 1.
        round_probabilities: of the sparse attention, see `mla.sparse_attention`.
    """
    attention_gates, attention_in = _read(streams, weights.attention_mhc, geometry)
    attention: kda.Attention | mla.Attention
    if isinstance(weights.attention, KdaWeights):
        ordinal = geometry.kda_layers.index(index)
        attention = kda.attention(attention_in, inputs, caches, ordinal, weights.attention, geometry)
    else:
        attention = _sparse(attention_in, index, inputs, weights.attention, caches, geometry, round_probabilities)
    between = mhc.write(attention.output, streams, attention_gates)

    ffn_gates, ffn_in = _read(between, weights.ffn_mhc, geometry)
    experts = moe.ffn(ffn_in, weights.ffn, geometry) if isinstance(weights.ffn, MoeWeights) else None
    ffn_out = experts.output if experts else dense.ffn(ffn_in, weights.ffn, geometry.swiglu_limit)
    return LayerTrace(
        streams_in=streams,
        attention_gates=attention_gates,
        attention_in=attention_in,
        attention=attention,
        streams_between=between,
        ffn_gates=ffn_gates,
        ffn_in=ffn_in,
        moe=experts,
        ffn_out=ffn_out,
        streams_out=mhc.write(ffn_out, between, ffn_gates),
    )


def commit(caches: Caches, inputs: StepInputs, accepted: Tensor) -> None:
    """Keep the recurrent states and convolution windows of the accepted draft tokens, in every KDA layer.

    Nothing else is committed: latents, pooled keys and the ring are written as they come
    (hybrid_linear_attn_backend.py:1514-1616).

    Args:
        caches: `conv` and `temporal` change.
        inputs: of the verify step.
        accepted: [requests] integer: the last right token of each request, 0 being its first; below 0 the request keeps
            its old state.

    Raises:
        ValueError: the step was no verify step.
    """
    if inputs.mode != "target_verify":
        raise ValueError(f"a {inputs.mode} step has nothing to commit; only target_verify has")
    kept = (accepted >= 0) & (inputs.mamba_slots != PADDED_SLOT)
    slots, rows, last = inputs.mamba_slots[kept].long(), inputs.verify_rows[kept].long(), accepted[kept].long()
    caches.temporal[:, slots] = caches.intermediate_ssm[:, rows, last]
    caches.conv[:, slots] = caches.intermediate_conv[:, rows, last]


def _read(streams: Tensor, weights: MhcWeights, geometry: Geometry) -> tuple[mhc.Gates, Tensor]:
    gates = mhc.gates(mhc.mix(streams, weights.fn, geometry.rms_eps), weights, geometry)
    return gates, rms_norm(mhc.read(streams, gates.pre), weights.norm, geometry.rms_eps)


def _sparse(
    y: Tensor,
    index: int,
    inputs: StepInputs,
    weights: MlaWeights[Tensor],
    caches: Caches,
    geometry: Geometry,
    round_probabilities: bool,
) -> mla.Attention:
    ordinal = geometry.dsa_layers.index(index)
    return mla.attention(y, inputs, caches, ordinal, weights, geometry, round_probabilities=round_probabilities)
