"""Reads of the benchmark: starting a model runner without a server, its graphs, its batches and their places."""

from __future__ import annotations

from glm53_mono.upstream.contract import Kind, Read
from glm53_mono.upstream.reads.groups import assigned, built, call, classes, fields, function, method

RUNNER = "sglang.srt.model_executor.model_runner"
GRAPH_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
GRAPH_BACKEND = "sglang.srt.model_executor.runner_backend.base_cuda_graph_backend"
BINDING = "sglang.srt.kernel_plugins.amd.binding"
BOOTSTRAP = "sglang.srt.distributed.bootstrap"
BATCH = "sglang.srt.model_executor.forward_batch_info"
CONTEXT = "sglang.srt.model_executor.forward_context"
EAGLE = "sglang.srt.speculative.eagle_info"
RUNTIME = "sglang.srt.runtime_context"
MEMORY = "sglang.srt.mem_cache.memory_pool"
ALLOCATOR = "sglang.srt.mem_cache.allocator"
TRANSLATOR = "sglang.srt.mem_cache.kv_index_translator"
MODEL_CONFIG = "sglang.srt.configs.model_config"
ARGUMENTS = "sglang.srt.arg_groups.fields"
LOADER = "sglang.srt.model_loader.loader"
QUANTIZATION = "sglang.srt.layers.quantization"

_START = "starting a model runner for the benchmark"
_GRAPHS = "the benchmark's two sets of graphs"
_BATCH = "a step of the benchmark"

BENCH_READS = (
    *fields(f"{ARGUMENTS}.model", "Model", _START, "model_path"),
    *fields(f"{ARGUMENTS}.schedule", "Schedule", _START, "mem_fraction_static"),
    function("sglang.srt.entrypoints.engine", "_set_envs_and_config", "server_args", _START),
    method("sglang.srt.server_args", "PortArgs", "init_new", "server_args", _START),
    *fields("sglang.srt.server_args", "PortArgs", _START, "nccl_port"),
    function(RUNTIME, "publish", "server_args, *, role, ranks", _START),
    *fields(RUNTIME, "SpawnRanks", _START, "world_rank", "gpu_id"),
    function(RUNTIME, "get_device", "", _START),
    function("sglang.srt.layers.moe.utils", "initialize_moe_config", "", _START),
    *(
        function(f"{QUANTIZATION}.{module}", f"initialize_{kind}_gemm_config", "", _START)
        for module, kind in (("fp8_utils", "fp8"), ("unquant", "bf16"), ("fp4_utils", "fp4"))
    ),
    function("sglang.srt.utils.common", "configure_logger", "server_args", _START),
    method(MODEL_CONFIG, "ModelConfig", "from_server_args", "server_args", _START),
    *assigned(MODEL_CONFIG, "ModelConfig", "the geometry of the benchmark's model", "hf_config"),
    function(BOOTSTRAP, "init_parallel_runtime", "*, server_args, device, dist_port", _START),
    function(BOOTSTRAP, "init_layer_runtime", "*, model_config", _START),
    function(
        "sglang.kernels.ops.mamba.triton_ops.ssu_dispatch",
        "initialize_mamba_selective_state_update_backend",
        "server_args",
        _START,
    ),
    method(
        RUNNER, "ModelRunner", "__init__", "model_config, mem_fraction_static, gpu_id, nccl_port, server_args", _START
    ),
    method(RUNNER, "ModelRunner", "alloc_memory_pool", "", _START),
    method(RUNNER, "ModelRunner", "init_attention_backends", "", _START),
    method(RUNNER, "ModelRunner", "init_cuda_graphs", "", _START),
    method(RUNNER, "ModelRunner", "init_decode_cuda_graph", "", _GRAPHS),
    *fields(RUNNER, "ModelRunnerOutput", "what a step of the benchmark gives", "logits_output"),
    *assigned(RUNNER, "ModelRunner", _BATCH, "model_config", "spec_algorithm"),
    *(
        Read(RUNNER, "ModelRunner", name, Kind.ASSIGNED, purpose, within=within)
        for name, purpose, within in (
            ("model", "the benchmark's loaded model", "load_model"),
            ("req_to_token_pool", _BATCH, "alloc_memory_pool"),
            ("token_to_kv_pool_allocator", _BATCH, "alloc_memory_pool"),
            ("kv_index_translator", _BATCH, "init_kv_index_translator"),
            ("attn_backend", _GRAPHS, "init_attention_backends"),
        )
    ),
    call(
        LOADER,
        "DummyModelLoader.load_model",
        "initialize_dummy_weights",
        "initialize_dummy_weights(model)",
        "drawing the weights of the benchmark",
    ),
    method(
        "sglang.srt.models.glm5_next",
        "Glm5NextForConditionalGeneration",
        "load_weights",
        "weights",
        "drawing the weights of the benchmark",
    ),
    # what stands in front of the model's forward
    call(BINDING, "_install_forward", "functools.wraps", "functools.wraps(original)", _GRAPHS),
    # one arm's graphs
    *assigned(GRAPH_RUNNER, "DecodeCudaGraphRunner", _GRAPHS, "capture_bs"),
    built(GRAPH_RUNNER, "DecodeCudaGraphRunner", "backend", _GRAPHS, "resolve_decode_backend"),
    Read(
        GRAPH_RUNNER,
        "DecodeCudaGraphRunner",
        "_replay_graph_key",
        Kind.ASSIGNED,
        "replaying a step's graph",
        within="load_batch",
    ),
    method(
        GRAPH_BACKEND,
        "BaseCudaGraphBackend",
        "replay",
        "shape_key, static_forward_batch",
        "replaying a step's graph",
    ),
    *classes(CONTEXT, "the forward context of a step of the benchmark", "ForwardContext"),
    *fields(CONTEXT, "ForwardContext", "the forward context of a step of the benchmark", "attn_backend"),
    function(CONTEXT, "forward_context", "ctx", "the forward context of a step of the benchmark"),
    # a batch and its places
    *fields(
        BATCH,
        "ForwardBatch",
        _BATCH,
        "seq_lens_cpu",
        "seq_lens_sum",
        "orig_seq_lens",
        "spec_algorithm",
        "capture_hidden_mode",
        "spec_info",
    ),
    *fields(BATCH, "CaptureHiddenMode", _BATCH, "NULL", "FULL"),
    *classes(EAGLE, _BATCH, "EagleVerifyInput"),
    *fields(
        EAGLE,
        "EagleVerifyInput",
        _BATCH,
        "draft_token",
        "custom_mask",
        "positions",
        "retrieve_index",
        "retrieve_next_token",
        "retrieve_next_sibling",
        "retrieve_cum_len",
        "spec_steps",
        "topk",
        "draft_token_num",
        "capture_hidden_mode",
        "seq_lens_sum",
        "seq_lens_cpu",
    ),
    method(TRANSLATOR, "KVIndexTranslator", "bind_own_plan", "forward_batch", _BATCH),
    method(MEMORY, "HybridReqToTokenPool", "clear", "", _BATCH),
    *(
        Read(MEMORY, "HybridReqToTokenPool", name, Kind.ASSIGNED, _BATCH, within="_init_mamba_pool")
        for name in ("mamba_allocator", "req_index_to_mamba_index_mapping")
    ),
    method(f"{ALLOCATOR}.mamba", "MambaSlotAllocator", "alloc", "need_size", _BATCH),
    method(f"{ALLOCATOR}.mamba", "MambaSlotAllocator", "available_size", "", _BATCH),
    method(f"{ALLOCATOR}.paged", "PagedTokenToKVPoolAllocator", "alloc", "need_size", _BATCH),
    method(f"{ALLOCATOR}.paged", "PagedTokenToKVPoolAllocator", "available_size", "", _BATCH),
    method(f"{ALLOCATOR}.paged", "PagedTokenToKVPoolAllocator", "clear", "", _BATCH),
    *assigned(f"{ALLOCATOR}.paged", "PagedTokenToKVPoolAllocator", _BATCH, "page_size"),
)
