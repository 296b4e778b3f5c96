"""What a compiled kernel may take, by ISA: the one table that `glm53-mono isa` holds every variant against."""

from __future__ import annotations

from collections.abc import Mapping

from glm53_mono.isa.occupancy import LIMITS, programs_per_unit
from glm53_mono.isa.resources import Resources

LEAST_PROGRAMS_PER_UNIT = 1
"""The grid is one program a compute unit, and all of them must be there at once."""

MOST: Mapping[str, Mapping[str, int]] = {
    "gfx950": {
        "registers": 512,
        "register_spills": 0,
        "scalar_spills": 192,
        "scratch": 0,
        "shared": LIMITS["gfx950"].shared,
        "code_bytes": 220_000,
        "waterfall_loops": 80,
    },
    "sm_90": {
        "registers": 255,
        "scratch": 512,
        "shared": LIMITS["sm_90"].shared,
        "code_bytes": 400_000,
    },
}
"""Fields of `Resources`. Registers and memory are the hardware's; the rest is what the kernel takes today and some
room: more of it is a change to look at, not to discover on the machine."""


def over_budget(isa: str, resources: Resources, warps: int) -> list[str]:
    """One line for each budget that a kernel exceeds.

    Args:
        isa: a key of `MOST`.
        warps: of a program.
    """
    found = []
    for name, most in MOST[isa].items():
        value = getattr(resources, name)
        if value > most:
            found.append(f"{name.replace('_', ' ')}: {value:,} of at most {most:,}")
    held = programs_per_unit(LIMITS[isa], resources.usage(warps))
    if held < LEAST_PROGRAMS_PER_UNIT:
        found.append(f"programs a compute unit holds: {held} of at least {LEAST_PROGRAMS_PER_UNIT}")
    return found
