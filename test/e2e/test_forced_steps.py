"""256 forced steps: the kernel is as close to SGLang's forward as that one is to itself in another batch size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from glm53_mono.numerics import BOUNDS
from test.e2e.compare import MOST_FLIPS, OWN_NOISE
from test.e2e.forced_steps import STEPS, WIDTHS

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]

LONGEST_S = 540

NEAR_TIE = 0.1
"""Standard deviations of a row's biased scores within which rounding may choose another expert: inputs that are 1.5e-2
apart move the difference of two scores by 2e-2, five times that happens to one in a million."""

FEWEST_ALIKE = 0.7
"""Share of rows whose five routers all choose the same experts: of 16, two are so near a tie in one row of fifty."""


@pytest.fixture(scope="module", params=[(8, 16), (45, 16)], ids=["8 layers", "45 layers"])
def outcome(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> tuple[int, dict[str, Any]]:
    """How far the forwards are apart, by depth."""
    layers, experts = request.param
    command = [sys.executable, "-m", "test.e2e.forced_steps", str(layers), str(experts), str(pytestconfig.option.seed)]
    finished = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_S)
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = json.loads(finished.stdout.splitlines()[-1])
    print(layers, json.dumps(found))
    return layers, found


def few(layers: int) -> bool:
    """Whether a step has an absolute bound; more layers are measured by SGLang's own noise."""
    return layers <= 8


def test_every_step_is_close(outcome: tuple[int, dict[str, Any]]) -> None:
    """From the same caches: rows whose experts are the same, or all where hardly any layer lets a row be alike."""
    layers, found = outcome
    kernel, own = found["steps"], found["own_steps"]
    if few(layers):
        assert kernel["alike"] <= BOUNDS["step", "logits"].rel
        assert kernel["alike_rows"] >= FEWEST_ALIKE * kernel["rows"]
    else:
        assert kernel["overall"] <= OWN_NOISE * own["overall"]


def test_rows_part_at_near_ties_only(outcome: tuple[int, dict[str, Any]]) -> None:
    layers, found = outcome
    if not few(layers):
        pytest.skip("dozens of layers move scores so far that no gap is wide: the test above bounds what comes of it")
    assert found["steps"]["alike_rows"] < found["steps"]["rows"], "near-ties are common with 16 experts"
    assert found["steps"]["widest_gap"] <= NEAR_TIE


def allowed(layers: int, own: float) -> float:
    """Few layers may be as far as their bound even where SGLang is nearer to itself."""
    return max(BOUNDS["step", "logits"].rel if few(layers) else 0.0, OWN_NOISE * own)


def test_walks_stay_together(outcome: tuple[int, dict[str, Any]]) -> None:
    """256 steps, each from what the steps before it left; near-ties apart, what they leave in the state not.

    That is a few of a request's steps or dozens, by chance: the worst request is measured by SGLang's worst.
    """
    layers, found = outcome
    assert max(found["walk"]["logits"]) <= allowed(layers, max(found["own_walk"]["logits"]))
    assert max(found["walk"]["flips"]) <= max(MOST_FLIPS * STEPS, 2 * max(found["own_walk"]["flips"]))


def test_no_difference_grows(outcome: tuple[int, dict[str, Any]]) -> None:
    found = outcome[1]
    assert max(found["walk"]["growth"]) <= max(2.0, OWN_NOISE * max(found["own_walk"]["growth"]))


@pytest.mark.parametrize("part", ["state", "windows"])
def test_states_agree_at_the_end(outcome: tuple[int, dict[str, Any]], part: str) -> None:
    layers, found = outcome
    assert max(found["walk"][part]) <= allowed(layers, max(found["own_walk"][part]))


def test_a_step_of_any_width_is_one_kernel_between_sglangs_nodes(outcome: tuple[int, dict[str, Any]]) -> None:
    assert outcome[1]["out of place"] == {str(rows): [] for rows in WIDTHS}
