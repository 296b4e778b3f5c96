"""Compiles one variant for a device that need not be there, exactly as a server's first launch would."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from glm53_mono.bindings import Unused, empty_step
from glm53_mono.checkpoint.config import model_config
from glm53_mono.geometry import Geometry
from glm53_mono.isa.published import shape_weights
from glm53_mono.isa.variants import KernelVariant
from glm53_mono.isas import ISAS
from glm53_mono.kernels.monokernel import monokernel
from glm53_mono.program.launch import BACKENDS, Launch, Variant
from glm53_mono.program.pools import Pools
from glm53_mono.program.step import step_phases
from glm53_mono.program.tiling import TILINGS
from glm53_mono.program.workspace import HEADROOM_PAGES
from glm53_mono.weights.formats import common_formats
from glm53_mono.weights.published import CHECKPOINTS, held_by_aiter

DEADLINE_S = 30.0
"""Any; the kernel reads it at run time."""


class CompileError(RuntimeError):
    """A variant that cannot be compiled here; the message is one sentence."""


@dataclass(frozen=True)
class Compiled:
    """What came of it.

    Attributes:
        asm: Triton's stages by name: `amdgcn` or `cubin` among them.
        files: where Triton's cache keeps the binary stages.
        shared: bytes of LDS or shared memory.
        warps: of a program.
        seconds: that it took; next to none from the cache.
        from_cache: whether Triton had it already.
    """

    asm: Mapping[str, Any]
    files: Mapping[str, str]
    shared: int
    warps: int
    seconds: float
    from_cache: bool


def compile_variant(variant: KernelVariant) -> Compiled:
    """Compiles the kernel at the published model's sizes; Triton's cache keeps it by its source.

    Raises:
        CompileError: this Triton is too old, or there are no weights of that format to compile for.
    """
    found = tuple(int(part) for part in triton.__version__.split(".")[:2])
    oldest_triton = ISAS[variant.isa].oldest_triton
    if found < oldest_triton:
        oldest = ".".join(map(str, oldest_triton))
        raise CompileError(f"Triton {triton.__version__} is too old for {variant.isa}: at least {oldest} is needed")
    launch = published_launch(variant)
    source, options = _source(launch, variant.isa)
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    started = time.monotonic()
    with launch.compiler():
        kernel = triton.compile(source, target=target(variant.isa), options=options)
    return Compiled(
        asm=kernel.asm,
        files=kernel.metadata_group,
        shared=kernel.metadata.shared,
        warps=launch.tiling.warps,
        seconds=time.monotonic() - started,
        from_cache=all(hits),
    )


def target(isa: str) -> GPUTarget:
    """What Triton compiles for."""
    found = ISAS[isa]
    return GPUTarget(found.backend, found.target, found.lanes)


def published_launch(variant: KernelVariant) -> Launch:
    """A launch of the published model as a server prepares it; its weights have shapes and no values.

    How many experts there are changes the sizes in the kernel and none of its phases, so the weights hold few.

    Raises:
        CompileError: see `compile_variant`.
    """
    if variant.weights not in CHECKPOINTS:
        raise CompileError(f"there are no {variant.weights} weights to compile {variant.name} for")
    config = model_config(mtp=False)
    text = SimpleNamespace(**config["text_config"])
    geometry = Geometry.from_config(text, variant.tp_size)
    few = model_config(experts=text.num_experts_per_tok, mtp=False)
    formats = CHECKPOINTS[variant.weights]
    if variant.isa == "gfx950":
        formats = held_by_aiter(formats, geometry, shared_fused=variant.shared_fused)
    weights = shape_weights(few, shared_fused=variant.shared_fused, formats=formats)
    return Launch.prepare(
        geometry,
        TILINGS[variant.isa],
        Variant(
            verify=variant.verify,
            index_tiled=ISAS[variant.isa].index_tiled,
            shared_fused=variant.shared_fused,
            backend=BACKENDS[variant.isa],
        ),
        step_phases(geometry, weights, Pools.missing(geometry)),
        formats=common_formats(weights.layers),
        max_tokens=text.max_position_embeddings + HEADROOM_PAGES * geometry.page_tokens,
        deadline_s=DEADLINE_S,
        device="cpu",
    )


def _source(launch: Launch, isa: str) -> tuple[ASTSource, dict[str, Any]]:
    """The kernel specialised as Triton's launcher does it, and the compiler's options."""
    backend = make_backend(target(isa))
    tensors, sizes = empty_step(Unused.on(launch.buffer.device))
    hidden = torch.empty((1, launch.geometry.hidden), dtype=torch.bfloat16)
    positional, constants = launch.arguments(tensors, sizes, hidden)
    bind = create_function_from_signature(monokernel.signature, monokernel.params, backend)
    bound, specialization, options = bind(*positional, **constants)
    names = [parameter.name for parameter in monokernel.params]
    kinds = [kind for kind, _ in specialization]
    source = ASTSource(
        fn=monokernel,
        signature=dict(zip(names, kinds, strict=True)),
        constexprs={(place,): bound[name] for place, name in enumerate(names) if kinds[place] == "constexpr"},
        attrs={
            (place,): backend.parse_attr(hint)
            for place, (kind, hint) in enumerate(specialization)
            if kind != "constexpr" and isinstance(hint, str)
        },
    )
    return source, options
