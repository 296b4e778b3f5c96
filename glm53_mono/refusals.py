"""What a server may not ask for: each row names a setting, tells when it is there, and says what to change.

SGLang itself refuses the features that its own probes know (kernel_plugins/amd/binding.py:85). Here stands the rest:
whatever a step on the kernel would silently skip, read wrongly or wait for in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from glm53_mono import quark
from glm53_mono.geometry import FP8_BLOCK, MAX_ROWS, Geometry
from glm53_mono.upstream.server import Server

READABLE_DSA_DECODE_BACKENDS = ("tilelang", "fa3", "flashmla_sparse")
"""Backends that SGLang can run with pooled index keys (attention/dsa/dsa_backend_kpool.py:36-60) and that share our
latent cache; on sm_90 the last one becomes fa3."""

READABLE_DSA_PREFILL_BACKENDS = (*READABLE_DSA_DECODE_BACKENDS, "flashmla_sparse_q8")
"""The same for prompts; the last one reads a bf16 cache there."""

READABLE_MOE_RUNNERS = ("auto", "triton", "deep_gemm", "aiter")
"""Runners that leave expert weights as loaded or in AITER's layout; the others repack them."""

FOREIGN_LOADERS = ("bitsandbytes", "expert_pack", "flash_rl", "gguf", "private")
"""Load formats that quantise, page or replace weights on their own, whatever `quantization` says."""

READABLE_FORMATS = (None, "unquant", "fp8", "quark")
"""Weight formats that a descriptor can have: bf16, FP8 blocks, and Quark's MXFP4."""


@dataclass(frozen=True)
class Refusal:
    """One thing that a server may not have.

    Attributes:
        name: short name, unique in its table.
        found: the offending value, or something false where there is none.
        sentence: the reason that SGLang prints; `{found}` is that value.
    """

    name: str
    found: Callable[[Server], object]
    sentence: str

    def reason(self, server: Server) -> str | None:
        """The sentence for this server, or None where nothing is wrong."""
        found = self.found(server)
        return self.sentence.format(found=found) if found else None


def reasons(table: Iterable[Refusal], server: Server) -> list[str]:
    """Every reason that a table of refusals has against a server, in the table's order."""
    return [reason for row in table if (reason := row.reason(server)) is not None]


def _unless_in(value: object, accepted: Collection[object]) -> str | None:
    return None if value in accepted else repr(value)


def _foreign_algorithm(server: Server) -> str | None:
    # EAGLE3 is left to SGLang's own probe, which names the hidden states it wants.
    return _unless_in(server.arguments.speculative_algorithm, (None, "EAGLE", "EAGLE3"))


def _tree(server: Server) -> object:
    a = server.arguments
    return a.speculative_algorithm == "EAGLE" and _unless_in(a.speculative_eagle_topk, (1,))


def _not_steps_plus_one(server: Server) -> str | None:
    a = server.arguments
    if a.speculative_algorithm != "EAGLE" or a.speculative_num_steps is None:
        return None
    if a.speculative_num_draft_tokens == a.speculative_num_steps + 1:
        return None
    return f"{a.speculative_num_draft_tokens} with --speculative-num-steps {a.speculative_num_steps}"


def _steps_unset(server: Server) -> bool:
    a = server.arguments
    return a.speculative_algorithm == "EAGLE" and a.speculative_num_steps is None


def _too_many_draft_tokens(server: Server) -> int | None:
    return server.tokens_per_request if server.tokens_per_request > MAX_ROWS else None


def _no_graph_fits(server: Server) -> str | None:
    sizes, tokens = server.captured_batch_sizes, server.tokens_per_request
    if not sizes or tokens > MAX_ROWS or min(sizes) * tokens <= MAX_ROWS:
        return None
    return f"{list(sizes)} (times {tokens} tokens)" if tokens > 1 else f"{list(sizes)}"


def _linear_decode(server: Server) -> str | None:
    return _unless_in(server.linear_decode_backend, ("triton",))


def _linear_verify(server: Server) -> object:
    # A decode that is refused for FlashInfer brings the verify with it: one reason is enough.
    speculative = server.arguments.speculative_algorithm is not None
    followed = server.arguments.linear_attn_verify_backend is None
    return speculative and not followed and _unless_in(server.linear_verify_backend, ("triton",))


def _fp8_without_blocks(server: Server) -> str | None:
    if server.quantization != "fp8":
        return None
    blocks = server.quantization_config.get("weight_block_size")
    return None if blocks == [FP8_BLOCK, FP8_BLOCK] else repr(blocks)


def _weight_format(server: Server) -> str | None:
    if server.arguments.modelopt_quant:
        return f"ModelOpt {server.arguments.modelopt_quant}"
    return _unless_in(server.quantization, READABLE_FORMATS)


DRAFT_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "speculative algorithm",
        _foreign_algorithm,
        "--speculative-algorithm {found} drafts in a way the verify launch is not built for: use EAGLE (or NEXTN, "
        "which SGLang resolves to it), or no speculative decoding",
    ),
    Refusal(
        "adaptive speculation",
        lambda s: s.arguments.speculative_adaptive,
        "--speculative-adaptive changes the number of draft tokens while the server runs, and a verify launch is built "
        "for one number: drop it and set --speculative-num-steps",
    ),
    Refusal(
        "draft tree",
        _tree,
        "--speculative-eagle-topk {found} drafts a tree, and verify launches take one chain: set it to 1",
    ),
    Refusal(
        "draft steps unset",
        _steps_unset,
        "--speculative-num-steps is not set, so the length of the chain is unknown: set it to draft tokens - 1",
    ),
    Refusal(
        "draft tokens",
        _not_steps_plus_one,
        "--speculative-num-draft-tokens {found} is not one chain: set it to steps + 1",
    ),
    Refusal(
        "draft width",
        _too_many_draft_tokens,
        f"--speculative-num-draft-tokens {{found}} makes every step wider than {MAX_ROWS} rows: "
        f"set at most {MAX_ROWS} (--speculative-num-steps {MAX_ROWS - 1})",
    ),
    Refusal(
        "multi-layer EAGLE",
        lambda s: s.arguments.enable_multi_layer_eagle,
        "--enable-multi-layer-eagle drafts with several MTP layers, and this model has one: drop it",
    ),
    Refusal(
        "decoupled drafts",
        lambda s: _unless_in(s.arguments.decoupled_spec_role, ("null",)),
        "--decoupled-spec-role {found} has its drafts made by another engine, and verify launches are built for "
        "SGLang's own EAGLE worker: drop it",
    ),
)
"""Drafts that are not one chain of EAGLE's, of at most a launch's rows."""

REFUSALS: tuple[Refusal, ...] = (
    *DRAFT_REFUSALS,
    Refusal(
        "pipelined verify rows",
        lambda s: s.environment.pp_spec,
        "SGLANG_ENABLE_PP_SPEC moves the verify scratch to other rows than the launch writes: unset it",
    ),
    Refusal(
        "graph sizes",
        _no_graph_fits,
        f"no decode graph of --cuda-graph-bs-decode {{found}} has at most {MAX_ROWS} rows: add smaller sizes, or leave "
        "the sizes to SGLang",
    ),
    Refusal(
        "decode graph backend",
        lambda s: _unless_in(s.decode_graph_backend, ("full", "disabled")),
        "--cuda-graph-backend-decode {found} replays a step in pieces with Python between them, and a launch is "
        "captured into one whole graph: set it to full",
    ),
    Refusal(
        "KDA decode backend",
        _linear_decode,
        "the KDA layers' decode backend is {found}, which keeps or commits their state in its own way: set "
        "--linear-attn-decode-backend triton",
    ),
    Refusal(
        "KDA verify backend",
        _linear_verify,
        "the KDA layers' verify backend is {found}, which commits the accepted state in its own way: set "
        "--linear-attn-verify-backend triton",
    ),
    Refusal(
        "ReplaySSM decode",
        lambda s: s.arguments.enable_linear_replayssm,
        "--enable-linear-replayssm keeps part of the KDA state in a ring that decode launches neither read nor write: "
        "drop it",
    ),
    Refusal(
        "ReplaySSM verify",
        lambda s: s.arguments.enable_linear_replayssm_spec,
        "--enable-linear-replayssm-spec commits from a ring of inputs that verify launches do not write: drop it",
    ),
    Refusal(
        "int8 state checkpoints",
        lambda s: s.arguments.enable_int8_mamba_checkpoint,
        "--enable-int8-mamba-checkpoint keeps cached KDA states in an int8 pool, which a decode step that crosses a "
        "track boundary does not write: drop it",
    ),
    Refusal(
        "convolution window dtype",
        lambda s: _unless_in(s.environment.conv_dtype, ("bfloat16",)),
        "the KDA layers' convolution windows are {found}, not 'bfloat16': unset SGLANG_MAMBA_CONV_DTYPE",
    ),
    Refusal(
        "recurrent state dtype",
        lambda s: _unless_in(s.environment.state_dtype, ("float32",)),
        "the KDA layers' recurrent state is {found}, not 'float32': drop --mamba-ssm-dtype and unset "
        "SGLANG_MAMBA_SSM_DTYPE",
    ),
    Refusal(
        "prefill attention backend",
        lambda s: _unless_in(s.attention_prefill_backend, ("dsa",)),
        "the prefill attention backend is {found}, which does not write the index keys that a step reads: set "
        "--prefill-attention-backend dsa",
    ),
    Refusal(
        "DSA decode backend",
        lambda s: _unless_in(s.arguments.dsa_decode_backend, READABLE_DSA_DECODE_BACKENDS),
        "--dsa-decode-backend {found} cannot run this model's pooled selection, which wider steps need: use tilelang",
    ),
    Refusal(
        "DSA prefill backend",
        lambda s: _unless_in(s.arguments.dsa_prefill_backend, READABLE_DSA_PREFILL_BACKENDS),
        "--dsa-prefill-backend {found} cannot run this model's pooled selection, so no prompt could be read: use "
        "tilelang",
    ),
    Refusal(
        "KV dtype",
        lambda s: _unless_in(s.arguments.kv_cache_dtype, ("bfloat16",)),
        "the latent cache is {found}, and a step reads bf16 rows: set --kv-cache-dtype bfloat16",
    ),
    Refusal(
        "page size",
        lambda s: _unless_in(s.arguments.page_size, (Geometry.page_tokens,)),
        f"the page size is {{found}}, and an index page holds {Geometry.page_tokens} tokens: drop --page-size; on ROCm "
        "set SGLANG_USE_AITER=1 and unset SGLANG_DSA_HIP_DISABLE_PRESHUFFLE, since without AITER's pre-shuffled index "
        "keys SGLang falls back to 1",
    ),
    Refusal(
        "unified memory",
        lambda s: s.arguments.enable_unified_memory,
        "--enable-unified-memory puts all caches into one buffer whose slots move while the server runs: drop it",
    ),
    Refusal(
        "page-major caches",
        # Unified memory implies it and is refused by its own name.
        lambda s: s.arguments.enable_page_major_kv_layout and not s.arguments.enable_unified_memory,
        "--enable-page-major-kv-layout interleaves the layers' caches, and a step reads one buffer a layer: drop it",
    ),
    Refusal(
        "sharded KV cache",
        lambda s: s.arguments.enable_kv_cache_sharding,
        "--enable-kv-cache-sharding spreads pages over the ranks, and a step reads its own rank's alone: drop it",
    ),
    Refusal(
        "HiSparse",
        lambda s: s.arguments.enable_hisparse,
        "--enable-hisparse swaps latent rows to the host between steps, and a launch cannot fetch them: drop it",
    ),
    Refusal(
        "external KV store",
        lambda s: s.arguments.enable_unified_cache_external_linker,
        "--enable-unified-cache-external-linker loads prefixes layer by layer during a step, and a launch does not "
        "wait for the transfers: drop it",
    ),
    Refusal(
        "radix cache plugin",
        lambda s: s.arguments.radix_cache_backend,
        "--radix-cache-backend {found} may load or move cache rows during a step, and a launch does not wait for it: "
        "drop it",
    ),
    Refusal(
        "weight format",
        _weight_format,
        "the weights are in format {found}, and a step reads bf16, FP8 in blocks, or Quark MXFP4: take another "
        "checkpoint, or drop --quantization",
    ),
    Refusal(
        "FP8 without blocks",
        _fp8_without_blocks,
        f"the FP8 weights have weight_block_size {{found}}, not [{FP8_BLOCK}, {FP8_BLOCK}]: take a checkpoint with "
        "block scales instead of --quantization fp8",
    ),
    Refusal(
        "Quark scheme",
        lambda s: s.quantization == "quark" and quark.foreign_scheme(s.quantization_config),
        f"Quark's scheme is {{found}}, and a step reads {quark.READ}: take a checkpoint of these, such as "
        "amd/GLM-5.3-Flash-Quark-MXFP4",
    ),
    Refusal(
        "Quark without AITER",
        lambda s: s.quantization == "quark" and not s.environment.aiter,
        "SGLang runs Quark's MXFP4 experts with AITER alone: set SGLANG_USE_AITER=1 on ROCm; on an NVIDIA GPU serve an "
        "FP8 or a bf16 checkpoint",
    ),
    Refusal(
        "MoE runner",
        lambda s: _unless_in(s.arguments.moe_runner_backend, READABLE_MOE_RUNNERS),
        "--moe-runner-backend {found} repacks the expert weights into its own layout: use triton or deep_gemm, or "
        "aiter on ROCm",
    ),
    Refusal(
        "MoE all-to-all",
        lambda s: _unless_in(s.arguments.moe_a2a_backend, ("none",)),
        "--moe-a2a-backend {found} sends tokens to other ranks' experts, and a launch runs its own rank's: set it to "
        "none",
    ),
    Refusal(
        "dense MLP TP size",
        lambda s: s.arguments.moe_dense_tp_size,
        "--moe-dense-tp-size {found} shards the dense layers by another number than --tp-size: drop it",
    ),
    Refusal(
        "MoE data parallelism",
        lambda s: s.arguments.moe_dp_size > 1 and s.arguments.moe_dp_size,
        "--moe-dp-size {found} shards the experts by another number than --tp-size: drop it",
    ),
    Refusal(
        "distributed expert weights",
        lambda s: s.arguments.dwdp_size > 1 and s.arguments.dwdp_size,
        "--dwdp-size {found} keeps experts on other ranks and fetches them layer by layer: drop it",
    ),
    Refusal(
        "layernorm SP",
        lambda s: s.arguments.enable_layernorm_sp,
        "--enable-layernorm-sp hands each rank a part of the rows between layers, and a launch wants all of them: drop "
        "it",
    ),
    Refusal(
        "paged experts",
        lambda s: s.arguments.enable_paged_experts,
        "--enable-paged-experts keeps most experts on the host, and a launch cannot fetch them: drop it",
    ),
    Refusal(
        "experts on the CPU",
        lambda s: s.arguments.kt_weight_path,
        "--kt-weight-path computes experts on the CPU during a step: drop it",
    ),
    Refusal(
        "expert placement",
        lambda s: _unless_in(s.arguments.init_expert_location, ("trivial",)),
        "--init-expert-location {found} renumbers the experts, and a launch takes the router's numbers: set it to "
        "trivial",
    ),
    Refusal(
        "redundant experts",
        lambda s: s.arguments.ep_num_redundant_experts,
        "--ep-num-redundant-experts {found} adds copies that the router's numbers do not reach: drop it",
    ),
    Refusal(
        "expert dispatch",
        # A placement of its own brings a dispatch algorithm with it and is refused by its own name.
        lambda s: s.arguments.init_expert_location == "trivial" and s.arguments.ep_dispatch_algorithm,
        "--ep-dispatch-algorithm {found} replaces the router's expert numbers: drop it",
    ),
    Refusal(
        "elastic experts",
        lambda s: s.arguments.elastic_ep_backend or (s.arguments.enable_elastic_expert_backup and "backup"),
        "elastic expert parallelism ({found}) moves experts while the server runs: drop --elastic-ep-backend and "
        "--enable-elastic-expert-backup",
    ),
    Refusal(
        "whole shared expert",
        lambda s: s.environment.shared_expert_tp1,
        "SGLANG_SHARED_EXPERT_TP1 gives every rank the whole shared expert, and a launch adds up the ranks' shares: "
        "unset it",
    ),
    Refusal(
        "whole embedding",
        lambda s: s.environment.embedding_replicated,
        "SGLANG_ENABLE_EMBED_REPLICATION gives every rank the whole embedding, and a launch takes each row from the "
        "rank that owns it: unset it",
    ),
    Refusal(
        "padded experts",
        lambda s: s.environment.experts_padded,
        "SGLANG_MOE_PADDING lengthens the expert weights' rows beyond the model's sizes: unset it",
    ),
    Refusal(
        "simulated routing",
        lambda s: s.environment.routing_simulated,
        "SGLANG_SIMULATE_UNIFORM_EXPERTS or SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS replaces the router's choice, and a "
        "launch routes by the weights: unset them",
    ),
    Refusal(
        "loader",
        lambda s: s.arguments.load_format in FOREIGN_LOADERS and repr(s.arguments.load_format),
        "--load-format {found} leaves other weights in the model than the checkpoint's own: use auto",
    ),
    Refusal(
        "custom weight loader",
        lambda s: s.arguments.custom_weight_loader,
        "--custom-weight-loader {found} replaces weights while the server runs, behind the addresses that a launch "
        "holds: drop it",
    ),
    Refusal(
        "overlapped weight loading",
        lambda s: _unless_in(s.arguments.startup_weight_load_mode, ("serial",)),
        "--startup-weight-load-mode {found} brings the real weights after the step has been built: set it to serial",
    ),
    Refusal(
        "weight cache",
        lambda s: _unless_in(s.arguments.weight_cache_mode, ("off",)),
        "--weight-cache-mode {found} leaves the weights in another process's memory: set it to off",
    ),
    Refusal(
        "weights from a checkpoint engine",
        lambda s: s.arguments.checkpoint_engine_wait_weights_before_ready,
        "--checkpoint-engine-wait-weights-before-ready starts without weights, and weights cannot be updated under a "
        "built step: drop it",
    ),
    Refusal(
        "expert distribution recorder",
        lambda s: s.arguments.expert_distribution_recorder_mode,
        "the expert distribution recorder (mode {found}) would not see the experts of a launch: drop "
        "--expert-distribution-recorder-mode and --expert-balancedness-report-mode",
    ),
    Refusal(
        "KV canary",
        lambda s: _unless_in(s.arguments.kv_canary, ("none",)),
        "--kv-canary {found} follows the caches through calls that a launch does not make: set it to none",
    ),
    Refusal(
        "tensor dumps",
        lambda s: s.arguments.debug_tensor_dump_output_folder,
        "--debug-tensor-dump-output-folder {found} would miss every layer of a launch: drop it",
    ),
    Refusal(
        "tensor dumper",
        lambda s: s.environment.dumper,
        "DUMPER_ENABLE or DUMPER_SERVER_PORT hooks the model's modules, which a launch does not call: unset them",
    ),
    Refusal(
        "forward hooks",
        lambda s: s.arguments.forward_hooks,
        "--forward-hooks attaches to modules that a launch does not call: drop it",
    ),
    Refusal(
        "msProbe",
        lambda s: s.arguments.msprobe_dump_config,
        "--msprobe-dump-config {found} attaches to modules that a launch does not call: drop it",
    ),
    Refusal(
        "layer markers",
        lambda s: s.arguments.enable_layerwise_nvtx_marker,
        "--enable-layerwise-nvtx-marker marks modules that a launch does not call: drop it",
    ),
    Refusal(
        "model implementation",
        lambda s: _unless_in(s.arguments.model_impl.lower(), ("auto", "sglang")),
        "--model-impl {found} is not SGLang's own model, whose weights a launch reads: set it to sglang",
    ),
    Refusal(
        "encoder only",
        lambda s: s.arguments.encoder_only,
        "--encoder-only has no language model to run: drop it",
    ),
    Refusal(
        "diffusion",
        lambda s: s.arguments.dllm_algorithm,
        "--dllm-algorithm {found} decodes in blocks that no launch is built for: drop it",
    ),
    Refusal(
        "NVIDIA megakernel",
        lambda s: s.arguments.enable_nvidia_megakernel,
        "--enable-nvidia-megakernel replaces the same forward: drop one of the two flags",
    ),
    Refusal(
        "PD multiplexing",
        lambda s: s.arguments.enable_pdmux,
        "--enable-pdmux runs prefill on compute units that the launch grid needs for itself, so a launch would wait "
        "until its deadline: drop it",
    ),
)
"""Every refusal of ours that holds whatever the plugin has built so far (see `capabilities` for the rest)."""
