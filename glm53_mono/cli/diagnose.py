"""`glm53-mono diagnose`: which part makes a server's output wrong?"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from glm53_mono.client.process import START_S
from glm53_mono.diagnose.arms import ArmError, Others, chosen
from glm53_mono.diagnose.command import Command
from glm53_mono.diagnose.requests import RecordingError, read_requests
from glm53_mono.diagnose.trial import Settings, Trial
from glm53_mono.diagnose.verdict import Ruling, Verdict, judge
from glm53_mono.quality.journal import Journal, JournalError

_STYLE = {Ruling.IMPLICATED: "red", Ruling.RULED_OUT: "green", Ruling.OPEN: "yellow", Ruling.NOT_RUN: "dim"}


def diagnose(
    server: Annotated[
        list[str],
        typer.Argument(
            metavar="URL | -- SERVER_COMMAND",
            help="A server that runs, or what starts one: a command, or the arguments of sglang.launch_server.",
        ),
    ],
    requests: Annotated[Path, typer.Option(help="Requests that came out wrong: JSONL, or SGLang's JSON request log.")],
    out: Annotated[Path, typer.Option(help="Folder of the records and the servers' logs; a second run goes on there.")],
    only: Annotated[
        list[str] | None, typer.Option(help="An arm to run, again if it failed; may be repeated. Default: all.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Nothing new begins after so long.")] = 60.0,
    start_minutes: Annotated[float, typer.Option(help="A server that takes longer to start has not.")] = START_S / 60,
    repeats: Annotated[int, typer.Option(help="How often each request is sent in an arm.", min=1)] = 3,
    parallel: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 4,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with tokenizer.json, for servers without a tokenizer.")
    ] = None,
    prefill: Annotated[
        bool, typer.Option(help="Compare each answer with what the same server's prefill makes of it.")
    ] = True,
    kv_dtype: Annotated[str | None, typer.Option(help="KV dtype of its arm; default: fp8 for bf16 and back.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="Sparse attention backend of its arm; default: fa3 for tilelang and back.")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks of the TP arm; default: 1, or 2 where it is 1.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which part of a server makes its output wrong, by sending the same requests to servers that differ in one
    thing each.

    Exit status 0: every arm has run; 1: some are left, and the same command goes on; 2: bad arguments.
    """
    url = server[0].rstrip("/") if len(server) == 1 and server[0].startswith("http") else None
    try:
        recorded = read_requests(requests)
        arms = chosen(only or [], starts_servers=url is None)
        out.mkdir(parents=True, exist_ok=True)
        journal = Journal(
            out / "answers.jsonl",
            {
                "server": server,
                "requests": [[each.name, each.prompt, each.tokens, each.contains] for each in recorded],
                "repeats": repeats,
                "prefill": prefill,
                "others": [kv_dtype, backend, tp],
            },
        )
    except (RecordingError, ArmError, JournalError, OSError) as error:
        _refuse(str(error))
    errors = Console(stderr=True, highlight=False)
    trial = Trial(
        url or Command.of(server),
        recorded,
        Others(kv_dtype, backend, tp),
        Settings(
            repeats=repeats,
            parallel=parallel,
            deadline=time.monotonic() + 60 * minutes,
            start_s=60 * start_minutes,
            tokenizer=tokenizer,
            scored=prefill,
            logs=out,
        ),
        journal,
        lambda line: errors.print(escape(line), soft_wrap=True),
    )
    complete = trial.run(arms, only or [])
    verdicts = judge(journal.records, arms)
    if as_json:
        report = {"complete": complete, "verdicts": [verdict.as_dict() for verdict in verdicts], "records": str(out)}
        print(json.dumps(report, indent=2))
    else:
        _print(verdicts, complete, starts_servers=url is None)
    raise typer.Exit(0 if complete else 1)


def _print(verdicts: Sequence[Verdict], complete: bool, *, starts_servers: bool) -> None:
    table = Table("arm", "hypothesis", "evidence", "ruling", box=None, pad_edge=False)
    for verdict in verdicts:
        style = _STYLE[verdict.ruling]
        table.add_row(
            escape(verdict.arm), escape(verdict.hypothesis), escape(verdict.evidence), f"[{style}]{verdict.ruling}[/]"
        )
    console = Console()
    console.print(table)
    if not complete:
        console.print("Time is up: the same command goes on from here.")
    if not starts_servers:
        console.print(
            "Flags and variables of a running server stay as they are: end it, and give its command behind --."
        )


def _refuse(sentence: str) -> NoReturn:
    print(f"glm53-mono diagnose: {sentence}", file=sys.stderr)
    raise typer.Exit(2)
