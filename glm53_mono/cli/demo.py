"""`glm53-mono demo`: a small GLM-5.3-Flash, step by step on SGLang's own forward and on ours, compared part by part."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from glm53_mono.cli.demo_plan import DRAFT_TOKENS, Plan
from glm53_mono.cli.versions import SOFTWARE, is_tested, versions_of

if TYPE_CHECKING:
    from glm53_mono.cli.demo_run import MakeRunner, Outcome
    from glm53_mono.cli.parts import Scores

ORACLE = Path("tests", "oracle", "sglang_cpu")
"""Where a checkout keeps what runs SGLang's forward on a CPU."""

EXPERTS = 8
INDEX_TOPK = 16
"""History tokens a row attends at most: four pools, so that rows of the demo's short contexts choose."""


class DemoError(ValueError):
    """The demo cannot run; the message is one line for the user."""


FULL = Plan(prompt_tokens=(70, 37), decode_steps=4, verify_rounds=6)
QUICK = Plan(prompt_tokens=(37,), decode_steps=2, verify_rounds=3)


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="One request and few steps: under a minute on two cores.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights, prompts and the mistakes in the drafts, from 0.")] = 0,
) -> None:
    """Generate with a small GLM-5.3-Flash of random weights, and hold our step against SGLang's own forward.

    The reference and the kernels, in Triton's interpreter, run the same steps, each part on what SGLang's part read.
    Prompt, decode steps, then MTP3 verify rounds whose drafts are wrong on purpose in places, commits included. Exit
    status: 0 if every part kept to its bound, 1 if not, 2 if the demo cannot run.
    """
    try:
        ok = run_demo(QUICK if quick else FULL, seed, Console(), Console(stderr=True))
    except DemoError as error:
        typer.echo(f"glm53-mono demo: {error}", err=True)
        raise typer.Exit(2) from error
    if not ok:
        raise typer.Exit(1)


def run_demo(
    plan: Plan, seed: int, out: Console, progress_on: Console, make_runners: Sequence[MakeRunner] | None = None
) -> bool:
    """Run the demo and print what it found.

    Args:
        plan: how long the run is.
        seed: of everything random.
        out: where the report goes.
        progress_on: where the progress bar goes.
        make_runners: the fast sides; the reference and the kernels if not given.

    Returns:
        Whether every part of every fast side kept to its bound.

    Raises:
        DemoError: the demo cannot run here.
    """
    if seed < 0:
        raise DemoError(f"--seed {seed} is less than 0")
    require_sglang()
    oracle = load_oracle(Path(__file__).resolve().parents[2])
    with warnings.catch_warnings():
        # SGLang warns at every import about what it cannot do without a GPU.
        warnings.simplefilter("ignore")
        started = time.monotonic()
        outcome, description = _run(oracle, plan, seed, progress_on, make_runners)
    print_report(out, outcome, [*description, ("time", f"{time.monotonic() - started:.0f} s")])
    return outcome.ok


def load_oracle(checkout: Path) -> Any:
    """The package that runs SGLang's forward on a CPU, from a checkout.

    Raises:
        DemoError: the directory is no checkout.
    """
    package = checkout / ORACLE / "__init__.py"
    if not package.is_file():
        raise DemoError(
            f"SGLang's forward on a CPU is part of a checkout, and {checkout} has no {ORACLE}: run `make demo` in one"
        )
    name = ORACLE.name
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, package, submodule_search_locations=[str(package.parent)])
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    # Before torch and Triton are imported: they read the environment then.
    importlib.import_module(f"{name}.context").prepare_environment()
    for part in ("batches", "forward", "models"):
        importlib.import_module(f"{name}.{part}")
    return sys.modules[name]


def require_sglang() -> None:
    """Check that the SGLang is installed whose forward the oracle knows how to run.

    Raises:
        DemoError: it is not.
    """
    sglang = next(software for software in SOFTWARE if software.module == "sglang")
    found = versions_of(sglang).installed
    if found is None:
        raise DemoError("the slow side is SGLang's own forward, and SGLang is not installed: `make demo` installs it")
    if not is_tested(sglang, found):
        raise DemoError(f"the demo runs SGLang {', '.join(sglang.tested)} on a CPU, and SGLang {found} is installed")


def _run(
    oracle: Any, plan: Plan, seed: int, progress_on: Console, make_runners: Sequence[MakeRunner] | None
) -> tuple[Outcome, list[tuple[str, str]]]:
    import torch

    from glm53_mono.checkpoint.config import checkpoint_geometry
    from glm53_mono.cli.checkpoint import checkpoint_tensors
    from glm53_mono.cli.demo_run import Demo
    from glm53_mono.cli.kernel_runner import KernelRunner
    from glm53_mono.cli.reference_runner import ReferenceRunner
    from glm53_mono.reference.weights import from_checkpoint

    torch.set_num_threads(1)
    config = oracle.models.small_config(oracle.models.ONE_OF_EACH, experts=EXPERTS, index_topk=INDEX_TOPK)
    geometry = checkpoint_geometry(config)
    with _Bar(progress_on, plan) as advance:
        advance("build SGLang's model")
        tensors = dict(checkpoint_tensors(config, seed))
        weights = from_checkpoint(tensors, geometry)
        with oracle.forward.serving(
            config,
            tensors.items(),
            requests=len(plan.prompt_tokens),
            max_context=max(plan.contexts),
            pages=sum(plan.pages(geometry.page_tokens)),
            draft_tokens=DRAFT_TOKENS,
        ) as model:
            runners = make_runners or [ReferenceRunner, KernelRunner]
            outcome = Demo(oracle, model, weights, geometry, plan, runners, seed).run(advance)
            replaced = len({patch.reason for patch in model.applied})
    return outcome, _description(geometry, plan, seed, replaced, outcome)


class _Bar:
    """A bar with one tick for each forward, and the name of the one that runs."""

    def __init__(self, console: Console, plan: Plan) -> None:
        columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, transient=True)
        self.task = self.bar.add_task("", total=plan.steps + 1)

    def __enter__(self) -> Callable[[str], None]:
        self.bar.start()
        begun: list[str] = []

        def advance(name: str) -> None:
            self.bar.update(self.task, description=name, completed=len(begun))
            begun.append(name)

        return advance

    def __exit__(self, *_error: object) -> None:
        self.bar.stop()


def _description(geometry: Any, plan: Plan, seed: int, replaced: int, outcome: Outcome) -> list[tuple[str, str]]:
    import torch
    import triton

    kinds = ", ".join(
        f"{'KDA' if geometry.is_kda(layer) else 'DSA'} + {'dense' if geometry.is_dense(layer) else 'experts'}"
        for layer in range(geometry.layers)
    )
    return [
        ("model", f"{geometry.layers} layers ({kinds}), hidden {geometry.hidden}, random weights, seed {seed}"),
        (
            "run",
            f"prompts of {_listed(plan.prompt_tokens)} tokens, {plan.decode_steps} decode steps, "
            f"{plan.verify_rounds} verify rounds of {DRAFT_TOKENS} tokens a request",
        ),
        (
            "slow side",
            f"SGLang {importlib.metadata.version('sglang')}, its own forward on the CPU of {platform.node()} "
            f"({platform.machine()}): torch {torch.__version__}, Triton {triton.__version__} in its interpreter; "
            f"what is CUDA alone is replaced ({replaced} reasons in {ORACLE / 'patches.py'})",
        ),
        *(("fast side", f"{name}: {where}") for name, where in outcome.where.items()),
    ]


def print_report(out: Console, outcome: Outcome, description: list[tuple[str, str]]) -> None:
    """Print what ran where, a table of parts for each fast side, the tokens and the verdict."""
    for name, text in description:
        out.print(f"{name + ':':11}{text}", highlight=False, soft_wrap=True)
    for name, scores in outcome.scores.items():
        out.print(_table(name, scores))
    for number, tokens in enumerate(outcome.tokens):
        out.print(f"tokens of request {number}: {_listed(tokens)}", highlight=False, soft_wrap=True)
    for number, lengths in enumerate(zip(*outcome.accept_lengths, strict=True)):
        out.print(f"accept lengths of request {number}: {_listed(lengths)}", highlight=False, soft_wrap=True)
    out.print(
        f"drafts: {outcome.accepted_drafts} of {outcome.drafts} accepted; "
        f"the stand-in proposed {outcome.right_drafts} before a mistake on purpose",
        highlight=False,
        soft_wrap=True,
    )
    for name, scores in outcome.scores.items():
        for failure in scores.failures():
            out.print(f"{name}: {failure}", highlight=False, soft_wrap=True)
    out.print("PASS" if outcome.ok else "FAIL", style="bold green" if outcome.ok else "bold red")


def _table(name: str, scores: Scores) -> Table:
    table = Table(
        title=f"{name} against SGLang, each part given SGLang's input; in units of the RMS",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    for column in ("part", "values", "rel RMSE", "bound", "max abs", "bound", "verdict"):
        table.add_column(column, justify="left" if column in ("part", "verdict") else "right", no_wrap=True)
    for part in scores.bounds:
        if (score := scores.parts.get(part)) is None:
            continue
        measured, bound = score.measured, score.bound
        table.add_row(
            part,
            f"{score.values:,}",
            f"{measured.rel:.1e}",
            f"{bound.rel:.0e}",
            f"{measured.max_abs:.1e}",
            f"{bound.max_abs:.0e}",
            "ok" if score.ok else "[bold red]EXCEEDED[/]",
        )
    return table


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
