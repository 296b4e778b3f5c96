"""`glm53-mono soak` against fake servers: deep sessions, what looks wrong in them, two arms that differ or do not."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glm53_mono.cli.main import app
from glm53_mono.client.http import Client, Limits
from glm53_mono.client.tokens import FILE, FileTokenizer, tokenizer_of
from glm53_mono.diagnose.requests import read_requests
from glm53_mono.quality.rates import fisher_exact
from glm53_mono.soak import run as run_module
from glm53_mono.soak.plan import MARGIN, PASSING_PROMPT, PASSING_TOKENS, QUESTION, SYSTEM, Plan, PlanError
from glm53_mono.soak.report import failures_of, report, turns_by_arm
from glm53_mono.soak.run import FAILED, TURN
from tests.unit.fake_server import CORRUPTIONS, serving

SMALL = ("--sessions", "2", "--parallel", "2", "--turns", "3", "--depth", "3600", "--answer", "500")
DETECTORS = {
    "repetition": "repetition",
    "control": "control tokens",
    "classes": "character classes",
    "broken": "broken characters",
}
"""What finds each corruption of a fake server in an answer by itself."""


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


class Run:
    """What the command printed as JSON, and its records."""

    def __init__(self, folder: Path, *words: str, out: str = "soak.jsonl", options: Sequence[str] = SMALL) -> None:
        self.out = folder / out
        result = CliRunner().invoke(app, ["soak", *options, "--out", str(self.out), "--json", *words])
        assert result.stdout, result.stderr or result.exception
        self.status, self.said = result.exit_code, json.loads(result.stdout)

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()[1:]]

    @property
    def turns(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == TURN]


@pytest.fixture
def right() -> Iterator[tuple[str, Any]]:
    with serving() as server:
        yield server


def test_a_right_server_is_clean(tmp_path: Path, right: tuple[str, Any]) -> None:
    url, _ = right
    run = Run(tmp_path, url)
    (arm,) = run.said["arms"]
    assert (run.status, run.said["clean"], run.said["complete"], arm["detectors"]) == (0, True, True, {})
    assert (arm["turns"]["hits"], arm["sessions"]["trials"]) == (0, 2)
    assert arm["turns"]["interval"][1] < 1.0
    # sessions grow, and all but their ends comes from the prefix cache
    turns = [record for record in run.turns if record["session"] == 0]
    prompts = [record["prompt_tokens"] for record in turns]
    assert prompts == sorted(prompts) and len(set(prompts)) == len(prompts) > 1
    assert [record["cached"] for record in turns] == [0, *prompts[:-1]]
    assert arm["deepest"] == max(prompts) <= 3600 - 500 and arm["cached"] > 0.25
    assert not run.out.with_suffix(".suspects.jsonl").exists()


def test_a_sessions_prompt_is_all_that_came_before(tmp_path: Path, right: tuple[str, Any]) -> None:
    url, state = right
    run = Run(tmp_path, url, options=("--sessions", "1", *SMALL[2:]))
    prompts = [body["input_ids"] for body in state.bodies if body["sampling_params"]["max_new_tokens"] == 500]
    answers = [record["tokens"] for record in run.turns]
    for earlier, answer, later in zip(prompts, answers, prompts[1:], strict=False):
        assert later[: len(earlier) + len(answer)] == earlier + answer
    assert "".join(map(chr, prompts[0])).startswith(SYSTEM) and "".join(map(chr, prompts[-1])).endswith(QUESTION)


def test_others_join_and_leave_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "PASSING_PAUSE_S", (0.0, 0.01))
    with serving() as (url, state):
        Run(tmp_path, url, options=("--sessions", "6", "--parallel", "1", *SMALL[4:6], "--answer", "400"))
    passing = [body for body in state.bodies if len(body["input_ids"]) <= PASSING_PROMPT[1]]
    assert passing and state.most_running > 1
    assert all(body["sampling_params"]["max_new_tokens"] <= PASSING_TOKENS[1] for body in passing)
    assert {body["rid"] for body in passing if body.get("stream")} == state.aborted


@pytest.mark.parametrize("corruption", DETECTORS)
def test_what_looks_wrong_is_counted(tmp_path: Path, corruption: str) -> None:
    with serving(corruption=corruption, cause="always") as (url, _):
        run = Run(tmp_path, url)
    (arm,) = run.said["arms"]
    assert run.status == 1 and not run.said["clean"]
    assert arm["detectors"][DETECTORS[corruption]] > 0
    assert arm["sessions"]["hits"] == 2
    assert arm["sessions"]["interval"][0] > 0.0
    suspects = read_requests(run.out.with_suffix(".suspects.jsonl"))
    assert len(suspects) == arm["turns"]["hits"] and suspects[0].tokens == 500


def test_every_corruption_of_an_answer_has_a_detector() -> None:
    # a drift is in the log-probabilities, another answer in the comparison of two arms
    assert {*DETECTORS, "drift", "other"} == set(CORRUPTIONS)


def test_two_arms_that_are_alike_do_not_differ(tmp_path: Path, right: tuple[str, Any]) -> None:
    with serving() as (other, _):
        run = Run(tmp_path, right[0], other)
    compared = run.said["comparison"]
    assert run.status == 0 and compared["diverged"]["hits"] == compared["near_ties"] == 0
    assert compared["diverged"]["trials"] == run.said["arms"][0]["turns"]["trials"] > 3
    assert compared["sessions_p"] == compared["turns_p"] == 1.0


@pytest.mark.parametrize(("tied", "diverged"), [(False, True), (True, False)])
def test_arms_that_say_something_else_diverge(
    tmp_path: Path, right: tuple[str, Any], tied: bool, diverged: bool
) -> None:
    """Both answer what the leading arm's session asks; where one nearly chose the other's token it is a near-tie."""
    with serving(corruption="other", cause="always", tied=tied) as (other, _):
        run = Run(tmp_path, right[0], other)
    compared = run.said["comparison"]
    count = run.said["arms"][0]["turns"]["trials"]
    assert (compared["diverged"]["hits"], compared["near_ties"]) == ((count, 0) if diverged else (0, count))
    assert run.status == (1 if diverged else 0)


def test_arms_of_which_one_is_corrupted_differ_by_fishers_test(tmp_path: Path, right: tuple[str, Any]) -> None:
    with serving(corruption="control", cause="always") as (other, _):
        run = Run(tmp_path, right[0], other)
    first, second = run.said["arms"]
    assert (first["turns"]["hits"], second["turns"]["hits"]) == (0, second["turns"]["trials"])
    assert run.said["comparison"]["turns_p"] < 0.05


def test_recorded_runs_are_compared(tmp_path: Path, right: tuple[str, Any]) -> None:
    """A file against a file; and a server that answers the prompts of a recorded run."""
    first = Run(tmp_path, right[0], out="first.jsonl")
    with serving(corruption="other", cause="always") as (url, _):
        second = Run(tmp_path, url, out="second.jsonl")
        replayed = Run(tmp_path, url, str(first.out), out="replayed.jsonl")
    again = Run(tmp_path, right[0], str(first.out), out="again.jsonl")
    count = first.said["arms"][0]["turns"]["trials"]
    # apart, their sessions part with the first answer; replayed, every turn is compared
    files = Run(tmp_path, str(first.out), str(second.out)).said["comparison"]["diverged"]
    assert (files["hits"], files["trials"]) == (2, 2)
    assert replayed.said["arms"][0]["name"] == str(first.out)
    assert (replayed.status, replayed.said["comparison"]["diverged"]["hits"]) == (1, count)
    assert (again.status, again.said["comparison"]["diverged"]) == (
        0,
        {"hits": 0, "trials": count}
        | {key: again.said["comparison"]["diverged"][key] for key in ("share", "interval")},
    )
    alone = CliRunner().invoke(app, ["soak", "--json", str(first.out)])
    assert json.loads(alone.stdout)["arms"][0]["turns"]["trials"] == count and alone.exit_code == 0


def test_time_ends_a_run_and_another_one_goes_on(tmp_path: Path, right: tuple[str, Any]) -> None:
    url, state = right
    nothing = Run(tmp_path, "--minutes", "0", url)
    assert (nothing.status, nothing.said["complete"], nothing.said["arms"][0]["turns"]["trials"]) == (1, False, 0)
    whole = Run(tmp_path, url)
    lines, before = whole.out.read_text().splitlines(), whole.turns
    whole.out.write_text("\n".join(lines[:5]) + "\n")
    kept = len(whole.turns)
    asked = sum(body["sampling_params"]["max_new_tokens"] == 500 for body in state.bodies)
    again = Run(tmp_path, url)
    assert again.status == 0 and again.said["arms"][0]["turns"] == whole.said["arms"][0]["turns"]
    more = sum(body["sampling_params"]["max_new_tokens"] == 500 for body in state.bodies) - asked
    assert more == len(before) - kept > 0 and kept > 0
    # what is asked again is asked the same
    assert {record["prompt"] for record in again.turns} == {record["prompt"] for record in before}


def test_a_server_that_breaks_is_reported_and_gone_on_with(tmp_path: Path) -> None:
    with serving(breaks_after=2) as (url, state):
        broken = Run(tmp_path, url)
        assert broken.status == 1 and not broken.said["complete"]
        assert any("status 500" in failure for failure in broken.said["failures"])
        assert any(record["kind"] == FAILED for record in broken.records)
        state.behaviour.breaks_after = None
        whole = Run(tmp_path, url)
    assert whole.said["complete"] and whole.said["failures"] == [] and whole.status == 0


def test_sessions_are_as_deep_as_the_server_allows() -> None:
    plan = Plan(seed=0, sessions=8, parallel=4, turns=40, depth=300_000, answer=256)
    assert plan.fitted(Limits(1_000_000, 10_000_000)).depth == 300_000
    assert plan.fitted(Limits(16_384, 10_000_000)).depth == 16_384 - 256 - MARGIN
    assert 4 * plan.fitted(Limits(16_384, 40_000)).depth < 40_000
    with pytest.raises(
        PlanError, match="takes 1024 tokens a request and 40000 at once, which leaves 256 for each of 4"
    ):
        plan.fitted(Limits(1024, 40_000))


def test_tools_say_much_the_same_again_and_again(seed: int) -> None:
    plan = Plan(seed=seed, sessions=1, parallel=1, turns=4, depth=16_000, answer=100)
    first, second = ("".join(map(chr, plan.turn(0, turn, ids))) for turn in (0, 1))
    assert plan.turn(0, 1, ids) == plan.turn(0, 1, ids) != plan.turn(1, 1, ids)
    assert len(second) == pytest.approx(plan.turn_tokens, abs=1200)
    lines = [line for line in (first + second).splitlines() if "host" in line]
    assert len(set(lines)) < len(lines) / 4


def test_passers_by_are_short(seed: int) -> None:
    plan = Plan(seed=seed, sessions=1, parallel=1, turns=4, depth=16_000, answer=100)
    source = random.Random(seed)
    for _ in range(20):
        prompt, tokens = plan.passer_by(source, ids)
        assert PASSING_PROMPT[0] <= len(prompt) <= PASSING_PROMPT[1]
        assert PASSING_TOKENS[0] <= tokens <= PASSING_TOKENS[1]


def test_the_tests_between_arms_are_fishers() -> None:
    def turns(hits: int, count: int) -> dict[tuple[int, int], dict[str, Any]]:
        return {
            (place, 0): {
                "suspicions": [{"detector": "repetition"}] * (place < hits),
                "prompt_tokens": 5,
                "cached": 1,
                "prompt": str(place),
                "tokens": [1],
                "gaps": [],
            }
            for place in range(count)
        }

    found = report({"a": turns(3, 20), "b": turns(11, 20)})
    one, other = found.arms
    assert found.comparison is not None
    assert found.comparison.sessions_p == fisher_exact(one.sessions, other.sessions) == pytest.approx(0.0187, rel=1e-2)
    assert found.comparison.diverged.trials == 20 and not found.is_clean
    assert turns_by_arm([]) == {} and failures_of([]) == []


def test_a_server_without_a_tokenizer_needs_a_file(tmp_path: Path) -> None:
    from glm53_mono.checkpoint.tokenizer import write_tokenizer

    write_tokenizer(tmp_path, 1024, 4096)
    with serving(has_tokenizer=False) as (url, _):
        client = Client(url)
        tokenizer = tokenizer_of(client, tmp_path)
        assert isinstance(tokenizer, FileTokenizer)
        assert tokenizer.decode(tokenizer.encode("<|user|>\nWhat?")) == "<|user|>\nWhat?"
        assert len(tokenizer.encode("<|user|>")) == 1
        result = CliRunner().invoke(app, ["soak", "--out", str(tmp_path / "a.jsonl"), url])
        assert result.exit_code == 2 and f"needs --tokenizer with the folder of its {FILE}" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["http://a", "http://b", "http://c"], "3 arms were named, two at most"),
        (["http://127.0.0.1:1"], "a server's answers need a file: name one with --out"),
        (["--out", "{folder}/x.jsonl", "http://127.0.0.1:1"], "does not answer"),
        (["--out", "{folder}/x.jsonl", "http://a", "http://a"], "http://a was named twice"),
        (["{folder}/none.jsonl"], "none.jsonl is missing or empty"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["soak", *(word.format(folder=tmp_path) for word in words)])
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1


def test_the_report_is_printed(tmp_path: Path, right: tuple[str, Any]) -> None:
    with serving(corruption="other", cause="always") as (other, _):
        words = ["soak", *SMALL, "--out", str(tmp_path / "a.jsonl"), right[0], other]
        result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert "95% interval" in result.stdout and "Fisher's exact test" in result.stdout
    assert "Answers to the same prompt that diverged:" in result.stdout
