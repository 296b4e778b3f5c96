"""`glm53-mono bench`: a step's time with the monokernel and with SGLang's own forward, over one loaded model."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from glm53_mono.checkpoint.config import model_config
from glm53_mono.checkpoint.tensors import tensor_table
from glm53_mono.cli.bench_origin import Progress, provenance
from glm53_mono.cli.checkpoint import checkpoint_tensors
from glm53_mono.geometry import MAX_ROWS, Geometry, GeometryError
from glm53_mono.isas import ISAS
from glm53_mono.refusals import DRAFT_REFUSALS, reasons

if TYPE_CHECKING:
    import torch

    from glm53_mono.cli.bench_report import Report
    from glm53_mono.upstream.bench_runner import BenchRunner, BenchServer
    from glm53_mono.upstream.running import ServedStep
    from glm53_mono.upstream.server import Server

DEFAULT_CONTEXTS = "1024,8192"
DEFAULT_ROWS = (1, 2, 4, 8)
"""Where no server says which have graphs."""

DRAFTS = "EAGLE"
"""SGLang's algorithm whose verify steps are measured; NEXTN resolves to it."""

DUMMY = "dummy"
"""SGLang's load format that reads no weights (configs/load_config.py)."""


class Only(StrEnum):
    """Which arms to measure."""

    BOTH = "both"
    MONOKERNEL = "mono"
    SGLANG = "sglang"


class OptionError(ValueError):
    """Options that cannot be measured; the message is one line for the user."""


@dataclass(frozen=True)
class Options:
    """The command's own options, parsed."""

    rows: tuple[int, ...] | None
    contexts: tuple[int, ...]
    steps: int
    only: Only
    randomise: bool | None
    seed: int
    json: Path | None
    phases: bool = False
    drafts_ms: Mapping[int, float] = field(default_factory=dict)


def bench(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- LAUNCH_SERVER_ARGUMENTS", help="The server whose steps are measured."),
    ] = None,
    rows: Annotated[
        str | None, typer.Option(help="Rows of a step, all requests together, e.g. 1,2,4,8; default: all with graphs.")
    ] = None,
    contexts: Annotated[
        str, typer.Option(help="Tokens that the first row of each request sees, its own included.")
    ] = DEFAULT_CONTEXTS,
    steps: Annotated[int, typer.Option(help="Replays of each graph; the median counts.")] = 50,
    only: Annotated[Only, typer.Option(help="Measure one arm alone.")] = Only.BOTH,
    randomise: Annotated[
        bool | None,
        typer.Option(
            help="Draw the weights as `checkpoint` does, on the GPU, for --load-format dummy, whose own weights route "
            "every token alike; default: with that format."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, caches and tokens, from 0.")] = 0,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers there too, after each step shape.")
    ] = None,
    phases: Annotated[
        bool, typer.Option("--phases", help="Tell where a launch's time goes; compiles the kernel once more.")
    ] = False,
    drafts_ms: Annotated[
        str | None,
        typer.Option(
            metavar="DRAFTS=MS[,...]",
            help="For a server that drafts: what a round of so many drafts takes beside its verify step, at one "
            "request, such as the round of `python -m test.e2e.mtp_round` less the step measured here.",
        ),
    ] = None,
    alone: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Measure the launch by itself, without SGLang: on drawn weights for the config.json of this folder, "
            "such as MXFP4 on an NVIDIA GPU, which SGLang does not serve there.",
        ),
    ] = None,
    predict: Annotated[
        str | None,
        typer.Option(
            "--predict",
            "--model",
            metavar="DEVICE",
            help="Measure nothing: predict the steps of the published model on mi355x or h200.",
        ),
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks, with --predict; default 1.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="Weights, with --predict: bf16, fp8 or mxfp4; default bf16.")
    ] = None,
) -> None:
    """Measure steps: the monokernel against SGLang's own forward, both as CUDA graphs over one loaded model.

    The steps are decode steps, or verify steps where the server's arguments ask for EAGLE drafts: then also launches by
    rows. Starts no server: SGLang's model runner runs in this process, on the first visible GPU. With --predict nothing
    runs: the published model's steps are predicted.
    """
    try:
        options = replace(
            parse_options(rows, contexts, steps, only, randomise, seed, as_json),
            phases=phases,
            drafts_ms={} if drafts_ms is None else parse_drafts_ms(drafts_ms),
        )
        if predict is not None:
            if options.drafts_ms:
                raise OptionError("--drafts-ms is for a server that drafts, and --predict starts none")
            _predict(predict, 1 if tp is None else tp, weights or "bf16", options, arguments or [])
            return
        for name, value in (("--tp", tp), ("--weights", weights)):
            if value is not None:
                raise OptionError(f"{name} {value} is for --predict; a server's own arguments stand behind --")
        if alone is not None and (arguments or options.drafts_ms):
            raise OptionError(
                f"--alone {alone} starts nothing of SGLang's and takes no server arguments and no --drafts-ms"
            )
        report = _run(arguments or [], options) if alone is None else _run_alone(alone, options)
    except OptionError as error:
        _refuse(str(error))
    _print(report)


def parse_options(
    rows: str | None,
    contexts: str,
    steps: int,
    only: Only,
    randomise: bool | None,
    seed: int,
    as_json: Path | None,
) -> Options:
    """Check what can be checked before anything is loaded.

    Raises:
        OptionError: a number that means nothing, or a file that could not be written.
    """
    if steps < 1:
        raise OptionError(f"--steps {steps} is less than 1")
    if seed < 0:
        raise OptionError(f"--seed {seed} is less than 0")
    if as_json is not None and (as_json.is_dir() or not as_json.absolute().parent.is_dir()):
        raise OptionError(f"--json {as_json}: its folder does not exist, or it is one")
    return Options(
        rows=None if rows is None else _numbers("--rows", rows),
        contexts=_numbers("--contexts", contexts),
        steps=steps,
        only=only,
        randomise=randomise,
        seed=seed,
        json=as_json,
    )


def parse_drafts_ms(text: str) -> dict[int, float]:
    """Milliseconds by number of drafts.

    Raises:
        OptionError: something else, or a number twice.
    """
    found: dict[int, float] = {}
    for pair in text.split(","):
        matched = re.fullmatch(r"([1-9]\d*)=(\d+(?:\.\d+)?)", pair.strip())
        if matched is None or int(matched[1]) in found:
            raise OptionError(f"--drafts-ms {text!r} is not a list of drafts and milliseconds, such as 1=1.5,3=3.2")
        found[int(matched[1])] = float(matched[2])
    return found


def arms_of(options: Options, server: BenchServer) -> tuple[str, ...]:
    """The arms to measure.

    Raises:
        OptionError: the arguments do not ask for the monokernel, but it is to be measured.
    """
    from glm53_mono.upstream.bench_runner import MONOKERNEL, SGLANG

    if not server.monokernel and options.only is not Only.SGLANG:
        raise OptionError(
            "the arguments do not ask for the monokernel: add --enable-amd-monokernel, or measure --only sglang"
        )
    return {Only.BOTH: (MONOKERNEL, SGLANG), Only.MONOKERNEL: (MONOKERNEL,), Only.SGLANG: (SGLANG,)}[options.only]


def check_drafts(server: Server, drafts_ms: Mapping[int, float]) -> None:
    """Refuses drafts whose verify steps are not measured, and times of drafts where there are none.

    Raises:
        OptionError: likewise.
    """
    algorithm = server.arguments.speculative_algorithm
    if algorithm not in (None, DRAFTS):
        raise OptionError(f"--speculative-algorithm {algorithm}: of drafts only those of {DRAFTS} are measured")
    for reason in reasons(DRAFT_REFUSALS, server):
        raise OptionError(reason)
    if drafts_ms and algorithm is None:
        raise OptionError("--drafts-ms is for a server that drafts: add its --speculative- arguments")


def shapes_of(options: Options, captured: Sequence[int], monokernel: bool, tokens: int = 1) -> list[tuple[int, int]]:
    """(rows, context) of every step shape, the contexts of one width together.

    Args:
        options: whose rows are measured; without any, all that can be.
        captured: requests of the graphs.
        monokernel: whether the rows must be some that it runs.
        tokens: rows of a request.

    Raises:
        OptionError: rows without a graph of their own.
    """
    widths = [count * tokens for count in captured if not monokernel or count * tokens <= MAX_ROWS]
    rows = widths if options.rows is None else options.rows
    missing = [count for count in rows if count not in widths]
    if missing:
        have = ", ".join(map(str, widths)) + (f" of up to {MAX_ROWS}" if monokernel else "")
        size = "--cuda-graph-bs-decode" + (f" times {tokens} rows a request" if tokens > 1 else "")
        raise OptionError(f"--rows {missing[0]} has no graph of its own; captured: {have} ({size})")
    return [(count, context) for count in rows for context in options.contexts]


def drawn_weights(options: Options, server: BenchServer) -> Callable[[], Iterator[tuple[str, torch.Tensor]]] | None:
    """What draws the weights, or None where SGLang's loader is to be left alone.

    Raises:
        OptionError: weights are to be drawn over a checkpoint's, or without a config.json to tell their shapes.
    """
    dummy = server.server.arguments.load_format == DUMMY
    if options.randomise is False or (options.randomise is None and not dummy):
        return None
    if not dummy:
        raise OptionError(f"--randomise would overwrite a checkpoint's weights: it needs --load-format {DUMMY}")
    config = drawable_config(Path(server.model_path), ", or use --no-randomise")
    return lambda: checkpoint_tensors(config, options.seed, "cuda")


def drawable_config(folder: Path, otherwise: str = "") -> dict[str, Any]:
    """The contents of a folder's config.json, which tell the shapes of its weights.

    Args:
        folder: of a checkpoint.
        otherwise: what else the user could do, behind "name a folder that ... wrote".

    Raises:
        OptionError: they do not.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
        tensor_table(config)
    except (OSError, ValueError, KeyError, GeometryError) as error:
        text = " ".join(str(error).split())
        raise OptionError(
            f"cannot tell the shapes of the weights from {file}: {type(error).__name__}: {text}; "
            f"name a folder that `glm53-mono checkpoint` wrote{otherwise}"
        ) from error
    return config


def _run(arguments: list[str], options: Options) -> Report:
    if not arguments:
        raise OptionError("no server arguments: name the server behind --, as for sglang.launch_server")
    for module in ("torch", "sglang"):
        if find_spec(module) is None:
            raise OptionError(f"{module} is not installed")
    import torch

    if not torch.cuda.is_available():
        raise OptionError("no GPU is visible: a step can only be measured on the device that serves it")
    from glm53_mono.upstream import bench_runner
    from glm53_mono.upstream.launch import LaunchError
    from glm53_mono.upstream.tensors import UpstreamError

    say = Progress()
    try:
        say("resolving the arguments")
        server = bench_runner.resolve(arguments)
        arms = arms_of(options, server)
        check_drafts(server.server, options.drafts_ms)
        shapes_of(options, server.server.captured_batch_sizes, server.monokernel, server.server.tokens_per_request)
        draw = drawn_weights(options, server)
        origin = provenance(arguments, options, server.server.arguments.load_format if draw is None else "drawn")
        with torch.no_grad():
            return _measure(bench_runner.start(server, draw, say), server, arms, options, origin, say)
    except (LaunchError, bench_runner.BenchError, UpstreamError) as error:
        raise OptionError(str(error)) from error


def _run_alone(folder: Path, options: Options) -> Report:
    config = drawable_config(folder)
    rows = options.rows or DEFAULT_ROWS
    if max(rows) > MAX_ROWS:
        raise OptionError(f"--rows {max(rows)} is more than the {MAX_ROWS} rows of the widest step")
    import torch

    if not torch.cuda.is_available():
        raise OptionError("no GPU is visible: a launch can only be measured on the device that runs it")
    from glm53_mono.admission import AdmissionError
    from glm53_mono.cli.bench_alone import Alone, measure_alone
    from glm53_mono.upstream.bench_runner import BenchError
    from glm53_mono.weights.descriptor import WeightError

    say = Progress()
    try:
        say("drawing the weights")
        built = Alone.prepare(
            config,
            isa="gfx950" if torch.version.hip else "sm_90",
            requests=max(rows),
            max_tokens=max(options.contexts),
            seed=options.seed,
            device="cuda",
        )
        origin = provenance(["--alone", str(folder)], options, f"drawn, {built.launch.formats.described()}")
        return measure_alone(built, origin, replace(options, rows=rows), say)
    except (AdmissionError, BenchError, WeightError) as error:
        raise OptionError(str(error)) from error


def _measure(
    runner: BenchRunner,
    server: BenchServer,
    arms: tuple[str, ...],
    options: Options,
    origin: dict[str, Any],
    say: Progress,
) -> Report:
    import torch

    from glm53_mono.cli.bench_measure import copy_bandwidth, fill_caches, measure_point, measure_rows
    from glm53_mono.cli.bench_report import Report
    from glm53_mono.upstream.bench_runner import MONOKERNEL, SGLANG
    from glm53_mono.upstream.model import step_weights
    from glm53_mono.upstream.running import served_step

    if server.monokernel and SGLANG in arms:
        say("capturing SGLang's own forward")
        runner.capture_own_forward()
    say("measuring the copy bandwidth")
    step = served_step()
    report = Report(
        origin,
        copy_bandwidth(),
        runner.head_bytes,
        tokens_per_request=step.tokens_per_request,
        drafts_ms=options.drafts_ms,
    )
    geometry = Geometry.from_config(runner.hf_config, 1)
    weights = step_weights(runner.model, geometry, {})
    generator = torch.Generator(weights.norm.device).manual_seed(options.seed)
    fill_caches(runner, MONOKERNEL if server.monokernel else SGLANG, geometry, generator)
    shapes = shapes_of(options, runner.captured_requests, server.monokernel, step.tokens_per_request)
    for rows, context in shapes:
        # refused here, before the first is measured
        runner.step_batch(step, torch.zeros(rows, dtype=torch.int64, device=generator.device), context)
    for rows, context in shapes:
        say(f"{rows} rows, {context} tokens")
        point = measure_point(
            runner,
            arms,
            weights,
            geometry,
            step,
            launch=server.monokernel,
            phases=options.phases,
            rows=rows,
            context=context,
            steps=options.steps,
            generator=generator,
        )
        report.points.append(point)
        say(" ".join(f"{name} {timing.median_ms:.3f} ms" for name, timing in point.arms.items()))
        if options.json is not None:
            report.write(options.json)
    for rows, context in shapes if measures_rows(step, arms) else ():
        requests = rows // step.tokens_per_request
        say(f"launches of {requests} requests by rows, {context} tokens")
        report.by_rows += measure_rows(
            runner,
            weights,
            geometry,
            step,
            requests=requests,
            context=context,
            steps=options.steps,
            generator=generator,
        )
        if options.json is not None:
            report.write(options.json)
    return report


def measures_rows(step: ServedStep, arms: Sequence[str]) -> bool:
    """Whether launches are measured by rows: those of a server that drafts, with the kernel."""
    from glm53_mono.upstream.bench_runner import MONOKERNEL

    return step.mode == "target_verify" and MONOKERNEL in arms


def _predict(device: str, tp_size: int, weights: str, options: Options, arguments: Sequence[str]) -> None:
    from glm53_mono.cli import barrier_model, roofline
    from glm53_mono.weights.published import CHECKPOINTS

    if arguments:
        raise OptionError(f"--predict {device} predicts the published model's steps and takes no server arguments")
    if device not in roofline.DEVICES:
        raise OptionError(f"--predict {device!r} is not one of {', '.join(roofline.DEVICES)}")
    if weights not in CHECKPOINTS:
        raise OptionError(f"--weights {weights!r} is not one of {', '.join(CHECKPOINTS)}")
    rows = options.rows or DEFAULT_ROWS
    if max(rows) > MAX_ROWS:
        raise OptionError(f"--rows {max(rows)} is more than the {MAX_ROWS} rows of the widest step")
    try:
        found = roofline.predict(
            roofline.DEVICES[device], model_config(mtp=False), rows, options.contexts, tp_size, weights
        )
    except GeometryError as error:
        raise OptionError(f"--tp {tp_size}: {error}") from error
    console = Console(highlight=False, markup=False)
    console.print(roofline.table(device, found, tp_size, weights))
    for line in (*roofline.DEVICES[device].assumptions, *roofline.ASSUMPTIONS):
        console.print(f"assumed: {line}", soft_wrap=True)
    isa = ISAS[roofline.DEVICES[device].isa]
    if isa.chiplets > 1:
        for line in barrier_model.lines(isa.compute_units, isa.chiplets):
            console.print(f"modelled: {line}", soft_wrap=True)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise OptionError(f"{option} {text!r} is not a list of whole numbers from 1, such as 1,2,4,8")
    return tuple(dict.fromkeys(numbers))


def _print(report: Report) -> None:
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    for name, value in report.provenance.items():
        shown = " ".join(value) if isinstance(value, list) else value
        console.print(f"{name}: {shown}", soft_wrap=True)
    console.print(report.table())
    by_rows = report.rows_table()
    if by_rows is not None:
        console.print(by_rows)
    for table in report.phase_tables():
        console.print(table)
    for note in report.notes:
        console.print(note, soft_wrap=True)


def _refuse(sentence: str) -> NoReturn:
    print(f"glm53-mono bench: {sentence}", file=sys.stderr)
    raise typer.Exit(2)
