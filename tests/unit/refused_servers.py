"""Servers that must be refused, and what must be said against each."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.unit.servers import CHAIN, PLAIN, SEED, ConfigChange, linear_field, quantized, quark, text_field, words


@dataclass(frozen=True)
class Row:
    """A server, and everything that must be said against it.

    Attributes:
        name: of the refusal it proves, or of the server where the refusal is SGLang's or the geometry's.
        arguments: its launch arguments.
        expected: for each reason, in order, a text that it must contain.
        environment: its environment variables.
        declared: resolved values put over SGLang's own, where SGLang refuses the arguments before it asks us.
        config: changes of config.json.
    """

    name: str
    arguments: tuple[str, ...]
    expected: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    declared: dict[str, Any] | None = None
    config: tuple[ConfigChange, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {self.expected[0]}"


def plain(name: str, arguments: str, *expected: str, **more: Any) -> Row:
    """A server without drafts."""
    return Row(name, (*PLAIN, *words(arguments)), expected, **more)


def eagle(name: str, arguments: str, *expected: str, **more: Any) -> Row:
    """A server with MTP3."""
    return Row(name, (*SEED, *words(arguments)), expected, **more)


HOOKS = json.dumps([{"name": "watch", "target_modules": ["model"], "hook_factory": "package:factory"}]).replace(" ", "")
CHAIN_TEXT = " ".join(CHAIN)
DRAFT = "--speculative-draft-model-path {model} --speculative-num-draft-tokens 4"

AITER = {"SGLANG_USE_AITER": "1"}
STATIC_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
W8A8 = {"weight": STATIC_FP8, "input_tensors": STATIC_FP8}
W4A8 = {
    "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False},
    "input_tensors": STATIC_FP8,
}
W4_OF_16 = {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 16}}

ROWS = (
    # Drafts
    plain("speculative algorithm", f"--speculative-algorithm DFLASH {DRAFT}", "--speculative-algorithm 'DFLASH'"),
    plain("speculative algorithm", f"--speculative-algorithm DSPARK {DRAFT}", "--speculative-algorithm 'DSPARK'"),
    plain(
        "speculative algorithm",
        f"--speculative-algorithm STANDALONE {DRAFT} --speculative-num-steps 3 --speculative-eagle-topk 1",
        "'STANDALONE'",
    ),
    plain(
        "speculative algorithm",
        "--speculative-algorithm NGRAM --speculative-num-draft-tokens 4 --speculative-ngram-max-bfs-breadth 1",
        "'NGRAM'",
    ),
    plain(
        "speculative algorithm",
        f"--speculative-algorithm FROZEN_KV_MTP {CHAIN_TEXT}",
        "'FROZEN_KV_MTP'",
    ),
    plain(
        "speculative algorithm",
        "--speculative-algorithm UNO",
        "--speculative-algorithm 'UNO'",
        declared={"speculative_algorithm": "UNO"},
    ),
    eagle("adaptive speculation", "--speculative-adaptive", "--speculative-adaptive changes"),
    eagle(
        "draft tree",
        "--speculative-eagle-topk 2",
        "--speculative-eagle-topk 2 drafts a tree",
        declared={"speculative_eagle_topk": 2},
    ),
    eagle(
        "draft steps unset",
        "--speculative-eagle-topk 2",
        "--speculative-num-steps is not set",
        declared={"speculative_num_steps": None},
    ),
    eagle(
        "draft tokens",
        "--speculative-eagle-topk 2",
        "--speculative-num-draft-tokens 6 with --speculative-num-steps 3",
        declared={"speculative_num_draft_tokens": 6},
    ),
    eagle(
        "draft width",
        "--speculative-num-steps 8 --speculative-num-draft-tokens 9",
        "--speculative-num-draft-tokens 9 makes every step wider than 8 rows",
    ),
    eagle("multi-layer EAGLE", "--enable-multi-layer-eagle", "--enable-multi-layer-eagle"),
    eagle("decoupled drafts", "--decoupled-spec-role verifier", "--decoupled-spec-role 'verifier'"),
    eagle("pipelined verify rows", "", "SGLANG_ENABLE_PP_SPEC", environment={"SGLANG_ENABLE_PP_SPEC": "1"}),
    plain("graph sizes", "--cuda-graph-bs-decode 16 32", "--cuda-graph-bs-decode [16, 32] has at most 8 rows"),
    eagle("graph sizes", "--cuda-graph-bs-decode 3 4", "--cuda-graph-bs-decode [3, 4] (times 4 tokens)"),
    plain("decode graph backend", "--cuda-graph-backend-decode breakable", "--cuda-graph-backend-decode 'breakable'"),
    # KDA
    plain(
        "KDA decode backend", "--linear-attn-backend flashinfer --disable-radix-cache", "decode backend is 'flashinfer'"
    ),
    eagle(
        "KDA decode backend", "--linear-attn-backend flashinfer --disable-radix-cache", "decode backend is 'flashinfer'"
    ),
    plain("KDA decode backend", "--linear-attn-decode-backend cutedsl", "decode backend is 'cutedsl'"),
    plain("KDA decode backend", "--linear-attn-decode-backend helion", "decode backend is 'helion'"),
    eagle("KDA verify backend", "--linear-attn-verify-backend nv_cutedsl", "verify backend is 'nv_cutedsl'"),
    eagle("KDA verify backend", "--linear-attn-verify-backend flashinfer", "verify backend is 'flashinfer'"),
    plain("ReplaySSM decode", "--enable-linear-replayssm --disable-radix-cache", "--enable-linear-replayssm keeps"),
    eagle("ReplaySSM verify", "--enable-linear-replayssm-spec", "--enable-linear-replayssm-spec commits"),
    plain("int8 state checkpoints", "--enable-int8-mamba-checkpoint", "--enable-int8-mamba-checkpoint"),
    plain(
        "convolution window dtype",
        "",
        "windows are 'float32', not 'bfloat16'",
        environment={"SGLANG_MAMBA_CONV_DTYPE": "float32"},
    ),
    plain("recurrent state dtype", "--mamba-ssm-dtype bfloat16", "state is 'bfloat16', not 'float32'"),
    plain(
        "recurrent state dtype",
        "",
        "state is 'float16', not 'float32'",
        environment={"SGLANG_MAMBA_SSM_DTYPE": "float16"},
    ),
    # Attention and caches
    plain(
        "prefill attention backend",
        "--prefill-attention-backend triton --decode-attention-backend dsa",
        "prefill attention backend is 'triton'",
    ),
    plain("DSA decode backend", "--dsa-decode-backend triton", "--dsa-decode-backend 'triton'"),
    plain("DSA decode backend", "--dsa-decode-backend aiter", "--dsa-decode-backend 'aiter'"),
    plain("DSA decode backend", "--dsa-decode-backend flashmla_kv", "--dsa-decode-backend 'flashmla_kv'"),
    plain("DSA prefill backend", "--dsa-prefill-backend triton", "--dsa-prefill-backend 'triton'"),
    plain("KV dtype", "--kv-cache-dtype fp8_e4m3", "latent cache is 'fp8_e4m3'"),
    plain(
        "page size", "--disable-radix-cache", "page size is 1", environment={"SGLANG_DSA_HIP_DISABLE_PRESHUFFLE": "1"}
    ),
    plain(
        "unified memory",
        "--enable-unified-memory",
        "--enable-unified-memory",
        declared={"enable_unified_memory": True, "enable_page_major_kv_layout": True},
    ),
    plain(
        "page-major caches",
        "--enable-page-major-kv-layout",
        "--enable-page-major-kv-layout",
        declared={"enable_page_major_kv_layout": True},
    ),
    plain(
        "sharded KV cache",
        "--enable-kv-cache-sharding",
        "--enable-kv-cache-sharding",
        declared={"enable_kv_cache_sharding": True},
    ),
    plain("HiSparse", "--enable-hisparse --disable-radix-cache", "--enable-hisparse"),
    plain("external KV store", "--enable-unified-cache-external-linker", "--enable-unified-cache-external-linker"),
    plain("radix cache plugin", "--radix-cache-backend flexkv", "--radix-cache-backend flexkv"),
    # Weights
    plain("weight format", "--quantization awq", "format 'awq'"),
    plain("weight format", "--quantization w8a8_int8", "format 'w8a8_int8'"),
    plain("weight format", "--modelopt-quant nvfp4", "format ModelOpt nvfp4"),
    plain("FP8 without blocks", "--quantization fp8", "weight_block_size None, not [128, 128]"),
    plain(
        "Quark scheme",
        "",
        "Quark's scheme is fp4 per_group of 32 e8m0 static with activations of fp8_e4m3 per_tensor static for all",
        config=(lambda config: quark(config, global_quant_config=W4A8),),
        environment=AITER,
    ),
    plain(
        "Quark scheme",
        "",
        "is fp8_e4m3 per_tensor static with activations of fp8_e4m3 per_tensor static for *self_attn.o_proj",
        config=(lambda config: quark(config, layer_quant_config={"*self_attn.o_proj": W8A8}),),
        environment=AITER,
    ),
    plain(
        "Quark scheme",
        "",
        "is fp4 per_group of 16 with activations of no format for FusedMoE",
        config=(lambda config: quark(config, layer_type_quant_config={"FusedMoE": W4_OF_16}),),
        environment=AITER,
    ),
    plain("Quark without AITER", "--page-size 256", "AITER alone: set SGLANG_USE_AITER=1", config=(quark,)),
    plain("MoE runner", "--moe-runner-backend triton_kernel", "--moe-runner-backend 'triton_kernel'"),
    plain("MoE runner", "--moe-runner-backend flashinfer_cutlass", "--moe-runner-backend 'flashinfer_cutlass'"),
    plain("MoE all-to-all", "--tp 1 --moe-a2a-backend deepep", "--moe-a2a-backend 'deepep'"),
    plain("dense MLP TP size", "--moe-dense-tp-size 1", "--moe-dense-tp-size 1"),
    plain("MoE data parallelism", "--moe-dp-size 2", "--moe-dp-size 2", declared={"moe_dp_size": 2}),
    plain(
        "distributed expert weights",
        "--dwdp-size 4",
        "DP attention",
        "expert parallelism",
        "--moe-dense-tp-size 1",
        "--dwdp-size 4",
    ),
    plain("layernorm SP", "--enable-layernorm-sp", "--enable-layernorm-sp", declared={"enable_layernorm_sp": True}),
    plain("paged experts", "--enable-paged-experts --paged-experts-num-resident 64", "--enable-paged-experts"),
    plain("experts on the CPU", "--kt-weight-path experts", "--kt-weight-path"),
    plain("expert placement", "--init-expert-location placement.pt", "--init-expert-location 'placement.pt'"),
    plain("redundant experts", "--ep-num-redundant-experts 4", "--ep-num-redundant-experts 4"),
    plain("expert dispatch", "--ep-dispatch-algorithm dynamic", "--ep-dispatch-algorithm dynamic"),
    plain("elastic experts", "--elastic-ep-backend mooncake", "elastic expert parallelism (mooncake)"),
    plain("elastic experts", "--enable-elastic-expert-backup", "elastic expert parallelism (backup)"),
    plain("whole shared expert", "", "SGLANG_SHARED_EXPERT_TP1", environment={"SGLANG_SHARED_EXPERT_TP1": "1"}),
    plain(
        "whole embedding", "", "SGLANG_ENABLE_EMBED_REPLICATION", environment={"SGLANG_ENABLE_EMBED_REPLICATION": "1"}
    ),
    plain("padded experts", "", "SGLANG_MOE_PADDING", environment={"SGLANG_MOE_PADDING": "1"}),
    plain(
        "simulated routing", "", "SGLANG_SIMULATE_UNIFORM_EXPERTS", environment={"SGLANG_SIMULATE_UNIFORM_EXPERTS": "1"}
    ),
    plain(
        "simulated routing",
        "",
        "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS",
        environment={"SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": "1"},
    ),
    plain("loader", "--load-format flash_rl", "--load-format 'flash_rl'"),
    plain("loader", "--load-format private", "--load-format 'private'"),
    plain("loader", "--load-format bitsandbytes", "--load-format 'bitsandbytes'"),
    plain("custom weight loader", "--custom-weight-loader package.load", "--custom-weight-loader ['package.load']"),
    plain("overlapped weight loading", "--startup-weight-load-mode overlap", "--startup-weight-load-mode 'overlap'"),
    plain("weight cache", "--weight-cache-mode client", "--weight-cache-mode 'client'"),
    plain(
        "weights from a checkpoint engine",
        "--checkpoint-engine-wait-weights-before-ready",
        "--checkpoint-engine-wait-weights-before-ready",
    ),
    # Observers
    plain("expert distribution recorder", "--expert-distribution-recorder-mode stat", "recorder (mode stat)"),
    plain("expert distribution recorder", "--expert-balancedness-report-mode server_log", "recorder (mode stat)"),
    plain("KV canary", "--kv-canary raise", "--kv-canary 'raise'"),
    plain("tensor dumps", "--debug-tensor-dump-output-folder dumps", "--debug-tensor-dump-output-folder dumps"),
    plain("forward hooks", f"--forward-hooks {HOOKS}", "--forward-hooks"),
    plain("msProbe", "--msprobe-dump-config probe.json", "--msprobe-dump-config probe.json"),
    plain("layer markers", "--enable-layerwise-nvtx-marker", "--enable-layerwise-nvtx-marker"),
    # Other forwards
    plain("model implementation", "--model-impl transformers", "--model-impl 'transformers'"),
    plain("encoder only", "--encoder-only", "--encoder-only"),
    plain(
        "diffusion",
        "--dllm-algorithm LowConfidence",
        "--dllm-algorithm LowConfidence",
        declared={"dllm_algorithm": "LowConfidence"},
    ),
    plain(
        "NVIDIA megakernel",
        "--enable-nvidia-megakernel",
        "--enable-nvidia-megakernel",
        declared={"enable_nvidia_megakernel": True},
    ),
    plain("PD multiplexing", "--enable-pdmux", "--enable-pdmux"),
)
"""One server or more for each row of REFUSALS, with that one reason against it."""

SGLANG_ROWS = (
    plain(
        "EAGLE3",
        f"--speculative-algorithm EAGLE3 {CHAIN_TEXT}",
        "EAGLE3 hidden states",
    ),
    eagle(
        "ragged verify", "", "uneven tokens per request in verify", environment={"SGLANG_RAGGED_VERIFY_MODE": "compact"}
    ),
    plain("pipeline parallelism", "--pp-size 2", "pipeline parallelism is in use"),
    plain("expert parallelism", "--ep-size 4", "expert parallelism is in use"),
    plain("DP attention", "--attn-dp-size 4", "DP attention is in use"),
    plain("two nodes", "--nnodes 2 --dist-init-addr 127.0.0.1:3000", "multi-node tensor parallelism is in use"),
    plain("LoRA", "--enable-lora --max-lora-rank 8 --lora-target-modules all", "LoRA is in use"),
    plain("PD disaggregation", "--disaggregation-mode decode", "PD disaggregation is in use"),
    plain("HiCache", "--enable-hierarchical-cache", "KV offload is in use"),
    plain("CPU offload", "--cpu-offload-gb 4", "CPU offload is in use"),
    plain("memory saver", "--enable-memory-saver", "memory release is in use"),
    plain("torch.compile", "--enable-torch-compile", "torch-compiled decode is in use"),
    plain("routed experts", "--enable-return-routed-experts", "--enable-return-routed-experts is in use"),
    plain("selection", "--enable-return-indexer-topk", "--enable-return-indexer-topk is in use"),
    plain("TP 3", "--tp 3", "tp_size 3 is not one of"),
    plain("TP 16", "--tp 16", "tp_size 16 is not one of"),
    plain("fp16", "--dtype float16", "dtype 'float16' is not one of"),
    plain(
        "decode attention backend",
        "--decode-attention-backend triton --prefill-attention-backend dsa",
        "decode attention backend 'triton' is not one of ['dsa']",
    ),
    plain("watchdog", "--watchdog-timeout 4", "--watchdog-timeout 4 s"),
)
"""Servers that SGLang refuses by itself, once it has our spec."""

GEOMETRY_ROWS = (
    plain(
        "mrope",
        "",
        "rope_scaling.mrope_section [16, 24, 24] is not None",
        config=(text_field("rope_scaling", {"rope_type": "default", "mrope_section": [16, 24, 24]}),),
    ),
    plain("streams", "", "hc_mult 2 is not 4", config=(text_field("hc_mult", 2),)),
    plain(
        "gate bound",
        "",
        "linear_attn_config.gate_lower_bound -4.0 is not -5.0",
        config=(linear_field("gate_lower_bound", -4.0),),
    ),
    plain(
        "index pool",
        "--disable-radix-cache",
        "page size is 1024",
        "index_kpool 16 is not 4",
        config=(text_field("index_kpool", 16),),
    ),
    plain(
        "dense layers",
        "",
        "mlp_layer_types has 'dense' for layer 2, and first_k_dense_replace 2 makes it 'sparse'",
        config=(text_field("first_k_dense_replace", 2),),
    ),
    plain(
        "FP8 blocks of the experts",
        "--tp 8",
        "mlp.shared_experts.gate_proj has 192 rows on a rank at TP 8, which is no multiple of 128, its block in FP8",
        "mlp.experts.gate_proj has 192 rows",
        "mlp.experts.down_proj has 192 columns",
        config=(quantized, text_field("moe_intermediate_size", 1536)),
    ),
    plain(
        "MXFP4 blocks of the experts",
        "--tp 8",
        "mlp.experts.down_proj has 160 columns on a rank at TP 8, which is no multiple of 64, its block in MXFP4",
        config=(quark, text_field("moe_intermediate_size", 1280)),
        environment=AITER,
    ),
    plain(
        "expert width",
        "",
        "moe_intermediate_size 2016 is not a multiple of 128 at tp_size 4",
        config=(text_field("moe_intermediate_size", 2016),),
    ),
)
"""Config files that the step cannot represent."""

CAPABILITY_ROWS = (
    plain("ranks of quantised weights", "", "shares bf16 weights alone among ranks", config=(quantized,)),
    plain(
        "AITER bf16 layout",
        "--tp 1",
        "bf16 expert weights that AITER has shuffled",
        environment={"SGLANG_USE_AITER": "1"},
    ),
    plain(
        "auxiliary hidden states",
        "--tp 1 --enable-return-aux-hidden-states --speculative-algorithm EAGLE3",
        "does not return hidden states of inner layers",
    ),
)
"""What each capability that is missing says, and no more; once a row of NOT_YET_BUILT goes, its row here goes too."""
