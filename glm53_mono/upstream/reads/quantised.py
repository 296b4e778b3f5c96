"""Reads of quantised weights: what SGLang registers for each format, what AITER does to it, and how that is marked."""

from __future__ import annotations

from glm53_mono.upstream.contract import Kind, Read
from glm53_mono.upstream.reads.groups import call, marked

FP8 = "sglang.srt.layers.quantization.fp8"
QUARK_LINEAR = "sglang.srt.layers.quantization.quark.schemes.quark_w4a4_mxfp4"
QUARK_MOE = "sglang.srt.layers.quantization.quark.schemes.quark_w4a4_mxfp4_moe"

_LAYOUT = "the layout of weights that AITER has shuffled"
_LINEAR_DONE = "Fp8LinearMethod.process_weights_after_loading_block_quant"
_MOE_DONE = "Fp8MoEMethod.process_weights_after_loading_block_quant"
_QUARK_LINEAR_DONE = "QuarkW4A4MXFP4.process_weights_after_loading"
_QUARK_MOE_DONE = "QuarkW4A4MXFp4MoE.process_weights_after_loading"

QUANTISED_READS = (
    Read(FP8, "Fp8LinearMethod", "weight", Kind.REGISTERED, "FP8 weights of linear layers"),
    Read(FP8, "Fp8LinearMethod", "weight_scale_inv", Kind.REGISTERED, "their block scales"),
    call(FP8, _LINEAR_DONE, "shuffle_weight", "shuffle_weight(layer.weight, (16, 16))", _LAYOUT),
    marked(FP8, _LINEAR_DONE, "aiter_bpreshuffled", "layer.aiter_bpreshuffled = True", _LAYOUT),
    Read(FP8, "Fp8MoEMethod", "w13_weight", Kind.REGISTERED, "FP8 gate and up of the experts"),
    Read(FP8, "Fp8MoEMethod", "w2_weight", Kind.REGISTERED, "FP8 down of the experts"),
    Read(FP8, "Fp8MoEMethod", "w13_weight_scale_inv", Kind.REGISTERED, "block scales of gate and up"),
    Read(FP8, "Fp8MoEMethod", "w2_weight_scale_inv", Kind.REGISTERED, "block scales of down"),
    call(FP8, _MOE_DONE, "shuffle_weight", "shuffle_weight(layer.w13_weight, (16, 16))", _LAYOUT),
    call(FP8, _MOE_DONE, "shuffle_weight", "shuffle_weight(layer.w2_weight, (16, 16))", _LAYOUT),
    marked(FP8, _MOE_DONE, "is_shuffled", "layer.w13_weight.is_shuffled = True", _LAYOUT),
    marked(FP8, _MOE_DONE, "is_shuffled", "layer.w2_weight.is_shuffled = True", _LAYOUT),
    Read(QUARK_LINEAR, "QuarkW4A4MXFP4", "weight", Kind.REGISTERED, "MXFP4 weights of the shared expert"),
    Read(QUARK_LINEAR, "QuarkW4A4MXFP4", "weight_scale", Kind.REGISTERED, "their E8M0 scales"),
    call(
        QUARK_LINEAR,
        _QUARK_LINEAR_DONE,
        "shuffle_weight",
        "shuffle_weight(layer.weight.data, layout=(16, 16))",
        _LAYOUT,
    ),
    marked(QUARK_LINEAR, _QUARK_LINEAR_DONE, "use_aiter_asm_fp4_gemm", "layer.use_aiter_asm_fp4_gemm = True", _LAYOUT),
    Read(QUARK_MOE, "QuarkW4A4MXFp4MoE", "w13_weight", Kind.REGISTERED, "MXFP4 gate and up of the experts"),
    Read(QUARK_MOE, "QuarkW4A4MXFp4MoE", "w2_weight", Kind.REGISTERED, "MXFP4 down of the experts"),
    Read(QUARK_MOE, "QuarkW4A4MXFp4MoE", "w13_weight_scale", Kind.REGISTERED, "E8M0 scales of gate and up"),
    Read(QUARK_MOE, "QuarkW4A4MXFp4MoE", "w2_weight_scale", Kind.REGISTERED, "E8M0 scales of down"),
    call(QUARK_MOE, _QUARK_MOE_DONE, "e8m0_shuffle", "e8m0_shuffle(w13_weight_scale)", _LAYOUT),
    call(QUARK_MOE, _QUARK_MOE_DONE, "e8m0_shuffle", "e8m0_shuffle(w2_weight_scale)", _LAYOUT),
    call(
        QUARK_MOE, _QUARK_MOE_DONE, "shuffle_weight", "shuffle_weight(layer.w13_weight.contiguous(), (16, 16))", _LAYOUT
    ),
    call(
        QUARK_MOE, _QUARK_MOE_DONE, "shuffle_weight", "shuffle_weight(layer.w2_weight.contiguous(), (16, 16))", _LAYOUT
    ),
    marked(QUARK_MOE, _QUARK_MOE_DONE, "is_shuffled", "layer.w13_weight.is_shuffled = True", _LAYOUT),
    marked(QUARK_MOE, _QUARK_MOE_DONE, "is_shuffled", "layer.w2_weight.is_shuffled = True", _LAYOUT),
)
