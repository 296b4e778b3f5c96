"""Occupancy and budgets, by numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from glm53_mono.isa.budget import MOST, over_budget
from glm53_mono.isa.occupancy import LIMITS, Usage, programs_per_unit
from glm53_mono.isa.resources import ResourceError, Resources, _section_bytes
from glm53_mono.program.tiling import TILINGS

FITS = Resources(
    registers=439, accumulation_registers=183, scalar_registers=106, register_spills=0, scalar_spills=102, scratch=0,
    shared=73_728, code_bytes=163_948, waterfall_loops=45,
)  # fmt: skip


@pytest.mark.parametrize(
    ("isa", "usage", "programs"),
    [
        # 512 registers a lane and SIMD: one wave of 439, two of 256, and 8 waves at most whatever they take.
        ("gfx950", Usage(439, 73_728, 4), 1),
        ("gfx950", Usage(256, 73_728, 4), 2),
        ("gfx950", Usage(257, 0, 4), 1),
        ("gfx950", Usage(256, 81_921, 4), 1),
        ("gfx950", Usage(16, 0, 4), 8),
        ("gfx950", Usage(256, 0, 8), 1),
        ("gfx950", Usage(264, 0, 8), 0),
        ("gfx950", Usage(128, 163_841, 4), 0),
        # 65,536 registers and 227 KB for a program, 1 KB of the multiprocessor's 228 taken by each.
        ("sm_90", Usage(255, 167_936, 8), 1),
        ("sm_90", Usage(128, 115_712, 8), 2),
        ("sm_90", Usage(128, 115_713, 8), 1),
        ("sm_90", Usage(255, 0, 16), 0),
        ("sm_90", Usage(32, 232_449, 4), 0),
    ],
)
def test_programs_that_a_unit_holds(isa: str, usage: Usage, programs: int) -> None:
    assert programs_per_unit(LIMITS[isa], usage) == programs


def test_a_kernel_within_its_budget() -> None:
    assert over_budget("gfx950", FITS, TILINGS["gfx950"].warps) == []


@pytest.mark.parametrize(("isa", "name"), [(isa, name) for isa, budget in MOST.items() for name in budget])
def test_one_more_than_the_budget_is_too_much(isa: str, name: str) -> None:
    most = MOST[isa][name]
    lean = replace(FITS, **dict.fromkeys(MOST[isa], 0))
    assert over_budget(isa, replace(lean, **{name: most}), 4) == []
    first = over_budget(isa, replace(lean, **{name: most + 1}), 4)[0]
    assert first == f"{name.replace('_', ' ')}: {most + 1:,} of at most {most:,}"


def test_a_kernel_of_which_no_program_fits() -> None:
    assert over_budget("gfx950", FITS, 8) == ["programs a compute unit holds: 0 of at least 1"]


def test_a_cubin_without_the_kernel_is_refused() -> None:
    header = bytearray(64 + 64)
    header[0x28:0x30] = (64).to_bytes(8, "little")
    header[0x3A:0x40] = (64).to_bytes(2, "little") + (1).to_bytes(2, "little") + (0).to_bytes(2, "little")
    with pytest.raises(ResourceError, match=r"no section \.text\.monokernel"):
        _section_bytes(bytes(header), ".text.monokernel")
