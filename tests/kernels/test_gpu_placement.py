"""What a build finds out of the GPU by running programs: the dies they run on, and how many there is room for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from glm53_mono.admission import dies_of_programs, misplaced, present_units
from glm53_mono.isas import ISAS
from glm53_mono.program.tiling import TILINGS

pytestmark = pytest.mark.gpu

BACKEND = "hip" if torch.version.hip else "cuda"
(ISA,) = (name for name, isa in ISAS.items() if isa.backend == BACKEND)

PATIENCE_S = 0.2
HELD_CYCLES = 4_000_000_000
"""Of a kernel that holds a place: more than a second of either GPU's clock."""


def launch() -> SimpleNamespace:
    return SimpleNamespace(
        tiling=TILINGS[ISA],
        variant=SimpleNamespace(backend=BACKEND),
        buffer=torch.empty(0, device="cuda"),
        deadline_s=PATIENCE_S,
    )


def test_programs_are_dealt_to_the_dies_in_turn() -> None:
    """A warning of the server's, and no more: where this fails the barrier is slow and right."""
    for _ in range(10):
        dies = dies_of_programs(launch())
        assert len(set(dies)) == ISAS[ISA].chiplets
        assert misplaced(dies, ISA) == [], dies


def test_every_unit_takes_programs_but_one_that_something_else_holds() -> None:
    """One thread of another stream's is enough: programs that fill the GPU have room for one less beside it."""
    units = torch.cuda.get_device_properties(0).multi_processor_count
    assert present_units(launch(), ISA, units) == units
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(HELD_CYCLES)
    assert present_units(launch(), ISA, units) == units - 1
    assert not other.query(), "the other kernel ended first, so this has shown nothing"
    other.synchronize()
    assert present_units(launch(), ISA, units) == units
