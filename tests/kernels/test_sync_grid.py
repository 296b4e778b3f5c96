"""The barrier's own source under an emulated grid: nobody comes early, nothing is left behind, and waits end."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from glm53_mono.cli.barrier_model import barrier
from glm53_mono.isas import ISAS
from glm53_mono.kernels import sync
from glm53_mono.kernels.record import Kind
from tests.kernels.emulated_grid import ROLL_CALL, SOURCE, Address, Fault, Grid, Hang

MLA = (Kind.EMBED, Kind.MIX, Kind.MLA_ABSORB, Kind.MLA_SELECT, Kind.MLA_ATTEND, Kind.MIX, Kind.MLA_SELECT, Kind.HEAD)
GRIDS = {
    "flat": Grid(programs=5, chiplets=1, rows=2),
    "two chiplets": Grid(programs=5, chiplets=2, rows=3),
    "eight chiplets": Grid(programs=20, chiplets=8, rows=8),
    "fewer programs than chiplets": Grid(programs=3, chiplets=8, rows=2),
    "more rows than programs": Grid(programs=3, chiplets=2, rows=4),
    "a selection": Grid(programs=5, chiplets=2, kinds=MLA, rows=2, selects=True),
    "a selection that is skipped": Grid(programs=5, chiplets=2, kinds=MLA, rows=2),
}


def fresh(grid: Grid, **changes: object) -> Grid:
    return replace(grid, memory={}, touched=type(grid.touched)(), **changes)


@pytest.mark.parametrize("name", GRIDS)
def test_launches_follow_one_another(name: str, seed: int) -> None:
    grid = fresh(GRIDS[name], seed=seed)
    for launches in (1, 2, 3):
        grid.launch()
        assert grid.words() == {sync.LAUNCHES.value: launches}
        assert grid.host(sync.SERVED) == launches
    assert grid.host(sync.FAULT_FLAG) == 0


@pytest.mark.parametrize("name", GRIDS)
def test_a_lost_arrival_ends_in_a_fault_that_counts_the_others(name: str, seed: int) -> None:
    grid = fresh(GRIDS[name], seed=seed, withholds=1)
    with pytest.raises(Fault):
        grid.launch()
    assert grid.host(sync.FAULT_FLAG) == 1
    assert 0 <= grid.host(sync.FAULT_PROGRAM) < grid.programs
    assert grid.kinds[grid.host(sync.FAULT_PHASE)] != Kind.EMBED
    assert grid.host(sync.FAULT_SEEN) == grid.host(sync.FAULT_EXPECTED) - 1
    assert grid.host(sync.SERVED) == 0


def test_lines_are_shared_as_the_model_says(seed: int) -> None:
    """An MI355X's grid through barriers at which all arrive: who adds to a line, how often, and who polls it."""
    isa = ISAS["gfx950"]
    kinds = (Kind.EMBED, Kind.KDA_PROJECT, Kind.HEAD)
    grid = Grid(isa.compute_units, isa.chiplets, kinds=kinds, seed=seed)
    grid.launch()
    model = barrier(isa.compute_units, isa.chiplets)
    barriers = len(kinds)
    for chiplet in range(isa.chiplets):
        own = {program for program in range(grid.programs) if isa.chiplet_of(program) == chiplet}
        met = users(grid, sync.MET.value + chiplet * sync.LINE)
        assert met.keys() == own and sum(met.values()) == barriers * model.longest_line
        released = users(grid, sync.MET.value + (isa.chiplets + chiplet) * sync.LINE)
        assert released.keys() <= own
    arrived = users(grid, sync.ARRIVED.value)
    assert len(arrived) <= barriers * model.shared_pollers
    flat = barrier(isa.compute_units, 1)
    assert (flat.shared_atomics, model.shared_atomics) == (256, 8)


def users(grid: Grid, word: int) -> dict[int, int]:
    """Atomic accesses to a word by program."""
    return {program: count for (place, program), count in grid.touched.items() if place == word}


def test_the_device_and_the_table_share_one_map() -> None:
    for isa in ISAS.values():
        own = SimpleNamespace(program=0)
        names = {
            "triton": SimpleNamespace(jit=lambda function: function),
            "tl": SimpleNamespace(program_id=lambda _, own=own: own.program, constexpr=lambda value: value),
        }
        exec("\n".join(line for line in SOURCE.splitlines() if not line.startswith("import ")), names)
        for own.program in range(isa.compute_units):
            assert names["chiplet"](isa.chiplets) == isa.chiplet_of(own.program)
        assert isa.compute_units % isa.chiplets == 0


ORDERS = 20
"""In which a wrong source runs: some of its orders are right."""

BUGS = {
    "leads before all have met": ("if met == due:", "if met == due - 1:", "early"),
    "nobody leads": ("if met == due:", "if met == due + 1:", "fault"),
    "releases itself alone": ("if role == LEADS:", "if role == ALONE:", "fault"),
    "all wait for the device": ("role == LED, released_word", "role == ALONE, released_word", "fault"),
    "few count as a chiplet": ("        if arrivals == tl.num_programs(0):\n", "        if arrivals > 0:\n", "fault"),
    "chiplets are not reset": ("tl.store(met_word(words, word), 0)", "tl.load(met_word(words, word))", "left behind"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_wrong_source_is_found(name: str, seed: int) -> None:
    right, wrong, found = BUGS[name]
    assert SOURCE.count(right) == 1
    assert any(outcome(seed + order, SOURCE.replace(right, wrong)) == found for order in range(ORDERS))


def outcome(seed: int, source: str) -> str | None:
    """What goes wrong in a launch on two chiplets."""
    grid = fresh(GRIDS["two chiplets"], seed=seed, source=source)
    try:
        grid.launch()
    except Fault:
        return "fault"
    except AssertionError:
        return "early"
    return None if grid.words() == {sync.LAUNCHES.value: 1} else "left behind"


def test_a_wait_without_a_deadline_is_a_hang(seed: int) -> None:
    """What the deadline is there for."""
    source = SOURCE.replace("if now(BACKEND) > deadline:", "if False:")
    with pytest.raises(Hang):
        fresh(GRIDS["flat"], seed=seed, withholds=1, source=source).launch()


@pytest.mark.parametrize("chiplets", [1, 2])
def test_a_grid_that_has_no_room_ends_in_a_fault(chiplets: int, seed: int) -> None:
    with pytest.raises(Fault):
        Grid(programs=5, chiplets=chiplets, seed=seed, slots=4).launch()


@pytest.mark.parametrize("slots", [1, 3, 7, 8])
def test_a_roll_call_counts_the_programs_that_there_is_room_for(slots: int, seed: int) -> None:
    grid = Grid(programs=8, chiplets=1, seed=seed, slots=slots)
    for _ in range(2):
        assert min(grid.roll_call()) == slots


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("while present < tl.num_programs(0):", "while False:"),
        ("tl.store(seen + tl.program_id(0), present % CLOSED)", "tl.store(seen + tl.program_id(0), present)"),
        ("(count, 0, sem", "(count, 1, sem"),
    ],
    ids=["does not wait", "takes the mark along", "counts itself twice"],
)
def test_a_wrong_roll_call_is_found(right: str, wrong: str, seed: int) -> None:
    assert ROLL_CALL.count(right) == 1
    grid = Grid(programs=8, chiplets=1, seed=seed, slots=5)
    assert min(grid.roll_call(ROLL_CALL.replace(right, wrong))) != 5


def test_a_roll_call_without_a_clock_is_a_hang(seed: int) -> None:
    with pytest.raises(Hang):
        Grid(programs=8, chiplets=1, seed=seed, slots=7).roll_call(ROLL_CALL.replace(">= deadline", "< 0"))


def test_addresses_add_up() -> None:
    assert Address(3) + 4 == 4 + Address(3) == 7
    assert Address(3).to(None, bitcast=True) == 3
