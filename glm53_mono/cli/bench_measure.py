"""Times of a step's graphs, of the monokernel's launch by itself, and of its barriers, on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Protocol

import torch

from glm53_mono.bindings import bind_pools
from glm53_mono.cli.bench_report import Barriers, Launched, PhaseTime, Point
from glm53_mono.cli.bench_times import Timing
from glm53_mono.cli.step_bytes import scored_pools, step_bytes
from glm53_mono.cli.verify_cost import RowsCost
from glm53_mono.geometry import Geometry
from glm53_mono.kernels.monokernel import StepSizes, StepTensors
from glm53_mono.kernels.record import Kind
from glm53_mono.program.launch import Launch
from glm53_mono.program.phase import Access, Phase
from glm53_mono.program.pools import Pools
from glm53_mono.program.step import write_records
from glm53_mono.upstream.bench_runner import MONOKERNEL, BenchError, BenchRunner
from glm53_mono.upstream.running import ServedStep, served_step
from glm53_mono.upstream.step import attention_backends
from glm53_mono.weights.model import StepWeights

WARM_UPS = 3
"""Replays before the first that counts."""

COPY_BYTES = 2 << 30
"""Bytes of the copy that measures the bandwidth: far beyond any cache."""

COPIES = 21
TIMED_LAUNCHES = 5
STATE_STD = 0.3
"""Recurrent states of about this size follow from unit keys and values."""

LAUNCH = "launch"
"""The monokernel's launch alone, beside the arms in the same loop."""


def times_of(replays: Mapping[str, Callable[[], object]], steps: int) -> dict[str, Timing]:
    """Replays everything in turn, `steps` times, between events on the current stream."""
    for _ in range(WARM_UPS):
        for replay in replays.values():
            replay()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in replays}
    for _ in range(steps):
        for name, replay in replays.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: Timing.of([start.elapsed_time(end) for start, end in pairs]) for name, pairs in events.items()}


def copy_bandwidth(device: torch.device | str = "cuda") -> float:
    """Bytes that a device-to-device copy reads and writes in a second, both counted."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = times_of({"copy": lambda: target.copy_(source)}, COPIES)["copy"]
    return 2 * COPY_BYTES / (timing.median_ms / 1e3)


def fill_caches(runner: BenchRunner, arm: str, geometry: Geometry, generator: torch.Generator) -> None:
    """Fills SGLang's pools with plausible random values, as if long requests had run before."""
    with runner.context(arm):
        fill_pools(bind_pools(attention_backends(), geometry, served_step()), geometry, generator)


def fill_pools(pools: Pools, geometry: Geometry, generator: torch.Generator) -> None:
    """The same for pools; index keys are FP8 with one power of two as scale for each, as SGLang writes them."""
    for cache in (*pools.conv, *pools.latent, *pools.ring_key, *pools.ring_gate):
        cache.normal_(generator=generator)
    for state in pools.state:
        state.normal_(std=STATE_STD, generator=generator)
    keys = geometry.page_pools * geometry.index_head_dim
    for pages in pools.index:
        count, device = pages.shape[0], pages.device
        drawn = torch.randn((count, keys), generator=generator, device=device).mul_(100).clamp_(-448, 448)
        pages[:, :keys] = drawn.to(torch.float8_e4m3fn).view(torch.uint8)
        exponents = torch.randint(-9, -6, (count, geometry.page_pools), generator=generator, device=device)
        pages[:, keys:] = torch.exp2(exponents.float()).view(torch.uint8)


class Launching(Protocol):
    """What launches the kernel and counts that it did: a `Runtime`, or a launch without a server."""

    launch: Launch

    def served(self) -> int:
        """Launches that have completed on the device."""


@contextmanager
def expect_launches(built: Launching, steps: int) -> Iterator[None]:
    """Check that the kernel runs so many launches within the block, as the device counts them.

    Raises:
        BenchError: it ran fewer or more: SGLang's own forward ran in its place, or the other way round.
    """
    _wait(built.launch)
    before = built.served()
    yield
    _wait(built.launch)
    ran = built.served() - before
    if ran != steps:
        raise BenchError(f"the kernel ran {ran} of {steps} steps")


def _wait(launch: Launch) -> None:
    if launch.buffer.is_cuda:
        torch.cuda.synchronize(launch.buffer.device)


def measure_point(
    runner: BenchRunner,
    arms: Sequence[str],
    weights: StepWeights,
    geometry: Geometry,
    step: ServedStep,
    *,
    launch: bool,
    phases: bool,
    rows: int,
    context: int,
    steps: int,
    generator: torch.Generator,
) -> Point:
    """Measures one step shape, all arms on the same tokens and in the same places of the pools.

    Args:
        step: what the server's steps are.
        launch: whether a monokernel was built, and so can be launched by itself.
        phases: whether to tell where its time goes, which compiles the kernel once more.
        rows: of the step, whole requests.
        context: tokens that the first row of each request sees, its own included.
        generator: of the token ids; its device is where everything runs.

    Raises:
        BenchError: no graph of so many rows, no room in the pools, or steps that the monokernel should have run and did
            not.
    """
    device = generator.device
    ids = torch.randint(geometry.vocab, (rows,), generator=generator, device=device)
    replays: dict[str, Callable[[], object]] = {}
    for arm in (name for name in arms if name != MONOKERNEL):
        replays[arm] = runner.prepare(arm, runner.step_batch(step, ids, context))
    if not launch:
        return Point(rows, context, times_of(replays, steps), None)
    batch, built = runner.step_batch(step, ids, context), runner.built
    with expect_launches(built, 1):
        prepared = runner.prepare(MONOKERNEL, batch)
    if MONOKERNEL in arms:
        replays[MONOKERNEL] = prepared
    with runner.context(MONOKERNEL):
        arguments = built.arguments_of(batch)
    times, launched = measure_launch(built, arguments, replays, weights, geometry, context, steps, phases=phases)
    return Point(rows, context, times, launched)


def measure_launch(
    built: Launching,
    step: tuple[StepTensors, StepSizes],
    replays: Mapping[str, Callable[[], object]],
    weights: StepWeights,
    geometry: Geometry,
    context: int,
    steps: int,
    *,
    phases: bool,
) -> tuple[dict[str, Timing], Launched]:
    """Measures a launch by itself, in turn with whole steps.

    Args:
        built: what launches.
        step: a decode or verify step.
        replays: whole steps of the same shape, by arm.
        weights: of the step; their sizes count.
        geometry: of the rank.
        context: tokens that the first row of each request sees, its own included.
        steps: replays of each.
        phases: as of `measure_point`.

    Returns:
        the arms' times, and the launch's.

    Raises:
        BenchError: launches that did not happen, or one too many.
    """
    tensors, sizes = step
    rows, device = sizes.rows, built.launch.buffer.device
    hidden = torch.empty((rows, geometry.hidden), dtype=torch.bfloat16, device=device)
    distinct = distinct_experts(built.launch, tensors, sizes, hidden)
    everything = {**replays, LAUNCH: graph_of(lambda: built.launch.run(tensors, sizes, hidden))}
    served = (WARM_UPS + steps) * len(everything.keys() & {MONOKERNEL, LAUNCH})
    with expect_launches(built, served):
        times = times_of(everything, steps)
    requests, tokens = rows // sizes.tokens, sizes.tokens
    selects = scored_pools(geometry, context + tokens - 1) > 0
    launched = Launched(
        timing=times.pop(LAUNCH),
        served=served,
        barriers=Barriers(barriers_of(built.launch, selects=selects), barrier_us(built.launch, tensors, sizes, steps)),
        distinct_experts=distinct,
        bytes=step_bytes(geometry, weights, [context] * requests, distinct, tokens),
        phases=phase_times(built.launch, tensors, sizes, hidden, selects=selects) if phases else (),
    )
    return times, launched


def measure_rows(
    runner: BenchRunner,
    weights: StepWeights,
    geometry: Geometry,
    step: ServedStep,
    *,
    requests: int,
    context: int,
    steps: int,
    generator: torch.Generator,
) -> list[RowsCost]:
    """Measures verify launches of every request's first row, its first two, and so on up to the whole verify step.

    All of them are replayed in turn, each as a graph of its own: what a server with fewer drafts would launch, on the
    same tokens in the same places.

    Args:
        step: verify steps.
        context: tokens that the first row of each request sees, its own included.

    Raises:
        BenchError: no graph of so many requests, no room in the pools, or launches that did not run.
    """
    built, device, most = runner.built, generator.device, step.tokens_per_request
    ids = torch.randint(geometry.vocab, (requests * most,), generator=generator, device=device)
    batch = runner.step_batch(step, ids, context)
    with expect_launches(built, 1):
        runner.prepare(MONOKERNEL, batch)
    with runner.context(MONOKERNEL):
        tensors, whole = built.arguments_of(batch)
    replays, distinct = {}, {}
    for tokens in range(1, most + 1):
        step_tensors, sizes = first_rows(tensors, whole, tokens)
        hidden = torch.empty((sizes.rows, geometry.hidden), dtype=torch.bfloat16, device=device)
        distinct[tokens] = distinct_experts(built.launch, step_tensors, sizes, hidden)
        replays[str(tokens)] = graph_of(partial(built.launch.run, step_tensors, sizes, hidden))
    with expect_launches(built, (WARM_UPS + steps) * most):
        times = times_of(replays, steps)
    lengths = [context] * requests
    return [
        RowsCost(
            requests, tokens, context, times[str(tokens)], found, step_bytes(geometry, weights, lengths, found, tokens)
        )
        for tokens, found in distinct.items()
    ]


def first_rows(tensors: StepTensors, sizes: StepSizes, tokens: int) -> tuple[StepTensors, StepSizes]:
    """The step of the first `tokens` rows of every request of a step."""

    def first(rows: torch.Tensor) -> torch.Tensor:
        return rows[: sizes.rows].view(-1, sizes.tokens)[:, :tokens].flatten()

    return (
        tensors._replace(input_ids=first(tensors.input_ids), cache_slots=first(tensors.cache_slots)),
        sizes._replace(rows=sizes.rows // sizes.tokens * tokens, tokens=tokens),
    )


def distinct_experts(launch: Launch, tensors: StepTensors, sizes: StepSizes, hidden: torch.Tensor) -> tuple[int, ...]:
    """Distinct experts of each layer that routes, read from the workspace behind its experts' phase.

    The step runs as a launch for each phase; the caches change as in any step.
    """
    counts = []
    for index, phase in enumerate(launch.phases):
        launch.run(tensors, sizes, hidden, index, index + 1)
        if phase.kind is Kind.EXPERTS:
            counts.append(int(launch.view("expert_list")[0, launch.workspace.distinct_count_at]))
    return tuple(counts)


def phase_times(
    launch: Launch, tensors: StepTensors, sizes: StepSizes, hidden: torch.Tensor, *, selects: bool
) -> tuple[PhaseTime, ...]:
    """Where a launch's time goes, by the clock that a timed one leaves in its workspace."""
    timed = replace(launch, variant=replace(launch.variant, timed=True))
    clocks = []
    for _ in range(WARM_UPS + TIMED_LAUNCHES):
        timed.run(tensors, sizes, hidden)
        clocks.append(timed.view("clock").tolist())
    return by_kind(launch.phases, clocks[WARM_UPS:], selects=selects)


def by_kind(phases: Sequence[Phase], clocks: Sequence[Sequence[int]], *, selects: bool) -> tuple[PhaseTime, ...]:
    """Sums up clocks.

    Args:
        phases: of the launch.
        clocks: of several launches; nanoseconds at which each phase began, and at which the last one ended.
        selects: whether the selection ran; a phase that did not leaves no time.
    """
    ran = [index for index, phase in enumerate(phases) if selects or phase.kind is not Kind.MLA_SELECT]
    times: dict[str, list[float]] = {}
    for index, following in pairwise([*ran, len(phases)]):
        took = median((clock[following] - clock[index]) / 1e3 for clock in clocks)
        times.setdefault(phases[index].kind.name, []).append(took)
    return tuple(PhaseTime(kind, len(each), median(each), sum(each)) for kind, each in times.items())


def barriers_of(launch: Launch, *, selects: bool) -> int:
    """Barriers of a launch: one between two phases; the selection is a phase only where some row must select."""
    skipped = 0 if selects else sum(phase.kind is Kind.MLA_SELECT for phase in launch.phases)
    return len(launch.phases) - skipped - 1


def barrier_us(launch: Launch, tensors: StepTensors, sizes: StepSizes, steps: int) -> float:
    """Microseconds of one barrier and the dispatch of a phase behind it, in a launch whose phases have no task.

    The phases are attention phases of a step without rows. Every program arrives at every barrier, also where a step's
    mix phases let most programs off.
    """
    idle = idle_launch(launch)
    none = sizes._replace(rows=0)
    hidden = torch.empty((1, launch.geometry.hidden), dtype=torch.bfloat16, device=launch.buffer.device)
    count = len(idle.phases)
    times = times_of(
        {
            "one": graph_of(lambda: idle.run(tensors, none, hidden, 0, 1)),
            "all": graph_of(lambda: idle.run(tensors, none, hidden)),
        },
        steps,
    )
    return 1e3 * (times["all"].median_ms - times["one"].median_ms) / (count - 1)


def idle_launch(launch: Launch) -> Launch:
    """The same launch with a table of as many phases that touch nothing in a step of no rows."""
    phases = [Phase(Kind.MLA_ATTEND, phase.layer, Access()) for phase in launch.phases]
    return replace(launch, phases=phases, records=write_records(phases, launch.records.device))


def graph_of(run: Callable[[], object]) -> Callable[[], None]:
    """A CUDA graph of what `run` launches, as its replay."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
