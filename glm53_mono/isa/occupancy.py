"""How many programs of a compiled kernel a compute unit holds at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """One compute unit (or streaming multiprocessor) of an ISA.

    Attributes:
        shared: bytes of LDS or shared memory that one program may have.
        unit_shared: bytes of the whole unit.
        reserved_shared: bytes of the unit that each program takes beside its own.
        lanes: threads of a warp (a wave).
        simds: parts of the unit; a warp lives on one.
        simd_registers: registers of a part, counted in those of one thread times the lanes.
        register_step: registers of a thread are handed out in multiples of this.
        simd_warps: warps that a part holds at most.
    """

    shared: int
    unit_shared: int
    reserved_shared: int
    lanes: int
    simds: int
    simd_registers: int
    register_step: int
    simd_warps: int


LIMITS: Mapping[str, Limits] = {
    "gfx950": Limits(
        shared=163_840, unit_shared=163_840, reserved_shared=0, lanes=64, simds=4, simd_registers=512 * 64,
        register_step=8, simd_warps=8,
    ),
    "sm_90": Limits(
        shared=232_448, unit_shared=233_472, reserved_shared=1_024, lanes=32, simds=4, simd_registers=16_384,
        register_step=8, simd_warps=16,
    ),
}  # fmt: skip
"""AMD CDNA4 ISA guide 3.6 (512 VGPRs a lane, AGPRs included) and LLVM's AMDGPU usage; CUDA's compute capability 9.0."""


@dataclass(frozen=True)
class Usage:
    """What one program takes.

    Attributes:
        registers: of a thread; on AMD vector registers, accumulation registers included.
        shared: bytes of LDS or shared memory.
        warps: of the program.
    """

    registers: int
    shared: int
    warps: int


def programs_per_unit(limits: Limits, usage: Usage) -> int:
    """Programs that a compute unit holds at once; 0 where not even one fits."""
    if usage.shared > limits.shared:
        return 0
    a_thread = -(-max(usage.registers, 1) // limits.register_step) * limits.register_step
    warps_of_simd = min(limits.simd_warps, limits.simd_registers // (a_thread * limits.lanes))
    by_registers = limits.simds * warps_of_simd // usage.warps
    return min(by_registers, limits.unit_shared // (usage.shared + limits.reserved_shared or 1))
