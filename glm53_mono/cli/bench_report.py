"""What `glm53-mono bench` found: as numbers, as JSON, and as a table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table

from glm53_mono.cli import verify_cost
from glm53_mono.cli.bench_times import Timing
from glm53_mono.cli.step_bytes import StepBytes
from glm53_mono.cli.verify_cost import RowsCost
from glm53_mono.upstream.bench_runner import MONOKERNEL, SGLANG

NOTES = (
    "ms: median of graph replays, the arms in turn. A replay is a step but for sampling, in both arms alike: the "
    "forward, SGLang's metadata nodes, and its LogitsProcessor with the head's matrix.",
    "launch: the monokernel's launch alone, embedding to last norm; its bytes are the step's without the head's.",
    "bytes: every weight once, the experts that some row chose, latents attended to, index keys scored, KDA state read "
    "once a request and written once a row. Bandwidth fractions are these bytes over time over what a copy in the same "
    "run read and wrote.",
    "barriers: a launch of as many phases that do no work, less one of a single phase. That is the price of meeting: "
    "all programs arrive together, so waiting for the slowest of them is not in it.",
    "inputs: no prompt was run; random tokens on caches filled with random values.",
)
"""What the numbers of every report are, and are not."""


@dataclass(frozen=True)
class Barriers:
    """The grid barriers of one launch."""

    count: int
    each_us: float

    @property
    def total_ms(self) -> float:
        """All barriers of the launch."""
        return self.count * self.each_us / 1e3


@dataclass(frozen=True)
class PhaseTime:
    """All phases of one kind in a launch, by the launch's own clock, their barrier included.

    Attributes:
        kind: as in `record.Kind`.
        count: phases of the launch.
        median_us: of one.
        total_us: of all of them together.
    """

    kind: str
    count: int
    median_us: float
    total_us: float


@dataclass(frozen=True)
class Launched:
    """What only a monokernel's launch tells.

    Attributes:
        timing: of the launch alone.
        served: launches that the device counted while the times were taken, in the step's graph and alone, warm-ups
            included.
        barriers: of it.
        distinct_experts: of each layer with routed experts, in order.
        bytes: that the launch cannot do without.
        phases: where its time goes; empty if that was not asked for.
    """

    timing: Timing
    served: int
    barriers: Barriers
    distinct_experts: tuple[int, ...]
    bytes: StepBytes
    phases: tuple[PhaseTime, ...] = ()


@dataclass(frozen=True)
class Point:
    """One step shape.

    Attributes:
        rows: of the step, all requests together.
        context: tokens that the first row of each request sees, its own included.
        arms: the whole step's times, by arm.
        launched: None where no monokernel was built.
    """

    rows: int
    context: int
    arms: Mapping[str, Timing]
    launched: Launched | None

    @property
    def ratio(self) -> float | None:
        """SGLang's time over the monokernel's: above 1 the monokernel is faster."""
        if not {MONOKERNEL, SGLANG} <= self.arms.keys():
            return None
        return self.arms[SGLANG].median_ms / self.arms[MONOKERNEL].median_ms


@dataclass
class Report:
    """A run.

    Attributes:
        provenance: device, versions, arguments.
        copy_bytes_per_s: bytes that a device-to-device copy read and wrote in a second.
        head_bytes: of the head's matrix.
        tokens_per_request: rows of a request; more than one where the server drafts.
        drafts_ms: what a round takes beside its verify step, by number of drafts, as measured elsewhere.
        by_rows: verify launches by rows, the shapes of `points` one after another; empty without drafts.
    """

    provenance: Mapping[str, Any]
    copy_bytes_per_s: float
    head_bytes: int
    points: list[Point] = field(default_factory=list)
    tokens_per_request: int = 1
    drafts_ms: Mapping[int, float] = field(default_factory=dict)
    by_rows: list[RowsCost] = field(default_factory=list)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the numbers are, and are not."""
        return (*NOTES, *verify_cost.NOTES) if self.by_rows else NOTES

    @property
    def beside_launch_ms(self) -> dict[tuple[int, int], float]:
        """What a step of the kernel takes beside its launch, by requests and context."""
        return {
            (point.rows // self.tokens_per_request, point.context): point.arms[MONOKERNEL].median_ms
            - point.launched.timing.median_ms
            for point in self.points
            if point.launched is not None and MONOKERNEL in point.arms
        }

    def fraction(self, step_bytes: int, timing: Timing) -> float:
        """Part of the copy bandwidth at which so many bytes were read in that time."""
        return step_bytes / (timing.median_ms / 1e3) / self.copy_bytes_per_s

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON; every name ends in its unit, fractions and counts have none."""
        return {
            "provenance": dict(self.provenance),
            "copy_bandwidth_bytes_per_s": self.copy_bytes_per_s,
            "head_bytes": self.head_bytes,
            "notes": list(self.notes),
            "tokens_per_request": self.tokens_per_request,
            "drafts_ms": {str(drafts): ms for drafts, ms in self.drafts_ms.items()},
            "points": [self._point(point) for point in self.points],
            "by_rows": list(verify_cost.as_dicts(self.by_rows, self.beside_launch_ms, self.drafts_ms)),
        }

    def _point(self, point: Point) -> dict[str, Any]:
        launched = point.launched
        values: dict[str, Any] = {"rows": point.rows, "context_tokens": point.context}
        values["arms"] = {
            name: asdict(timing) | {"copy_bandwidth_fraction": self.arm_fraction(point, name)}
            for name, timing in point.arms.items()
        }
        values["sglang_over_monokernel"] = point.ratio
        if launched is not None:
            barriers = launched.barriers
            values["launch"] = asdict(launched.timing) | {
                "served": launched.served,
                "copy_bandwidth_fraction": self.fraction(launched.bytes.total, launched.timing),
            }
            values["step_bytes"] = asdict(launched.bytes) | {"total": launched.bytes.total}
            values["distinct_experts_mean"] = _mean(launched.distinct_experts)
            values["distinct_experts_by_layer"] = list(launched.distinct_experts)
            values["barriers"] = {
                "count": barriers.count,
                "each_us": barriers.each_us,
                "total_ms": barriers.total_ms,
                "launch_fraction": barriers.total_ms / launched.timing.median_ms,
            }
            values["phases"] = [asdict(phase) for phase in launched.phases]
        return values

    def arm_fraction(self, point: Point, arm: str) -> float | None:
        """Part of the copy bandwidth of a whole step, the head's matrix counted; None where the bytes are unknown."""
        if point.launched is None:
            return None
        return self.fraction(point.launched.bytes.total + self.head_bytes, point.arms[arm])

    def write(self, path: Path) -> None:
        """Write the JSON, all of it or nothing."""
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
        unfinished.write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        unfinished.replace(path)

    def table(self) -> Table:
        """The points, a line each."""
        tokens = self.tokens_per_request
        step = "decode step" if tokens == 1 else f"verify step of {tokens} rows a request"
        table = Table(title=f"{step}, copy bandwidth {self.copy_bytes_per_s / 1e12:.2f} TB/s")
        for name in (
            "rows",
            "context\ntokens",
            "monokernel\nms",
            "SGLang\nms",
            "SGLang /\nmonokernel",
            "experts\na layer",
            "step\nGB",
            "monokernel\nof copy",
            "SGLang\nof copy",
            "launch\nms",
            "launch\nof copy",
            "barriers",
            "barriers\nms",
            "barriers\nof launch",
        ):
            table.add_column(name, justify="right")
        for point in self.points:
            table.add_row(*self._cells(point))
        return table

    def rows_table(self) -> Table | None:
        """The verify launches by rows; None where there are none."""
        if not self.by_rows:
            return None
        return verify_cost.table(self.by_rows, self.beside_launch_ms, self.drafts_ms, self.copy_bytes_per_s)

    def phase_tables(self) -> Iterator[Table]:
        """Where the time of each point's launch goes; nothing for points without that."""
        for point in self.points:
            if point.launched is None or not point.launched.phases:
                continue
            table = Table(title=f"phases at {point.rows} rows, {point.context} tokens, in microseconds")
            for name in ("phase", "launches", "median", "total"):
                table.add_column(name, justify="left" if name == "phase" else "right")
            for phase in point.launched.phases:
                table.add_row(phase.kind, str(phase.count), f"{phase.median_us:.1f}", f"{phase.total_us:.0f}")
            yield table

    def _cells(self, point: Point) -> list[str]:
        ms = {name: f"{timing.median_ms:.3f}" for name, timing in point.arms.items()}
        share = {name: _percent(self.arm_fraction(point, name)) for name in point.arms}
        cells = [str(point.rows), str(point.context), ms.get(MONOKERNEL, "-"), ms.get(SGLANG, "-")]
        cells.append("-" if point.ratio is None else f"{point.ratio:.3f}")
        launched = point.launched
        if launched is None:
            return [*cells, "-", "-", *(["-"] * 7)]
        barriers, total = launched.barriers, launched.bytes.total + self.head_bytes
        return [
            *cells,
            f"{_mean(launched.distinct_experts):.1f}",
            f"{total / 1e9:.2f}",
            share.get(MONOKERNEL, "-"),
            share.get(SGLANG, "-"),
            f"{launched.timing.median_ms:.3f}",
            _percent(self.fraction(launched.bytes.total, launched.timing)),
            str(barriers.count),
            f"{barriers.total_ms:.3f}",
            _percent(barriers.total_ms / launched.timing.median_ms),
        ]


def _mean(counts: Sequence[int]) -> float:
    return mean(counts) if counts else 0.0


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f} %"
