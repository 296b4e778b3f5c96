"""`glm53-mono isa`: every kernel that a server can launch, compiled: what each takes, and what is wrong with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from glm53_mono.isa import worker_file
from glm53_mono.isa.occupancy import LIMITS
from glm53_mono.isa.report import Report
from glm53_mono.isa.variants import KernelVariant, variants
from glm53_mono.isas import ISAS

LONGEST_S = 1200
"""Seconds for one variant; a minute is usual on one core."""


class ExamineError(RuntimeError):
    """A variant that could not be compiled or read; the message is one line."""


def isa(
    isas: Annotated[
        list[str] | None, typer.Option("--isa", help=f"Only this one: {', '.join(ISAS)}; may be repeated.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Only variants whose name holds this, e.g. decode-tp1.")] = None,
    jobs: Annotated[int, typer.Option(help="Variants to compile at once, about 2 GB each.")] = 1,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the reports there too.")] = None,
    listings: Annotated[Path | None, typer.Option(help="Leave the assembly of each variant in this folder.")] = None,
) -> None:
    """Compile the kernels for a device that need not be here: registers, memory, occupancy, hazards, budgets.

    Exit status 0: nothing is wrong; 1: something is; 2: bad arguments.
    """
    for name in isas or ():
        if name not in ISAS:
            _refuse(f"--isa {name!r} is not one of {', '.join(ISAS)}")
    chosen = [each for name in isas or ISAS for each in variants(name) if only is None or only in each.name]
    if not chosen:
        _refuse(f"--only {only!r} is in the name of no variant")
    if jobs < 1:
        _refuse(f"--jobs {jobs} is less than 1")
    if as_json is not None and (as_json.is_dir() or not as_json.absolute().parent.is_dir()):
        _refuse(f"--json {as_json}: its folder does not exist, or it is one")
    if listings is not None and not listings.is_dir():
        _refuse(f"--listings {listings} is not a folder")
    reports, failed = [], []
    for variant, answer in examine_all(chosen, jobs, listings):
        if isinstance(answer, Report):
            reports.append(answer)
        else:
            failed.append(f"{variant.name}: {answer}")
    if as_json is not None:
        as_json.write_text(json.dumps([report.as_dict() for report in reports], indent=2) + "\n")
    if reports:
        _print(reports)
    failed += [f"{report.variant.name}: {line}" for report in reports for line in report.wrong]
    for line in failed:
        print(f"glm53-mono isa: {line}", file=sys.stderr)
    raise typer.Exit(1 if failed else 0)


def examine_all(
    chosen: Sequence[KernelVariant], jobs: int, listings: Path | None = None
) -> Iterator[tuple[KernelVariant, Report | ExamineError]]:
    """Each variant with its report, or with what kept it from any, in order; each in a process of its own."""

    def answer(variant: KernelVariant) -> Report | ExamineError:
        print(f"glm53-mono isa: compiling {variant.name}", file=sys.stderr, flush=True)
        try:
            return examine(variant, listings)
        except ExamineError as error:
            return error

    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(chosen, pool.map(answer, chosen), strict=True)


def examine(variant: KernelVariant, listings: Path | None = None) -> Report:
    """Compiles one variant and reads it.

    Raises:
        ExamineError: the process that does so ended without a report.
    """
    task = json.dumps([asdict(variant), None if listings is None else str(listings)])
    # A process that inherits the interpreter from a test run would have no kernel to compile.
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-P", str(worker_file()), task]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        raise ExamineError(f"compiling it took longer than {LONGEST_S} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ExamineError(f"it does not compile (status {done.returncode}): {last}")
    return Report.from_dict(json.loads(done.stdout))


def _print(reports: Sequence[Report]) -> None:
    table = Table(title="compiled, not run", title_justify="left")
    columns = ("variant", "registers", "spills", "scratch B", "LDS B", "of", "programs a unit", "waterfalls", "code B")
    for column in (*columns, "compile s", "hazards", "Triton"):
        table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
    for report in reports:
        found = report.resources
        table.add_row(
            report.variant.name,
            f"{found.registers}",
            f"{found.register_spills} + {found.scalar_spills} scalar",
            f"{found.scratch}",
            f"{found.shared:,}",
            f"{LIMITS[report.variant.isa].shared:,}",
            f"{report.programs_per_unit}",
            f"{found.waterfall_loops}",
            f"{found.code_bytes:,}",
            "cached" if report.from_cache else f"{report.seconds:.0f}",
            f"{len(report.hazards)}",
            report.triton,
        )
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table)


def _refuse(sentence: str) -> NoReturn:
    print(f"glm53-mono isa: {sentence}", file=sys.stderr)
    raise typer.Exit(2)
