"""256 forced steps: the kernel stays as close to SGLang's forward as that one is to itself in another batch size."""

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


def allowed(layers: int, own: float) -> float:
    """Few layers have a bound of their own; many have SGLang's own noise."""
    return max(BOUNDS["step", "logits"].rel, OWN_NOISE * own) if layers <= 8 else OWN_NOISE * own


def test_logits_agree_over_256_steps(outcome: tuple[int, dict[str, Any]]) -> None:
    layers, found = outcome
    assert max(found["kernel"]["logits"]) <= allowed(layers, found["own"]["logits"][0])
    most = max(MOST_FLIPS * STEPS, 2 * found["own"]["flips"][0])
    assert max(found["kernel"]["flips"]) <= most


def test_no_difference_grows(outcome: tuple[int, dict[str, Any]]) -> None:
    found = outcome[1]
    assert max(found["kernel"]["growth"]) <= max(2.0, OWN_NOISE * found["own"]["growth"][0])


@pytest.mark.parametrize("part", ["state", "windows"])
def test_states_agree_at_the_end(outcome: tuple[int, dict[str, Any]], part: str) -> None:
    layers, found = outcome
    assert max(found["kernel"][part]) <= allowed(layers, found["own"][part][0])


def test_a_step_of_any_width_is_one_kernel_between_sglangs_nodes(outcome: tuple[int, dict[str, Any]]) -> None:
    assert outcome[1]["out of place"] == {str(rows): [] for rows in WIDTHS}
