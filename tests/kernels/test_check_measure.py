"""Comparisons on the device: what they measure, which rows count, what the host reads, near-ties told from mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from glm53_mono.check import measure
from glm53_mono.check.choices import (
    compared,
    contained,
    expert_mask,
    mask_of,
    normalised_weights,
    tokens_of_pools,
    with_experts,
)
from glm53_mono.check.comparisons import Comparison, Comparisons, Counts
from glm53_mono.check.plan import ANY
from glm53_mono.check.watch import Watch
from glm53_mono.numerics import Distance, distance

WIDE, NARROW = (0, "attention", "output"), (3, "launch", "state")
ROWS, COLUMNS, PLACES = 4, 3000, 5


def tables(every: int = 1, device: str = "cpu") -> Comparisons:
    comparisons = [
        Comparison(*WIDE, Distance(1e-2, 1e-1)),
        Comparison(*NARROW, Distance(0.0, 0.0), per_request=True),
    ]
    made = Comparisons(comparisons, every, torch.device(device))
    made.fit({WIDE: COLUMNS, NARROW: PLACES}, tokens=2)
    return made


def step(
    made: Comparisons,
    seed: int,
    change: Callable[[torch.Tensor, torch.Tensor], None] = lambda wide, narrow: None,
    live: tuple[int, ...] = (1, 1, 1, 1),
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of both comparisons, the first side changed; returns the wide pair."""
    generator = torch.Generator().manual_seed(seed)
    wide, narrow = (
        torch.randn(ROWS, COLUMNS, generator=generator).bfloat16(),
        torch.randn(2, PLACES, generator=generator),
    )
    found, small = wide.clone(), narrow.clone()
    change(found, small)
    device = made._counts.device
    rows = torch.tensor(live, dtype=torch.int32, device=device)
    made.begin()
    made.compare(*WIDE, found.to(device), wide.to(device), rows)
    made.compare(*NARROW, small.to(device), narrow.to(device), rows[::2].contiguous())
    made.end(torch.tensor([7, 9], device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    return found, wide


def moved(wide: torch.Tensor, narrow: torch.Tensor) -> None:
    wide[3, COLUMNS - 1] += 8


def test_equal_tensors_have_no_violation(seed: int) -> None:
    made = tables()
    step(made, seed)
    assert made.counts() == Counts(1, 1, 0, 0, 0)
    assert made.violations(0, 1) == []
    assert made.worst(*WIDE) == Distance(0.0, 0.0)


def test_a_violation_says_where_and_how_far(seed: int) -> None:
    made = tables()
    found, wide = step(made, seed, moved)
    (violation,) = made.violations(0, 9)
    expected = distance(found[3:], wide[3:])
    assert violation.comparison == made.comparisons[0]
    assert (violation.step, violation.row, violation.request_row, violation.place) == (0, 3, 9, COLUMNS - 1)
    assert violation.distance.rel == pytest.approx(expected.rel, rel=1e-5)
    assert violation.distance.max_abs == pytest.approx(expected.max_abs, rel=1e-5)
    assert (violation.found, violation.expected) == (found[3, -1].item(), wide[3, -1].item())


def test_the_first_in_the_order_of_the_step_is_logged(seed: int) -> None:
    def both(wide: torch.Tensor, narrow: torch.Tensor) -> None:
        narrow[1, 2] += 1e-6
        moved(wide, narrow)

    def second(wide: torch.Tensor, narrow: torch.Tensor) -> None:
        narrow[1, 2] += 1e-6

    made = tables()
    step(made, seed, both)
    step(made, seed, second)
    first, later = made.violations(0, 9)
    assert (first.comparison, later.comparison) == made.comparisons
    # one row a request: row 1 is the second request
    assert (later.step, later.row, later.request_row) == (1, 1, 9)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_wrong(seed: int, value: float) -> None:
    def spoil(wide: torch.Tensor, narrow: torch.Tensor) -> None:
        narrow[0, 1] = value

    made = tables()
    step(made, seed, spoil)
    (violation,) = made.violations(0, 9)
    assert violation.comparison == made.comparisons[1]
    assert violation.distance.max_abs == math.inf
    assert violation.place == 1


def test_padding_does_not_count(seed: int) -> None:
    def spoil(wide: torch.Tensor, narrow: torch.Tensor) -> None:
        wide[2:] = torch.nan
        narrow[1] = torch.nan

    made = tables()
    step(made, seed, spoil, live=(1, 1, 0, 0))
    assert made.counts() == Counts(1, 1, 0, 0, 0)
    step(made, seed, spoil, live=(1, 1, 1, 0))
    assert made.counts().violating == 1


def test_every_nth_step_is_compared(seed: int) -> None:
    made = tables(every=3)
    for number in range(7):
        made.count_ties(measure.EXPERT_TIES, torch.tensor([True, False, True]))
        step(made, seed, moved if number in (1, 3) else lambda wide, narrow: None)
    assert [violation.step for violation in made.violations(0, 9)] == [3]
    assert made.counts() == Counts(7, 3, 1, 6, 0)


def test_more_violations_than_the_log_holds_are_counted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_LOG_LENGTH", type(measure._LOG_LENGTH)(2))
    made = tables()
    for _ in range(3):
        step(made, seed, moved)
    assert made.counts().violating == 3
    assert [violation.step for violation in made.violations(0, 2)] == [0, 1]
    assert made._log[2].eq(0).all()


def test_rows_of_another_width_are_refused(seed: int) -> None:
    made = tables()
    rows = torch.ones(ROWS, dtype=torch.int32)
    with pytest.raises(ValueError, match="output of attention in layer 0 has 2999 values a row, not 3000"):
        made.compare(*WIDE, torch.zeros(ROWS, COLUMNS - 1), torch.zeros(ROWS, COLUMNS - 1), rows)
    with pytest.raises(ValueError, match=r"has shape \(4, 3000\), not \(4, 1\)"):
        made.compare(*WIDE, torch.zeros(ROWS, COLUMNS), torch.zeros(ROWS, 1), rows)


@pytest.mark.gpu
def test_a_graph_compares_each_replay(seed: int) -> None:
    """Nothing waits for the host: captured, and seen by the host after the replays."""
    made = tables(device="cuda")
    wide = torch.randn(ROWS, COLUMNS, device="cuda").bfloat16()
    found, narrow = wide.clone(), torch.randn(2, PLACES, device="cuda")
    rows, requests = torch.ones(ROWS, dtype=torch.int32, device="cuda"), torch.tensor([7, 9], device="cuda")

    def run() -> None:
        made.begin()
        made.compare(*WIDE, found, wide, rows)
        made.compare(*NARROW, narrow, narrow, rows[::2].contiguous())
        made.end(requests)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for number in range(4):
        found[0, 0] = 100.0 if number == 2 else wide[0, 0]
        graph.replay()
    torch.cuda.synchronize()
    assert made.counts() == Counts(5, 5, 1, 0, 0)
    assert [violation.step for violation in made.violations(0, 9)] == [3]


def test_a_near_tie_is_not_a_mistake(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 64, generator=generator)
    order = scores.argsort(1, descending=True)
    known = torch.ones_like(scores, dtype=torch.bool)
    launch = mask_of(order[:, :8], 64)
    # row 0 agrees; row 1 has the next in place of the last, a hair behind it; row 2 has the worst of all
    scores[1, order[1, 8]] = scores[1, order[1, 7]] - 1e-6
    others = order[:, :8].clone()
    others[1, 7], others[2, 7] = order[1, 8], order[2, -1]
    choice = compared(launch, mask_of(others, 64), scores, known)
    assert choice.apart.tolist() == [False, True, True]
    assert choice.beyond[0] == 0
    assert 0 < choice.beyond[1] < 1e-4
    assert choice.beyond[2] > 1
    fewer = compared(launch, mask_of(others[:, :7], 64), scores, known)
    assert fewer.beyond.isinf().all()
    reversed_ = compared(launch, mask_of(order[:, -8:], 64), torch.zeros_like(scores), known)
    assert reversed_.beyond.isinf().all(), "scores that are all alike are no tie"
    nonsense = compared(launch, mask_of(others, 64), scores.masked_fill(launch, torch.nan), known)
    assert nonsense.beyond[1:].isnan().all()


def test_sglangs_part_goes_on_with_the_launchs_experts(seed: int) -> None:
    """Two routed experts of a row and the shared one, id 6, behind them; an id of -1 is padding's."""
    weights = torch.tensor([[1.5, 1.0, 0.4], [2.0, 0.5, 0.4], [1.0, 1.0, 0.4]])
    ids = torch.tensor([[0, 1, 6], [2, 3, 6], [-1, -1, 6]], dtype=torch.int32)
    launch = torch.zeros(3, 6)
    launch[0, 0], launch[0, 1] = 0.6, 0.4
    launch[1, 2], launch[1, 5] = 0.75, 0.25
    assert expert_mask(ids, 6).nonzero().tolist() == [[0, 0], [0, 1], [1, 2], [1, 3]]
    new_weights, new_ids = with_experts(weights, ids, launch, 2, torch.tensor([False, True, False]), 6)
    assert new_ids.tolist() == [[0, 1, 6], [2, 5, 6], [-1, -1, 6]]
    assert torch.allclose(new_weights[1], torch.tensor([1.875, 0.625, 0.4]))
    assert torch.equal(new_weights[::2], weights[::2])
    assert torch.allclose(normalised_weights(new_weights, new_ids, 6)[:2], launch[:2])


def test_tokens_of_pools() -> None:
    pools, length = torch.tensor([[0, 3], [1, -1]]), torch.tensor([18, 8])
    assert tokens_of_pools(pools, length, 4, 13).tolist() == [
        [0, 1, 2, 3, 12, 13, 14, 15, 16, 17, -1, -1, -1],
        [4, 5, 6, 7, -1, -1, -1, -1, -1, -1, -1, -1, -1],
    ]


def test_contained() -> None:
    among = torch.tensor([[9, -1, 4], [5, 5, -1]])
    assert contained(torch.tensor([[4, 5, 9], [4, 5, 9]]), among).tolist() == [
        [True, False, True],
        [False, True, False],
    ]


def test_the_watch_logs_and_ends_the_process(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    made, ended = tables(), []
    watch = Watch(made, rank=0, raises=True, end=lambda: ended.append(True))
    watch.start()
    step(made, seed)
    step(made, seed, moved)
    watch._thread.join(timeout=5)
    assert ended == [True]
    (line,) = [r.message for r in caplog.records if "layer 0, attention, output" in r.message]
    assert "step 1, row 3 of the batch (request row 9)" in line
    assert f"place {COLUMNS - 1}" in line


def test_a_watch_that_only_logs_goes_on(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    made = tables()
    watch = Watch(made, rank=0, raises=False, end=lambda: pytest.fail("it was to log alone"))
    for _ in range(6):
        step(made, seed, moved)
    watch.start()
    watch.stop()
    assert sum("relative error" in r.message for r in caplog.records) == 4
    assert "2 more steps with a violation" in caplog.text
    assert "6 of 6 steps compared, 6 with a violation" in watch.summary()


def test_a_request_that_is_left_out_has_no_violation(seed: int) -> None:
    """Rows 2 and 3 are the second request's; in the other comparison, which has a row a request, it is row 1."""

    def spoil(wide: torch.Tensor, narrow: torch.Tensor) -> None:
        moved(wide, narrow)
        narrow[1, 0] = torch.nan

    made = tables()
    end = made.end
    for out, violating in (([False, True], 0), ([True, False], 1)):
        made.end = lambda rows, out=out: (made.leave_out(torch.tensor(out), 2), end(rows))[1]
        step(made, seed, spoil)
        assert made.counts().violating == violating
    assert made.counts().left_out == 2


def test_a_comparison_that_was_not_made_is_named(seed: int) -> None:
    made = tables()
    made.begin()
    rows = torch.zeros(ROWS, COLUMNS)
    made.compare(*WIDE, rows, rows, torch.ones(ROWS, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="1 comparisons of a checked step were not made, first state of launch in"):
        made.end(torch.tensor([7, 9]))


@pytest.mark.parametrize("side", [0, 1])
def test_what_is_only_measured_must_be_a_number(side: int) -> None:
    made = Comparisons([Comparison(*WIDE, ANY)], 1, torch.device("cpu"))
    made.fit({WIDE: 3}, tokens=1)
    pair = [torch.ones(1, 3), torch.full((1, 3), 5.0)]
    for value, violating in ((7.0, 0), (torch.nan, 1)):
        pair[side][0, 1] = value
        made.begin()
        made.compare(*WIDE, *pair, torch.ones(1, dtype=torch.int32))
        made.end(torch.tensor([7]))
        assert made.counts().violating == violating


def test_a_watch_that_fails_ends_the_process_too(caplog: pytest.LogCaptureFixture) -> None:
    made, ended = tables(), []
    made.counts = lambda: 1 / 0
    watch = Watch(made, rank=0, raises=True, end=lambda: ended.append(True))
    watch.start()
    watch._thread.join(timeout=5)
    assert ended == [True]
    assert "rank 0 watches no more" in caplog.text
