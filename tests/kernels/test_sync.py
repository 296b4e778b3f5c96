"""The barrier's protocol over every order of its steps, and the transcription that this rests on."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from glm53_mono.kernels import sync
from tests.kernels.sync_model import Model, Protocol, Violation, broken

TWO_WAVES = Model(Protocol())
THREE_PROGRAMS = Model(Protocol(), programs=3, waves=1, arrivals=(3, 2, 3, 3))
ALL = Model(Protocol(), programs=3, waves=2, arrivals=(3, 1, 3, 3))
ON_CHIPLETS = Model(Protocol(), programs=3, waves=1, arrivals=(3, 1, 3, 3), chiplets=2)
"""Programs 0 and 2 meet on one chiplet; each is on a die of its own all the same."""

AS_MAPPED = replace(ON_CHIPLETS, dies=(0, 1, 0))
TWO_PAIRS = Model(Protocol(), programs=4, waves=1, arrivals=(4, 1, 4), launches=1, chiplets=2)
"""Two chiplets, on each of which one leads another."""

MODELS = {
    "waves": TWO_WAVES,
    "programs": THREE_PROGRAMS,
    "both": ALL,
    "waves on chiplets": replace(TWO_WAVES, chiplets=2),
    "chiplets": ON_CHIPLETS,
    "chiplets as mapped": AS_MAPPED,
    "pairs on chiplets": TWO_PAIRS,
    "waves of pairs": replace(ON_CHIPLETS, waves=2, arrivals=(3, 1, 3)),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_no_run_deadlocks_reads_stale_data_or_loses_a_reset(model: Model) -> None:
    assert model.explore() > 500


@pytest.mark.parametrize(
    ("model", "bug", "says"),
    [
        (TWO_WAVES, {"drains": False}, "stale read"),
        (TWO_WAVES, {"meets": False}, "stale read"),
        (TWO_WAVES, {"releases": False}, "stale read"),
        (TWO_WAVES, {"acquires": False}, "stale read"),
        (THREE_PROGRAMS, {"releases": False}, "stale read"),
        (THREE_PROGRAMS, {"acquires": False}, "stale read"),
        (THREE_PROGRAMS, {"counts_absent": True}, "deadlock"),
        (THREE_PROGRAMS, {"absent_arrive": True}, "stale read"),
        (THREE_PROGRAMS, {"resets": "first to leave"}, "deadlock"),
        (THREE_PROGRAMS, {"resets": "last to arrive"}, "deadlock"),
        (THREE_PROGRAMS, {"resets": "nobody"}, "lost reset"),
        (ON_CHIPLETS, {"releases": False}, "stale read"),
        (ON_CHIPLETS, {"acquires": False}, "stale read"),
        (ON_CHIPLETS, {"counts_absent": True}, "deadlock"),
        (ON_CHIPLETS, {"resets": "first to leave"}, "deadlock"),
        (ON_CHIPLETS, {"resets_chiplets": False}, "lost reset"),
        (ON_CHIPLETS, {"leads": "first"}, "stale read"),
        (ON_CHIPLETS, {"reports_all": False}, "deadlock"),
        (ON_CHIPLETS, {"few_meet": True}, "deadlock"),
        (ON_CHIPLETS, {"releases_early": True}, "stale read"),
        (AS_MAPPED, {"releases": False}, "stale read"),
        (TWO_PAIRS, {"releases_early": True}, "stale read"),
        (TWO_PAIRS, {"reports_all": False}, "deadlock"),
        (TWO_PAIRS, {"leads": "first"}, "stale read"),
        (replace(TWO_WAVES, chiplets=2), {"drains": False}, "stale read"),
        (replace(TWO_WAVES, chiplets=2), {"meets": False}, "stale read"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_a_bug_in_the_protocol_is_found(model: Model, bug: dict[str, object], says: str) -> None:
    with pytest.raises(Violation, match=says):
        broken(model, **bug).explore()


def test_an_arrival_that_trusts_the_map_is_right_only_where_the_map_is() -> None:
    """Leaving the write-back to the last one of a chiplet saves 31 of 32, and relies on sharing a cache."""
    assert broken(AS_MAPPED, meets_release=False).explore() > 500
    with pytest.raises(Violation, match="stale read"):
        broken(ON_CHIPLETS, meets_release=False).explore()


def synchronisation(source: str, function: str) -> list[str]:
    """What a function of `sync.py` does that the model has a step for, in order."""
    tree = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == function)
    found = []
    for node in sorted((n for n in ast.walk(tree) if isinstance(n, ast.Call)), key=lambda n: (n.lineno, n.col_offset)):
        name = ast.unparse(node.func)
        sem = next((keyword.value.value for keyword in node.keywords if keyword.arg == "sem"), "")
        if name in ("drain", "tl.debug_barrier", "program_barrier"):
            found.append(name.removeprefix("tl."))
        elif name in ("tl.atomic_add", "tl.atomic_xchg", "tl.store"):
            place = node.args[0].func if isinstance(node.args[0], ast.Call) else node.args[0]
            found.append(f"{sem} {name.removeprefix('tl.')} {ast.unparse(place).rpartition(' ')[2].lower()}".strip())
    return found


TRANSCRIBED = {
    "program_barrier": ["drain", "debug_barrier"],
    "arrive": [
        *("program_barrier", "release atomic_add arrived"),
        *("release atomic_add arrived", "acq_rel atomic_add met_word", "release atomic_add arrived"),
    ],
    "wait": [
        *["acquire atomic_add word"] * 2,
        *("program_barrier", "release atomic_xchg released_word", "debug_barrier"),
    ],
    "leave": [
        *("program_barrier", "acq_rel atomic_add left"),
        *("store arrived", "store left", "store met_word", "store launches"),
    ],
}
"""The steps of `Model`, by function of `sync.py`: a flat arrival, one of few programs, one by chiplets. The count that
the host reads is no part of the barrier.
"""


def test_the_model_is_what_sync_does() -> None:
    source = Path(sync.__file__).read_text()
    for function, steps in TRANSCRIBED.items():
        assert synchronisation(source, function)[: len(steps)] == steps
    for order in ("release", "acq_rel"):
        relaxed = source.replace(f'1, sem="{order}"', '1, sem="relaxed"')
        assert synchronisation(relaxed, "arrive") != TRANSCRIBED["arrive"]
    undrained = source.replace("        drain(BACKEND)\n", "")
    assert synchronisation(undrained, "program_barrier") != TRANSCRIBED["program_barrier"]
