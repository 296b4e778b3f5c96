"""What a compiled kernel takes of a compute unit, read from what the compiler wrote."""

from __future__ import annotations

import re
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from glm53_mono.isa.flow import waterfall_loops
from glm53_mono.isa.listing import Listing
from glm53_mono.isa.occupancy import Usage


class ResourceError(RuntimeError):
    """The compiler's output lacks a number; the message names it."""


@dataclass(frozen=True)
class Resources:
    """One compiled kernel.

    Attributes:
        registers: of a thread; on AMD accumulation registers are among them.
        accumulation_registers: of those, on AMD; 0 elsewhere.
        scalar_registers: of a wave, on AMD; 0 elsewhere.
        register_spills: registers kept in memory, on AMD; NVIDIA's tools tell `scratch` alone.
        scalar_spills: scalar registers kept in lanes of vector registers, on AMD.
        scratch: bytes of memory of a thread: spills, and arrays indexed at run time.
        shared: bytes of LDS or shared memory of a program.
        code_bytes: of the instructions.
        waterfall_loops: loops over lanes' addresses, on AMD.
    """

    registers: int
    accumulation_registers: int
    scalar_registers: int
    register_spills: int
    scalar_spills: int
    scratch: int
    shared: int
    code_bytes: int
    waterfall_loops: int

    def usage(self, warps: int) -> Usage:
        """What decides how many programs a compute unit holds."""
        return Usage(registers=self.registers, shared=self.shared, warps=warps)


def of_listing(listing: Listing, shared: int) -> Resources:
    """Resources of an AMD kernel from its listing's metadata.

    Args:
        shared: bytes of LDS, which Triton asks for at launch.

    Raises:
        ResourceError: a number is missing.
    """

    def metadata(key: str) -> int:
        return _number(listing.text, rf"^[\s-]*\.{key}:\s+(\d+)", key)

    return Resources(
        registers=metadata("vgpr_count"),
        accumulation_registers=metadata("agpr_count"),
        scalar_registers=metadata("sgpr_count"),
        register_spills=metadata("vgpr_spill_count"),
        scalar_spills=metadata("sgpr_spill_count"),
        scratch=metadata("private_segment_fixed_size"),
        shared=shared,
        code_bytes=_number(listing.text, r"codeLenInByte = (\d+)", "codeLenInByte"),
        waterfall_loops=waterfall_loops(listing),
    )


def of_cubin(cubin: bytes, file: Path, cuobjdump: Path, shared: int) -> Resources:
    """Resources of an NVIDIA kernel.

    Args:
        cubin: its bytes.
        file: where they lie, by the name of the kernel.
        cuobjdump: NVIDIA's tool, as Triton's wheel brings it.
        shared: bytes of shared memory, which Triton asks for at launch.

    Raises:
        ResourceError: a number is missing.
    """
    said = subprocess.run([cuobjdump, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    return Resources(
        registers=_number(said, r"\bREG:(\d+)", "REG"),
        accumulation_registers=0,
        scalar_registers=0,
        register_spills=0,
        scalar_spills=0,
        scratch=_number(said, r"\bSTACK:(\d+)", "STACK") + _number(said, r"\bLOCAL:(\d+)", "LOCAL"),
        shared=shared,
        code_bytes=_section_bytes(cubin, f".text.{file.stem}"),
        waterfall_loops=0,
    )


def _number(text: str, pattern: str, name: str) -> int:
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise ResourceError(f"the compiler's output has no {name}")
    return int(found[1])


def _section_bytes(elf: bytes, name: str) -> int:
    """Size of a section of a 64-bit ELF file."""
    table, size, count, names = struct.unpack_from("<Q10xHHH", elf, 0x28)
    headers = [struct.unpack_from("<I4xQQQQ", elf, table + size * index) for index in range(count)]
    strings = headers[names][3]
    for at, _, _, _, section_bytes in headers:
        start = strings + at
        if elf[start : elf.index(b"\0", start)].decode() == name:
            return section_bytes
    raise ResourceError(f"the cubin has no section {name}")
