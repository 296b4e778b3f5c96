"""What the measurement of rounds makes of a server's answers, and the servers that it starts."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from test.e2e import mtp_round
from test.e2e.mtp_round import (
    KERNEL,
    SGLANG,
    SHORT,
    Pace,
    RoundError,
    as_dict,
    check_accept_length,
    check_kernel,
    pace,
    parse_drafts,
    table,
)
from test.e2e.server import Answer, Generation, ServerError
from test.e2e.test_mtp_speed import EXPLAINED, H200_ROUND_MS, assert_explained, assert_faster

START_S = 0.3
"""What an answer of the server below takes beside its steps."""


class FakeServer:
    """Answers after so many seconds of its own clock, with so many tokens a step.

    Args:
        counts: whether its answers tell their verify steps.
    """

    log = ""

    def __init__(self, step_s: float, tokens_per_step: int, *, counts: bool = True, kernel: bool = True) -> None:
        self.step_s, self.tokens_per_step, self.counts, self.kernel = step_s, tokens_per_step, counts, kernel
        self.now, self.served = 0.0, 0

    def generate(self, generation: Generation) -> Answer:
        steps = -(-(generation.tokens - 1) // self.tokens_per_step)
        self.now += START_S + steps * self.step_s
        self.served += steps
        told = steps if self.counts and self.tokens_per_step > 1 else 0
        return Answer([7] * generation.tokens, 0, [], [], [], told)

    def steps(self) -> dict[tuple[str, str], int]:
        return {("kernel", "") if self.kernel else ("sglang", "4 rows"): self.served}


def paced(server: FakeServer, drafts: int, tokens: int = 100) -> Pace:
    return pace(server.generate, [5], tokens=tokens, pairs=3, drafts=drafts, clock=lambda: server.now)


def test_a_round_takes_what_a_longer_answer_takes_more() -> None:
    """33 rounds of 3 tokens for 100 tokens, 5 for 16: what an answer takes beside them falls out."""
    found = paced(FakeServer(0.0125, 3), 3)
    assert found.step_ms == pytest.approx(12.5) and found.least_ms == pytest.approx(found.most_ms)
    assert found.tokens_per_step == 3
    assert found.steps == 4 * (33 + 5)


def test_a_decode_step_gives_one_token() -> None:
    found = paced(FakeServer(0.0104, 1), 0)
    assert found.step_ms == pytest.approx(10.4)
    assert (found.tokens_per_step, found.steps) == (1, 4 * (99 + 15))


def test_a_slower_server_is_seen() -> None:
    assert paced(FakeServer(0.016, 3), 3).step_ms == pytest.approx(16)


def test_rounds_that_cannot_be_told_are_refused() -> None:
    with pytest.raises(RoundError, match="do not tell their verify steps"):
        paced(FakeServer(0.01, 3, counts=False), 3)
    with pytest.raises(RoundError, match="an answer of 16 tokens took no more steps than one of 16"):
        paced(FakeServer(0.01, 3), 3, tokens=SHORT)


def test_steps_that_sglang_ran_are_no_pace_of_the_kernel() -> None:
    check_kernel({("kernel", ""): 300, ("sglang", "extend"): 4}, 300)
    with pytest.raises(RoundError, match="the kernel ran 299 steps while the server took 300"):
        check_kernel({("kernel", ""): 299}, 300)
    with pytest.raises(RoundError, match="the kernel ran 0 steps"):
        check_kernel({("sglang", "4 rows"): 300}, 300)


def test_another_accept_length_than_the_simulated_one_is_refused() -> None:
    found = paced(FakeServer(0.0125, 3), 3, tokens=512)
    check_accept_length(found, 3.0)
    for wrong in (1.0, 2.5, 4.0):
        with pytest.raises(RoundError, match=f"a step gave 2.99 tokens, not {wrong:g}: SGLang did not simulate"):
            check_accept_length(found, wrong)


def of(step_ms: float, tokens: float = 3.0) -> Pace:
    return Pace(step_ms, step_ms, step_ms, 100, tokens)


PACES = {0: {SGLANG: of(12.0, 1.0), KERNEL: of(10.0, 1.0)}, 3: {SGLANG: of(16.2), KERNEL: of(12.5)}}


def lines(paces: mtp_round.Paces) -> list[str]:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(paces))
    kept = ([word for word in line.split() if word not in "│┃|"] for line in console.export_text().splitlines())
    return [" ".join(words) for words in kept if len(words) == 7 and words[0] in ("-", "3")]


def test_the_table_of_rounds() -> None:
    """A round of 16.2 ms pays from 1.35 tokens where a decode step takes 12.0, one of 12.5 from 1.25."""
    assert lines(PACES) == ["- 1.00 12.00 10.00 1.200 - -", "3 3.00 16.20 12.50 1.296 1.35 1.25"]
    assert lines({3: PACES[3]}) == ["3 3.00 16.20 12.50 1.296 - -"]
    values = json.loads(json.dumps(as_dict(PACES)))
    assert values["3"][KERNEL]["pays_from_accept_length"] == 1.25
    assert values["0"][KERNEL]["pays_from_accept_length"] is None


def test_rounds_that_are_not_faster_are_noticed() -> None:
    def rounds(kernel_ms: float, sglang_ms: float) -> dict[str, dict[str, dict[str, float]]]:
        return as_dict({3: {KERNEL: of(kernel_ms), SGLANG: of(sglang_ms)}})

    assert_faster(rounds(12.5, 16.2), "NVIDIA H200")
    assert_faster(rounds(H200_ROUND_MS, 16.2), "some GPU")
    for slow in (rounds(12.5, 12.5), rounds(H200_ROUND_MS, 16.2)):
        with pytest.raises(AssertionError, match="ms a round"):
            assert_faster(slow, "NVIDIA H200")


def test_a_launch_that_its_bytes_do_not_explain_is_noticed() -> None:
    """Of one request's whole verify step; fewer rows, and two requests, are not judged."""
    costs = [
        {"requests": requests, "drafts": drafts, "time_over_bytes": 1.0 if (requests, drafts) == (1, 3) else 2.0}
        for requests in (1, 2)
        for drafts in range(4)
    ]
    assert_explained(costs)
    costs[3]["time_over_bytes"] = EXPLAINED + 0.01
    with pytest.raises(AssertionError, match="of what the bytes explain"):
        assert_explained(costs)


@pytest.mark.parametrize("text", ["", "x", "8", "-1", "3,,4", "3.5"])
def test_numbers_of_drafts_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of numbers from 0 to 7"):
        parse_drafts(text)
    assert parse_drafts("0,3,3,7") == (0, 3, 7)


Started = list[tuple[list[str], dict[str, str]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """The servers that were asked for; the kernel's take 12 ms a step, SGLang's 16."""
    started: Started = []
    running_now: list[FakeServer] = []

    @contextmanager
    def running(folder: Path, log: Path, *arguments: str, environment: dict[str, str]) -> Iterator[Any]:
        text = json.loads((folder / "config.json").read_text())["text_config"]
        assert (text["num_hidden_layers"], text["n_routed_experts"]) == (4, 8)
        started.append((list(arguments), environment))
        server = FakeServer(
            0.012 if "--monokernel-backend" in arguments else 0.016,
            int(float(environment.get("SGLANG_SIMULATE_ACC_LEN", "1"))),
        )
        running_now.append(server)
        yield server

    def timed(*arguments: Any, **settings: Any) -> Pace:
        return pace(*arguments, **settings, clock=lambda: running_now[-1].now)

    monkeypatch.setattr(mtp_round, "running", running)
    monkeypatch.setattr(mtp_round, "pace", timed)
    return started


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(mtp_round.main)
    return CliRunner().invoke(app, ["--layers", "4", "--experts", "8", *arguments])


def test_both_arms_are_served_alike(started: Started, tmp_path: Path) -> None:
    done = run("--drafts", "0,1,3", "--json", str(tmp_path / "out.json"))
    assert done.exit_code == 0, done.output
    values = json.loads((tmp_path / "out.json").read_text())
    assert {arm: found["step_ms"] for arm, found in values["3"].items()} == {
        SGLANG: pytest.approx(16), KERNEL: pytest.approx(12),
    }  # fmt: skip
    assert values["1"][KERNEL]["tokens_per_step"] == 2, "no round gives more tokens than it has rows"
    (_, own0), (plain, own), (_, one), (_, _), (off, off_environment), (on, on_environment) = started
    assert own0 == own == {} and not any(word.startswith("--speculative") for word in plain)
    assert one["SGLANG_SIMULATE_ACC_LEN"] == "2"
    assert off_environment == on_environment == {
        "SGLANG_SIMULATE_ACC_LEN": "3.0", "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    }  # fmt: skip
    assert [word for word in on if word not in off] == ["--monokernel-backend", "amd"]
    assert [word for word in off if word not in on] == []
    assert on[on.index("--speculative-num-draft-tokens") + 1] == "4" and on[-1] == "dummy"


def test_a_limit_is_kept_or_the_status_says_so(started: Started) -> None:
    assert run("--at-most", "12.1").exit_code == 0
    done = run("--at-most", "11.9")
    assert done.exit_code == 1 and "a round of 3 drafts on the kernel takes more than 11.9 ms" in done.stderr


def test_a_kernel_that_did_not_run_is_no_measurement(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeServer, "steps", lambda server: {("sglang", "4 rows"): server.served})
    done = run()
    assert done.exit_code == 1 and "mtp_round: kernel, 3 drafts: the kernel ran 0 steps" in done.stderr


def test_a_length_that_is_not_simulated_is_no_measurement(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp_round, "environment_of", lambda length: {"SGLANG_SIMULATE_ACC_LEN": str(length - 1)})
    done = run()
    assert done.exit_code == 1 and "mtp_round: sglang, 3 drafts: a step gave 2.00 tokens, not 3" in done.stderr


def test_a_server_that_does_not_start_is_told(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def running(*arguments: Any, **settings: Any) -> Iterator[Any]:
        raise ServerError("the server ended with 1")
        yield

    monkeypatch.setattr(mtp_round, "running", running)
    done = run()
    assert done.exit_code == 1 and done.stderr == "mtp_round: sglang, 3 drafts: the server ended with 1\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--drafts", "8"), "--drafts '8' is not a list"),
        (("--tokens", "16"), "--tokens must be more than 16"),
        (("--accept-length", "0.5"), "--accept-length 0.5 is less than 1"),
        (("--pairs", "0"), "--pairs and --context at least 1"),
        (("--logs", "/nowhere"), "--logs /nowhere is not a folder"),
    ],
)
def test_bad_options_are_one_line(arguments: tuple[str, ...], sentence: str, started: Started) -> None:
    done = run(*arguments)
    assert done.exit_code == 2 and done.stderr.startswith("mtp_round: ") and done.stderr.count("\n") == 1
    assert sentence in done.stderr and started == []
