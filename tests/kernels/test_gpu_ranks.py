"""Several ranks at the real widths: in lockstep on one GPU, and two of them on a GPU each, a launch a step."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from glm53_mono.kernels.peers import PEER_QUARTERS
from glm53_mono.reference.state import Caches, StepInputs
from tests.kernels import full_width, two_ranks
from tests.kernels.chains import run_chain
from tests.kernels.full_width import ROOT, digest, full_model, full_step
from tests.kernels.ranks import Ranks, RanksComparison, differing_ranks, lockstep, one_ahead
from tests.kernels.rig import Model

pytestmark = pytest.mark.gpu

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host")
FAULT = re.compile(r"rank 0, program \d+ waited \S+ s before phase \d+ \(\w+ of layer -?\d+\): rank 1 has not left")


@pytest.fixture(scope="module")
def model() -> Model:
    return full_model()


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("lengths", "tokens", "padded"), [([1, 256, 2052, 8190], 1, 1), ([2049], 4, 1)], ids=str)
def test_ranks_are_within_bounds_and_agree(
    model: Model, seed: int, ranks: int, lengths: list[int], tokens: int, padded: int
) -> None:
    caches, inputs = full_step(model, lengths, seed, tokens=tokens, padded=padded, verify=tokens > 1)
    RanksComparison.of_ranks(model, caches, inputs, ranks, backend="cuda").whole_step().assert_right()


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("tokens", "lengths"), [(3, [2049, 255]), (4, [2046, 4093]), (6, [0])], ids=["MTP2", "MTP3", "MTP5"]
)
def test_verify_equals_decode(model: Model, seed: int, ranks: int, tokens: int, lengths: list[int]) -> None:
    def prepare(model: Model, caches: Caches, inputs: StepInputs, *, backend: str) -> Ranks:
        return Ranks.prepare(model, caches, inputs, ranks, backend=backend)

    def run(launches: Ranks, _caches: Caches, inputs: StepInputs) -> torch.Tensor:
        hidden = launches.run_step(inputs)
        assert not differing_ranks(launches, hidden)
        return hidden[0]

    assert not run_chain(
        model, lengths, tokens, 2, seed, max_tokens=full_width.MAX_TOKENS, backend="cuda", device=full_width.DEVICE,
        prepare=prepare, run=run,
    )  # fmt: skip


def test_a_rank_that_runs_ahead_changes_no_bit(model: Model, seed: int) -> None:
    answers = []
    for order in (lockstep, one_ahead(0), one_ahead(1)):
        caches, inputs = full_step(model, [300, 2052], seed)
        answers.append(
            digest(Ranks.prepare(model, caches, inputs, 2, backend="cuda").run_step(inputs, order)[0], caches)
        )
    assert len({*answers}) == 1


def on_two_gpus(folder: Path, run: str) -> list[tuple[int, dict[str, Any], str]]:
    """Exit status, answer and errors of either rank."""
    command = [sys.executable, "-m", "tests.kernels.two_ranks"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder), run], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(two_ranks.RANKS)
    ]
    found = []
    for process in processes:
        status, out, error = full_width.finished(process)
        found.append((status, json.loads(out.splitlines()[-1]) if out else {}, error))
    return found


@two_gpus
@pytest.mark.parametrize("run", ["step", "late"])
def test_two_gpus_answer_as_one_does_in_lockstep(model: Model, tmp_path: Path, run: str) -> None:
    """The second step; one rank starts it as the other one does, or a second later."""
    found = on_two_gpus(tmp_path, run)
    assert [status for status, _, _ in found] == [0, 0], found
    caches, inputs = full_step(model, two_ranks.LENGTHS, two_ranks.SEED)
    ranks = Ranks.prepare(model, caches, inputs, two_ranks.RANKS, backend="cuda")
    for _ in range(2):
        hidden = ranks.run_step(inputs)
    assert [answer["digest"] for _, answer, _ in found] == [
        digest(own, shard) for own, shard in zip(hidden, ranks.shards, strict=True)
    ]


@two_gpus
def test_a_thousand_replays_on_two_gpus(tmp_path: Path) -> None:
    found = on_two_gpus(tmp_path, "replays")
    assert [status for status, _, _ in found] == [0, 0], found
    assert len({answer["digest"] for _, answer, _ in found}) == 1


@two_gpus
@pytest.mark.parametrize("run", ["withheld", "killed"])
def test_a_rank_that_does_not_come_is_named_in_time(tmp_path: Path, run: str) -> None:
    (status, answer, error), _ = on_two_gpus(tmp_path, run)
    assert status != 0
    assert FAULT.search(error), error
    least = two_ranks.DEADLINE_S * PEER_QUARTERS.value / 4
    assert least <= answer["ended_after_s"] <= 2 * two_ranks.DEADLINE_S


@two_gpus
def test_builds_and_teardowns_leave_nothing(tmp_path: Path) -> None:
    found = on_two_gpus(tmp_path, "cycles")
    assert [status for status, _, _ in found] == [0, 0], found
    for _, answer, _ in found:
        assert len({*answer["taken"][1:]}) == 1
