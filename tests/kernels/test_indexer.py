"""The exact selection: ties, special values, more pools than 65,536, and 2,051 beside 2,052 tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm53_mono.kernels import indexer, monokernel
from glm53_mono.kernels.record import Kind
from glm53_mono.reference.indexer import best_pools
from tests.kernels import rig
from tests.kernels.compare import bits, compare_step
from tests.kernels.rig import ONE_MLA, TINY, Model, tiny_model
from tests.kernels.seeded_bugs import edited


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(ONE_MLA, seed=11, sinkhorn_iterations=1)


def chosen_pools(model: Model, scores: Tensor) -> Tensor:
    """What the selection makes of scores fp32 [rows, pools], [rows, selected pools]; a row sees its last pool's end."""
    rows, pools = scores.shape
    lengths = [pools * model.geometry.pool] * rows
    inputs = rig.step_inputs(model.geometry, lengths, tokens=1, seed=0, max_tokens=lengths[0])
    caches = rig.random_caches(model.geometry, requests=rows, pages=1, seed=0)
    launch = rig.prepare_launch(model, caches, inputs)
    launch.view("scores")[:rows, :pools] = scores
    select = next(index for index, phase in enumerate(launch.phases) if phase.kind == Kind.MLA_SELECT)
    unused = torch.empty(rows, model.geometry.hidden, dtype=torch.bfloat16)
    launch.run(*rig.step_of(inputs, rig.pools_of(caches)), unused, select, select + 1)
    return launch.view("selected")[:rows].long()


def best(model: Model, scores: Tensor) -> Tensor:
    """The reference's choice."""
    return torch.stack([best_pools(row, len(row), model.geometry.selected_pools) for row in scores])


def hard_scores(pools: int, seed: int) -> Tensor:
    """Rows of equal scores, of few values, of neighbours in fp32, of both zeros, of denormals, of infinities."""
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (pools,), generator=generator)

    neighbours = (0x3F800000 + whole(0, 24)).int().view(torch.float32)
    signs = torch.where(whole(0, 2) == 0, -1.0, 1.0)
    denormals = signs * whole(0, 4).float() * 1e-45
    infinite = torch.randn(pools, generator=generator)
    infinite[whole(0, pools)[:3]] = float("inf")
    infinite[whole(0, pools)[:3]] = float("-inf")
    return torch.stack(
        (torch.full((pools,), 0.5), whole(-1, 2).float(), neighbours, signs * 0.0, denormals, infinite, -neighbours)
    )


def test_ties_and_special_values(model: Model, seed: int) -> None:
    scores = hard_scores(75, seed)
    assert torch.equal(chosen_pools(model, scores), best(model, scores))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("on & (rank <= ties)", "on & (rank > 1) & (rank <= ties + 1)"),
        ("RADIX_LEVELS = tl.constexpr(4)", "RADIX_LEVELS = tl.constexpr(3)"),
        ("tl.where(score == 0.0, 0.0, score)", "score"),
    ],
    ids=["ties not to the lowest", "24 of 32 bits", "-0 below +0"],
)
def test_an_inexact_selection_is_found(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str, new: str
) -> None:
    monkeypatch.setattr(monokernel, "select", edited(indexer, old, new, tmp_path).select)
    scores = hard_scores(75, seed=1)
    assert not torch.equal(chosen_pools(model, scores), best(model, scores))


@pytest.mark.slow
def test_more_pools_than_16_bits_count(model: Model, seed: int) -> None:
    """262,148 tokens, of whose 65,537 pools the last one is the best and the one before the threshold's tie."""
    scores = torch.randn(1, 65537, generator=torch.Generator().manual_seed(seed))
    scores[0, -1] = 100.0
    scores[0, -2] = scores[0].sort(descending=True).values[model.geometry.selected_pools - 1]
    assert torch.equal(chosen_pools(model, scores), best(model, scores))


@pytest.mark.slow
def test_a_row_that_selects_beside_one_that_does_not(seed: int) -> None:
    """2,051 tokens are all attended, of 2,052 one pool is left out; neither row's bits depend on the other."""
    model = tiny_model(ONE_MLA, seed=seed, scale=replace(TINY, index_topk=2048), sinkhorn_iterations=1)
    inputs = rig.step_inputs(model.geometry, [2051, 2052], tokens=1, seed=seed, max_tokens=2304)
    pages = rig.pages_of(inputs, model.geometry)
    caches = rig.random_caches(model.geometry, requests=2, pages=pages, seed=seed)
    alone = caches.clone()
    hidden = rig.run_step(rig.prepare_launch(model, alone, inputs), alone, rig.of_requests(inputs, [0]))
    comparison = compare_step(model, caches, inputs)
    comparison.report.assert_right()
    assert torch.equal(bits(comparison.hidden[:1]), bits(hidden))
