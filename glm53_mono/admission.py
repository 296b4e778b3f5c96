"""Whether the compiled kernel may run on this GPU: all of its programs at once, and no hazard in its assembly.

A grid barrier waits for every program, so a program that has no compute unit to run on is a hang. How many units the
driver shows is checked first. What another process holds of the GPU, or a mask on its units, no driver tells: programs
that fill a whole GPU are run and counted (`roll_call`). What is taken later ends a wait at its deadline (`sync.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from triton.runtime import driver

from glm53_mono.bindings import Unused, empty_step
from glm53_mono.isa.hazards import protocol_hazards
from glm53_mono.isa.hazards.loads import streamed_lines
from glm53_mono.isa.listing import parse
from glm53_mono.isa.occupancy import LIMITS, Usage, programs_per_unit
from glm53_mono.isa.resources import of_listing
from glm53_mono.isas import ISAS
from glm53_mono.kernels.monokernel import monokernel
from glm53_mono.kernels.placement import placement
from glm53_mono.kernels.roll_call import roll_call
from glm53_mono.program.launch import Launch

logger = logging.getLogger(__name__)

WIDEST_PROGRAM = 1024
"""Threads that a program can have, on either vendor's GPU."""


class AdmissionError(RuntimeError):
    """The kernel must not run on this GPU; the message is one sentence."""


def admit(launch: Launch, isa: str) -> None:
    """Compiles and loads the launch's kernel without running it, and refuses one that could hang or go wrong.

    Args:
        launch: on the device that is to run it; the interpreter has nothing to check.
        isa: of that device, a key of `LIMITS`.

    Raises:
        AdmissionError: fewer programs than the grid has fit at once, compute units are masked or taken, or the assembly
            has a hazard.
    """
    if launch.variant.backend == "interp":
        return
    kernel = loaded_kernel(launch)
    shared = kernel.metadata.shared
    if launch.variant.backend == "hip":
        listing = parse(kernel.asm["amdgcn"])
        hazards = protocol_hazards(listing, streamed_lines())
        if hazards:
            raise AdmissionError(
                f"the kernel that this Triton compiles has hazards in its assembly ({len(hazards)}), the first of "
                f"them: {hazards[0]}; install a Triton with which `glm53-mono isa` finds none"
            )
        usage = of_listing(listing, shared).usage(launch.tiling.warps)
    else:
        usage = Usage(registers=kernel.n_regs, shared=shared, warps=launch.tiling.warps)
    device = launch.buffer.device.index
    properties = driver.active.utils.get_device_properties(torch.cuda.current_device() if device is None else device)
    units = properties["multiprocessor_count"]
    check_residency(isa, usage, launch.tiling.programs, units)
    check_presence(isa, usage, launch.tiling.programs, units, present_units(launch, isa, units))


def loaded_kernel(launch: Launch) -> Any:
    """The launch's kernel, compiled and loaded as its first run would, but not run."""
    tensors, sizes = empty_step(Unused.on(launch.buffer.device))
    hidden = torch.empty((1, launch.geometry.hidden), dtype=torch.bfloat16, device=launch.buffer.device)
    positional, constants = launch.arguments(tensors, sizes, hidden)
    with launch.compiler():
        kernel = monokernel.warmup(*positional, grid=(launch.tiling.programs,), **constants)
    kernel._init_handles()
    return kernel


def log_placement(launch: Launch, isa: str) -> None:
    """Says whether programs run on the dies that the barrier takes them to be on. Only its speed depends on it.

    Args:
        launch: on the device that is to run it; the interpreter has no dies.
        isa: of that device, a key of ISAS.
    """
    if launch.variant.backend == "interp":
        return
    chiplets = ISAS[isa].chiplets
    if chiplets == 1:
        return
    dies = dies_of_programs(launch)
    strangers = misplaced(dies, isa)
    if strangers:
        logger.warning(
            "glm53_mono: %d of %d programs, program %d first, do not run on the die that the barrier takes them to be "
            "on; it is right and slower, and the dies of the first programs are %s",
            len(strangers),
            len(dies),
            strangers[0],
            dies[: 2 * chiplets],
        )
    else:
        logger.info("glm53_mono: programs run on %d dies as the barrier groups them", chiplets)


def dies_of_programs(launch: Launch) -> list[int]:
    """The die of each program of a grid like the launch's."""
    dies = torch.empty(launch.tiling.programs, dtype=torch.int32, device=launch.buffer.device)
    placement[(launch.tiling.programs,)](dies, BACKEND=launch.variant.backend)
    return dies.tolist()


def misplaced(dies: Sequence[int], isa: str) -> list[int]:
    """Programs that are not on the die of their chiplet's first program, or on that of another chiplet's."""
    of = ISAS[isa].chiplet_of
    first: dict[int, int] = {}
    for program, die in enumerate(dies):
        first.setdefault(of(program), die)
    shared = {chiplet for chiplet, die in first.items() if list(first.values()).index(die) != chiplet}
    return [program for program, die in enumerate(dies) if die != first[of(program)] or of(program) in shared]


def check_residency(isa: str, usage: Usage, programs: int, units: int) -> None:
    """Refuses a grid of which not all programs are resident at once.

    Args:
        isa: a key of `LIMITS`.
        usage: what a program takes.
        programs: of the grid.
        units: compute units that the driver shows.

    Raises:
        AdmissionError: likewise.
    """
    per_unit = programs_per_unit(LIMITS[isa], usage)
    slots = units * per_unit
    takes = f"{usage.warps} warps x {usage.registers} registers and {usage.shared:,} bytes of shared memory a program"
    if slots < programs:
        raise AdmissionError(
            f"the kernel's {programs} programs wait for one another, but this GPU holds {slots} of them at once "
            f"({units} compute units x {per_unit}; {takes}): serve on a whole, unpartitioned {isa}"
        )
    logger.info(
        "glm53_mono: %d programs of %d that this GPU holds at once (%d compute units x %d; %s)",
        programs,
        slots,
        units,
        per_unit,
        takes,
    )


def present_units(launch: Launch, isa: str, units: int) -> int:
    """Compute units that take programs: as many programs as fill them all wait for one another, up to the deadline.

    Args:
        launch: on the device that is to run it; nothing else of this process runs there.
        isa: of that device, a key of `LIMITS`.
        units: compute units that the driver shows.
    """
    limits = LIMITS[isa]
    warps = WIDEST_PROGRAM // limits.lanes
    a_unit = limits.simds * limits.simd_warps // warps
    device = launch.buffer.device
    count = torch.zeros(1, dtype=torch.int32, device=device)
    seen = torch.empty(units * a_unit, dtype=torch.int32, device=device)
    patience = round(launch.deadline_s * 1e9)
    roll_call[(len(seen),)](count, seen, patience, BACKEND=launch.variant.backend, num_warps=warps)
    return int(seen.min()) // a_unit


def check_presence(isa: str, usage: Usage, programs: int, units: int, present: int) -> None:
    """Refuses a grid that waits for compute units which the driver shows and which take no programs.

    Args:
        isa: a key of `LIMITS`.
        usage: what a program takes.
        programs: of the grid.
        units: compute units that the driver shows.
        present: of `present_units`.

    Raises:
        AdmissionError: likewise.
    """
    per_unit = programs_per_unit(LIMITS[isa], usage)
    if present * per_unit < programs:
        raise AdmissionError(
            f"the kernel's {programs} programs wait for one another, but only {present} of the {units} compute units "
            f"that the driver shows take programs, {per_unit} each: another process holds the others, or a mask hides "
            "them; serve on a GPU of its own without a mask"
        )
    if present < units:
        logger.warning(
            "glm53_mono: %d of the %d compute units that the driver shows take programs; the grid fits", present, units
        )
