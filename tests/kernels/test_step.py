"""A whole step in the interpreter: every part against the reference, every row the same whatever the others are."""

from __future__ import annotations

import pytest
import torch

from glm53_mono.reference.state import Caches, StepInputs
from tests.kernels import rig
from tests.kernels.batches import BATCHES, assert_same_bits, run_in_batches
from tests.kernels.compare import Comparison, compare_step
from tests.kernels.rig import EVERY_PAIR, EVERY_PHASE, Model, tiny_model
from tests.kernels.seeded_bugs import BUGS, PLACE_IN_BATCH, Bug

MAX_TOKENS = 512
EDGES = [1, 4, 5, 67, 68, 255, 256, 257]
"""The first token, a pool closed and another begun, the last length without a choice and the first with one, and a page
about to fill, full, and followed by the next."""


def some_step(
    model: Model, lengths: list[int], seed: int, *, tokens: int = 1, padded: int = 0, verify: bool = False,
    layout: str = "linear",
) -> tuple[Caches, StepInputs]:  # fmt: skip
    """Caches as long requests leave them, and a step on them."""
    inputs = rig.step_inputs(
        model.geometry, lengths, tokens=tokens, seed=seed, max_tokens=MAX_TOKENS, padded=padded, verify=verify
    )
    caches = rig.random_caches(
        model.geometry,
        requests=len(lengths),
        pages=rig.pages_of(inputs, model.geometry),
        seed=seed,
        draft_tokens=tokens if verify else 0,
        layout=layout,
    )
    return caches, inputs


@pytest.mark.slow
def test_eight_rows_at_every_edge(seed: int) -> None:
    """Each attention before each FFN, two layers of a kind."""
    model = tiny_model(EVERY_PAIR, seed=seed)
    compare_step(model, *some_step(model, EDGES, seed)).report.assert_right()


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["shared expert apart", "shared expert fused"])
@pytest.mark.parametrize(
    ("lengths", "tokens", "padded"), [([2, 3, 258], 1, 2), ([253, 66], 3, 0), ([0], 4, 1)], ids=str
)
def test_padded_rows_and_drafts(seed: int, lengths: list[int], tokens: int, padded: int, fused: bool) -> None:
    """Padded requests write nothing and disturb nobody; drafts cross a pool, a page and the selection's border."""
    model = tiny_model(EVERY_PHASE, seed=seed, fused=fused, sinkhorn_iterations=2)
    layout = "tiled" if fused else "linear"
    step = some_step(model, lengths, seed, tokens=tokens, padded=padded, verify=tokens > 1, layout=layout)
    compare_step(model, *step).report.assert_right()


@pytest.mark.slow
def test_a_rows_bits_do_not_depend_on_the_others(seed: int) -> None:
    """Any batch of one to eight of the same requests, in any order: the same hidden states and the same caches."""
    model = tiny_model(EVERY_PHASE, seed=seed, sinkhorn_iterations=2)
    step = some_step(model, EDGES, seed)
    expected = run_in_batches(model, *step, [list(range(8))])
    for batches in BATCHES:
        assert_same_bits(run_in_batches(model, *step, batches), expected)


def test_a_row_that_depends_on_its_place_is_found(seed: int) -> None:
    model = tiny_model(PLACE_IN_BATCH.pattern, seed=seed, sinkhorn_iterations=2)
    step = some_step(model, [9, 66], seed)
    with PLACE_IN_BATCH.seeded():
        together = run_in_batches(model, *step, [[0, 1]])
        apart = run_in_batches(model, *step, [[0], [1]])
    assert torch.equal(together[0][0], apart[0][0])
    assert not torch.equal(together[0][1], apart[0][1])


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_seeded_bugs_are_found(seed: int, bug: Bug) -> None:
    """A comparison that passes a wrong kernel would pass anything: each of these mistakes turns it red."""
    model = tiny_model(bug.pattern, seed=seed, sinkhorn_iterations=2)
    lengths = [67] if bug.verify else [68, 7]
    step = some_step(model, lengths, seed, tokens=2 if bug.verify else 1, verify=bug.verify)
    comparison = Comparison.prepare(model, *step)
    comparison.stops_at_failure = True
    with bug.seeded():
        assert comparison.whole_step().failures


def test_a_timed_launch_stamps_every_phase_and_changes_no_bit(seed: int) -> None:
    model = tiny_model(EVERY_PHASE, seed=seed, sinkhorn_iterations=2)
    caches, inputs = some_step(model, [5, 66], seed)
    timed_caches = caches.clone()
    launch = rig.prepare_launch(model, timed_caches, inputs, timed=True)
    timed = rig.run_step(launch, timed_caches, inputs)
    untimed = rig.run_step(rig.prepare_launch(model, caches, inputs), caches, inputs)
    assert_same_bits((timed, timed_caches), (untimed, caches))
    # the interpreter's clock stands at 0, and the workspace was full of NaN
    assert not launch.view("clock").any()
