"""SGLANG_AMD_MONO_CHECK on a GPU: captured steps of one loaded model, and a real server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from glm53_mono.check.settings import CHECK, FAIL
from glm53_mono.check.watch import REPORT_S
from test.e2e.server import MONOKERNEL, Generation, drafting, running

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]

LAYERS, EXPERTS, STEPS = 8, 16, 1000

LONGEST_S = 540

COUNTED = re.compile(r"monokernel check: rank 0: (\d+) of (\d+) steps compared, (\d+) with a violation")


@pytest.fixture(scope="module")
def checked(pytestconfig: pytest.Config) -> dict[str, Any]:
    """What the check said of captured steps."""
    arguments = map(str, (LAYERS, EXPERTS, pytestconfig.option.seed, STEPS))
    finished = subprocess.run(
        [sys.executable, "-m", "test.e2e.checked_steps", *arguments],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        env=os.environ | {CHECK: "1"},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = json.loads(finished.stdout.splitlines()[-1])
    print(json.dumps(found))
    return found


def test_right_steps_have_no_violation(checked: dict[str, Any]) -> None:
    counts = checked["clean"]["counts"]
    assert counts["violating"] == 0, checked["clean"]["violations"]
    assert counts["compared"] == counts["steps"] >= STEPS


def test_wrong_wiring_is_named(checked: dict[str, Any]) -> None:
    wrong = {name: found for name, found in checked["spoiled"].items() if found["named"] != found["expected"]}
    assert len(checked["spoiled"]) >= 12
    assert wrong == {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A synthetic model with its draft layer; drafts are right as often as chance has it."""
    made = tmp_path_factory.mktemp("model") / "checked"
    command = [sys.executable, "-c", "from glm53_mono.cli.main import app; app()", "checkpoint", str(made), "--mtp"]
    sizes = ["--layers", str(LAYERS), "--experts", str(EXPERTS), "--device", "cuda"]
    subprocess.run([*command, *sizes, "--seed", str(pytestconfig.option.seed)], check=True)
    return made


class TestMonokernelCheck:
    """A server under the check, graphs on: it answers, compares every step, and finds nothing."""

    @pytest.mark.parametrize("drafts", [(), drafting(3)], ids=["decode", "verify"])
    def test_a_server_checks_its_steps(self, drafts: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
        prompts = [[7 * place + token for token in range(60 * (place + 1))] for place in range(3)]
        environment = {CHECK: "1", FAIL: "raise"}
        with running(folder, tmp_path / "log", *MONOKERNEL, *drafts, environment=environment) as server:
            server.generate_together([Generation(prompt, 48) for prompt in prompts])
            server.generate(Generation(prompts[0], 32))
            time.sleep(2 * REPORT_S)
            counted = COUNTED.findall(server.log)
        assert counted, server.log[-3000:]
        compared, steps, violating = map(int, counted[-1])
        assert compared == steps > 0
        assert violating == 0
