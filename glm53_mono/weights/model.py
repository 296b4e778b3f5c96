"""All weights of a step, layer by layer, as one rank holds them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.reference import weights as reference
from glm53_mono.weights import bf16
from glm53_mono.weights.descriptor import Matrix


@dataclass(frozen=True)
class MixWeights:
    """One branch's hyper-connection and the norm behind it."""

    fn: Tensor
    scale: Tensor
    base: Tensor
    norm: Tensor


@dataclass(frozen=True)
class KdaWeights:
    """A KDA layer's attention; shapes as in `reference.weights.KdaWeights`."""

    qkv: Matrix
    beta: Matrix
    f_a: Matrix
    g_a: Matrix
    f_b: Matrix
    g_b: Matrix
    output: Matrix
    taps: Tensor
    a_log: Tensor
    dt_bias: Tensor
    output_norm: Tensor


@dataclass(frozen=True)
class MlaWeights:
    """An MLA layer's attention and indexer; shapes as in `reference.weights`."""

    latents: Matrix
    query: Matrix
    key_up: Matrix
    value_up: Matrix
    output: Matrix
    query_norm: Tensor
    latent_norm: Tensor
    index_query: Matrix
    index_key: Matrix
    index_gate: Matrix
    head_weights: Tensor
    key_norm_weight: Tensor
    key_norm_bias: Tensor
    position_bias: Tensor


@dataclass(frozen=True)
class DenseWeights:
    """A dense FFN."""

    up: Matrix
    down: Matrix


@dataclass(frozen=True)
class MoeWeights:
    """Router, routed experts and the shared one: a pair of its own, or the last row of the experts' stacks."""

    router: Matrix
    bias: Tensor
    experts_up: Matrix
    experts_down: Matrix
    shared: DenseWeights | None

    def shared_addresses(self) -> tuple[int, int]:
        """Where the shared expert's gate-and-up and its down matrix start."""
        if self.shared is not None:
            return self.shared.up.address, self.shared.down.address
        return self.experts_up.data[-1].data_ptr(), self.experts_down.data[-1].data_ptr()


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer."""

    attention_mix: MixWeights
    attention: KdaWeights | MlaWeights
    ffn_mix: MixWeights
    ffn: DenseWeights | MoeWeights


@dataclass(frozen=True)
class StepWeights:
    """The text model without its MTP layer and without its head, which stays with SGLang."""

    embedding: Matrix
    layers: tuple[LayerWeights, ...]
    norm: Tensor

    @property
    def shared_is_fused(self) -> bool:
        """Whether the shared expert is one more row of the routed experts' stacks."""
        return any(isinstance(layer.ffn, MoeWeights) and layer.ffn.shared is None for layer in self.layers)


def from_reference(weights: reference.ModelWeights, geometry: Geometry) -> StepWeights:
    """The reference's weights as the kernels read them; `w_kc` and `w_vc` are laid out anew, as SGLang does."""
    return StepWeights(
        embedding=bf16.matrix("embedding", weights.embedding, geometry.vocab, geometry.hidden),
        layers=tuple(_layer(f"layers.{i}", layer, geometry) for i, layer in enumerate(weights.layers)),
        norm=weights.norm,
    )


def _layer(name: str, layer: reference.LayerWeights, g: Geometry) -> LayerWeights:
    attention, ffn = layer.attention, layer.ffn
    return LayerWeights(
        attention_mix=_mix(layer.attention_mhc, layer.attention_norm),
        attention=_kda(name, attention, g) if isinstance(attention, reference.KdaWeights) else _mla(name, attention, g),
        ffn_mix=_mix(layer.ffn_mhc, layer.ffn_norm),
        ffn=_dense(name, ffn, g.dense_width, g) if isinstance(ffn, reference.DenseWeights) else _moe(name, ffn, g),
    )


def _mix(mhc: reference.MhcWeights, norm: Tensor) -> MixWeights:
    return MixWeights(fn=mhc.fn, scale=mhc.scale, base=mhc.base, norm=norm)


def _kda(name: str, w: reference.KdaWeights, g: Geometry) -> KdaWeights:
    rank = g.kda_head_dim
    return KdaWeights(
        qkv=bf16.matrix(f"{name}.qkv", w.qkv, g.conv_channels, g.hidden),
        beta=bf16.matrix(f"{name}.beta", w.beta, g.kda_heads, g.hidden),
        f_a=bf16.matrix(f"{name}.f_a", w.decay_down, rank, g.hidden),
        g_a=bf16.matrix(f"{name}.g_a", w.gate_down, rank, g.hidden),
        f_b=bf16.matrix(f"{name}.f_b", w.decay_up, g.kda_width, rank),
        g_b=bf16.matrix(f"{name}.g_b", w.gate_up, g.kda_width, rank),
        output=bf16.matrix(f"{name}.output", w.output, g.hidden, g.kda_width),
        taps=w.taps,
        a_log=w.a_log,
        dt_bias=w.dt_bias,
        output_norm=w.output_norm,
    )


def _mla(name: str, w: reference.MlaWeights, g: Geometry) -> MlaWeights:
    index, heads = w.indexer, g.mla_heads
    key_up = w.key_up.transpose(1, 2).contiguous().transpose(1, 2)
    value_up = w.value_up.transpose(1, 2).contiguous().transpose(1, 2)
    return MlaWeights(
        latents=bf16.matrix(f"{name}.latents", w.query_latent, g.q_rank + g.latent, g.hidden),
        query=bf16.matrix(f"{name}.query", w.query, heads * g.qk_head_dim, g.q_rank),
        key_up=bf16.transposed_stack(f"{name}.key_up", key_up, g.latent, g.qk_head_dim, heads),
        value_up=bf16.transposed_stack(f"{name}.value_up", value_up, g.v_head_dim, g.latent, heads),
        output=bf16.matrix(f"{name}.output", w.output, g.hidden, heads * g.v_head_dim),
        query_norm=w.query_norm,
        latent_norm=w.latent_norm,
        index_query=bf16.matrix(f"{name}.index_query", index.query, g.index_heads * g.index_head_dim, g.q_rank),
        index_key=bf16.matrix(f"{name}.index_key", index.key, g.index_head_dim, g.hidden),
        index_gate=bf16.matrix(f"{name}.index_gate", index.pool_gate, g.index_head_dim, g.hidden),
        head_weights=index.head_weights,
        key_norm_weight=index.key_norm_weight,
        key_norm_bias=index.key_norm_bias,
        position_bias=index.position_bias,
    )


def _dense(name: str, w: reference.DenseWeights, width: int, g: Geometry) -> DenseWeights:
    return DenseWeights(
        up=bf16.matrix(f"{name}.up", w.gate_up, 2 * width, g.hidden),
        down=bf16.matrix(f"{name}.down", w.down, g.hidden, width),
    )


def _moe(name: str, w: reference.MoeWeights, g: Geometry) -> MoeWeights:
    rows = g.experts + (w.shared is None)
    return MoeWeights(
        router=bf16.matrix(f"{name}.router", w.router, g.experts, g.hidden),
        bias=w.bias,
        experts_up=bf16.matrix(f"{name}.experts_up", w.gate_up, 2 * g.expert_width, g.hidden, stack=rows),
        experts_down=bf16.matrix(f"{name}.experts_down", w.down, g.hidden, g.expert_width, stack=rows),
        shared=None if w.shared is None else _dense(f"{name}.shared", w.shared, g.expert_width, g),
    )
