"""Two ranks of SGLang's server on the CPU, each in a process: its sharded weights as we read them, both forwards.

SGLang's side reduces over gloo. Ours runs the built runtime: exchange, launches and flags are the real ones, but for
handles of mapped files instead of GPU memory and a wait that the interpreter would not do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
LONGEST_S = 400
SHARED = (
    *(
        "embedding",
        "first_token",
        "qkv",
        "beta",
        "decay_up",
        "taps",
        "a_log",
        "dt_bias",
        "query",
        "key_up",
        "value_up",
        "output",
    ),
    *("gate_up", "down", "shared.gate_up", "shared.down"),
)
"""Weights of which each rank has its own part."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank's process found."""
    folder, seed = tmp_path_factory.mktemp("ranks"), str(request.config.option.seed)
    command = [sys.executable, "-m", "tests.oracle.ranks_process"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(folder), seed], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    found = [process.communicate(timeout=LONGEST_S) for process in processes]
    for process, (_, error) in zip(processes, found, strict=True):
        assert process.returncode == 0, error[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in found]


def test_sglangs_shards_are_read_as_they_are(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["weights"] == []
        differing = answer["weights of another rank"]
        for name in SHARED:
            assert any(each.endswith(name) for each in differing), name
        assert not any("router" in each or "indexer" in each or "mhc" in each for each in differing)


def test_two_ranks_decode_as_sglangs_do(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["ranks"] == RANKS
        assert answer["differences"] == []
        assert answer["differences with a bug"] != []
    assert len({answer["bits"] for answer in answers}) == 1
