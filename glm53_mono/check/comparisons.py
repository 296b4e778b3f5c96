"""The comparisons of a step in order, their tables on the device, and what the host may read of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm53_mono.check import measure
from glm53_mono.geometry import MAX_ROWS
from glm53_mono.numerics import Distance

BLOCK = 1024
"""Values that a program of a GPU compares at once."""


@dataclass(frozen=True)
class Comparison:
    """One thing that is compared in each step.

    Attributes:
        layer: -1 before the first layer, the number of layers behind the last.
        part: of the layer.
        value: of the part: what it returns, or a region that it writes.
        bound: how far the launch may be from what it is compared with.
        per_request: one row a request, not one a token.
    """

    layer: int
    part: str
    value: str
    bound: Distance
    per_request: bool = False


@dataclass(frozen=True)
class Violation:
    """A comparison beyond its bound: the first of its step.

    Attributes:
        step: counted on the device, replays of graphs included.
        row: of the step; the request's place in the batch where the comparison has one row a request.
        request_row: row of the request in SGLang's `req_to_token`.
        distance: measured.
        place: of the largest error within the row.
        found, expected: the values there.
    """

    step: int
    comparison: Comparison
    row: int
    request_row: int
    distance: Distance
    place: int
    found: float
    expected: float


@dataclass(frozen=True)
class Counts:
    """Steps seen and compared, steps with a violation, rows whose near-ties fell the other way, requests left out."""

    steps: int
    compared: int
    violating: int
    expert_ties: int
    pool_ties: int
    left_out: int = 0


class Comparisons:
    """Tables of all comparisons; a step calls `begin`, then `compare` for each in any order, then `end`.

    Everything between is device work that a graph can capture. The host reads `counts` and `violations` from pinned
    memory at any time.

    Args:
        comparisons: in the order in which a step computes them, so that the first that fails is nearest the cause.
        every: compare each so-manieth step.
    """

    def __init__(self, comparisons: Sequence[Comparison], every: int, device: torch.device) -> None:
        self.comparisons = tuple(comparisons)
        self._index = {(c.layer, c.part, c.value): i for i, c in enumerate(self.comparisons)}
        if len(self._index) != len(self.comparisons):
            raise ValueError("two comparisons have one layer, part and value")
        self._every = every
        # programs of a row: a KDA state has half a million values; the interpreter pays by the program
        self._interpreted = device.type == "cpu"
        self._parts = 1 if self._interpreted else 32
        count = len(self.comparisons)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._sums = zeros(count, MAX_ROWS, self._parts, measure.SUMS)
        self._columns = torch.ones(count, dtype=torch.int32, device=device)
        self._columns_host = [1] * count
        bounds = [(c.bound.rel, c.bound.max_abs) for c in self.comparisons]
        self._bounds = torch.tensor(bounds, dtype=torch.float32, device=device)
        self._row_tokens = torch.ones(count, dtype=torch.int32, device=device)
        self._kinds = torch.tensor([int(c.per_request) for c in self.comparisons], device=device)
        self._missing: set[int] = set()
        self._measured = zeros(count, MAX_ROWS, measure.MEASURES)
        self._violated = zeros(count, MAX_ROWS, dtype=torch.int32)
        self._worst = zeros(count, 2)
        self._violations = zeros(count, dtype=torch.int64)
        self._log = zeros(measure.LOG_LENGTH, measure.LOG_WORDS, dtype=torch.float64)
        self._counts = zeros(measure.COUNTS, dtype=torch.int64)
        tables = (self._worst, self._violations, self._log, self._counts)
        pinned = device.type != "cpu"
        self._host = [torch.zeros(t.shape, dtype=t.dtype, pin_memory=pinned) for t in tables]
        self._tables = tables

    def fit(self, columns: dict[tuple[int, str, str], int], tokens: int) -> None:
        """Tells how wide each comparison's rows are, before the first step; copies to the device.

        Args:
            columns: by layer, part and value.
            tokens: rows of a request.
        """
        widths = [columns[c.layer, c.part, c.value] for c in self.comparisons]
        self._columns.copy_(torch.tensor(widths, dtype=torch.int32))
        self._columns_host = widths
        spans = [1 if c.per_request else tokens for c in self.comparisons]
        self._row_tokens.copy_(torch.tensor(spans, dtype=torch.int32))

    def begin(self) -> None:
        """Starts a step."""
        self._sums.zero_()
        self._missing = set(range(len(self.comparisons)))

    def bound_of(self, layer: int, part: str, value: str) -> Distance:
        """The bound of a comparison."""
        return self.comparisons[self._index[layer, part, value]].bound

    def leave_out(self, requests: Tensor, tokens: int) -> None:
        """Leaves requests out of the step, whatever was measured of them, and counts them.

        Args:
            requests: [requests] bool.
            tokens: rows of a request.
        """
        rows = requests[:, None].expand(-1, tokens).flatten()
        out = torch.zeros((2, MAX_ROWS), dtype=torch.bool, device=requests.device)
        out[0, : len(rows)] = rows
        out[1, : len(requests)] = requests
        self._sums.masked_fill_(out[self._kinds][:, :, None, None], 0.0)
        self._counts[measure.LEFT_OUT] += requests.sum()

    def compare(self, layer: int, part: str, value: str, found: Tensor, expected: Tensor, live: Tensor) -> None:
        """Measures one comparison.

        Args:
            found: [rows, ...] what the launch has.
            expected: the same shape, what it is compared with.
            live: [rows] int32, zero for rows that are padding.
        """
        index = self._index[layer, part, value]
        self._missing.discard(index)
        rows = found.shape[0]
        if found.shape != expected.shape:
            raise ValueError(
                f"{value} of {part} in layer {layer} has shape {tuple(found.shape)}, not {tuple(expected.shape)}"
            )
        columns = found[0].numel()
        if columns != self._columns_host[index]:
            raise ValueError(
                f"{value} of {part} in layer {layer} has {columns} values a row, not {self._columns_host[index]}"
            )
        block = 1 << (columns - 1).bit_length() if self._interpreted else BLOCK
        measure.measure[(rows, self._parts)](
            found.contiguous(), expected.contiguous(), live, self._sums[index], columns, self._parts, block
        )

    def count_ties(self, kind: int, rows: Tensor) -> None:
        """Counts rows whose near-tie fell the other way, in steps that are compared.

        Args:
            kind: `measure.EXPERT_TIES` or `measure.POOL_TIES`.
            rows: [rows] bool.
        """
        compared = self._counts[measure.STEPS] % self._every == 0
        self._counts[kind] += rows.sum() * compared

    def end(self, request_rows: Tensor) -> None:
        """Judges the step and hands the tables to the host.

        Args:
            request_rows: [requests] int64, each request's row in `req_to_token`.

        Raises:
            RuntimeError: a comparison of the step was not made.
        """
        if self._missing:
            missing = self.comparisons[min(self._missing)]
            raise RuntimeError(
                f"{len(self._missing)} comparisons of a checked step were not made, first {missing.value} of "
                f"{missing.part} in layer {missing.layer}: SGLang no longer calls what it hangs on"
            )
        count = len(self.comparisons)
        at_once = 1 << (count - 1).bit_length() if self._interpreted else 4
        measure.judge[(-(-count // at_once),)](
            self._sums, self._columns, self._bounds, self._counts, self._measured, self._violated, self._worst,
            self._violations, count, self._every, self._parts, at_once,
        )  # fmt: skip
        measure.conclude[(1,)](
            self._violated, self._measured, self._log, self._counts, request_rows, self._row_tokens, count,
            self._every, max(16, 1 << (count - 1).bit_length()),
        )  # fmt: skip
        # the counts go last: whoever sees a violation counted finds it in the log
        for host, table in zip(self._host, self._tables, strict=True):
            host.copy_(table, non_blocking=True)

    def counts(self) -> Counts:
        """As of the last step that has completed."""
        words = self._host[3].tolist()
        return Counts(
            words[measure.STEPS],
            words[measure.COMPARED],
            words[measure.VIOLATING],
            words[measure.EXPERT_TIES],
            words[measure.POOL_TIES],
            words[measure.LEFT_OUT],
        )

    def violations(self, first: int, last: int) -> list[Violation]:
        """The logged violations [first, last), each the first of its step; those beyond the log are left out."""
        lines = self._host[2][first : min(last, self.counts().violating, measure.LOG_LENGTH)].tolist()
        return [
            Violation(
                step=int(step),
                comparison=self.comparisons[int(index)],
                row=int(row),
                request_row=int(request_row),
                distance=Distance(relative, largest),
                place=int(place),
                found=found,
                expected=expected,
            )
            for step, index, row, relative, largest, place, found, expected, request_row in lines
        ]

    def nearest_to_its_bound(self) -> tuple[Comparison, Distance]:
        """The comparison that has come nearest its bound in all steps, and how near."""
        worst = self._host[0].double()
        bounds = torch.tensor([(c.bound.rel, c.bound.max_abs) for c in self.comparisons], dtype=torch.float64)
        # a bound of zero is met or not
        shares = torch.where(bounds > 0, worst / bounds.clamp(min=1e-30), worst * 1e30)
        shares = shares.amax(1)
        index = int(shares.argmax())
        return self.comparisons[index], Distance(*worst[index].tolist())

    def worst(self, layer: int, part: str, value: str) -> Distance:
        """The largest of both measures of a comparison in all steps."""
        return Distance(*self._host[0][self._index[layer, part, value]].tolist())

    def bytes(self) -> int:
        """Device memory of the tables."""
        tables = (self._sums, self._columns, self._bounds, self._row_tokens, self._measured, self._violated)
        return sum(t.nbytes for t in (*tables, *self._tables))
