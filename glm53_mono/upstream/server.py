"""A server's configuration as SGLang resolved it: arguments, environment variables, and what follows from both.

`Arguments` names SGLang's own server arguments, so its fields are at once the list that the contract test checks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any


class MissingRead(RuntimeError):
    """This SGLang lacks something that the refusals read; the message names it."""


@dataclass(frozen=True)
class Arguments:
    """Resolved server arguments, under SGLang's names (srt/arg_groups/fields/)."""

    tp_size: int

    speculative_algorithm: str | None
    speculative_num_steps: int | None
    speculative_eagle_topk: int | None
    speculative_num_draft_tokens: int | None
    speculative_adaptive: bool
    enable_multi_layer_eagle: bool
    decoupled_spec_role: str

    linear_attn_backend: str
    linear_attn_decode_backend: str | None
    linear_attn_verify_backend: str | None
    enable_linear_replayssm: bool
    enable_linear_replayssm_spec: bool
    enable_int8_mamba_checkpoint: bool

    prefill_attention_backend: str | None
    attention_backend: str | None
    dsa_prefill_backend: str | None
    dsa_decode_backend: str | None
    kv_cache_dtype: str
    page_size: int | None

    enable_unified_memory: bool
    enable_page_major_kv_layout: bool
    enable_kv_cache_sharding: bool
    enable_hisparse: bool
    enable_unified_cache_external_linker: bool
    radix_cache_backend: str | None

    quantization: str | None
    modelopt_quant: Any
    moe_runner_backend: str
    moe_a2a_backend: str
    moe_dense_tp_size: int | None
    moe_dp_size: int
    dwdp_size: int
    enable_layernorm_sp: bool
    enable_paged_experts: bool
    kt_weight_path: str | None
    init_expert_location: str
    ep_num_redundant_experts: int
    ep_dispatch_algorithm: str | None
    elastic_ep_backend: str | None
    enable_elastic_expert_backup: bool

    load_format: str
    custom_weight_loader: list[str] | None
    startup_weight_load_mode: str
    weight_cache_mode: str
    checkpoint_engine_wait_weights_before_ready: bool

    expert_distribution_recorder_mode: str | None
    kv_canary: str
    debug_tensor_dump_output_folder: str | None
    forward_hooks: list[dict[str, Any]] | None
    msprobe_dump_config: str | None
    enable_layerwise_nvtx_marker: bool
    enable_return_aux_hidden_states: bool

    model_impl: str
    encoder_only: bool
    dllm_algorithm: str | None
    enable_nvidia_megakernel: bool
    enable_pdmux: bool
    cuda_graph_config: Any


@dataclass(frozen=True)
class Environment:
    """What SGLang reads from environment variables at run time, not from its arguments."""

    pp_spec: bool
    """SGLANG_ENABLE_PP_SPEC: verify scratch rows are request rows, not batch positions."""
    shared_expert_tp1: bool
    """SGLANG_SHARED_EXPERT_TP1: every rank holds the whole shared expert."""
    embedding_replicated: bool
    """SGLANG_ENABLE_EMBED_REPLICATION: every rank holds the whole embedding."""
    experts_padded: bool
    """SGLANG_MOE_PADDING: expert rows are longer than the model says."""
    routing_simulated: bool
    """SGLANG_SIMULATE_UNIFORM_EXPERTS or SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS: the router's choice is replaced."""
    aiter: bool
    """SGLANG_USE_AITER on ROCm: AITER's kernels and the layouts they want."""
    dumper: bool
    """DUMPER_ENABLE or DUMPER_SERVER_PORT: SGLang's tensor dumper hooks the model's modules."""
    conv_dtype: str
    """Dtype of the convolution windows, e.g. "bfloat16" (SGLANG_MAMBA_CONV_DTYPE)."""
    state_dtype: str
    """Dtype of the recurrent state (SGLANG_MAMBA_SSM_DTYPE, which --mamba-ssm-dtype sets)."""


@dataclass(frozen=True)
class Server:
    """One server before its weights are loaded."""

    arguments: Arguments
    environment: Environment
    hf_config: Any

    @cached_property
    def linear_decode_backend(self) -> str:
        """Kernel of the KDA layers' decode steps (layers/attention/linear/utils.py:96)."""
        return self.arguments.linear_attn_decode_backend or self.arguments.linear_attn_backend

    @cached_property
    def linear_verify_backend(self) -> str:
        """Kernel of the KDA layers' verify steps: unset, it follows a FlashInfer decode (utils.py:102-104)."""
        follows = "flashinfer" if self.linear_decode_backend == "flashinfer" else "triton"
        return self.arguments.linear_attn_verify_backend or follows

    @cached_property
    def attention_prefill_backend(self) -> str | None:
        """Attention backend of prompts (arg_groups/model_override_base.py:169)."""
        return self.arguments.prefill_attention_backend or self.arguments.attention_backend

    @cached_property
    def quantization(self) -> str | None:
        """Weight format: the argument, else what config.json says (configs/model_config.py:2076-2107)."""
        return (self.arguments.quantization or self.quantization_config.get("quant_method") or "").lower() or None

    @cached_property
    def quantization_config(self) -> dict[str, Any]:
        """`quantization_config` of config.json, empty for a checkpoint without one."""
        return getattr(self.hf_config, "quantization_config", None) or {}

    @cached_property
    def tokens_per_request(self) -> int:
        """Rows of one request in a step (srt/kernel_plugins/amd/binding.py:580-586)."""
        if self.arguments.speculative_algorithm is None:
            return 1
        return int(self.arguments.speculative_num_draft_tokens or 1)

    @cached_property
    def decode_graph_backend(self) -> str:
        """How decode steps are captured: "full", "breakable" or "disabled"."""
        return self.arguments.cuda_graph_config.decode.backend

    @cached_property
    def captured_batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes of the decode graphs, ascending; empty where decode runs without graphs."""
        sizes = set(self.arguments.cuda_graph_config.decode.bs or ())
        return () if self.decode_graph_backend == "disabled" else tuple(sorted(sizes))


def read_server(cfg: Any, hf_config: Any) -> Server:
    """Read what SGLang hands to a spec's `config_disable_reasons`.

    Args:
        cfg: SGLang's view of the resolved arguments.
        hf_config: the model's HF config.

    Raises:
        MissingRead: an argument or environment variable that this SGLang does not have.
    """
    names = [field.name for field in fields(Arguments)]
    values = {name: _attribute(cfg, name, "server argument") for name in names}
    return Server(Arguments(**values), read_environment(), hf_config)


def read_environment() -> Environment:
    """Read the environment through SGLang's own registry of variables.

    Raises:
        MissingRead: a variable that this SGLang does not have.
    """
    from sglang.srt.configs.mamba_utils import mamba2_state_dtype
    from sglang.srt.debug_utils.dumper import dumper
    from sglang.srt.runtime_context import get_platform

    state = mamba2_state_dtype()
    return Environment(
        pp_spec=_variable("SGLANG_ENABLE_PP_SPEC"),
        shared_expert_tp1=_variable("SGLANG_SHARED_EXPERT_TP1"),
        embedding_replicated=_variable("SGLANG_ENABLE_EMBED_REPLICATION"),
        experts_padded=_variable("SGLANG_MOE_PADDING"),
        routing_simulated=_variable("SGLANG_SIMULATE_UNIFORM_EXPERTS")
        or _variable("SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS"),
        aiter=_variable("SGLANG_USE_AITER") and get_platform().is_hip,
        dumper=dumper.may_enable,
        conv_dtype=_dtype_name(state.conv),
        state_dtype=_dtype_name(state.temporal),
    )


def _variable(name: str) -> Any:
    from sglang.srt.environ import envs

    return _attribute(envs, name, "environment variable").get()


def _attribute(owner: Any, name: str, what: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise MissingRead(
            f"this SGLang has no {what} {name}, by which glm53_mono judges a server: run `glm53-mono doctor`"
        ) from None


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
