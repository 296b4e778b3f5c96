"""Compiles one variant, reads what came of it, and prints a report as one line of JSON.

A process of its own: kernels are declared for a device and not for the interpreter, and a compiler that crashes takes
nothing with it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    # Last on the path, for a package that is run from its source folder.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import triton

from glm53_mono.isa.compile import Compiled, CompileError, compile_variant
from glm53_mono.isa.hazards import protocol_hazards, width_hazards
from glm53_mono.isa.hazards.loads import streamed_lines
from glm53_mono.isa.hazards.ptx import ptx_hazards, ptx_width_hazards
from glm53_mono.isa.listing import parse
from glm53_mono.isa.ptx import parse_ptx
from glm53_mono.isa.report import Report
from glm53_mono.isa.resources import Resources, of_cubin, of_listing
from glm53_mono.isa.variants import KernelVariant


def examine(variant: KernelVariant, listings: Path | None) -> Report:
    """Compiles a variant and reads its assembly.

    Args:
        listings: folder to leave the assembly in.

    Raises:
        CompileError: see `compile_variant`.
    """
    compiled = compile_variant(variant)
    resources, hazards = _read(compiled)
    if listings is not None:
        stage = "amdgcn" if "amdgcn" in compiled.asm else "ptx"
        (listings / f"{variant.name}.{stage}").write_text(compiled.asm[stage])
    return Report(
        variant=variant,
        resources=resources,
        warps=compiled.warps,
        seconds=round(compiled.seconds, 1),
        from_cache=compiled.from_cache,
        triton=triton.__version__,
        hazards=tuple(hazards),
    )


def _read(compiled: Compiled) -> tuple[Resources, list[str]]:
    if "amdgcn" in compiled.asm:
        listing = parse(compiled.asm["amdgcn"])
        streamed = streamed_lines()
        hazards = [*protocol_hazards(listing, streamed), *width_hazards(listing, streamed)]
        return of_listing(listing, compiled.shared), hazards
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    file = next(Path(path) for name, path in compiled.files.items() if name.endswith(".cubin"))
    ptx, streamed = parse_ptx(compiled.asm["ptx"]), streamed_lines()
    hazards = [*ptx_hazards(ptx, streamed), *ptx_width_hazards(ptx, streamed)]
    return of_cubin(compiled.asm["cubin"], file, tool, compiled.shared), hazards


def main() -> None:
    """Reads the variant and the listings' folder from the command line, both as JSON."""
    variant, listings = json.loads(sys.argv[1])
    answers, sys.stdout = sys.stdout, sys.stderr
    try:
        report = examine(KernelVariant(**variant), None if listings is None else Path(listings))
    except CompileError as error:
        sys.exit(str(error))
    print(json.dumps(report.as_dict()), file=answers)


if __name__ == "__main__":
    main()
