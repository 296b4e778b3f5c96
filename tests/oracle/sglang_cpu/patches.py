"""Every change to SGLang, PyTorch and Triton that the CPU run needs: what is replaced, by what, and why."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from . import substitutes

FLA = "sglang.kernels.ops.attention.fla."
KPOOL = "sglang.srt.layers.attention.dsa."
SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
COMMIT = "sglang.srt.layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend"


@dataclass(frozen=True)
class Patch:
    """One attribute of a module or class, replaced for as long as the patches are applied."""

    target: str
    """`module:attribute` or `module:class.attribute`."""
    replacement: Any
    reason: str


@dataclass(frozen=True)
class StandIn:
    """A module that cannot be imported without a GPU, in `sys.modules` for as long as the patches are applied."""

    module: str
    attributes: dict[str, Any]
    reason: str


@dataclass(frozen=True)
class Original:
    """A replacement that is another attribute of SGLang, `module:path`, read when the patches are applied."""

    source: str


def _fewest_programs(_tuner: Any, *_args: Any, config: Any, **_meta: Any) -> list[float]:
    """A 'time' that makes the autotuner take the configuration with the largest blocks, the fastest to interpret."""
    size = 1
    for value in config.kwargs.values():
        size *= value if isinstance(value, int) and not isinstance(value, bool) else 1
    return [1.0 / size] * 3


TABLE: tuple[Patch, ...] = (
    Patch(
        "torch.nn.functional:linear",
        substitutes.exact_linear,
        "oneDNN's order of addition is no part of the mathematics; with exact sums nearly all values have equal bits",
    ),
    Patch(
        "torch:bmm",
        substitutes.exact_bmm,
        "the same for the absorbed key and value matrices (forward_mla.py:586, :921)",
    ),
    Patch(
        "torch.cuda:get_device_capability",
        lambda *_args, **_kwargs: (9, 0),
        "the DSA backend reads the GPU's capability (dsa_backend.py:675)",
    ),
    Patch(
        "triton.runtime.autotuner:Autotuner._bench",
        _fewest_programs,
        "the autotuner's clock needs a GPU driver",
    ),
    Patch(
        "sglang.srt.models.deepseek_v2:_is_cuda",
        True,
        "off CUDA the routed scale is a second bf16 rounding (deepseek_v2.py:1416), the router logits are bf16 (:587)",
    ),
    Patch(
        "sglang.srt.models.deepseek_v2:silu_and_mul_clamp",
        substitutes.clamped_swiglu,
        "the clamped SwiGLU is JIT CUDA (deepseek_v2.py:489)",
    ),
    Patch(
        "sglang.srt.layers.quantization.unquant:UnquantizedFusedMoEMethod.forward_native",
        substitutes.routed_experts,
        "the native experts drop swiglu_limit (fused_moe_native.py:84), the Triton ones assert CUDA (fused_moe.py:770)",
    ),
    Patch(
        f"{SCATTER}:fused_mamba_state_scatter_with_mask",
        Original(f"{COMMIT}._scatter_speculative_state_with_mask"),
        "the commit's copy refuses CPU tensors; SGLang's fallback makes the same (hybrid_linear_attn_backend.py:1619)",
    ),
    Patch(
        f"{SCATTER}:fused_conv_window_scatter_with_mask",
        Original(f"{COMMIT}._scatter_speculative_state_with_mask"),
        "the same for the convolution windows",
    ),
    Patch(
        "sglang.srt.layers.attention.dsa_backend:seqlens_expand_triton",
        substitutes.expand_lengths,
        "asserts CUDA tensors (kernels/ops/attention/pad.py:369)",
    ),
    Patch(
        f"{KPOOL}kpool_plan:torch",
        substitutes.TorchWithoutPinning(),
        "the write plan pins host memory (kpool_plan.py:308, :338)",
    ),
    Patch(
        f"{KPOOL}kpool_plan:is_cuda",
        lambda: True,
        "the pooled page table and the write plan exist only on a GPU (kpool_plan.py:590, :767)",
    ),
    Patch(
        f"{KPOOL}dsa_indexer_kpool:is_cuda",
        lambda: True,
        "the indexer asserts a GPU (dsa_indexer_kpool.py:1597, :1851)",
    ),
    Patch(
        f"{KPOOL}dsa_indexer_kpool:deep_gemm",
        substitutes.DeepGemm,
        "the FP8 logits are DeepGEMM's (dsa_indexer_kpool.py:965, :1075)",
    ),
    Patch(
        f"{KPOOL}dsa_indexer_kpool:rotate_activation",
        substitutes.rotate_activation,
        "the queries' Hadamard transform is JIT CUDA (kernels/ops/quantization/hadamard.py)",
    ),
    Patch(
        f"{KPOOL}dsa_indexer_kpool:_mqa_logits_row_chunks",
        lambda *, num_rows, num_cols, device: (slice(0, num_rows),),
        "chunks of rows follow the free memory of a GPU",
    ),
    Patch(
        f"{KPOOL}dsa_indexer_kpool:IndexerKPool._should_use_tilelang_paged_mqa_logits",
        staticmethod(lambda _q: False),
        "on sm_90 fewer than 32 index heads go to TileLang instead of DeepGEMM (dsa_indexer_kpool.py:972)",
    ),
    Patch(
        f"{KPOOL}dsa_indexer_kpool:IndexerKPool.forward_native",
        Original(f"{KPOOL}dsa_indexer_kpool:IndexerKPool.forward_cuda"),
        "the indexer has no native forward; the CUDA one is Python and Triton",
    ),
    Patch(
        f"{KPOOL}kpool_fp8_index:topk_from_pooled_history_logits",
        substitutes.select_pooled_history,
        "asks for CUDA logits and a real index_topk (kpool_fp8_index.py:788)",
    ),
)

STAND_INS: tuple[StandIn, ...] = (
    StandIn("sgl_kernel", {"fast_topk_v2": substitutes.pick_pools}, "the top-k pick is CUDA (kpool_fp8_index.py:876)"),
    StandIn(
        "sglang.kernels.ops.attention.dsa.tilelang_kernel",
        {"tilelang_sparse_fwd": substitutes.sparse_attention},
        "the sparse attention is TileLang (dsa_backend.py)",
    ),
)

INTERPRETED_FLA_MODULES = (
    "op",
    "kda",
    "fused_recurrent",
    "chunk_delta_h",
    "chunk_intra",
    "chunk_intra_token_parallel",
    "chunk_o",
    "chunk_fwd",
)
"""Modules with a Triton builtin under a name of their own; the interpreter rebinds only the attributes of `tl`."""


def _interpreted_builtins() -> dict[str, Any]:
    import triton.language as tl

    return {
        "exp": lambda x, **_options: tl.exp(x),
        "exp2": lambda x, **_options: tl.exp2(x),
        "log": lambda x, **_options: tl.log(x),
        "log2": lambda x, **_options: tl.log2(x),
        "gather": lambda source, index, axis, **_options: tl.gather(source, index, axis),
    }


def _alias_patches() -> list[Patch]:
    builtins = _interpreted_builtins()
    patches = []
    for name in INTERPRETED_FLA_MODULES:
        module = importlib.import_module(FLA + name)
        for builtin, replacement in builtins.items():
            if hasattr(module, builtin):
                patches.append(
                    Patch(f"{FLA}{name}:{builtin}", replacement, "a bound name of a Triton builtin is not interpreted")
                )
        if hasattr(module, "libdevice"):
            patches.append(
                Patch(f"{FLA}{name}:libdevice", types.SimpleNamespace(**builtins), "libdevice is not interpreted")
            )
    return patches


def _resolve(path: str) -> tuple[Any, str]:
    """The owner of `module:a.b` and the name of its last attribute."""
    module, _, attributes = path.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = attributes.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


@contextmanager
def applied() -> Iterator[tuple[Patch | StandIn, ...]]:
    """Apply every patch and stand-in; the end of the block restores what was there. Yields what was applied."""
    done: list[Patch | StandIn] = []
    with ExitStack() as stack:
        for stand_in in STAND_INS:
            module = types.ModuleType(stand_in.module)
            vars(module).update(stand_in.attributes)
            _set_item(stack, sys.modules, stand_in.module, module)
            done.append(stand_in)
        for patch in (*TABLE, *_alias_patches()):
            owner, name = _resolve(patch.target)
            replacement = patch.replacement
            if isinstance(replacement, Original):
                source, attribute = _resolve(replacement.source)
                replacement = inspect.getattr_static(source, attribute)
            _set_attribute(stack, owner, name, replacement)
            done.append(patch)
        yield tuple(done)


def _set_item(stack: ExitStack, mapping: dict[str, Any], key: str, value: Any) -> None:
    if key in mapping:
        stack.callback(mapping.__setitem__, key, mapping[key])
    else:
        stack.callback(mapping.pop, key)
    mapping[key] = value


def _set_attribute(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)
