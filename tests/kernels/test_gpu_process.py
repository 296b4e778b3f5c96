"""Fresh processes agree to the bit, and a process whose launch waits in vain dies of a GPU fault that says where."""

from __future__ import annotations

import json
import re

import pytest

from tests.kernels import full_width

pytestmark = pytest.mark.gpu

PROCESSES = 10
FAULT = re.compile(r"program \d+ waited \S+ s before phase (\d+) \((\w+) of layer (-?\d+)\): (\d+) of (\d+) arrivals")
"""`Watch.sentence`, on either vendor's GPU; how the process dies of it is the driver's to say."""


@pytest.mark.parametrize("name", ["short", "8k"])
def test_fresh_processes_agree(compiled: None, name: str) -> None:
    """Twenty of them, ten at either context."""
    answers = []
    while len(answers) < PROCESSES:
        count = min(full_width.PROCESSES_AT_ONCE, PROCESSES - len(answers))
        for process in [full_width.start(name) for _ in range(count)]:
            status, out, error = full_width.finished(process)
            assert status == 0, error
            assert FAULT.search(error) is None
            answers.append(json.loads(out))
    assert all(answer["finite"] for answer in answers)
    assert len({answer["digest"] for answer in answers}) == 1


def test_a_withheld_arrival_is_a_fault_that_names_the_phase(compiled: None) -> None:
    """The programs wait at the barrier before phase 1 for an arrival that does not come, until the deadline."""
    status, out, error = full_width.finished(full_width.start("withheld"))
    assert status != 0
    assert out == ""
    fault = FAULT.search(error)
    assert fault is not None, error
    phase, kind, layer, seen, expected = fault.groups()
    assert (phase, kind, layer) == ("1", "MIX", "0")
    assert int(seen) == int(expected) - 1
