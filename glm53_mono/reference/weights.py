"""The model's weights as the reference reads them, and how they come out of a checkpoint.

Dtypes are those of SGLang's parameters: bf16, but fp32 for the mHC matrices, `A_log`, `dt_bias`, the convolution taps,
the indexer's head weights, key norm and position bias, and the router's bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from glm53_mono.geometry import Geometry

PREFIX = "model.language_model."
"""What the names of the text model's tensors begin with in a checkpoint."""


class CheckpointError(ValueError):
    """A checkpoint that does not hold what the geometry needs; the message names the tensor."""


@dataclass(frozen=True)
class MhcWeights:
    """One branch's hyper-connection."""

    fn: Tensor
    """[mix, streams * hidden] fp32."""
    scale: Tensor
    """[3] fp32: of pre, post and comb."""
    base: Tensor
    """[mix] fp32."""


@dataclass(frozen=True)
class KdaWeights:
    """One linear-attention layer; P = kda_width = kda_heads * kda_head_dim."""

    qkv: Tensor
    """[3 * P, hidden] bf16: q, k, v."""
    beta: Tensor
    """[kda_heads, hidden] bf16."""
    decay_down: Tensor
    """[kda_head_dim, hidden] bf16 (f_a)."""
    decay_up: Tensor
    """[P, kda_head_dim] bf16 (f_b)."""
    gate_down: Tensor
    """[kda_head_dim, hidden] bf16 (g_a)."""
    gate_up: Tensor
    """[P, kda_head_dim] bf16 (g_b)."""
    taps: Tensor
    """[3 * P, conv_taps] fp32, oldest input first."""
    a_log: Tensor
    """[kda_heads] fp32."""
    dt_bias: Tensor
    """[kda_heads, kda_head_dim] fp32."""
    output_norm: Tensor
    """[kda_head_dim] bf16."""
    output: Tensor
    """[hidden, P] bf16."""


@dataclass(frozen=True)
class IndexerWeights:
    """The sparse indexer of one MLA layer."""

    query: Tensor
    """[index_heads * index_head_dim, q_rank] bf16 (wq_b)."""
    key: Tensor
    """[index_head_dim, hidden] bf16 (wk)."""
    key_norm_weight: Tensor
    """[index_head_dim] fp32."""
    key_norm_bias: Tensor
    """[index_head_dim] fp32."""
    head_weights: Tensor
    """[index_heads, hidden] fp32 (weights_proj)."""
    pool_gate: Tensor
    """[index_head_dim, hidden] bf16 (index_kpool_compress_gate)."""
    position_bias: Tensor
    """[pool, index_head_dim] fp32, added to the gate by position inside the pool (index_kpool_compress_ape)."""


@dataclass(frozen=True)
class MlaWeights:
    """One sparse-attention layer."""

    query_latent: Tensor
    """[q_rank + latent, hidden] bf16: q_a_proj, then kv_a_proj_with_mqa."""
    query_norm: Tensor
    """[q_rank] bf16."""
    latent_norm: Tensor
    """[latent] bf16."""
    query: Tensor
    """[mla_heads * qk_head_dim, q_rank] bf16 (q_b_proj)."""
    key_up: Tensor
    """[mla_heads, qk_head_dim, latent] bf16: the key rows of kv_b_proj, absorbed into the query."""
    value_up: Tensor
    """[mla_heads, latent, v_head_dim] bf16: the value rows of kv_b_proj, transposed."""
    output: Tensor
    """[hidden, mla_heads * v_head_dim] bf16."""
    indexer: IndexerWeights


@dataclass(frozen=True)
class DenseWeights:
    """A dense FFN or a shared expert, `width` wide."""

    gate_up: Tensor
    """[2 * width, hidden] bf16: gate, then up."""
    down: Tensor
    """[hidden, width] bf16."""


@dataclass(frozen=True)
class MoeWeights:
    """Routed experts, and the shared one: a DenseWeights, or fused as row `experts` of the expert tensors."""

    router: Tensor
    """[experts, hidden] bf16."""
    bias: Tensor
    """[experts] fp32, for the choice alone (e_score_correction_bias)."""
    gate_up: Tensor
    """[experts (+ 1 if fused), 2 * expert_width, hidden] bf16 (w13_weight)."""
    down: Tensor
    """[experts (+ 1 if fused), hidden, expert_width] bf16 (w2_weight)."""
    shared: DenseWeights | None
    """None when the shared expert is fused."""


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer."""

    attention_mhc: MhcWeights
    attention_norm: Tensor
    """[hidden] bf16 (input_layernorm)."""
    attention: KdaWeights | MlaWeights
    ffn_mhc: MhcWeights
    ffn_norm: Tensor
    """[hidden] bf16 (post_attention_layernorm)."""
    ffn: DenseWeights | MoeWeights


@dataclass(frozen=True)
class ModelWeights:
    """The text model without its MTP layer."""

    embedding: Tensor
    """[vocab, hidden] bf16."""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    """[hidden] bf16."""
    head: Tensor
    """[vocab, hidden] bf16 (lm_head)."""

    def to(self, device: torch.device | str) -> ModelWeights:
        """The same weights on another device."""
        return _moved(self, device)


def fuse_shared_expert(weights: MoeWeights) -> MoeWeights:
    """Append a separate shared expert to the routed ones, as SGLang's fusion loads it (glm5_next.py:1377)."""
    if weights.shared is None:
        raise ValueError("the shared expert is fused already; give MoE weights with a separate one")
    return MoeWeights(
        router=weights.router,
        bias=weights.bias,
        gate_up=torch.cat((weights.gate_up, weights.shared.gate_up[None])),
        down=torch.cat((weights.down, weights.shared.down[None])),
        shared=None,
    )


def from_checkpoint(tensors: Mapping[str, Tensor], geometry: Geometry) -> ModelWeights:
    """Read the model out of a checkpoint's tensors.

    Args:
        tensors: unquantised tensors under their Hugging Face names.
        geometry: sizes at TP 1.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the geometry wants, or the geometry is sharded.
    """
    if geometry.tp_size != 1:
        raise CheckpointError(
            f"the reference holds whole weights: geometry.tp_size is {geometry.tp_size}, it must be 1"
        )
    model = _Reader(tensors, geometry, PREFIX)
    return ModelWeights(
        embedding=model.bf16("embed_tokens.weight", geometry.vocab, geometry.hidden),
        layers=tuple(_layer(model.within(f"layers.{i}."), i) for i in range(geometry.layers)),
        norm=model.bf16("norm.weight", geometry.hidden),
        head=_Reader(tensors, geometry, "").bf16("lm_head.weight", geometry.vocab, geometry.hidden),
    )


@dataclass(frozen=True)
class _Reader:
    """Tensors below one name prefix, checked for shape and converted."""

    tensors: Mapping[str, Tensor]
    geometry: Geometry
    prefix: str

    def within(self, prefix: str) -> _Reader:
        return _Reader(self.tensors, self.geometry, self.prefix + prefix)

    def bf16(self, name: str, *shape: int) -> Tensor:
        return self._read(name, shape).bfloat16()

    def fp32(self, name: str, *shape: int) -> Tensor:
        return self._read(name, shape).float()

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        full = self.prefix + name
        if full not in self.tensors:
            raise CheckpointError(f"the checkpoint has no tensor {full}")
        tensor = self.tensors[full]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{full} has shape {tuple(tensor.shape)}, the geometry wants {shape}")
        return tensor


def _layer(layer: _Reader, index: int) -> LayerWeights:
    geometry = layer.geometry
    attention, ffn = layer.within("self_attn."), layer.within("mlp.")
    return LayerWeights(
        attention_mhc=_mhc(layer, "attn"),
        attention_norm=layer.bf16("input_layernorm.weight", geometry.hidden),
        attention=_kda(attention) if geometry.is_kda(index) else _mla(attention),
        ffn_mhc=_mhc(layer, "ffn"),
        ffn_norm=layer.bf16("post_attention_layernorm.weight", geometry.hidden),
        ffn=_dense(ffn, geometry.dense_width) if geometry.is_dense(index) else _moe(ffn),
    )


def _mhc(layer: _Reader, branch: str) -> MhcWeights:
    geometry = layer.geometry
    return MhcWeights(
        fn=layer.fp32(f"hc_{branch}_fn", geometry.mix, geometry.stream_width),
        scale=layer.fp32(f"hc_{branch}_scale", 3),
        base=layer.fp32(f"hc_{branch}_base", geometry.mix),
    )


def _kda(attention: _Reader) -> KdaWeights:
    g = attention.geometry
    width, rank = g.kda_width, g.kda_head_dim
    taps = [attention.fp32(f"{part}_conv1d.weight", width, 1, g.conv_taps) for part in "qkv"]
    return KdaWeights(
        qkv=torch.cat([attention.bf16(f"{part}_proj.weight", width, g.hidden) for part in "qkv"]),
        beta=attention.bf16("b_proj.weight", g.kda_heads, g.hidden),
        decay_down=attention.bf16("f_a_proj.weight", rank, g.hidden),
        decay_up=attention.bf16("f_b_proj.weight", width, rank),
        gate_down=attention.bf16("g_a_proj.weight", rank, g.hidden),
        gate_up=attention.bf16("g_b_proj.weight", width, rank),
        taps=torch.cat(taps).squeeze(1),
        a_log=attention.fp32("A_log", g.kda_heads),
        dt_bias=attention.fp32("dt_bias", width).view(g.kda_heads, rank),
        output_norm=attention.bf16("o_norm.weight", rank),
        output=attention.bf16("o_proj.weight", g.hidden, width),
    )


def _mla(attention: _Reader) -> MlaWeights:
    g = attention.geometry
    key_value = attention.bf16("kv_b_proj.weight", g.mla_heads * (g.qk_head_dim + g.v_head_dim), g.latent)
    key_up, value_up = key_value.view(g.mla_heads, -1, g.latent).split((g.qk_head_dim, g.v_head_dim), dim=1)
    return MlaWeights(
        query_latent=torch.cat(
            (
                attention.bf16("q_a_proj.weight", g.q_rank, g.hidden),
                attention.bf16("kv_a_proj_with_mqa.weight", g.latent, g.hidden),
            )
        ),
        query_norm=attention.bf16("q_a_layernorm.weight", g.q_rank),
        latent_norm=attention.bf16("kv_a_layernorm.weight", g.latent),
        query=attention.bf16("q_b_proj.weight", g.mla_heads * g.qk_head_dim, g.q_rank),
        key_up=key_up.contiguous(),
        value_up=value_up.transpose(1, 2).contiguous(),
        output=attention.bf16("o_proj.weight", g.hidden, g.mla_heads * g.v_head_dim),
        indexer=_indexer(attention.within("indexer.")),
    )


def _indexer(indexer: _Reader) -> IndexerWeights:
    g = indexer.geometry
    return IndexerWeights(
        query=indexer.bf16("wq_b.weight", g.index_heads * g.index_head_dim, g.q_rank),
        key=indexer.bf16("wk.weight", g.index_head_dim, g.hidden),
        key_norm_weight=indexer.fp32("k_norm.weight", g.index_head_dim),
        key_norm_bias=indexer.fp32("k_norm.bias", g.index_head_dim),
        head_weights=indexer.fp32("weights_proj.weight", g.index_heads, g.hidden),
        pool_gate=indexer.bf16("index_kpool_compress_gate", g.index_head_dim, g.hidden),
        position_bias=indexer.fp32("index_kpool_compress_ape", g.pool, g.index_head_dim),
    )


def _dense(ffn: _Reader, width: int) -> DenseWeights:
    hidden = ffn.geometry.hidden
    return DenseWeights(
        gate_up=torch.cat((ffn.bf16("gate_proj.weight", width, hidden), ffn.bf16("up_proj.weight", width, hidden))),
        down=ffn.bf16("down_proj.weight", hidden, width),
    )


def _moe(ffn: _Reader) -> MoeWeights:
    g = ffn.geometry
    experts = [_dense(ffn.within(f"experts.{expert}."), g.expert_width) for expert in range(g.experts)]
    return MoeWeights(
        router=ffn.bf16("gate.weight", g.experts, g.hidden),
        bias=ffn.fp32("gate.e_score_correction_bias", g.experts),
        gate_up=torch.stack([expert.gate_up for expert in experts]),
        down=torch.stack([expert.down for expert in experts]),
        shared=_dense(ffn.within("shared_experts."), g.expert_width),
    )


def _moved(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    if is_dataclass(value):
        return type(value)(**{field.name: _moved(getattr(value, field.name), device) for field in fields(value)})
    return value
