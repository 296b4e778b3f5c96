"""The kernels that a build runs before a step, compiled for every ISA: they fill a GPU, and wait without a hazard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from glm53_mono.isa.hazards.clock import clock_hazards
from glm53_mono.isa.hazards.polling import polling_hazards
from glm53_mono.isa.hazards.ptx import ptx_hazards
from glm53_mono.isa.hazards.release import release_hazards
from glm53_mono.isa.listing import parse
from glm53_mono.isa.occupancy import LIMITS, Usage, programs_per_unit
from glm53_mono.isa.ptx import parse_ptx
from glm53_mono.isas import ISAS

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 120


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.isa.small_kernels"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LONGEST_S
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def hazards(isa: str, text: str) -> list[str]:
    if ISAS[isa].backend == "cuda":
        return ptx_hazards(parse_ptx(text), frozenset())
    listing = parse(text)
    return [*release_hazards(listing), *polling_hazards(listing), *clock_hazards(listing)]


@pytest.mark.parametrize("isa", ISAS)
def test_a_roll_call_fills_every_unit_and_no_program_more(isa: str, compiled: dict[str, dict[str, Any]]) -> None:
    """As many by registers and shared memory as by threads, which is what `present_units` counts with."""
    found = compiled[isa]["roll_call"]
    limits = LIMITS[isa]
    usage = Usage(found["registers"], found["shared"], found["warps"])
    assert programs_per_unit(limits, usage) == limits.simds * limits.simd_warps // found["warps"] == 2


@pytest.mark.parametrize(
    ("isa", "poll", "says"),
    [
        ("gfx950", "global_load_dword", "spin without a load"),
        ("sm_90", "ld.global.gpu.acquire", "poll without an acquire"),
    ],
)
def test_a_roll_call_waits_without_a_hazard(
    isa: str, poll: str, says: str, compiled: dict[str, dict[str, Any]]
) -> None:
    """Nor would one be missed: without its poll nothing is left, or on CUDA the addition that ends it."""
    text = compiled[isa]["roll_call"]["text"]
    assert hazards(isa, text) == []
    without = "\n".join(line for line in text.splitlines() if poll not in line)
    assert any(each.startswith(says) for each in hazards(isa, without))


def test_a_program_reads_its_die_where_there_are_several(compiled: dict[str, dict[str, Any]]) -> None:
    read = {isa: "HW_REG_XCC_ID" in found["placement"]["text"] for isa, found in compiled.items()}
    assert read == {name: isa.chiplets > 1 for name, isa in ISAS.items()}
