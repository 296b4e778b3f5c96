"""The protocol between ranks over every order of its steps, and the transcription that this rests on."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm53_mono.kernels import monokernel, peers
from tests.kernels.ranks_model import RanksModel, RanksProtocol
from tests.kernels.sync_model import Violation, broken
from tests.kernels.test_sync import synchronisation

TWO_RANKS = RanksModel(RanksProtocol())
THREE_RANKS = RanksModel(RanksProtocol(), programs=3, waves=1, reduces=2, launches=1)


@pytest.mark.parametrize("model", [TWO_RANKS, THREE_RANKS], ids=["waves", "ranks"])
def test_no_run_deadlocks_or_reads_stale_rows(model: RanksModel) -> None:
    assert model.explore() > 100


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        ({"drains": False}, "stale read"),
        ({"meets": False}, "stale read"),
        ({"releases": False}, "stale read"),
        ({"acquires": False}, "stale read"),
        ({"halves": 1}, "stale read"),
        ({"accepts": 1}, "stale read"),
        ({"restarts": True}, "stale read"),
        ({"reads_first": False}, "stale read"),
    ],
    ids=str,
)
def test_a_bug_in_the_protocol_is_found(bug: dict[str, object], says: str) -> None:
    with pytest.raises(Violation, match=says):
        broken(TWO_RANKS, **bug).explore()


TRANSCRIBED = {
    "raise_flags": ["program_barrier", "release atomic_xchg flags"],
    "poll": ["acquire atomic_add peer"],
    "wait_for_peers": ["debug_barrier"],
    "finish_reduce": ["program_barrier", "store place"],
}
"""The steps of `RanksModel`, by function of `peers.py`."""


def test_the_model_is_what_the_kernel_does() -> None:
    source = Path(peers.__file__).read_text()
    for function, steps in TRANSCRIBED.items():
        assert synchronisation(source, function) == steps, function
    relaxed = source.replace(
        'sem="release", scope="sys")\n\n\n@triton.jit\ndef poll',
        'sem="relaxed", scope="sys")\n\n\n@triton.jit\ndef poll',
    )
    assert synchronisation(relaxed, "raise_flags") != TRANSCRIBED["raise_flags"]


def unordered_by_system(source: str) -> list[str]:
    """Atomics on flags that another GPU reads or raises, at less than system scope."""
    return [
        line.strip() for line in source.splitlines() if "tl.atomic" in line and "flags" in line and '"sys"' not in line
    ]


def test_flags_are_of_system_scope() -> None:
    source = Path(peers.__file__).read_text()
    assert source.count("tl.atomic_xchg(flags") == source.count("tl.atomic_add(flags") == 1
    assert not unordered_by_system(source)
    assert len(unordered_by_system(source.replace('sem="acquire", scope="sys"', 'sem="acquire", scope="gpu"'))) == 1


def test_a_launch_leaves_before_it_raises_and_waits_before_it_adds() -> None:
    """The order in the launch's loop: wait for the peers, the phase, then the flags."""
    source = Path(monokernel.__file__).read_text()
    loop = source[source.index("for phase in tl.range") :]
    assert loop.index("wait_for_peers(") < loop.index("run_phase(") < loop.index("raise_flags(")
