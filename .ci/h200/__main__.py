"""`python3 .ci/h200 bundle | unpack | run`: see README.md beside this file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from run import JOBS, LIMIT_S, RunError
from run import run as run_job
from unpack import BUNDLE, ROOT, Places, UnpackError
from unpack import unpack as unpack_all

app = typer.Typer(add_completion=False, help="Runs on a bare H200 machine without a network.")

Root = Annotated[Path, typer.Option(help="Where everything lies on the machine.")]


@app.command()
def bundle(folder: Annotated[Path, typer.Option(help="Where the parts go.")] = BUNDLE) -> None:
    """Here, with a network: build the parts that calls carry."""
    # needs packages that the machine need not have
    from bundle import BundleError, build
    from pins import PinError

    try:
        build(folder)
    except (BundleError, PinError) as error:
        sys.exit(str(error))


@app.command()
def unpack(root: Root = ROOT, folder: Annotated[Path, typer.Option(help="What the call carried.")] = BUNDLE) -> None:
    """There: unpack what has come; does nothing twice."""
    try:
        unpack_all(folder, Places(root))
    except UnpackError as error:
        sys.exit(str(error))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    job: Annotated[str, typer.Argument(help=f"One of {', '.join(JOBS)}.")],
    out: Annotated[Path, typer.Option(help="Where logs and compiled kernels go; on the machine $OUT.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="For pytest, or for glm53-mono bench.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds.")] = LIMIT_S,
    tail: Annotated[int, typer.Option(help="Lines of the log to print.")] = 40,
    root: Root = ROOT,
) -> None:
    """There: run tests or the benchmark; options of ours stand before the job's name."""
    if job not in JOBS:
        sys.exit(f"there is no job {job!r}: take one of {', '.join(JOBS)}")
    try:
        status = run_job(job, arguments or [], Places(root), out.absolute(), limit_s=limit, tail=tail)
    except RunError as error:
        sys.exit(str(error))
    sys.exit(status)


app()
