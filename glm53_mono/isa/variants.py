"""Every kernel that a server can launch on a device, as far as the plugin lets servers start."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from glm53_mono import capabilities
from glm53_mono.geometry import TP_SIZES
from glm53_mono.refusals import reasons
from glm53_mono.upstream.server import Arguments, Environment, Server

VERIFY_ALGORITHM = "EAGLE"
FORMATS = {"gfx950": {"bf16": None, "fp8": "fp8", "mxfp4": "quark"}, "sm_90": {"bf16": None, "fp8": "fp8"}}
"""Weight formats of servers on that ISA, and SGLang's `quantization` of each: it has MXFP4 experts on ROCm alone."""


@dataclass(frozen=True)
class KernelVariant:
    """What a server's kernel is compiled for, at the published model's sizes."""

    isa: str
    verify: bool
    tp_size: int
    weights: str
    """a key of FORMATS[isa]"""
    shared_fused: bool

    @property
    def name(self) -> str:
        """One word for tables and file names."""
        mode = "verify" if self.verify else "decode"
        return f"{self.isa}-{mode}-tp{self.tp_size}-{self.weights}-{'fused' if self.shared_fused else 'separate'}"


def variants(isa: str) -> list[KernelVariant]:
    """The kernels of one ISA, a key of ISAS.

    Widths are no variants: one kernel runs 1 to 8 rows.
    """
    return [
        KernelVariant(isa, verify, tp_size, weights, fused)
        for tp_size, (weights, quantization), verify, fused in product(
            TP_SIZES, FORMATS[isa].items(), (False, True), (False, True)
        )
        if _is_built(
            tp_size=tp_size,
            quantization=quantization,
            speculative_algorithm=VERIFY_ALGORITHM if verify else None,
        )
    ]


def _is_built(**arguments: Any) -> bool:
    """Whether a server with these arguments, and nothing else that could stand against it, is let through."""
    unset = dict.fromkeys(field.name for field in fields(Arguments))
    nothing = dict.fromkeys((field.name for field in fields(Environment)), False)
    server = Server(Arguments(**unset | arguments), Environment(**nothing), hf_config=None)
    return not reasons(capabilities.NOT_YET_BUILT, server)
