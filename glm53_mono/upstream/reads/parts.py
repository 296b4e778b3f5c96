"""Reads of SGLang's parts of a layer, which the check runs one by one."""

from __future__ import annotations

from glm53_mono.upstream.contract import Kind, Read
from glm53_mono.upstream.reads.groups import assigned, classes, fields, function, method

GLM = "sglang.srt.models.glm5_next"
DEEPSEEK = "sglang.srt.models.deepseek_v2"
ADAPTER = "sglang.srt.layers.layer_boundary.adapters.attention"
STAGE = "sglang.srt.layers.layer_boundary.stage"
INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer_kpool"
HYBRID = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
TOPK = "sglang.srt.layers.moe.topk"
NORM = "sglang.srt.layers.layernorm"
BATCH = "sglang.srt.model_executor.forward_batch_info"
MHC = "sglang.kernels.ops.layernorm.mhc"
UTILS = "sglang.srt.utils"

_LAYER = "Glm5NextDecoderLayer"
_PARTS = "running a layer's parts one by one"
_CHOICE = "seeing what a row chooses"

PARTS_READS = (
    method(GLM, _LAYER, "hc_attn_pre", "hidden_states, out_norm_weight, out_norm_eps", _PARTS),
    method(GLM, _LAYER, "hc_ffn_pre", "hidden_states, out_norm_weight, out_norm_eps", _PARTS),
    method(GLM, _LAYER, "hc_post", "hidden_states, residual, h_res, h_post", _PARTS),
    *assigned(GLM, _LAYER, _PARTS, "is_linear_attn", "attn_boundary"),
    *assigned(GLM, "Glm5NextForConditionalGeneration", "the positions that its forward hands on", "is_mrope_enabled"),
    *fields(BATCH, "ForwardBatch", "the positions that the model's forward hands on", "mrope_positions"),
    Read(STAGE, "StageBoundary", "input_on_attn_tp_slices", Kind.PROPERTY, _PARTS),
    method(DEEPSEEK, "DeepseekV2AttentionMLA", "prepare_qkv_latent", "hidden_states, forward_batch", _PARTS),
    *classes(ADAPTER, "an attention's inputs", "AttentionInputs"),
    function(ADAPTER, "get_attn_tp_context", "", _PARTS),
    method(ADAPTER, "AttnTpContext", "set_attn_inputs", "attn_inputs", _PARTS),
    method(ADAPTER, "AttnTpContext", "clear_attn_inputs", "", _PARTS),
    method(ADAPTER, "AttnTpContext", "maybe_input_scattered", "forward_batch", _PARTS),
    *classes(f"{UTILS}.common", "numbers that a layer is lent", "BumpAllocator"),
    function(MHC, "hc_contract", "x, n", "the mean of the streams"),
    *assigned(NORM, "RMSNorm", _PARTS, "variance_epsilon"),
    *assigned(DEEPSEEK, "DeepseekV2MoE", _CHOICE, "topk"),
    *fields(TOPK, "StandardTopKOutput", _CHOICE, "topk_weights", "topk_ids"),
    function(INDEXER, "_should_fuse_kpool_topk", "metadata", "whether a selection names slots or positions"),
    method(HYBRID, "HybridLinearAttnBackend", "get_indexer_metadata", "layer_id, forward_batch", _CHOICE),
)
