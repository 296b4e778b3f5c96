"""What a verify launch costs by its rows, whether its bytes explain it, and from which accept length drafts pay.

A round of a server that drafts is one verify step, and beside it the draft model's steps and what the server does
between them. It gives each request as many tokens as its accept length, where a decode step gives it one: drafts pay
from the accept length at which a round takes as long as so many decode steps of the same requests,

    accept length = (verify step of n + 1 rows a request + drafts of MTPn) / decode step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import linear_regression, mean
from typing import Any

from rich.table import Table

from glm53_mono.cli.bench_times import Timing
from glm53_mono.cli.step_bytes import StepBytes

NOTES = (
    "by rows: launches of the first row of every request, of its first two, and so on; one row of each is a decode "
    "step's work. Each has its own distinct experts counted; with random tokens nearly every row brings new ones.",
    "time over bytes: the launch's time over that of one row a request, divided by the same ratio of their bytes: 1 is "
    "what the bytes explain, and more is what rows cost beside them.",
    "step: the launch, and beside it what the verify step of these requests takes beside its own (head, metadata).",
    "pays from: the accept length, tokens that a round gives a request, from which a token costs less than by decode "
    "steps: (step + drafts) / step of one row a request. Verify alone takes drafts for free, a bound from below. "
    "What drafts take at one request is measured elsewhere (--drafts-ms); for other numbers of drafts it is taken from "
    "the line through two or more that were measured, since a round of n drafts runs the draft model n - 1 times for "
    "one token and once over the rows.",
)
"""What the table by rows says, and does not."""


@dataclass(frozen=True)
class RowsCost:
    """A verify launch of the first rows of every request.

    Attributes:
        requests: of the launch.
        tokens: rows of each: its last token and its drafts.
        context: tokens that the first row of each sees, its own included.
        timing: of the launch alone.
        distinct_experts: of each layer with routed experts, in order.
        bytes: that the launch cannot do without.
    """

    requests: int
    tokens: int
    context: int
    timing: Timing
    distinct_experts: tuple[int, ...]
    bytes: StepBytes

    @property
    def rows(self) -> int:
        """Of the launch, all requests together."""
        return self.requests * self.tokens

    @property
    def drafts(self) -> int:
        """Draft tokens of a request: the n of MTPn."""
        return self.tokens - 1

    @property
    def shape(self) -> tuple[int, int]:
        """Requests and context: launches of one shape are compared."""
        return self.requests, self.context


@dataclass(frozen=True)
class Explained:
    """A launch beside that of one row a request.

    Attributes:
        time_ratio: its time over that of one row.
        bytes_ratio: its bytes over those of one row: what the time ratio would be if bytes were all.
    """

    time_ratio: float
    bytes_ratio: float

    @property
    def unexplained(self) -> float:
        """Measured over predicted; 1 where the bytes explain everything."""
        return self.time_ratio / self.bytes_ratio


@dataclass(frozen=True)
class Pays:
    """From which accept length drafts pay.

    Attributes:
        step_ms: the verify step.
        verify_alone: the accept length if drafts cost nothing.
        whole_round: with the drafts' time; None where that is unknown.
    """

    step_ms: float
    verify_alone: float
    whole_round: float | None


def explained(cost: RowsCost, one_row: RowsCost) -> Explained:
    """Relates a launch to that of one row a request, of the same shape."""
    return Explained(
        cost.timing.median_ms / one_row.timing.median_ms,
        cost.bytes.total / one_row.bytes.total,
    )


def drafts_ms(drafts: int, measured: Mapping[int, float]) -> float | None:
    """Milliseconds of a round of so many drafts beside its verify step.

    Args:
        measured: the same by number of drafts; another number is taken from the line through two or more of them.
    """
    if drafts in measured:
        return measured[drafts]
    if len(measured) < 2:
        return None
    slope, intercept = linear_regression(list(measured), list(measured.values()))
    return intercept + slope * drafts


def pays(cost: RowsCost, one_row: RowsCost, beside_ms: float, measured: Mapping[int, float]) -> Pays:
    """From which accept length drafts pay on the kernel.

    Args:
        one_row: the launch of one row a request, of the same shape.
        beside_ms: what a step takes beside its launch.
        measured: as in `drafts_ms`, at one request; nothing is known of the drafts of more.
    """
    step, decode = (each.timing.median_ms + beside_ms for each in (cost, one_row))
    drafts = drafts_ms(cost.drafts, measured) if cost.requests == 1 else None
    return Pays(step, step / decode, None if drafts is None else (step + drafts) / decode)


def as_dicts(
    costs: Sequence[RowsCost], beside_ms: Mapping[tuple[int, int], float], measured: Mapping[int, float]
) -> Iterator[dict[str, Any]]:
    """The launches as plain values, for JSON.

    Args:
        costs: the shapes one after another, each with its launch of one row a request first.
        beside_ms: what a step takes beside its launch, by shape.
        measured: as in `pays`.
    """
    for cost, one_row in _with_one_row(costs):
        found = explained(cost, one_row)
        from_ = pays(cost, one_row, beside_ms[cost.shape], measured)
        yield {
            "requests": cost.requests,
            "rows": cost.rows,
            "drafts": cost.drafts,
            "context_tokens": cost.context,
            "launch": asdict(cost.timing),
            "distinct_experts_mean": mean(cost.distinct_experts or (0,)),
            "distinct_experts_by_layer": list(cost.distinct_experts),
            "step_bytes": asdict(cost.bytes) | {"total": cost.bytes.total},
            "time_over_one_row": found.time_ratio,
            "bytes_over_one_row": found.bytes_ratio,
            "time_over_bytes": found.unexplained,
            "step_ms": from_.step_ms,
            "pays_from_accept_length_verify_alone": from_.verify_alone,
            "pays_from_accept_length": from_.whole_round,
        }


def table(
    costs: Sequence[RowsCost],
    beside_ms: Mapping[tuple[int, int], float],
    measured: Mapping[int, float],
    copy_bytes_per_s: float,
) -> Table:
    """The launches, a line each; arguments as for `as_dicts`."""
    result = Table(title="verify launch by rows")
    for name in (
        "requests",
        "rows",
        "MTP",
        "context\ntokens",
        "launch\nms",
        "of copy",
        "experts\na layer",
        "launch\nGB",
        "time /\n1 row",
        "bytes /\n1 row",
        "time /\nbytes",
        "step\nms",
        "pays from,\nverify alone",
        "pays from",
    ):
        result.add_column(name, justify="right")
    for cost, one_row in _with_one_row(costs):
        found = explained(cost, one_row)
        from_ = pays(cost, one_row, beside_ms[cost.shape], measured)
        result.add_row(
            str(cost.requests),
            str(cost.rows),
            str(cost.drafts) if cost.drafts else "-",
            str(cost.context),
            f"{cost.timing.median_ms:.3f}",
            f"{100 * cost.bytes.total / (cost.timing.median_ms / 1e3) / copy_bytes_per_s:.1f} %",
            f"{mean(cost.distinct_experts or (0,)):.1f}",
            f"{cost.bytes.total / 1e9:.2f}",
            f"{found.time_ratio:.3f}",
            f"{found.bytes_ratio:.3f}",
            f"{found.unexplained:.3f}",
            f"{from_.step_ms:.3f}",
            _accept_length(from_.verify_alone, cost),
            _accept_length(from_.whole_round, cost),
        )
    return result


def _accept_length(found: float | None, cost: RowsCost) -> str:
    """No round gives a request more tokens than it has rows there."""
    if found is None or not cost.drafts:
        return "-"
    return f"{found:.2f}" if found <= cost.tokens else f"never ({found:.2f})"


def _with_one_row(costs: Sequence[RowsCost]) -> Iterator[tuple[RowsCost, RowsCost]]:
    for _, group in groupby(costs, lambda cost: cost.shape):
        of_shape = list(group)
        yield from ((cost, of_shape[0]) for cost in of_shape)
