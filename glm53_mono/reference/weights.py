"""The reference's weights out of a checkpoint, in the dtypes of SGLang's parameters: matrices are bf16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.weights.model import (
    DenseWeights,
    IndexerWeights,
    KdaWeights,
    LayerWeights,
    MhcWeights,
    MlaWeights,
    ModelWeights,
    MoeWeights,
)

PREFIX = "model.language_model."
"""What the names of the text model's tensors begin with in a checkpoint."""


class CheckpointError(ValueError):
    """A checkpoint that does not hold what the geometry needs; the message names the tensor."""


def fuse_shared_expert(weights: MoeWeights[Tensor]) -> MoeWeights[Tensor]:
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


def from_checkpoint(tensors: Mapping[str, Tensor], geometry: Geometry) -> ModelWeights[Tensor]:
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
        layers=tuple(checkpoint_layers(tensors, geometry)),
        norm=model.bf16("norm.weight", geometry.hidden),
        head=_Reader(tensors, geometry, "").bf16("lm_head.weight", geometry.vocab, geometry.hidden),
    )


def checkpoint_layers(tensors: Mapping[str, Tensor], geometry: Geometry) -> Iterator[LayerWeights[Tensor]]:
    """The decoder layers one after another; arguments and errors as of `from_checkpoint`."""
    model = _Reader(tensors, geometry, PREFIX)
    for index in range(geometry.layers):
        yield _layer(model.within(f"layers.{index}."), index)


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


def _layer(layer: _Reader, index: int) -> LayerWeights[Tensor]:
    geometry = layer.geometry
    attention, ffn = layer.within("self_attn."), layer.within("mlp.")
    return LayerWeights(
        attention_mhc=_mhc(layer, "attn", "input_layernorm"),
        attention=_kda(attention) if geometry.is_kda(index) else _mla(attention),
        ffn_mhc=_mhc(layer, "ffn", "post_attention_layernorm"),
        ffn=_dense(ffn, geometry.dense_width) if geometry.is_dense(index) else _moe(ffn),
    )


def _mhc(layer: _Reader, branch: str, norm: str) -> MhcWeights:
    geometry = layer.geometry
    return MhcWeights(
        fn=layer.fp32(f"hc_{branch}_fn", geometry.mix, geometry.stream_width),
        scale=layer.fp32(f"hc_{branch}_scale", 3),
        base=layer.fp32(f"hc_{branch}_base", geometry.mix),
        norm=layer.bf16(f"{norm}.weight", geometry.hidden),
    )


def _kda(attention: _Reader) -> KdaWeights[Tensor]:
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


def _mla(attention: _Reader) -> MlaWeights[Tensor]:
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
        key_up=key_up.transpose(1, 2).contiguous(),
        value_up=value_up.contiguous(),
        output=attention.bf16("o_proj.weight", g.hidden, g.mla_heads * g.v_head_dim),
        indexer=_indexer(attention.within("indexer.")),
    )


def _indexer(indexer: _Reader) -> IndexerWeights[Tensor]:
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


def _dense(ffn: _Reader, width: int) -> DenseWeights[Tensor]:
    hidden = ffn.geometry.hidden
    return DenseWeights(
        gate_up=torch.cat((ffn.bf16("gate_proj.weight", width, hidden), ffn.bf16("up_proj.weight", width, hidden))),
        down=ffn.bf16("down_proj.weight", hidden, width),
    )


def _moe(ffn: _Reader) -> MoeWeights[Tensor]:
    g = ffn.geometry
    experts = [_dense(ffn.within(f"experts.{expert}."), g.expert_width) for expert in range(g.experts)]
    return MoeWeights(
        router=ffn.bf16("gate.weight", g.experts, g.hidden),
        bias=ffn.fp32("gate.e_score_correction_bias", g.experts),
        gate_up=torch.stack([expert.gate_up for expert in experts]),
        down=torch.stack([expert.down for expert in experts]),
        shared=_dense(ffn.within("shared_experts."), g.expert_width),
    )
