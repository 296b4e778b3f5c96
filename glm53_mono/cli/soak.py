"""`glm53-mono soak`: how often does a server's output go wrong in deep sessions?"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from glm53_mono.client.http import Client, ServerError
from glm53_mono.client.tokens import tokenizer_of
from glm53_mono.quality.journal import Journal, JournalError, read_header, read_records
from glm53_mono.soak.plan import Plan, PlanError
from glm53_mono.soak.report import Report, failures_of, report, turns_by_arm
from glm53_mono.soak.run import Arm, Soak

DEPTH = 300_000

PLAN = "plan"
"""Key of the plan in a journal's header."""


def soak(
    arms: Annotated[
        list[str],
        typer.Argument(
            metavar="URL|JSONL [URL|JSONL]",
            help="A server, or the records of an earlier run; two of them are compared.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File of the records; a second run goes on there. Needed with a URL.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="No turn begins after so long.")] = 30.0,
    sessions: Annotated[int, typer.Option(help="Sessions in all.", min=1)] = 16,
    parallel: Annotated[int, typer.Option(help="Sessions at once.", min=1)] = 4,
    turns: Annotated[int, typer.Option(help="Turns of a session.", min=1)] = 40,
    depth: Annotated[int, typer.Option(help="Tokens of a session, as far as they fit the server.", min=1)] = DEPTH,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 256,
    seed: Annotated[int, typer.Option(help="Of the sessions' contents.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with tokenizer.json, for servers without a tokenizer.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run deep sessions with a warm prefix cache while other requests come and go, and count answers that look wrong.

    Exit status 0: every session came to its end and nothing looks wrong; 1: something does, or sessions are left, which
    the same command goes on with; 2: bad arguments, or no server.
    """
    if len(arms) > 2:
        _refuse(f"{len(arms)} arms were named, two at most are compared")
    errors = Console(stderr=True, highlight=False)
    plan = Plan(seed, sessions, parallel, turns, depth, answer)
    try:
        if all(map(_is_file, arms)):
            complete, found = True, _recorded(arms)
        else:
            if out is None:
                raise PlanError("a server's answers need a file: name one with --out")
            complete, found = _run(
                arms, plan, out, minutes, tokenizer, lambda line: errors.print(escape(line), soft_wrap=True)
            )
    except (JournalError, PlanError, ServerError, OSError) as error:
        _refuse(str(error))
    if as_json:
        print(json.dumps({"complete": complete, **found.as_dict()}, indent=2))
    else:
        _print(found, complete)
    raise typer.Exit(0 if complete and found.is_clean else 1)


def _is_file(arm: str) -> bool:
    return not arm.startswith(("http://", "https://"))


def _recorded(arms: Sequence[str]) -> Report:
    """The report of files alone; the two arms of one file, if it has two."""
    files = [read_records(Path(arm)) for arm in arms]
    if len(files) == 1:
        return report(turns_by_arm(files[0]), failures_of(files[0]))
    chosen = {arm: _leading(records) for arm, records in zip(arms, files, strict=True)}
    if len(chosen) < 2:
        raise PlanError(f"{arms[0]} was named twice")
    return report(chosen, [failure for records in files for failure in failures_of(records)])


def _leading(records: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], Mapping[str, Any]]:
    return next(iter(turns_by_arm(records).values()), {})


def _run(
    names: Sequence[str], plan: Plan, out: Path, minutes: float, tokenizer: Path | None, say: Any
) -> tuple[bool, Report]:
    """Runs what the servers among the arms have to answer."""
    if len(set(names)) < len(names):
        raise PlanError(f"{names[0]} was named twice: two arms are two servers, or a server and a file")
    deadline = time.monotonic() + 60 * minutes
    # a recorded run leads: its answers are what the sessions go on with
    names = sorted(names, key=_is_file, reverse=True)
    made = []
    for name in names:
        if _is_file(name):
            file = Path(name)
            records = read_records(file)
            try:
                plan = Plan(**read_header(file)[PLAN])
            except (KeyError, TypeError) as error:
                raise JournalError(f"{file} does not begin with the plan of a soak: {error}") from error
            made.append(Arm(name, recorded=_leading(records)))
        else:
            client = Client(name.rstrip("/"))
            made.append(Arm(name, client, tokenizer_of(client, tokenizer)))
    if not any(map(_is_file, names)):
        for arm in made:
            assert arm.client is not None
            plan = plan.fitted(arm.client.limits())
    journal = Journal(out, {PLAN: asdict(plan), "arms": names})
    say(f"{plan.sessions} sessions of up to {plan.depth} tokens, {plan.parallel} at once")
    run = Soak(plan, made, journal, out.with_suffix(".suspects.jsonl"), deadline, say)
    complete = run.run()
    turns = turns_by_arm(journal.records)
    arms = {arm.name: turns.get(arm.name, {}) if arm.recorded is None else arm.recorded for arm in made}
    return complete, report(arms, failures_of(journal.records))


def _print(found: Report, complete: bool) -> None:
    console = Console(highlight=False)
    table = Table("arm", "answers that look wrong", "sessions", "found", "deepest", "cached", box=None, pad_edge=False)
    for arm in found.arms:
        detectors = ", ".join(f"{name} {count}" for name, count in arm.detectors.items()) or "nothing"
        table.add_row(
            *map(escape, (arm.name, str(arm.turns), str(arm.sessions), detectors)),
            str(arm.deepest),
            f"{arm.cached:.0%}",
        )
    console.print(table)
    if found.comparison is not None:
        compared = found.comparison
        console.print(
            f"Answers to the same prompt that diverged: {compared.diverged}; near-ties beside: {compared.near_ties}",
            markup=False,
        )
        console.print(
            f"If both arms were alike, rates as far apart would come with p = {compared.sessions_p:.3g} for sessions "
            f"and {compared.turns_p:.3g} for answers (Fisher's exact test).",
            markup=False,
        )
    for failure in found.failures:
        console.print(f"No answer: {failure}", markup=False)
    if not complete:
        console.print("Sessions are left: the same command goes on with them.")


def _refuse(sentence: str) -> NoReturn:
    print(f"glm53-mono soak: {sentence}", file=sys.stderr)
    raise typer.Exit(2)
