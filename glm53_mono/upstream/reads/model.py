"""Reads of the model: modules, parameters and the flags that decide their layout."""

from __future__ import annotations

from glm53_mono.upstream.contract import Kind, Read
from glm53_mono.upstream.reads.groups import alias, assigned, built, classes, constant, fields, function, method
from glm53_mono.upstream.reads.quantised import QUANTISED_READS

GLM = "sglang.srt.models.glm5_next"
DEEPSEEK = "sglang.srt.models.deepseek_v2"
INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer_kpool"
LINEAR = "sglang.srt.layers.linear"
UNQUANTIZED = "sglang.srt.layers.quantization.unquant"
NORM = "sglang.srt.layers.layernorm"
GATED_NORM = "sglang.kernels.ops.attention.fla.fused_norm_gate"
EMBEDDING = "sglang.srt.layers.vocab_parallel_embedding"
LOGITS = "sglang.srt.layers.logits_processor"
RUNTIME = "sglang.srt.runtime_context"
PARALLEL = "sglang.srt.arg_groups.fields.parallel"
STATE = "sglang.srt.distributed.parallel_state"

_WEIGHTS = "the weights of a layer"
_KDA = "Glm5NextLinearAttention"
_MLA = "DeepseekV2AttentionMLA"
_MOE = "DeepseekV2MoE"

MODEL_READS = (
    *classes(GLM, "the model that the step replaces", "Glm5NextForConditionalGeneration", "Glm5NextModel"),
    Read(
        GLM,
        "Glm5NextForConditionalGeneration",
        "forward",
        Kind.METHOD,
        "the arguments that our forward must take",
        signature="input_ids, positions, forward_batch, input_embeds=None, pp_proxy_tensors=None",
        closed=True,
    ),
    built(GLM, "Glm5NextForConditionalGeneration", "model", "the language model", "Glm5NextModel"),
    built(GLM, "Glm5NextForConditionalGeneration", "logits_processor", "logits of a step", "LogitsProcessor"),
    built(GLM, "Glm5NextForConditionalGeneration", "lm_head", "the head", "ParallelLMHead", "PPMissingLayer"),
    *assigned(
        GLM,
        "Glm5NextForConditionalGeneration",
        "refusing a model that must hand out hidden states of layers",
        "capture_aux_hidden_states",
    ),
    built(GLM, "Glm5NextModel", "embed_tokens", "the embedding of phase 0", "VocabParallelEmbedding", "PPMissingLayer"),
    built(GLM, "Glm5NextModel", "norm", "the final norm", "RMSNorm", "PPMissingLayer"),
    built(GLM, "Glm5NextModel", "layers", "the decoder layers", "make_pp_layers"),
    *assigned(GLM, "Glm5NextModel", "refusing a model that must hand out hidden states of layers", "layers_to_capture"),
    # the decoder layer
    built(GLM, "Glm5NextDecoderLayer", "self_attn", "a layer's attention", _KDA, _MLA),
    built(GLM, "Glm5NextDecoderLayer", "mlp", "a layer's FFN", "Glm5NextMLP", "Glm5NextMoE"),
    built(GLM, "Glm5NextDecoderLayer", "input_layernorm", "the norm before attention", "RMSNorm"),
    built(GLM, "Glm5NextDecoderLayer", "post_attention_layernorm", "the norm before the FFN", "RMSNorm"),
    *assigned(
        GLM,
        "Glm5NextDecoderLayer",
        "the mHC mixes",
        "hc_attn_fn",
        "hc_attn_base",
        "hc_attn_scale",
        "hc_ffn_fn",
        "hc_ffn_base",
        "hc_ffn_scale",
    ),
    constant(GLM, "_MHC_POST_MULT_VALUE", 2.0, "the factor of mHC's post gate"),
    alias(GLM, "Glm5NextMLP", f"{DEEPSEEK}.DeepseekV2MLP", "the class of a dense FFN"),
    alias(GLM, "Glm5NextMoE", f"{DEEPSEEK}.DeepseekV2MoE", "the class of a routed FFN"),
    alias(GLM, "DeepseekV2AttentionMLA", f"{DEEPSEEK}.DeepseekV2AttentionMLA", "the class of a DSA layer's attention"),
    # KDA
    *classes(GLM, "telling KDA layers from DSA layers", _KDA),
    *assigned(GLM, _KDA, "the form of a layer's KDA projections", "do_fuse_qkvbfg", "fuse_bfg"),
    built(GLM, _KDA, "fused_qkvbfg_a_proj", "KDA projections, all fused", "MergedColumnParallelRepeatedLinear"),
    built(GLM, _KDA, "fused_bfg_a_proj", "KDA projections, gates fused", "MergedColumnParallelRepeatedLinear"),
    built(GLM, _KDA, "fused_fg_b_proj", "the second factors of both gates", "ColumnParallelBatchedLinear"),
    built(GLM, _KDA, "qkv_proj", "KDA projections, q k v fused", "QKVParallelLinear"),
    built(GLM, _KDA, "b_proj", "KDA projections, separate", "ColumnParallelLinear"),
    built(GLM, _KDA, "f_a_proj", "KDA projections, separate", "ReplicatedLinear"),
    built(GLM, _KDA, "f_b_proj", "KDA projections, separate", "ColumnParallelLinear"),
    built(GLM, _KDA, "g_a_proj", "KDA projections, separate", "ReplicatedLinear"),
    built(GLM, _KDA, "g_b_proj", "KDA projections, separate", "ColumnParallelLinear"),
    built(GLM, _KDA, "qkv_conv1d", "the causal convolution", "MergedColumnParallelLinear"),
    built(GLM, _KDA, "o_norm", "the gated norm", "FusedRMSNormGated"),
    built(GLM, _KDA, "o_proj", _WEIGHTS, "RowParallelLinear"),
    *assigned(GLM, _KDA, "the decay of the recurrence", "A_log", "dt_bias"),
    # MLA with the indexer
    *classes(DEEPSEEK, "telling DSA layers from KDA layers", _MLA),
    built(DEEPSEEK, _MLA, "fused_qkv_a_proj_with_mqa", _WEIGHTS, "ReplicatedLinear"),
    built(DEEPSEEK, _MLA, "q_a_layernorm", _WEIGHTS, "RMSNorm"),
    built(DEEPSEEK, _MLA, "q_b_proj", _WEIGHTS, "ColumnParallelLinear"),
    built(DEEPSEEK, _MLA, "kv_a_layernorm", _WEIGHTS, "RMSNorm"),
    built(DEEPSEEK, _MLA, "o_proj", _WEIGHTS, "RowParallelLinear"),
    *assigned(DEEPSEEK, _MLA, "the absorbed halves of kv_b_proj", "w_kc", "w_vc"),
    *assigned(DEEPSEEK, _MLA, "the layer's own indexer", "indexer"),
    alias(DEEPSEEK, "IndexerKPool", f"{INDEXER}.IndexerKPool", "the class of the indexer"),
    built(INDEXER, "IndexerKPool", "wq_b", "the indexer's queries", "ReplicatedLinear"),
    built(INDEXER, "IndexerKPool", "wk", "the indexer's keys", "ReplicatedLinear"),
    built(INDEXER, "IndexerKPool", "weights_proj", "the indexer's head weights", "ReplicatedLinear"),
    built(INDEXER, "IndexerKPool", "k_norm", "the norm of the indexer's keys", "LayerNorm"),
    *assigned(
        INDEXER,
        "IndexerKPool",
        "the softmax that pools four keys into one",
        "index_kpool_compress_gate",
        "index_kpool_compress_ape",
    ),
    # FFN
    *classes(DEEPSEEK, "telling dense layers from routed ones", "DeepseekV2MLP", _MOE),
    built(DEEPSEEK, "DeepseekV2MLP", "gate_up_proj", _WEIGHTS, "MergedColumnParallelLinear"),
    built(DEEPSEEK, "DeepseekV2MLP", "down_proj", _WEIGHTS, "RowParallelLinear"),
    built(DEEPSEEK, _MOE, "gate", "the router", "MoEGate"),
    built(DEEPSEEK, _MOE, "experts", "the routed experts", "get_moe_impl_class(quant_config)"),
    built(DEEPSEEK, _MOE, "shared_experts", "the shared expert where it is not fused", "DeepseekV2MLP"),
    *assigned(DEEPSEEK, _MOE, "whether the shared expert is a row of the routed ones", "num_fused_shared_experts"),
    *assigned(DEEPSEEK, "MoEGate", "the router", "weight", "e_score_correction_bias"),
    # parameters of SGLang's layers
    Read(UNQUANTIZED, "UnquantizedLinearMethod", "weight", Kind.REGISTERED, "bf16 weights of linear layers"),
    Read(UNQUANTIZED, "UnquantizedEmbeddingMethod", "weight", Kind.REGISTERED, "the embedding and the head"),
    Read(UNQUANTIZED, "UnquantizedFusedMoEMethod", "w13_weight", Kind.REGISTERED, "bf16 gate and up of the experts"),
    Read(UNQUANTIZED, "UnquantizedFusedMoEMethod", "w2_weight", Kind.REGISTERED, "bf16 down of the experts"),
    *QUANTISED_READS,
    *assigned(LINEAR, "ColumnParallelBatchedLinear", "the second factors of both gates", "weight"),
    *assigned(NORM, "RMSNorm", "the norms' weights", "weight"),
    *assigned(NORM, "LayerNorm", "the norm of the indexer's keys", "weight", "bias"),
    *assigned(GATED_NORM, "FusedRMSNormGated", "the gated norm", "weight"),
    # embedding, logits, ranks
    *assigned(EMBEDDING, "VocabParallelEmbedding", "the tokens whose rows this rank holds", "shard_indices"),
    *fields(
        EMBEDDING,
        "VocabParallelEmbeddingShardIndices",
        "the tokens whose rows this rank holds",
        "org_vocab_start_index",
        "org_vocab_end_index",
    ),
    method(
        LOGITS,
        "LogitsProcessor",
        "forward",
        "input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states=None",
        "logits of a step",
    ),
    function(RUNTIME, "get_parallel", "", "this process's rank"),
    *fields(PARALLEL, "Parallel", "this process's rank", "tp_rank", "tp_group"),
    *fields(STATE, "GroupCoordinator", "what the ranks tell one another at the build", "cpu_group"),
)
