"""Comparing on the device: two tensors a launch, a verdict over all comparisons of a step, a log of violations."""

import triton
import triton.language as tl

from glm53_mono.geometry import MAX_ROWS

ROWS = tl.constexpr(MAX_ROWS)

SUMS = 6
"""Numbers of a part of a row: squared error, square of the expected, largest error, its place, both values there."""

MEASURES = 5
"""Numbers of a row: relative RMS error, largest error in RMS of the expected, its place, both values there."""

LOG_WORDS = 3 + MEASURES + 1
"""Numbers of a logged violation: step, comparison, row, `MEASURES`, the row's request row."""

LOG_LENGTH = 256
"""Violating steps that are kept; later ones are counted alone."""

STEPS, COMPARED, VIOLATING, EXPERT_TIES, POOL_TIES, LEFT_OUT = 0, 1, 2, 3, 4, 5
COUNTS = 8
"""Words of the counts: steps seen, steps compared, steps with a violation, rows whose near-ties fell apart, requests
that were left out."""

_SUMS = tl.constexpr(SUMS)
_MEASURES = tl.constexpr(MEASURES)
_LOG_WORDS = tl.constexpr(LOG_WORDS)
_LOG_LENGTH = tl.constexpr(LOG_LENGTH)
_STEPS = tl.constexpr(STEPS)
_COMPARED = tl.constexpr(COMPARED)
_VIOLATING = tl.constexpr(VIOLATING)


@triton.jit
def measure(found, expected, live, sums, columns, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """One part of one row of one comparison; grid (rows, PARTS).

    Args:
        found, expected: [rows, columns], rows dense, any type.
        live: [rows] int32, zero for a row that is not compared.
        sums: fp32 [ROWS, PARTS, SUMS] of this comparison.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    share = tl.cdiv(columns, PARTS)
    first = part * share
    last = tl.minimum(first + share, columns)
    wanted = tl.load(live + row) != 0
    error2 = 0.0
    square = 0.0
    largest = 0.0
    place = 0
    lane = tl.arange(0, BLOCK)
    base = row.to(tl.int64) * columns
    for start in range(first, last, BLOCK):
        column = start + lane
        inside = (column < last) & wanted
        a = tl.load(found + base + column, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(expected + base + column, mask=inside, other=0.0).to(tl.float32)
        error = tl.where(a == b, 0.0, tl.abs(a - b))
        # a NaN on either side, and infinities of two signs, are as wrong as can be
        error = tl.where(error == error, error, float("inf"))
        error2 += tl.sum(error * error, 0)
        finite = tl.where((b == b) & (tl.abs(b) < float("inf")), b, 0.0)
        square += tl.sum(finite * finite, 0)
        worst = tl.max(error, 0)
        if worst > largest:
            largest = worst
            place = start + tl.argmax(error, 0)
    out = sums + (row * PARTS + part) * _SUMS
    tl.store(out, error2)
    tl.store(out + 1, square)
    tl.store(out + 2, largest)
    tl.store(out + 3, place.to(tl.float32))
    tl.store(out + 4, tl.load(found + base + place).to(tl.float32))
    tl.store(out + 5, tl.load(expected + base + place).to(tl.float32))


@triton.jit
def raise_to(place, value, mask):
    """The larger of what is there and `value`."""
    tl.store(place, tl.maximum(tl.load(place, mask=mask, other=0.0), value), mask=mask)


@triton.jit
def judge(
    sums, columns, bounds, counts, measured, violated, worst, violations, checks, every,
    PARTS: tl.constexpr, CHECKS: tl.constexpr,
):  # fmt: skip
    """The verdicts on CHECKS comparisons a program.

    Args:
        sums: fp32 [comparisons, ROWS, PARTS, SUMS].
        columns: int32 [comparisons].
        bounds: fp32 [comparisons, 2], relative and largest error.
        counts: int64 [COUNTS].
        measured: fp32 [comparisons, ROWS, MEASURES], of this step.
        violated: int32 [comparisons, ROWS], of this step.
        worst: fp32 [comparisons, 2], of all steps.
        violations: int64 [comparisons], rows of all steps.
        checks: comparisons.
        every: compare each so-manieth step.
    """
    place = tl.program_id(0) * (CHECKS * ROWS) + tl.arange(0, CHECKS * ROWS)
    check = place // ROWS
    known = check < checks
    part = tl.arange(0, PARTS)[None, :]
    own = sums + (place[:, None] * PARTS + part) * _SUMS
    inside = known[:, None] & (part >= 0)
    count = tl.load(columns + check, mask=known, other=1).to(tl.float32)
    error2 = tl.sum(tl.load(own, mask=inside, other=0.0), 1)
    square = tl.sum(tl.load(own + 1, mask=inside, other=0.0), 1)
    unit = tl.sqrt(square / count)
    unit = tl.where(unit > 0.0, unit, 1.0)
    relative = tl.sqrt(error2 / count) / unit
    largest_of_part = tl.load(own + 2, mask=inside, other=0.0)
    largest = tl.max(largest_of_part, 1) / unit
    here = inside & (part == tl.argmax(largest_of_part, 1)[:, None])
    out = measured + place * _MEASURES
    tl.store(out, relative, mask=known)
    tl.store(out + 1, largest, mask=known)
    tl.store(out + 2, tl.sum(tl.load(own + 3, mask=here, other=0.0), 1), mask=known)
    tl.store(out + 3, tl.sum(tl.load(own + 4, mask=here, other=0.0), 1), mask=known)
    tl.store(out + 4, tl.sum(tl.load(own + 5, mask=here, other=0.0), 1), mask=known)
    within = relative <= tl.load(bounds + 2 * check, mask=known, other=0.0)
    within = within & (largest <= tl.load(bounds + 2 * check + 1, mask=known, other=0.0))
    compared = tl.load(counts + _STEPS) % every == 0
    bad = tl.where(within | (compared == 0), 0, 1)
    tl.store(violated + place, bad, mask=known)
    if compared:
        each = tl.program_id(0) * CHECKS + tl.arange(0, CHECKS)
        counted = each < checks
        raise_to(worst + 2 * each, tl.max(tl.reshape(relative, [CHECKS, ROWS]), 1), counted)
        raise_to(worst + 2 * each + 1, tl.max(tl.reshape(largest, [CHECKS, ROWS]), 1), counted)
        rows = tl.sum(tl.reshape(bad, [CHECKS, ROWS]), 1)
        before = tl.load(violations + each, mask=counted, other=0)
        tl.store(violations + each, before + rows, mask=counted)


@triton.jit
def conclude(violated, measured, log, counts, request_rows, row_tokens, checks, every, CHECKS_PADDED: tl.constexpr):
    """Logs the first comparison of the step that failed, first in the order of the step, and counts; grid (1,).

    Args:
        violated, measured, counts: as `judge` left them.
        log: fp64 [LOG_LENGTH, LOG_WORDS].
        request_rows: int64 [requests].
        row_tokens: int32 [comparisons], rows of the comparison that are one request's.
    """
    check = tl.arange(0, CHECKS_PADDED)[:, None]
    row = tl.arange(0, ROWS)[None, :]
    bad = tl.load(violated + check * ROWS + row, mask=check < checks, other=0)
    order = tl.where(bad != 0, check * ROWS + row, CHECKS_PADDED * ROWS)
    first = tl.min(tl.min(order, 1), 0)
    step = tl.load(counts + _STEPS)
    seen = tl.load(counts + _VIOLATING)
    if first < CHECKS_PADDED * ROWS:
        if seen < _LOG_LENGTH:
            line = log + seen * _LOG_WORDS
            tl.store(line, step.to(tl.float64))
            tl.store(line + 1, (first // ROWS).to(tl.float64))
            tl.store(line + 2, (first % ROWS).to(tl.float64))
            for i in range(_MEASURES):
                tl.store(line + 3 + i, tl.load(measured + first * _MEASURES + i).to(tl.float64))
            request = (first % ROWS) // tl.load(row_tokens + first // ROWS)
            tl.store(line + 3 + _MEASURES, tl.load(request_rows + request).to(tl.float64))
        tl.store(counts + _VIOLATING, seen + 1)
    if step % every == 0:
        tl.store(counts + _COMPARED, tl.load(counts + _COMPARED) + 1)
    tl.store(counts + _STEPS, step + 1)
