"""The demo's refusals, its table and its exit status; `tests/oracle/test_demo_run.py` runs it."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from glm53_mono.cli import demo as demo_module
from glm53_mono.cli.demo import QUICK, DemoError, load_oracle, print_report, require_sglang
from glm53_mono.cli.demo_plan import DRAFT_TOKENS, Plan, leading_matches
from glm53_mono.cli.demo_run import Outcome
from glm53_mono.cli.main import app
from glm53_mono.cli.parts import Scores
from glm53_mono.cli.versions import Versions
from glm53_mono.numerics import Distance

BOUNDS = {"kda": Distance(rel=1e-2, max_abs=0.1)}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--seed", "-1"], "--seed -1"), (["--seed", "many"], "--seed"), (["--slow"], "--slow"), (["now"], "now")],
)
def test_bad_input_is_refused(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert named in result.stderr
    assert not result.stdout


def test_kernels_are_declared_after_the_interpreter_is_chosen() -> None:
    """Triton reads `TRITON_INTERPRET` when a kernel is declared, and the demo sets it when it runs."""
    program = "import sys, glm53_mono.cli.demo; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_negative_seed_gets_one_line() -> None:
    result = CliRunner().invoke(app, ["demo", "--seed", "-1"])
    assert result.stderr == "glm53-mono demo: --seed -1 is less than 0\n"


def test_an_installed_package_has_no_oracle(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"run `make demo`"):
        load_oracle(tmp_path)


@pytest.mark.parametrize(
    ("installed", "message"), [(None, "SGLang is not installed"), ("0.5.24", r"SGLang 0\.5\.24 is installed")]
)
def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch, installed: str | None, message: str) -> None:
    monkeypatch.setattr(demo_module, "versions_of", lambda _software: Versions(installed, None, None))
    with pytest.raises(DemoError, match=message):
        require_sglang()


@pytest.mark.parametrize(("passed", "status"), [(True, 0), (False, 1)])
def test_exit_status_is_the_verdict(monkeypatch: pytest.MonkeyPatch, passed: bool, status: int) -> None:
    monkeypatch.setattr(demo_module, "run_demo", lambda *_args: passed)
    assert CliRunner().invoke(app, ["demo", "--quick"]).exit_code == status


@pytest.mark.parametrize(
    ("drafts", "targets", "count"),
    [
        ([5, 6, 7], [5, 6, 7, 8], 3),
        ([5, 6, 7], [5, 6, 1, 8], 2),
        ([5, 6, 7], [1, 6, 7, 8], 0),
        ([5, 6, 7], [5, 1, 7, 8], 1),
    ],
)
def test_leading_matches(drafts: list[int], targets: list[int], count: int) -> None:
    assert leading_matches(drafts, targets) == count


def test_a_plan_has_room_for_the_drafts_of_its_last_round() -> None:
    plan = Plan(prompt_tokens=(250, 10), decode_steps=2, verify_rounds=1)
    assert plan.contexts == [250 + 1 + 2 + DRAFT_TOKENS, 10 + 1 + 2 + DRAFT_TOKENS]
    assert plan.pages(256) == [2, 1]
    assert plan.steps == 4
    assert QUICK.steps < demo_module.FULL.steps


def scores_of(error: float) -> Scores:
    scores = Scores(BOUNDS)
    right = torch.ones(2, 8)
    scores.add("kda", right + error, right)
    return scores


@pytest.mark.parametrize(("error", "verdict"), [(0.0, "PASS"), (5e-3, "PASS"), (5e-2, "FAIL"), (float("nan"), "FAIL")])
def test_report_shows_the_verdict(error: float, verdict: str) -> None:
    page = io.StringIO()
    outcome = Outcome({"reference": scores_of(error)}, {"reference": "here"}, [[1, 2, 3]], [[2]], 3, 1, 1)
    print_report(Console(file=page, width=100), outcome, [("slow side", "SGLang")])
    text = page.getvalue()
    assert text.endswith(f"{verdict}\n")
    assert ("EXCEEDED" in text) == (verdict == "FAIL")
    assert "tokens of request 0: 1, 2, 3" in text
    assert "accept lengths of request 0: 2" in text


def test_errors_of_all_comparisons_count_together() -> None:
    scores = Scores(BOUNDS)
    right = torch.full((4,), 2.0)
    scores.add("kda", right, right)
    scores.add("kda", right * 1.02, right)
    assert scores.parts["kda"].measured.rel == pytest.approx(0.02 / 2**0.5)
    assert scores.parts["kda"].measured.max_abs == pytest.approx(0.02)
    assert scores.parts["kda"].values == 8
    assert not scores.ok


def test_nothing_compared_is_no_pass() -> None:
    assert not Scores(BOUNDS).ok
    assert not Outcome({}, {}, []).ok


def test_a_part_without_a_bound_is_refused() -> None:
    with pytest.raises(KeyError, match="experts"):
        Scores(BOUNDS).add("experts", torch.ones(1), torch.ones(1))
