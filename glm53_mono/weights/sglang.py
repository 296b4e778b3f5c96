"""The weights of SGLang's loaded model as the kernels read them: in place, each matrix described once."""

from __future__ import annotations

import torch

from glm53_mono.geometry import Geometry
from glm53_mono.upstream import model as upstream
from glm53_mono.weights import bf16
from glm53_mono.weights.descriptor import WeightError
from glm53_mono.weights.model import (
    DenseWeights,
    KdaWeights,
    LayerWeights,
    MixWeights,
    MlaWeights,
    MoeWeights,
    StepWeights,
)


def from_sglang(model: torch.nn.Module, geometry: Geometry) -> StepWeights:
    """Describes every weight of a step; copies none.

    Args:
        model: SGLang's loaded `Glm5NextForConditionalGeneration`.
        geometry: of this rank.

    Raises:
        UpstreamError: SGLang holds a weight of another shape, dtype or stride.
        WeightError: a weight that lies where the kernels cannot read it.
    """
    shard = upstream.embedding_shard(model, geometry)
    layers = upstream.model_layers(model, geometry)
    return StepWeights(
        # SGLang pads the vocabulary; no token has those rows
        embedding=bf16.matrix("embedding", shard.weight[: geometry.vocab], geometry.vocab, geometry.hidden),
        layers=tuple(_layer(f"layers.{index}", layer, geometry) for index, layer in enumerate(layers)),
        norm=upstream.final_norm(model, geometry),
    )


def _layer(name: str, layer: upstream.LayerWeights, g: Geometry) -> LayerWeights:
    attention, ffn = layer.attention, layer.ffn
    return LayerWeights(
        attention_mix=_mix(layer.attention_mix, layer.attention_norm),
        attention=_kda(name, attention, g) if isinstance(attention, upstream.KdaWeights) else _mla(name, attention, g),
        ffn_mix=_mix(layer.ffn_mix, layer.ffn_norm),
        ffn=_dense(name, ffn, g.dense_width, g) if isinstance(ffn, upstream.DenseWeights) else _moe(name, ffn, g),
    )


def _mix(mix: upstream.Mix, norm: torch.Tensor) -> MixWeights:
    return MixWeights(fn=mix.fn, scale=mix.scale, base=mix.base, norm=norm)


def _kda(name: str, w: upstream.KdaWeights, g: Geometry) -> KdaWeights:
    rank = g.kda_head_dim
    return KdaWeights(
        qkv=bf16.matrix(f"{name}.qkv", w.qkv, g.conv_channels, g.hidden),
        beta=bf16.matrix(f"{name}.beta", w.beta, g.kda_heads, g.hidden),
        f_a=bf16.matrix(f"{name}.f_a", w.forget_down, rank, g.hidden),
        g_a=bf16.matrix(f"{name}.g_a", w.gate_down, rank, g.hidden),
        f_b=bf16.matrix(f"{name}.f_b", w.forget_up, g.kda_width, rank),
        g_b=bf16.matrix(f"{name}.g_b", w.gate_up, g.kda_width, rank),
        output=bf16.matrix(f"{name}.output", w.out, g.hidden, g.kda_width),
        taps=w.conv,
        a_log=w.a_log,
        dt_bias=w.dt_bias,
        output_norm=w.norm,
    )


def _mla(name: str, w: upstream.DsaWeights, g: Geometry) -> MlaWeights:
    index, heads = w.indexer, g.mla_heads
    return MlaWeights(
        latents=bf16.matrix(f"{name}.latents", w.down, g.q_rank + g.latent, g.hidden),
        query=bf16.matrix(f"{name}.query", w.query_up, heads * g.qk_head_dim, g.q_rank),
        key_up=bf16.transposed_stack(f"{name}.key_up", w.absorb_key, g.latent, g.qk_head_dim, heads),
        value_up=bf16.transposed_stack(f"{name}.value_up", w.absorb_value, g.v_head_dim, g.latent, heads),
        output=bf16.matrix(f"{name}.output", w.out, g.hidden, heads * g.v_head_dim),
        query_norm=w.query_norm,
        latent_norm=w.latent_norm,
        index_query=bf16.matrix(f"{name}.index_query", index.query, g.index_heads * g.index_head_dim, g.q_rank),
        index_key=bf16.matrix(f"{name}.index_key", index.key, g.index_head_dim, g.hidden),
        index_gate=bf16.matrix(f"{name}.index_gate", index.pool_gate, g.index_head_dim, g.hidden),
        head_weights=index.head_weights,
        key_norm_weight=index.key_norm_weight,
        key_norm_bias=index.key_norm_bias,
        position_bias=index.pool_position,
    )


def _dense(name: str, w: upstream.DenseWeights, width: int, g: Geometry) -> DenseWeights:
    return DenseWeights(
        up=bf16.matrix(f"{name}.up", w.gate_up, 2 * width, g.hidden),
        down=bf16.matrix(f"{name}.down", w.down, g.hidden, width),
    )


def _moe(name: str, w: upstream.ExpertWeights, g: Geometry) -> MoeWeights:
    if w.router_bias.dtype != torch.float32:
        raise WeightError(f"{name}.router_bias is {w.router_bias.dtype}, the step reads it as torch.float32")
    rows = g.experts + (w.shared is None)
    return MoeWeights(
        router=bf16.matrix(f"{name}.router", w.router, g.experts, g.hidden),
        bias=w.router_bias,
        experts_up=bf16.matrix(f"{name}.experts_up", w.gate_up, 2 * g.expert_width, g.hidden, stack=rows),
        experts_down=bf16.matrix(f"{name}.experts_down", w.down, g.hidden, g.expert_width, stack=rows),
        shared=None if w.shared is None else _dense(f"{name}.shared", w.shared, g.expert_width, g),
    )
