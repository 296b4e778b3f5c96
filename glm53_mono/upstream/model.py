"""The model's weights, read where SGLang put them: every tensor's layout is checked once.

bf16, FP8 blocks and MXFP4, row-major or as AITER lays them out (`stored`); another format or layout is refused by name.
What little cannot be read in place is copied (`weights.copies`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from glm53_mono.geometry import Geometry
from glm53_mono.upstream.stored import expert_matrices, linear_matrix
from glm53_mono.upstream.tensors import UpstreamError, expect
from glm53_mono.weights.bf16 import matrix
from glm53_mono.weights.copies import Copies, readable
from glm53_mono.weights.descriptor import Matrix
from glm53_mono.weights.formats import common_formats
from glm53_mono.weights.model import (
    DenseWeights,
    IndexerWeights,
    KdaWeights,
    LayerWeights,
    MhcWeights,
    MlaWeights,
    MoeWeights,
    StepWeights,
)


@dataclass(frozen=True)
class EmbeddingShard:
    """The rank's rows of the embedding: weight [rows, hidden], row i for token `first_token` + i up to `end_token`."""

    weight: Matrix
    first_token: int
    end_token: int


def step_weights(model: Any, geometry: Geometry, copies: Copies) -> StepWeights[Matrix]:
    """Describes every weight of a step.

    Args:
        model: SGLang's loaded `Glm5NextForConditionalGeneration`.
        geometry: of this rank.
        copies: gets what cannot be read in place.

    Raises:
        UpstreamError: SGLang holds a weight of another shape, dtype or stride, or another number or kind of layers.
        WeightError: a weight that lies where the kernels cannot read it.
    """
    shard = embedding_shard(model, geometry)
    return StepWeights(
        embedding=shard.weight,
        first_token=shard.first_token,
        layers=model_layers(model, geometry, copies),
        norm=final_norm(model, geometry),
    )


def model_layers(model: Any, geometry: Geometry, copies: Copies) -> tuple[LayerWeights[Matrix], ...]:
    """The weights of every decoder layer; arguments and errors as of `step_weights`."""
    layers = model.model.layers
    if len(layers) != geometry.layers:
        raise UpstreamError(f"model.layers has {len(layers)} layers, the config {geometry.layers}")
    read = tuple(_layer(layer, f"model.layers.{index}", index, geometry) for index, layer in enumerate(layers))
    read = readable(read, copies)
    common_formats(read)
    return read


def embedding_shard(model: Any, geometry: Geometry) -> EmbeddingShard:
    """The rank's part of the embedding (vocab_parallel_embedding.py: VocabParallelEmbedding); see `step_weights`."""
    embedding, name = model.model.embed_tokens, "model.embed_tokens.weight"
    weight = expect(embedding.weight, name, (geometry.vocab_shard, geometry.hidden), torch.bfloat16)
    first = embedding.shard_indices.org_vocab_start_index
    end = embedding.shard_indices.org_vocab_end_index
    wanted = geometry.owned_tokens(tensor_parallel_rank()[0])
    if (first, end) != wanted:
        raise UpstreamError(f"{name} has the rows of tokens {first} to {end}, not of {wanted[0]} to {wanted[1]}")
    # SGLang pads the vocabulary; no token has the rows behind the last
    return EmbeddingShard(matrix(name, weight[: end - first]), first, end)


def final_norm(model: Any, geometry: Geometry) -> torch.Tensor:
    """The weight of the norm before the head, [hidden] bf16; see `step_weights`."""
    return _norm(model.model.norm, "model.norm", geometry.hidden)


def hands_out_hidden_states(model: Any) -> bool:
    """Whether the server asked the model for hidden states of inner layers, which a step does not produce."""
    return bool(model.capture_aux_hidden_states or model.model.layers_to_capture)


def logits(model: Any, input_ids: torch.Tensor, hidden: torch.Tensor, forward_batch: Any) -> Any:
    """What the model's forward returns: SGLang's own head on the normalised hidden states.

    Args:
        hidden: [rows, hidden] bf16.
    """
    return model.logits_processor(input_ids, hidden, model.lm_head, forward_batch, None)


def tensor_parallel_rank() -> tuple[int, int]:
    """(rank, ranks) of this process among those that share the model."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.tp_rank, parallel.tp_size


def gather_from_ranks(value: Any) -> list[Any]:
    """Every rank's value, in the order of the ranks, through their CPU group: a collective of all ranks.

    Args:
        value: anything that can be pickled.
    """
    import torch.distributed as dist
    from sglang.srt.runtime_context import get_parallel

    found: list[Any] = [None] * get_parallel().tp_size
    dist.all_gather_object(found, value, group=get_parallel().tp_group.cpu_group)
    return found


def _layer(layer: Any, name: str, index: int, geometry: Geometry) -> LayerWeights[Matrix]:
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA, DeepseekV2MLP, DeepseekV2MoE
    from sglang.srt.models.glm5_next import Glm5NextLinearAttention

    attention_class = Glm5NextLinearAttention if geometry.is_kda(index) else DeepseekV2AttentionMLA
    ffn_class = DeepseekV2MLP if geometry.is_dense(index) else DeepseekV2MoE
    for part, found, wanted in (("self_attn", layer.self_attn, attention_class), ("mlp", layer.mlp, ffn_class)):
        if not isinstance(found, wanted):
            raise UpstreamError(f"{name}.{part} is {type(found).__name__}, not {wanted.__name__}")
    attention = _kda if geometry.is_kda(index) else _mla
    if geometry.is_dense(index):
        ffn = _dense(layer.mlp, f"{name}.mlp", geometry.dense_width, geometry.hidden)
    else:
        ffn = _moe(layer.mlp, f"{name}.mlp", geometry)
    hidden = geometry.hidden
    attention_norm = _norm(layer.input_layernorm, f"{name}.input_layernorm", hidden)
    ffn_norm = _norm(layer.post_attention_layernorm, f"{name}.post_attention_layernorm", hidden)
    attention_mix = layer.hc_attn_fn, layer.hc_attn_scale, layer.hc_attn_base
    ffn_mix = layer.hc_ffn_fn, layer.hc_ffn_scale, layer.hc_ffn_base
    return LayerWeights(
        attention_mhc=_mhc(attention_mix, f"{name}.hc_attn", attention_norm, geometry),
        attention=attention(layer.self_attn, f"{name}.self_attn", geometry),
        ffn_mhc=_mhc(ffn_mix, f"{name}.hc_ffn", ffn_norm, geometry),
        ffn=ffn,
    )


def _mhc(parameters: tuple[torch.Tensor, ...], name: str, norm: torch.Tensor, geometry: Geometry) -> MhcWeights:
    fn, scale, base = parameters
    return MhcWeights(
        fn=_fp32(fn, f"{name}_fn", geometry.mix, geometry.stream_width),
        scale=_fp32(scale, f"{name}_scale", 3),
        base=_fp32(base, f"{name}_base", geometry.mix),
        norm=norm,
    )


def _kda(attention: Any, name: str, geometry: Geometry) -> KdaWeights[Matrix]:
    """The three forms in which SGLang fuses the projections look alike here."""
    heads, width, rank, channels = geometry.kda_heads, geometry.kda_width, geometry.kda_head_dim, geometry.conv_channels
    hidden = geometry.hidden
    if attention.do_fuse_qkvbfg:
        fused, counts = attention.fused_qkvbfg_a_proj, [channels, heads, rank, rank]
        qkv, beta, decay_down, gate_down = _rows(fused, f"{name}.fused_qkvbfg_a_proj", counts, hidden)
    else:
        qkv = _linear(attention.qkv_proj, f"{name}.qkv_proj", channels, hidden)
        if attention.fuse_bfg:
            fused, counts = attention.fused_bfg_a_proj, [heads, rank, rank]
            beta, decay_down, gate_down = _rows(fused, f"{name}.fused_bfg_a_proj", counts, hidden)
        else:
            beta = _linear(attention.b_proj, f"{name}.b_proj", heads, hidden)
            decay_down = _linear(attention.f_a_proj, f"{name}.f_a_proj", rank, hidden)
            gate_down = _linear(attention.g_a_proj, f"{name}.g_a_proj", rank, hidden)
    if attention.do_fuse_qkvbfg or attention.fuse_bfg:
        up = _linear(attention.fused_fg_b_proj, f"{name}.fused_fg_b_proj", 2, width, rank)
        decay_up, gate_up = up.item(0), up.item(1)
    else:
        decay_up = _linear(attention.f_b_proj, f"{name}.f_b_proj", width, rank)
        gate_up = _linear(attention.g_b_proj, f"{name}.g_b_proj", width, rank)
    taps = _fp32(attention.qkv_conv1d.weight, f"{name}.qkv_conv1d.weight", channels, 1, geometry.conv_taps)
    return KdaWeights(
        qkv=qkv,
        beta=beta,
        decay_down=decay_down,
        decay_up=decay_up,
        gate_down=gate_down,
        gate_up=gate_up,
        taps=taps.squeeze(1),
        a_log=_fp32(attention.A_log, f"{name}.A_log", 1, 1, heads, 1).flatten(),
        dt_bias=_fp32(attention.dt_bias, f"{name}.dt_bias", width).view(heads, rank),
        output_norm=_norm(attention.o_norm, f"{name}.o_norm", rank),
        output=_linear(attention.o_proj, f"{name}.o_proj", hidden, width),
    )


def _rows(fused: Any, name: str, counts: list[int], columns: int) -> list[Matrix]:
    """The matrices, of so many rows each, that a linear layer holds one below the other."""
    name = f"{name}.weight"
    return [matrix(name, part) for part in _bf16(fused.weight, name, sum(counts), columns).split(counts)]


def _mla(attention: Any, name: str, geometry: Geometry) -> MlaWeights[Matrix]:
    heads, q_rank, latent, hidden = geometry.mla_heads, geometry.q_rank, geometry.latent, geometry.hidden
    key_dim, value_dim = geometry.qk_head_dim, geometry.v_head_dim
    if attention.indexer is None:
        raise UpstreamError(f"{name}.indexer is None: the layer reuses another layer's selection")
    return MlaWeights(
        query_latent=linear_matrix(
            attention.fused_qkv_a_proj_with_mqa, f"{name}.fused_qkv_a_proj_with_mqa", q_rank + latent, hidden
        ),
        query_norm=_norm(attention.q_a_layernorm, f"{name}.q_a_layernorm", q_rank),
        latent_norm=_norm(attention.kv_a_layernorm, f"{name}.kv_a_layernorm", latent),
        query=linear_matrix(attention.q_b_proj, f"{name}.q_b_proj", heads * key_dim, q_rank),
        key_up=_absorbed(attention.w_kc, f"{name}.w_kc", heads, key_dim, latent),
        value_up=_absorbed(attention.w_vc, f"{name}.w_vc", heads, latent, value_dim),
        output=linear_matrix(attention.o_proj, f"{name}.o_proj", hidden, heads * value_dim),
        indexer=_indexer(attention.indexer, f"{name}.indexer", geometry),
    )


def _absorbed(tensor: torch.Tensor, name: str, heads: int, inputs: int, outputs: int) -> Matrix:
    """Half of kv_b_proj, [heads, inputs, outputs] with the inputs contiguous (deepseek_weight_loader.py:780-786)."""
    shape, strides = (heads, inputs, outputs), (inputs * outputs, 1, inputs)
    return matrix(name, expect(tensor, name, shape, torch.bfloat16, strides=strides).transpose(1, 2))


def _indexer(indexer: Any, name: str, geometry: Geometry) -> IndexerWeights[Matrix]:
    heads, dim, hidden = geometry.index_heads, geometry.index_head_dim, geometry.hidden
    gate, bias = f"{name}.index_kpool_compress_gate", f"{name}.index_kpool_compress_ape"
    return IndexerWeights(
        query=linear_matrix(indexer.wq_b, f"{name}.wq_b", heads * dim, geometry.q_rank),
        key=linear_matrix(indexer.wk, f"{name}.wk", dim, hidden),
        key_norm_weight=_fp32(indexer.k_norm.weight, f"{name}.k_norm.weight", dim),
        key_norm_bias=_fp32(indexer.k_norm.bias, f"{name}.k_norm.bias", dim),
        head_weights=_fp32(indexer.weights_proj.weight, f"{name}.weights_proj.weight", heads, hidden),
        pool_gate=matrix(gate, _bf16(indexer.index_kpool_compress_gate, gate, dim, hidden)),
        position_bias=_fp32(indexer.index_kpool_compress_ape, bias, geometry.pool, dim),
    )


def _dense(mlp: Any, name: str, width: int, hidden: int) -> DenseWeights[Matrix]:
    return DenseWeights(
        gate_up=linear_matrix(mlp.gate_up_proj, f"{name}.gate_up_proj", 2 * width, hidden),
        down=linear_matrix(mlp.down_proj, f"{name}.down_proj", hidden, width),
    )


def _moe(moe: Any, name: str, geometry: Geometry) -> MoeWeights[Matrix]:
    hidden, width = geometry.hidden, geometry.expert_width
    fused = moe.num_fused_shared_experts
    if fused not in (0, 1) or (fused == 0) != (moe.shared_experts is not None):
        raise UpstreamError(f"{name} fuses {fused} shared experts and has shared_experts {moe.shared_experts!r}")
    rows = geometry.experts + fused
    router = _linear(moe.gate, f"{name}.gate", geometry.experts, hidden)
    up_shape, down_shape = (rows, 2 * width, hidden), (rows, hidden, width)
    gate_up, down = expert_matrices(moe.experts, f"{name}.experts", up_shape, down_shape)
    bias = f"{name}.gate.e_score_correction_bias"
    return MoeWeights(
        router=router,
        bias=expect(moe.gate.e_score_correction_bias, bias, (geometry.experts,), torch.float32, torch.bfloat16),
        gate_up=gate_up,
        down=down,
        shared=None if fused else _dense(moe.shared_experts, f"{name}.shared_experts", width, hidden),
    )


def _norm(norm: Any, name: str, width: int) -> torch.Tensor:
    return _bf16(norm.weight, f"{name}.weight", width)


def _linear(linear: Any, name: str, *shape: int) -> Matrix:
    """A linear layer's matrix that is bf16 in every checkpoint."""
    return matrix(f"{name}.weight", _bf16(linear.weight, f"{name}.weight", *shape))


def _bf16(tensor: torch.Tensor, name: str, *shape: int) -> torch.Tensor:
    return expect(tensor, name, shape, torch.bfloat16)


def _fp32(tensor: torch.Tensor, name: str, *shape: int) -> torch.Tensor:
    return expect(tensor, name, shape, torch.float32)
