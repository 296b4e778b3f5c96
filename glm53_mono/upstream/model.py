"""The model's weights, where SGLang put them: one typed record a layer part, every tensor's layout checked once.

M is the hidden size, H the rank's heads, P = H x 128 the rank's KDA width. Matrices are [outputs, inputs] row-major
unless a docstring says otherwise. Weights are read as bf16; another format is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glm53_mono.geometry import Geometry
from glm53_mono.upstream.tensors import UpstreamError, expect

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Mix:
    """mHC parameters before attention or before the FFN (glm5_next.py: Glm5NextDecoderLayer).

    Attributes:
        fn: [24, 4M] fp32, rows pre 4 | post 4 | comb 16.
        base: [24] fp32.
        scale: [3] fp32, of pre, post and comb.
    """

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class KdaWeights:
    """A KDA layer's attention; the three forms in which SGLang fuses its projections look alike here.

    Attributes:
        qkv: [3P, M], q | k | v.
        beta: [H, M].
        forget_down, gate_down: [128, M].
        forget_up, gate_up: [P, 128].
        conv: [3P, taps] fp32, the newest input last.
        a_log: [H] fp32.
        dt_bias: [P] fp32.
        norm: [128], the gated norm's weight.
        out: [M, P].
    """

    qkv: torch.Tensor
    beta: torch.Tensor
    forget_down: torch.Tensor
    gate_down: torch.Tensor
    forget_up: torch.Tensor
    gate_up: torch.Tensor
    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class IndexerWeights:
    """A DSA layer's indexer (dsa_indexer_kpool.py: IndexerKPool).

    Attributes:
        query: [index heads x 128, q rank].
        key: [128, M].
        key_norm_weight, key_norm_bias: [128] fp32.
        head_weights: [index heads, M] fp32.
        pool_gate: [128, M].
        pool_position: [pool, 128] fp32, added to the gate's logits by place in the pool.
    """

    query: torch.Tensor
    key: torch.Tensor
    key_norm_weight: torch.Tensor
    key_norm_bias: torch.Tensor
    head_weights: torch.Tensor
    pool_gate: torch.Tensor
    pool_position: torch.Tensor


@dataclass(frozen=True)
class DsaWeights:
    """A DSA layer's attention (deepseek_v2.py: DeepseekV2AttentionMLA).

    Attributes:
        down: [q rank + latent, M].
        query_norm: [q rank].
        query_up: [H x 256, q rank].
        latent_norm: [latent].
        absorb_key: [H, 256, latent], column-major in the last two (deepseek_weight_loader.py: w_kc).
        absorb_value: [H, latent, 256], column-major in the last two (w_vc).
        out: [M, H x 256].
        indexer: the layer's own.
    """

    down: torch.Tensor
    query_norm: torch.Tensor
    query_up: torch.Tensor
    latent_norm: torch.Tensor
    absorb_key: torch.Tensor
    absorb_value: torch.Tensor
    out: torch.Tensor
    indexer: IndexerWeights


@dataclass(frozen=True)
class DenseWeights:
    """A gated FFN of width I: gate_up [2I, M] with the gate first, down [M, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """A routed FFN (deepseek_v2.py: DeepseekV2MoE).

    Attributes:
        router: [experts, M].
        router_bias: [experts] fp32, or bf16 where AITER serves FP8 or Quark weights; for the choice only.
        gate_up: [experts, 2I, M] with the gate first; one expert more where the shared one is fused.
        down: [experts, M, I]; likewise.
        shared: the shared expert, or None where it is the last row of `gate_up` and `down`.
        scale_in_router: whether the routed scale is already in SGLang's routing weights.
    """

    router: torch.Tensor
    router_bias: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: DenseWeights | None
    scale_in_router: bool


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer: norms [M] before each half, the mixes of both halves, and the halves."""

    attention_norm: torch.Tensor
    ffn_norm: torch.Tensor
    attention_mix: Mix
    ffn_mix: Mix
    attention: KdaWeights | DsaWeights
    ffn: DenseWeights | ExpertWeights


@dataclass(frozen=True)
class EmbeddingShard:
    """The rank's rows of the embedding: weight [rows, M], row i for token `first_token` + i up to `end_token`."""

    weight: torch.Tensor
    first_token: int
    end_token: int


def model_layers(model: Any, geometry: Geometry) -> tuple[LayerWeights, ...]:
    """The weights of every decoder layer.

    Args:
        model: SGLang's loaded `Glm5NextForConditionalGeneration`.
        geometry: of this rank.

    Raises:
        UpstreamError: another number of layers, a layer of another kind, or a weight of another shape, dtype or stride.
    """
    layers = model.model.layers
    if len(layers) != geometry.layers:
        raise UpstreamError(f"model.layers has {len(layers)} layers, the config {geometry.layers}")
    return tuple(_layer(layer, f"model.layers.{index}", index, geometry) for index, layer in enumerate(layers))


def embedding_shard(model: Any, geometry: Geometry) -> EmbeddingShard:
    """The rank's part of the embedding (vocab_parallel_embedding.py: VocabParallelEmbedding).

    Raises:
        UpstreamError: another shape, dtype or stride.
    """
    import torch

    embedding = model.model.embed_tokens
    shape = (geometry.vocab_shard, geometry.hidden)
    weight = expect(embedding.weight, "model.embed_tokens.weight", shape, torch.bfloat16)
    shard = embedding.shard_indices
    return EmbeddingShard(weight, shard.org_vocab_start_index, shard.org_vocab_end_index)


def final_norm(model: Any, geometry: Geometry) -> torch.Tensor:
    """The weight of the norm before the head: [M] bf16.

    Raises:
        UpstreamError: another shape, dtype or stride.
    """
    return _norm(model.model.norm, "model.norm", geometry.hidden)


def hands_out_hidden_states(model: Any) -> bool:
    """Whether the server asked the model for hidden states of inner layers, which a step does not produce."""
    return bool(model.capture_aux_hidden_states or model.model.layers_to_capture)


def logits(model: Any, input_ids: torch.Tensor, hidden: torch.Tensor, forward_batch: Any) -> Any:
    """What the model's forward returns: SGLang's own head on the normalised hidden states.

    Args:
        hidden: [rows, M] bf16.
    """
    return model.logits_processor(input_ids, hidden, model.lm_head, forward_batch, None)


def tensor_parallel_rank() -> tuple[int, int]:
    """(rank, ranks) of this process among those that share the model."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.tp_rank, parallel.tp_size


def _layer(layer: Any, name: str, index: int, geometry: Geometry) -> LayerWeights:
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA, DeepseekV2MLP, DeepseekV2MoE
    from sglang.srt.models.glm5_next import Glm5NextLinearAttention

    attention_class = Glm5NextLinearAttention if geometry.is_kda(index) else DeepseekV2AttentionMLA
    ffn_class = DeepseekV2MLP if geometry.is_dense(index) else DeepseekV2MoE
    for part, found, wanted in (("self_attn", layer.self_attn, attention_class), ("mlp", layer.mlp, ffn_class)):
        if not isinstance(found, wanted):
            raise UpstreamError(f"{name}.{part} is {type(found).__name__}, not {wanted.__name__}")
    attention = _kda if geometry.is_kda(index) else _dsa
    if geometry.is_dense(index):
        ffn = _dense(layer.mlp, f"{name}.mlp", geometry.dense_width, geometry.hidden)
    else:
        ffn = _experts(layer.mlp, f"{name}.mlp", geometry)
    return LayerWeights(
        attention_norm=_norm(layer.input_layernorm, f"{name}.input_layernorm", geometry.hidden),
        ffn_norm=_norm(layer.post_attention_layernorm, f"{name}.post_attention_layernorm", geometry.hidden),
        attention_mix=_mix(layer.hc_attn_fn, layer.hc_attn_base, layer.hc_attn_scale, f"{name}.hc_attn", geometry),
        ffn_mix=_mix(layer.hc_ffn_fn, layer.hc_ffn_base, layer.hc_ffn_scale, f"{name}.hc_ffn", geometry),
        attention=attention(layer.self_attn, f"{name}.self_attn", geometry),
        ffn=ffn,
    )


def _mix(fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, name: str, geometry: Geometry) -> Mix:
    import torch

    return Mix(
        fn=expect(fn, f"{name}_fn", (geometry.mix, geometry.stream_width), torch.float32),
        base=expect(base, f"{name}_base", (geometry.mix,), torch.float32),
        scale=expect(scale, f"{name}_scale", (3,), torch.float32),
    )


def _kda(attention: Any, name: str, geometry: Geometry) -> KdaWeights:
    import torch

    heads, width, rank, channels = geometry.kda_heads, geometry.kda_width, geometry.kda_head_dim, geometry.conv_channels
    if attention.do_fuse_qkvbfg:
        fused = _weight(
            attention.fused_qkvbfg_a_proj,
            f"{name}.fused_qkvbfg_a_proj",
            (channels + heads + 2 * rank, geometry.hidden),
        )
        qkv, beta, forget_down, gate_down = fused.split([channels, heads, rank, rank])
    else:
        qkv = _weight(attention.qkv_proj, f"{name}.qkv_proj", (channels, geometry.hidden))
        if attention.fuse_bfg:
            fused = _weight(attention.fused_bfg_a_proj, f"{name}.fused_bfg_a_proj", (heads + 2 * rank, geometry.hidden))
            beta, forget_down, gate_down = fused.split([heads, rank, rank])
        else:
            beta = _weight(attention.b_proj, f"{name}.b_proj", (heads, geometry.hidden))
            forget_down = _weight(attention.f_a_proj, f"{name}.f_a_proj", (rank, geometry.hidden))
            gate_down = _weight(attention.g_a_proj, f"{name}.g_a_proj", (rank, geometry.hidden))
    if attention.do_fuse_qkvbfg or attention.fuse_bfg:
        forget_up, gate_up = _weight(attention.fused_fg_b_proj, f"{name}.fused_fg_b_proj", (2, width, rank))
    else:
        forget_up = _weight(attention.f_b_proj, f"{name}.f_b_proj", (width, rank))
        gate_up = _weight(attention.g_b_proj, f"{name}.g_b_proj", (width, rank))
    conv = expect(
        attention.qkv_conv1d.weight, f"{name}.qkv_conv1d.weight", (channels, 1, geometry.conv_taps), torch.float32
    )
    a_log = expect(attention.A_log, f"{name}.A_log", (1, 1, heads, 1), torch.float32)
    return KdaWeights(
        qkv=qkv,
        beta=beta,
        forget_down=forget_down,
        gate_down=gate_down,
        forget_up=forget_up,
        gate_up=gate_up,
        conv=conv.squeeze(1),
        a_log=a_log.flatten(),
        dt_bias=expect(attention.dt_bias, f"{name}.dt_bias", (width,), torch.float32),
        norm=_norm(attention.o_norm, f"{name}.o_norm", rank),
        out=_weight(attention.o_proj, f"{name}.o_proj", (geometry.hidden, width)),
    )


def _dsa(attention: Any, name: str, geometry: Geometry) -> DsaWeights:
    import torch

    heads, q_rank, latent = geometry.mla_heads, geometry.q_rank, geometry.latent
    key_dim, value_dim = geometry.qk_head_dim, geometry.v_head_dim
    if attention.indexer is None:
        raise UpstreamError(f"{name}.indexer is None: the layer reuses another layer's selection")
    return DsaWeights(
        down=_weight(
            attention.fused_qkv_a_proj_with_mqa,
            f"{name}.fused_qkv_a_proj_with_mqa",
            (q_rank + latent, geometry.hidden),
        ),
        query_norm=_norm(attention.q_a_layernorm, f"{name}.q_a_layernorm", q_rank),
        query_up=_weight(attention.q_b_proj, f"{name}.q_b_proj", (heads * key_dim, q_rank)),
        latent_norm=_norm(attention.kv_a_layernorm, f"{name}.kv_a_layernorm", latent),
        absorb_key=expect(
            attention.w_kc,
            f"{name}.w_kc",
            (heads, key_dim, latent),
            torch.bfloat16,
            strides=(key_dim * latent, 1, key_dim),
        ),
        absorb_value=expect(
            attention.w_vc,
            f"{name}.w_vc",
            (heads, latent, value_dim),
            torch.bfloat16,
            strides=(value_dim * latent, 1, latent),
        ),
        out=_weight(attention.o_proj, f"{name}.o_proj", (geometry.hidden, heads * value_dim)),
        indexer=_indexer(attention.indexer, f"{name}.indexer", geometry),
    )


def _indexer(indexer: Any, name: str, geometry: Geometry) -> IndexerWeights:
    import torch

    heads, dim, hidden = geometry.index_heads, geometry.index_head_dim, geometry.hidden
    return IndexerWeights(
        query=_weight(indexer.wq_b, f"{name}.wq_b", (heads * dim, geometry.q_rank)),
        key=_weight(indexer.wk, f"{name}.wk", (dim, hidden)),
        key_norm_weight=expect(indexer.k_norm.weight, f"{name}.k_norm.weight", (dim,), torch.float32),
        key_norm_bias=expect(indexer.k_norm.bias, f"{name}.k_norm.bias", (dim,), torch.float32),
        head_weights=expect(indexer.weights_proj.weight, f"{name}.weights_proj.weight", (heads, hidden), torch.float32),
        pool_gate=expect(
            indexer.index_kpool_compress_gate, f"{name}.index_kpool_compress_gate", (dim, hidden), torch.bfloat16
        ),
        pool_position=expect(
            indexer.index_kpool_compress_ape, f"{name}.index_kpool_compress_ape", (geometry.pool, dim), torch.float32
        ),
    )


def _dense(mlp: Any, name: str, width: int, hidden: int) -> DenseWeights:
    return DenseWeights(
        gate_up=_weight(mlp.gate_up_proj, f"{name}.gate_up_proj", (2 * width, hidden)),
        down=_weight(mlp.down_proj, f"{name}.down_proj", (hidden, width)),
    )


def _experts(moe: Any, name: str, geometry: Geometry) -> ExpertWeights:
    import torch

    hidden, width = geometry.hidden, geometry.expert_width
    fused = moe.num_fused_shared_experts
    if fused not in (0, 1) or (fused == 0) != (moe.shared_experts is not None):
        raise UpstreamError(f"{name} fuses {fused} shared experts and has shared_experts {moe.shared_experts!r}")
    rows = geometry.experts + fused
    return ExpertWeights(
        router=expect(moe.gate.weight, f"{name}.gate.weight", (geometry.experts, hidden), torch.bfloat16),
        router_bias=expect(
            moe.gate.e_score_correction_bias,
            f"{name}.gate.e_score_correction_bias",
            (geometry.experts,),
            torch.float32,
            torch.bfloat16,
        ),
        gate_up=expect(moe.experts.w13_weight, f"{name}.experts.w13_weight", (rows, 2 * width, hidden), torch.bfloat16),
        down=expect(moe.experts.w2_weight, f"{name}.experts.w2_weight", (rows, hidden, width), torch.bfloat16),
        shared=None if fused else _dense(moe.shared_experts, f"{name}.shared_experts", width, hidden),
        scale_in_router=bool(moe.routed_scaling_factor_fused_in_topk),
    )


def _norm(norm: Any, name: str, width: int) -> torch.Tensor:
    import torch

    return expect(norm.weight, f"{name}.weight", (width,), torch.bfloat16)


def _weight(linear: Any, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return expect(linear.weight, f"{name}.weight", shape, torch.bfloat16)
