"""The barrier's protocol over every order of its steps, and the transcription that this rests on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from glm53_mono.kernels import sync
from tests.kernels.sync_model import Model, Protocol, Violation, broken

TWO_WAVES = Model(Protocol())
THREE_PROGRAMS = Model(Protocol(), programs=3, waves=1, arrivals=(3, 2, 3, 3))
ALL = Model(Protocol(), programs=3, waves=2, arrivals=(3, 1, 3, 3))


@pytest.mark.parametrize("model", [TWO_WAVES, THREE_PROGRAMS, ALL], ids=["waves", "programs", "both"])
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
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_a_bug_in_the_protocol_is_found(model: Model, bug: dict[str, object], says: str) -> None:
    with pytest.raises(Violation, match=says):
        broken(model, **bug).explore()


def synchronisation(source: str, function: str) -> list[str]:
    """What a function of `sync.py` does that the model has a step for, in order."""
    tree = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == function)
    found = []
    for node in sorted((n for n in ast.walk(tree) if isinstance(n, ast.Call)), key=lambda n: (n.lineno, n.col_offset)):
        name = ast.unparse(node.func)
        sem = next((keyword.value.value for keyword in node.keywords if keyword.arg == "sem"), "")
        if name in ("drain", "tl.debug_barrier", "program_barrier"):
            found.append(name.removeprefix("tl."))
        elif name in ("tl.atomic_add", "tl.store"):
            place = ast.unparse(node.args[0]).rpartition(" ")[2].lower()
            found.append(f"{sem} {name.removeprefix('tl.')} {place}".strip())
    return found


TRANSCRIBED = {
    "program_barrier": ["drain", "debug_barrier"],
    "arrive": ["program_barrier", "release atomic_add arrived"],
    "wait": ["acquire atomic_add arrived", "acquire atomic_add arrived", "debug_barrier"],
    "leave": ["program_barrier", "acq_rel atomic_add left", "store arrived", "store left", "store launches"],
}
"""The steps of `Model`, by function of `sync.py`; the count that the host reads is no part of the barrier."""


def test_the_model_is_what_sync_does() -> None:
    source = Path(sync.__file__).read_text()
    for function, steps in TRANSCRIBED.items():
        assert synchronisation(source, function)[: len(steps)] == steps
    relaxed = source.replace('1, sem="release"', '1, sem="relaxed"')
    assert synchronisation(relaxed, "arrive") != TRANSCRIBED["arrive"]
    undrained = source.replace("        drain(BACKEND)\n", "")
    assert synchronisation(undrained, "program_barrier") != TRANSCRIBED["program_barrier"]
