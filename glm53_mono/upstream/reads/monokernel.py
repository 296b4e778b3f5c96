"""Reads of SGLang's plugin system: the monokernel contract, its binding, and the hook registry."""

from __future__ import annotations

from glm53_mono.upstream.contract import Kind, Read
from glm53_mono.upstream.reads.groups import call, classes, constant, fields, function, method

SPEC = "sglang.kernels.plugin_kernels.amd.spec"
BINDING = "sglang.srt.kernel_plugins.amd.binding"
HOOKS = "sglang.srt.plugins.hook_registry"
PLUGINS = "sglang.srt.plugins"
BATCH = "sglang.srt.model_executor.forward_batch_info"
RUNNER = "sglang.srt.model_executor.model_runner"
GRAPH_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
DRAFT_GRAPHS = "sglang.srt.speculative.eagle_draft_cuda_graph_runner"
DRAFT_EXTEND_GRAPHS = "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner"
CONTEXT = "sglang.srt.runtime_context"

MONOKERNEL_READS = (
    constant(SPEC, "MONOKERNEL_API_VERSION", 1, "the version our spec is written against"),
    constant(SPEC, "BACKEND", "amd", "the backend name our spec registers under"),
    function(SPEC, "register", "*, backend, architecture, path", "registering our spec"),
    *classes(
        SPEC, "writing our spec", "DeviceLimits", "Feature", "MonoSpec", "Numerics", "NumericsKind", "Requirements"
    ),
    *classes(SPEC, "what SGLang hands to build and forward", "BuildContext", "Plan", "ShapeKey"),
    *classes(SPEC, "what build returns", "BuiltMonokernels"),
    *fields(SPEC, "DeviceLimits", "widths, TP sizes and grid of a device", "widths", "tp_sizes", "resident_blocks"),
    *fields(
        SPEC,
        "Requirements",
        "the requirements that SGLang checks for us",
        "dtypes",
        "attention_backends",
        "server_args",
        "hf_config",
        "env",
    ),
    *fields(SPEC, "Numerics", "our numerical bounds", "kind", "bounds"),
    Read(SPEC, "NumericsKind", "TOLERANCE", Kind.FIELD, "the kind of our bounds", value="tolerance"),
    *fields(SPEC, "Feature", "the features our spec accepts", "SPECULATIVE_DECODING"),
    *fields(
        SPEC,
        "MonoSpec",
        "the fields of our spec",
        "name",
        "devices",
        "features",
        "requires",
        "numerics",
        "model_disable_reasons",
        "build",
        "api_version",
        "config_disable_reasons",
    ),
    Read(SPEC, "MonoSpec", "load_tensor", Kind.FIELD, "weights read where SGLang put them", value=None),
    *fields(SPEC, "BuildContext", "building for one server", "isa", "widths", "deadline_s", "copies"),
    *fields(SPEC, "Plan", "the step that forward runs", "key"),
    *fields(SPEC, "ShapeKey", "the shape of a step", "forward_mode", "batch_size", "tokens_per_request"),
    function(BINDING, "monokernel_disable_reasons", "*, cfg, model_config, isa", "refusals without a GPU"),
    call(
        BINDING,
        "monokernel_disable_reasons",
        "spec.config_disable_reasons",
        "spec.config_disable_reasons(cfg, hf_config)",
        "the arguments of our configuration check",
    ),
    call(
        BINDING,
        "install_monokernel_forward",
        "spec.model_disable_reasons",
        "spec.model_disable_reasons(model, hf_config, copies)",
        "the arguments of our model check",
    ),
    call(
        BINDING,
        "install_monokernel_forward",
        "spec.build",
        "spec.build(model, hf_config, build_context)",
        "the arguments of our build",
    ),
    call(
        BINDING,
        "_install_forward",
        "built.forward",
        "built.forward(Plan(key=key), *args, **kwargs)",
        "the arguments of our forward",
    ),
    call(
        BINDING,
        "shape_key",
        "ShapeKey",
        "ShapeKey(forward_mode=name, batch_size=bs, tokens_per_request=rows // bs)",
        "how SGLang counts the rows of a step",
    ),
    constant(PLUGINS, "GENERAL_PLUGINS_GROUP", "sglang.srt.plugins", "our entry point's group"),
    *classes(HOOKS, "watching every step of the runners", "HookRegistry", "HookType"),
    Read(
        HOOKS,
        "HookRegistry",
        "register",
        Kind.METHOD,
        "watching every step of the runners",
        signature="target, hook, hook_type",
    ),
    Read(HOOKS, "HookType", "AFTER", Kind.FIELD, "watching every step of the runners", value="after"),
    Read(
        RUNNER,
        "ModelRunner",
        "forward",
        Kind.METHOD,
        "the call through which every step passes, replays included",
        signature="forward_batch",
    ),
    Read(HOOKS, "HookRegistry", "apply_hooks", Kind.METHOD, "watching every step of the runners", signature=""),
    *fields(RUNNER, "ModelRunnerOutput", "whether a step was a graph replay", "can_run_graph"),
    Read(
        RUNNER,
        "ModelRunner",
        "decode_cuda_graph_runner",
        Kind.ASSIGNED,
        "the graph of a step",
        within="init_cuda_graphs",
    ),
    Read(GRAPH_RUNNER, "DecodeCudaGraphRunner", "bs", Kind.ASSIGNED, "the graph of a step", within="load_batch"),
    Read(RUNNER, "ModelRunner", "is_draft_worker", Kind.ASSIGNED, "telling the target's steps from the draft's"),
    method(DRAFT_GRAPHS, "EAGLEDraftCudaGraphRunner", "execute", "forward_batch", "replays of the draft model"),
    method(
        DRAFT_EXTEND_GRAPHS,
        "EAGLEDraftExtendCudaGraphRunner",
        "execute",
        "forward_batch, select_index",
        "replays of the draft model over accepted tokens",
    ),
    Read(BATCH, "ForwardMode", "DRAFT_EXTEND_V2", Kind.FIELD, "the name of a draft model's step"),
    function(CONTEXT, "get_observability", "", "whether the server has metrics"),
    *fields(
        "sglang.srt.arg_groups.fields.observability",
        "Observability",
        "whether the server has metrics",
        "enable_metrics",
        "enable_metrics_for_all_schedulers",
    ),
)
