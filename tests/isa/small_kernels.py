"""Compiles the kernels that a build runs before a step, for every ISA, and prints what each takes as JSON.

A process of its own: the tests' kernels are declared for the interpreter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import triton
from triton.compiler import ASTSource

from glm53_mono.admission import WIDEST_PROGRAM
from glm53_mono.isa.compile import target
from glm53_mono.isa.listing import parse
from glm53_mono.isa.resources import Resources, of_cubin, of_listing
from glm53_mono.isas import ISAS
from glm53_mono.kernels.placement import placement
from glm53_mono.kernels.roll_call import roll_call

KERNELS = {roll_call: {"count": "*i32", "seen": "*i32", "patience": "i64"}, placement: {"dies": "*i32"}}
"""The kernels, and the types of their arguments."""


def resources(kernel: Any) -> Resources:
    """What a compiled kernel takes."""
    if "amdgcn" in kernel.asm:
        return of_listing(parse(kernel.asm["amdgcn"]), kernel.metadata.shared)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    file = next(Path(path) for name, path in kernel.metadata_group.items() if name.endswith(".cubin"))
    return of_cubin(kernel.asm["cubin"], file, tool, kernel.metadata.shared)


def main() -> None:
    """For each ISA and kernel its registers, shared memory, warps, and text."""
    found: dict[str, dict[str, Any]] = {}
    for name, isa in ISAS.items():
        for function, types in KERNELS.items():
            source = ASTSource(
                fn=function,
                signature={**types, "BACKEND": "constexpr"},
                constexprs={(len(types),): isa.backend},
            )
            warps = WIDEST_PROGRAM // isa.lanes
            kernel = triton.compile(source, target=target(name), options={"num_warps": warps})
            takes = resources(kernel)
            found.setdefault(name, {})[function.__name__] = {
                "registers": takes.usage(warps).registers,
                "shared": takes.usage(warps).shared,
                "warps": warps,
                "text": kernel.asm["amdgcn" if "amdgcn" in kernel.asm else "ptx"],
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
