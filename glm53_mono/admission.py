"""Whether the compiled kernel may run on this GPU: all of its programs at once, and no hazard in its assembly.

A grid barrier waits for every program, so a program that has no compute unit to run on is a hang. What another process
takes of the GPU, or a mask on its compute units, no driver tells: then the first wait ends at its deadline (`sync.py`).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from triton.runtime import driver

from glm53_mono.bindings import Unused, empty_step
from glm53_mono.isa.hazards import protocol_hazards
from glm53_mono.isa.hazards.loads import streamed_lines
from glm53_mono.isa.listing import parse
from glm53_mono.isa.occupancy import LIMITS, Usage, programs_per_unit
from glm53_mono.isa.resources import of_listing
from glm53_mono.kernels.monokernel import monokernel
from glm53_mono.program.launch import Launch

logger = logging.getLogger(__name__)


class AdmissionError(RuntimeError):
    """The kernel must not run on this GPU; the message is one sentence."""


def admit(launch: Launch, isa: str) -> None:
    """Compiles and loads the launch's kernel without running it, and refuses one that could hang or go wrong.

    Args:
        launch: on the device that is to run it; the interpreter has nothing to check.
        isa: of that device, a key of `LIMITS`.

    Raises:
        AdmissionError: fewer programs than the grid has fit at once, or the assembly has a hazard.
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
    check_residency(isa, usage, launch.tiling.programs, properties["multiprocessor_count"])


def loaded_kernel(launch: Launch) -> Any:
    """The launch's kernel, compiled and loaded as its first run would, but not run."""
    tensors, sizes = empty_step(Unused.on(launch.buffer.device))
    hidden = torch.empty((1, launch.geometry.hidden), dtype=torch.bfloat16, device=launch.buffer.device)
    positional, constants = launch.arguments(tensors, sizes, hidden)
    kernel = monokernel.warmup(*positional, grid=(launch.tiling.programs,), **constants)
    kernel._init_handles()
    return kernel


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
