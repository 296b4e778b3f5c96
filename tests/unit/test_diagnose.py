"""`glm53-mono diagnose` against fake servers whose output is wrong for one known reason each, and against none."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from glm53_mono.check import watch as check_watch
from glm53_mono.check.settings import CHECK, FAIL
from glm53_mono.cli.main import app
from glm53_mono.diagnose.arms import ARMS, CHECK_ACTIVE, CHECK_VIOLATION, Arm, ArmError, Changes, Others, chosen
from glm53_mono.diagnose.command import LAUNCHER, Command
from glm53_mono.diagnose.requests import DEFAULT_TOKENS, RecordingError, read_requests
from glm53_mono.diagnose.trial import ANSWER, STATE, Ended
from glm53_mono.diagnose.verdict import Ruling, judge
from glm53_mono.probe.observer import PROBE
from tests.unit import fake_server
from tests.unit.fake_server import CORRUPTIONS, serving

SERVER = (
    *("--model-path", "/models/glm", "--tp", "1", "--kv-cache-dtype", "bfloat16"),
    *("--dsa-prefill-backend", "tilelang", "--dsa-decode-backend", "tilelang", "--enable-amd-monokernel"),
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens=4", "--cuda-graph-bs-decode", "1", "2", "4"),
)
"""Arguments in which every arm has something to change."""

DIFFERENCES = {
    "monokernel off": {"enable_amd_monokernel"},
    "graphs off": {"disable_cuda_graph"},
    "radix cache off": {"disable_radix_cache"},
    "chunked prefill off": {"chunked_prefill_size"},
    "overlap off": {"disable_overlap_schedule"},
    "drafts off": {
        *("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"),
    },
    "attention backend": {"dsa_prefill_backend", "dsa_decode_backend"},
    "KV dtype": {"kv_cache_dtype"},
    "TP": {"tp_size"},
}
"""SGLang's fields that each arm changes."""


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """The fields of SGLang's own parser."""
    import msgspec

    from glm53_mono.upstream.launch import parse

    arguments = parse(words)
    return {field.name: getattr(arguments, field.name) for field in msgspec.structs.fields(type(arguments))}


def applied(arm: Arm, *words: str, others: Others | None = None) -> Command:
    changed = arm.apply(Command.of(words), others or Others())
    assert changed is not None
    return changed


def arm_of(name: str) -> Arm:
    return next(arm for arm in ARMS if arm.name == name)


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm.changes is Changes.SERVER], ids=lambda arm: arm.name)
def test_an_arm_changes_one_variable_of_sglangs(arm: Arm) -> None:
    before = parsed(SERVER)
    command = applied(arm, *SERVER)
    assert command.words[: len(LAUNCHER)] == LAUNCHER and not command.environment
    after = parsed(command.words[len(LAUNCHER) :])
    # where SGLang puts the command line as it was given
    differing = {name for name in before if before[name] != after[name]} - {"launch_command"}
    assert differing == DIFFERENCES[arm.name]


def test_every_arm_of_a_server_is_checked() -> None:
    assert set(DIFFERENCES) == {arm.name for arm in ARMS if arm.changes is Changes.SERVER}


def test_watching_arms_change_variables_alone() -> None:
    for name, variables in (("probe", {PROBE: "1"}), ("check", {CHECK: "1", FAIL: "log"})):
        command = applied(arm_of(name), *SERVER)
        assert (command.words, command.environment) == (Command.of(SERVER).words, variables)
        assert arm_of(name).apply(Command.of(SERVER[:2]), Others()) is None


def test_what_is_already_so_is_nothing_to_change() -> None:
    for name, words in (
        ("monokernel off", SERVER[:2]),
        ("drafts off", SERVER[:2]),
        ("graphs off", (*SERVER, "--disable-cuda-graph")),
        ("chunked prefill off", ("--chunked-prefill-size=-1",)),
    ):
        assert arm_of(name).apply(Command.of(words), Others()) is None


def test_arms_of_several_choices() -> None:
    assert applied(arm_of("TP"), "--tensor-parallel-size", "4").value("--tp") == "1"
    assert applied(arm_of("TP"), "--tp", "1", others=Others(tp=8)).value("--tp") == "8"
    assert applied(arm_of("KV dtype"), "--kv-cache-dtype=fp8_e4m3").words[-1] == "bfloat16"
    assert applied(arm_of("attention backend"), "--tp", "1").words[-1] == "tilelang"
    old = applied(arm_of("monokernel off"), "--tp", "1", "--monokernel-backend", "amd", "--port", "1")
    assert old.words[len(LAUNCHER) :] == ("--tp", "1", "--port", "1")


def test_options_are_taken_out_with_their_values() -> None:
    command = Command.of(("run.sh", "--a", "1", "2", "--b=3", "--c", "-1", "--d"))
    assert command.without_options("--a", "--b").words == ("run.sh", "--c", "-1", "--d")
    assert (command.value("--b"), command.value("--c"), command.value("--e")) == ("3", "-1", None)
    assert command.has("--d") and not command.has("--")


def test_arms_are_named() -> None:
    assert chosen([], starts_servers=True) == list(ARMS)
    assert [arm.name for arm in chosen([], starts_servers=False)] == ["one at a time", "cold cache"]
    with pytest.raises(ArmError, match="arm 'graph' is not one of one at a time, cold cache, probe"):
        chosen(["graph"], starts_servers=True)
    with pytest.raises(ArmError, match="arm 'graphs off' starts a server of its own: give its command"):
        chosen(["graphs off"], starts_servers=False)


def recorded(folder: Path, *lines: dict[str, Any] | str) -> Path:
    file = folder / "requests.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def test_requests_are_read(tmp_path: Path) -> None:
    logged = {
        "event": "request.received",
        "rid": "x",
        "obj": {"text": None, "input_ids": [5, 6], "sampling_params": {"max_new_tokens": 9}},
    }
    finished = {"event": "request.finished", "obj": {"text": "a"}}
    file = recorded(
        tmp_path,
        {"prompt": "What?", "name": "first", "contains": "42"},
        {"input_ids": [1, 2], "max_new_tokens": 7},
        "[2026-12-01 00:00:00] " + json.dumps(logged),
        finished,
        "",
    )
    first, second, third = read_requests(file)
    assert (first.name, first.prompt, first.tokens, first.contains) == ("first", "What?", DEFAULT_TOKENS, "42")
    assert (second.prompt, second.tokens, second.name) == ((1, 2), 7, "line 2")
    assert (third.prompt, third.tokens) == ((5, 6), 9)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is no request"),
        ("3", "line 1 is no request: int, not an object"),
        ('{"input_ids": ["a"]}', "neither `prompt`, a text, nor `input_ids`, whole numbers"),
        ("", "holds no request"),
    ],
)
def test_what_is_no_request_is_refused(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        read_requests(recorded(tmp_path, line))
    with pytest.raises(RecordingError, match="cannot be read"):
        read_requests(tmp_path / "none")


QUESTIONS = [{"prompt": f"Question {number}: what failed?", "max_new_tokens": 760} for number in range(4)]


class Diagnosis:
    """What a run of the command printed as JSON."""

    def __init__(self, folder: Path, *words: str, requests: Sequence[dict[str, Any]] = QUESTIONS) -> None:
        options = ["--requests", str(recorded(folder, *requests)), "--out", str(folder / "out"), "--json"]
        result = CliRunner().invoke(app, ["diagnose", *options, *words])
        self.status, self.errors = result.exit_code, result.stderr
        assert result.stdout, result.stderr or result.exception
        said = json.loads(result.stdout)
        self.complete = said["complete"]
        self.verdicts = {verdict["arm"]: verdict for verdict in said["verdicts"]}

    def ruling(self, arm: str) -> str:
        return self.verdicts[arm]["ruling"]


def fake(*options: str) -> list[str]:
    return ["--", sys.executable, fake_server.__file__, *SERVER, *options]


def test_a_right_server_leaves_nothing_to_explain(tmp_path: Path) -> None:
    with serving() as (url, state):
        found = Diagnosis(tmp_path, "--repeats", "2", url)
    assert found.status == 0
    assert {name: found.ruling(name) for name in found.verdicts} == dict.fromkeys(
        ("as it is", "one at a time", "cold cache"), Ruling.OPEN
    )
    assert found.verdicts["as it is"]["answers"] == 8 and found.verdicts["as it is"]["symptomatic"] == 0
    assert state.flushes == 8 and state.most_running > 1


@pytest.mark.parametrize("corruption", [name for name in CORRUPTIONS if name != "other"])
def test_each_symptom_is_seen(tmp_path: Path, corruption: str) -> None:
    with serving(corruption=corruption, cause="always") as (url, _):
        found = Diagnosis(tmp_path, "--only", "one at a time", url)
    assert (found.ruling("as it is"), found.ruling("one at a time")) == (Ruling.IMPLICATED, Ruling.RULED_OUT)
    assert found.verdicts["as it is"]["symptomatic"] == found.verdicts["as it is"]["answers"] == 12


def test_content_that_must_be_there_is_missed(tmp_path: Path) -> None:
    asked = [QUESTIONS[0] | {"contains": "!"}, QUESTIONS[1] | {"contains": " "}]
    with serving() as (url, _):
        found = Diagnosis(tmp_path, "--only", "one at a time", url, requests=asked)
    assert found.verdicts["as it is"]["symptomatic"] == 3
    assert "content 3" in found.verdicts["as it is"]["evidence"]


@pytest.mark.parametrize(("cause", "arm"), [("batch", "one at a time"), ("cache", "cold cache")])
def test_what_the_asking_tells_is_found(tmp_path: Path, cause: str, arm: str) -> None:
    with serving(cause=cause) as (url, _):
        found = Diagnosis(tmp_path, url)
    assert found.ruling(arm) == Ruling.IMPLICATED
    assert [name for name in found.verdicts if found.ruling(name) == Ruling.RULED_OUT] == (
        [] if cause == "batch" else ["one at a time"]
    )


def test_the_part_is_found_and_the_others_are_ruled_out(tmp_path: Path) -> None:
    """Every arm starts a server of its own; the fault is in the graphs."""
    found = Diagnosis(tmp_path, "--repeats", "2", *fake("--cause", "graphs", "--watches", "--finds", PROBE))
    rulings = {name: found.ruling(name) for name in found.verdicts}
    assert rulings.pop("as it is") == Ruling.IMPLICATED
    assert rulings.pop("graphs off") == Ruling.IMPLICATED
    assert rulings.pop("probe") == Ruling.IMPLICATED
    assert (
        "1 lines in the server's log, the first: SGLANG_AMD_MONO_PROBE: probe finding in 3 steps"
        in (found.verdicts["probe"]["evidence"])
    )
    assert rulings.pop("TP") == Ruling.NOT_RUN
    evidence = found.verdicts["TP"]["evidence"]
    assert evidence.startswith("the server ended with status 1") and evidence.endswith("invalid device ordinal")
    assert set(rulings.values()) == {Ruling.RULED_OUT}
    assert len(rulings) == len(ARMS) - 3
    assert found.status == 0 and found.complete
    # nothing runs twice
    again = Diagnosis(tmp_path, "--repeats", "2", *fake("--cause", "graphs", "--watches", "--finds", PROBE))
    assert again.verdicts == found.verdicts and "starting" not in again.errors


def test_time_ends_a_diagnosis_and_another_run_goes_on(tmp_path: Path) -> None:
    with serving(cause="always") as (url, state):
        first = Diagnosis(tmp_path, "--minutes", "0", url)
        assert (first.status, first.complete, len(state.bodies)) == (1, False, 0)
        assert "out of time" in first.verdicts["cold cache"]["evidence"]
        second = Diagnosis(tmp_path, url)
        assert (second.status, second.complete) == (0, True)
        asked = len(state.bodies)
        Diagnosis(tmp_path, url)
        assert len(state.bodies) == asked


def test_answers_of_an_earlier_run_are_not_asked_for_again(tmp_path: Path) -> None:
    """An arm that failed is run again if it is named, the control always."""
    words = ("--only", "one at a time", "--parallel", "1")
    with serving(cause="always", breaks_after=5) as (url, state):
        broken = Diagnosis(tmp_path, *words, url)
        assert broken.ruling("as it is") == broken.ruling("one at a time") == Ruling.NOT_RUN
        assert "status 500" in broken.verdicts["as it is"]["evidence"]
        answered = broken.verdicts["as it is"]["answers"]
        assert answered == 2  # an answer and its score are two requests
        state.behaviour.breaks_after = None
        before = len(state.bodies)
        whole = Diagnosis(tmp_path, *words, url)
        assert len(state.bodies) - before == 2 * (12 - answered) + 2 * 12
    assert (whole.ruling("as it is"), whole.ruling("one at a time")) == (Ruling.IMPLICATED, Ruling.RULED_OUT)


def test_a_server_that_had_no_time_to_start_has_not_failed(tmp_path: Path) -> None:
    sleeps = ["--", sys.executable, "-c", "import time; time.sleep(60)"]
    found = Diagnosis(tmp_path, "--minutes", "0.002", *sleeps)
    assert not found.complete and "out of time" in found.verdicts["as it is"]["evidence"]
    found = Diagnosis(tmp_path, "--start-minutes", "0.002", "--only", "one at a time", *sleeps)
    assert "the server does not answer after 0.12 s" in found.verdicts["as it is"]["evidence"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "nothing", "http://127.0.0.1:1"], "arm 'nothing' is not one of"),
        (["--repeats", "2", "http://127.0.0.1:1"], "was begun with repeats 3, this run has 2"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    file = recorded(tmp_path, *QUESTIONS)
    options = ["--requests", str(file), "--out", str(tmp_path / "out")]
    CliRunner().invoke(app, ["diagnose", *options, "--minutes", "0", "http://127.0.0.1:1"])
    result = CliRunner().invoke(app, ["diagnose", *options, *words])
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1


def test_a_server_that_is_not_there_is_a_clear_sentence(tmp_path: Path) -> None:
    found = Diagnosis(tmp_path, "http://127.0.0.1:1")
    assert found.ruling("as it is") == Ruling.NOT_RUN
    assert "http://127.0.0.1:1/tokenize does not answer" in found.verdicts["as it is"]["evidence"]
    missing = Diagnosis(tmp_path / "b", "--", "/no/such/program") if (tmp_path / "b").mkdir() is None else None
    assert missing is not None and "cannot be run" in missing.verdicts["as it is"]["evidence"]


def records_of(
    control: tuple[int, int], own: tuple[int, int], ended: str = Ended.DONE, *, watched: bool = True
) -> list[dict[str, Any]]:
    def answers(arm: str, hits: int, count: int) -> list[dict[str, Any]]:
        return [
            {"kind": ANSWER, "arm": arm, "symptoms": [{"detector": "repetition"}] if place < hits else []}
            for place in range(count)
        ]

    states = [
        {
            "kind": STATE,
            "arm": arm,
            "ended": end,
            "reason": "why",
            "findings": [],
            "finding_count": 0,
            "watched": watched,
        }
        for arm, end in (("as it is", Ended.DONE), ("graphs off", ended), ("check", ended))
    ]
    return [*answers("as it is", *control), *answers("graphs off", *own), *answers("check", *own), *states]


@pytest.mark.parametrize(
    ("control", "own", "flipped", "watched"),
    [
        ((8, 12), (0, 12), Ruling.IMPLICATED, Ruling.OPEN),
        ((8, 12), (7, 12), Ruling.RULED_OUT, Ruling.RULED_OUT),
        ((1, 12), (0, 12), Ruling.OPEN, Ruling.OPEN),
        ((0, 12), (0, 12), Ruling.OPEN, Ruling.OPEN),
        ((12, 12), (1, 12), Ruling.IMPLICATED, Ruling.RULED_OUT),
    ],
)
def test_rulings(control: tuple[int, int], own: tuple[int, int], flipped: Ruling, watched: Ruling) -> None:
    _, graphs, check = judge(records_of(control, own), [arm_of("graphs off"), arm_of("check")])
    assert (graphs.ruling, check.ruling) == (flipped, watched)


def test_a_server_that_did_not_watch_itself_rules_nothing_out() -> None:
    _, check = judge(records_of((8, 12), (8, 12), watched=False), [arm_of("check")])
    assert check.ruling == Ruling.OPEN and "nothing in the server's log says that it watched" in check.evidence


def test_lines_of_the_check_are_told_apart() -> None:
    bound = SimpleNamespace(rel=1.0, max_abs=1.0)
    compared = SimpleNamespace(per_request=False, layer=3, part="kda", value="output", bound=bound)
    violation = SimpleNamespace(
        comparison=compared, distance=bound, step=5, row=1, request_row=2, place=7, found=1.0, expected=2.0
    )
    counts = SimpleNamespace(compared=3, steps=3, violating=0, expert_ties=0, pool_ties=0, left_out=0)
    comparisons = SimpleNamespace(comparisons=[], counts=lambda: counts, nearest_to_its_bound=lambda: (compared, bound))
    watch = check_watch.Watch(comparisons, 0, raises=False)
    assert re.search(CHECK_VIOLATION, watch.sentence(violation))
    assert not re.search(CHECK_VIOLATION, watch.summary())
    step = Path(check_watch.__file__).with_name("step.py").read_text()
    assert f'"{CHECK_ACTIVE}' in step


def test_what_did_not_run_says_why() -> None:
    _, graphs, _ = judge(records_of((3, 4), (0, 0), Ended.FAILED), [arm_of("graphs off"), arm_of("check")])
    assert (graphs.ruling, graphs.evidence) == (Ruling.NOT_RUN, "why")


def test_the_table_is_printed(tmp_path: Path) -> None:
    with serving() as (url, _):
        words = ["--requests", str(recorded(tmp_path, *QUESTIONS)), "--out", str(tmp_path / "out"), url]
        result = CliRunner().invoke(app, ["diagnose", *words], env={"COLUMNS": "200"})
    assert "hypothesis" in result.stdout and "nothing to explain with these requests" in result.stdout
    assert "end it, and give its command behind --" in result.stdout
