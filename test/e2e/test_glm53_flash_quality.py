"""`soak`, `diagnose` and the probes against a real server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glm53_mono.cli.main import app
from glm53_mono.diagnose.verdict import Ruling
from glm53_mono.metrics import KERNEL
from glm53_mono.probe.observer import PROBE
from glm53_mono.probe.report import MARK
from test.e2e.conftest import Model
from test.e2e.scenario import Plan
from test.e2e.server import COUNTED, MONOKERNEL, Generation, command_of, grown, running

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SESSIONS = ("--sessions", "4", "--parallel", "2", "--turns", "10", "--answer", "128", "--minutes", "8")

MOST_DIVERGED = 0.05
"""Of the answers of a model of random weights, whose likeliest tokens are near each other everywhere."""


def said(words: Sequence[str], *, statuses: Sequence[int]) -> dict[str, Any]:
    """What the command prints as JSON."""
    result = CliRunner().invoke(app, [*words])
    print(result.stderr)
    assert result.exit_code in statuses, (result.stdout, result.stderr, result.exception)
    return json.loads(result.stdout)


class TestMonokernelSoak:
    """Deep sessions without the monokernel, and the same prompts with it."""

    def test_sessions_do_not_diverge(self, model: Model, logs: Path) -> None:
        recorded, compared = logs / "soak-off.jsonl", logs / "soak-on.jsonl"
        common = ["soak", "--json", *SESSIONS, "--tokenizer", str(model.folder)]
        with running(model.folder, logs / "soak-off.log") as server:
            off = said([*common, "--out", str(recorded), server.url], statuses=(0, 1))
        assert off["complete"] and not off["failures"]
        with running(model.folder, logs / "soak-on.log", *COUNTED) as server:
            before = server.steps()
            on = said([*common, "--out", str(compared), server.url, str(recorded)], statuses=(0, 1))
            steps = grown(server.steps(), before)
        assert on["complete"] and not on["failures"]
        lead, follow = on["arms"]
        assert follow["turns"]["trials"] == lead["turns"]["trials"] > 20
        assert follow["deepest"] > 10_000 and follow["cached"] > 0.5
        assert steps[KERNEL, ""] > 10 * follow["turns"]["trials"]
        comparison = on["comparison"]
        print(comparison)
        assert comparison["diverged"]["trials"] == lead["turns"]["trials"]
        assert comparison["diverged"]["share"] <= MOST_DIVERGED
        assert comparison["turns_p"] > 0.01


class TestMonokernelDiagnose:
    """Arms of a server that is right, and one that no machine with one GPU can start."""

    def test_arms_run(self, model: Model, plan: Plan, logs: Path) -> None:
        file = logs / "requests.jsonl"
        requests = [{"input_ids": list(each.prompt), "max_new_tokens": 64} for each in plan.greedy]
        file.write_text("\n".join(map(json.dumps, requests)))
        arms = ["one at a time", "probe", "monokernel off", "graphs off", "TP"]
        words = ["diagnose", "--json", "--requests", str(file), "--out", str(logs / "diagnosis")]
        words += ["--tokenizer", str(model.folder), "--minutes", "40", "--tp", "8"]
        words += [word for arm in arms for word in ("--only", arm)]
        report = said([*words, "--", *command_of(model.folder, *MONOKERNEL)], statuses=(0,))
        verdicts = {verdict["arm"]: verdict for verdict in report["verdicts"]}
        print(json.dumps(verdicts, indent=2))
        ran = ["as it is", *arms[:-1]]
        assert {name for name, verdict in verdicts.items() if verdict["ruling"] == Ruling.NOT_RUN} == {"TP"}
        assert "the server ended" in verdicts["TP"]["evidence"]
        assert all(verdicts[name]["answers"] == 3 * len(requests) for name in ran)
        # random weights may repeat themselves, in every arm alike; no arm may be the one that does it
        assert not [name for name in arms if verdicts[name]["ruling"] == Ruling.IMPLICATED]


class TestMonokernelProbe:
    """The probes in a server with graphs, over requests that join, leave, are aborted and share a prefix."""

    def test_a_right_server_has_no_finding(self, model: Model, plan: Plan, logs: Path) -> None:
        with running(model.folder, logs / "probe.log", *COUNTED, environment={PROBE: "1"}) as server:
            server.generate_together(plan.forced)
            server.generate_in_turn(plan.passing, plan.aborted)
            history: list[int] = []
            for new, answer in plan.turns:
                history += new
                server.generate(Generation(history, len(answer), forced=answer))
                history += answer
            steps = server.steps()
        assert steps[KERNEL, ""] > 0
        assert "probes of each step's inputs take" in server.log
        assert MARK not in server.log, [line for line in server.log.splitlines() if MARK in line][:3]
