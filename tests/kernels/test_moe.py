"""Sparse FFN: ties in the router, saturated scores, padded rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from glm53_mono.kernels import moe, monokernel
from glm53_mono.weights.model import MoeWeights
from tests.kernels import rig
from tests.kernels.compare import Comparison, compare_step
from tests.kernels.rig import ONE_KDA, Model, tiny_model
from tests.kernels.seeded_bugs import edited


def all_equal(weights: MoeWeights) -> None:
    """Every expert has the same logit."""
    weights.router[1:] = weights.router[0]
    weights.bias.zero_()


def equal_triples(weights: MoeWeights) -> None:
    """Experts 0 to 2 have the same logit, and so have 3 to 5; two are wanted."""
    weights.router[1:3], weights.router[4:] = weights.router[0], weights.router[3]
    weights.bias.zero_()


def saturated(weights: MoeWeights) -> None:
    """Sigmoids of exactly 1 and 0: the scores tie where the logits do not."""
    weights.router.mul_(1e5)
    weights.bias.zero_()


def biased(weights: MoeWeights) -> None:
    """The bias alone decides, and must not show in the weights."""
    weights.bias.copy_(torch.tensor([0.0, 9.0, 0.0, 7.0, 0.0, 8.0]))


def routed(seed: int, change: Callable[[MoeWeights], None], *, fused: bool = False) -> Comparison:
    model = tiny_model(ONE_KDA, seed=seed, fused=fused, sinkhorn_iterations=1)
    change(model.weights.layers[0].ffn)
    return Comparison.prepare(model, *small_step(model, seed))


def small_step(model: Model, seed: int) -> tuple[rig.Caches, rig.StepInputs]:
    """Two requests and a padded one."""
    inputs = rig.step_inputs(model.geometry, [3, 9], tokens=1, seed=seed, max_tokens=256, padded=1)
    return rig.random_caches(model.geometry, requests=2, pages=3, seed=seed), inputs


@pytest.mark.parametrize("change", [all_equal, equal_triples, saturated, biased], ids=lambda change: change.__name__)
def test_experts_are_chosen_as_the_reference_does(seed: int, change: Callable[[MoeWeights], None]) -> None:
    routed(seed, change, fused=change is saturated).whole_step().assert_right()


def test_a_tie_to_the_higher_expert_is_found(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = edited(moe, "score + bias,", "score + bias + 1e-7 * expert.to(tl.float32),", tmp_path)
    monkeypatch.setattr(monokernel, "experts", wrong.experts)
    assert routed(seed, all_equal).whole_step().failures


def test_a_padded_row_reads_no_expert(seed: int) -> None:
    """Whatever a padded row's token would choose: no expert but the live rows' is listed."""
    model = tiny_model(ONE_KDA, seed=seed, sinkhorn_iterations=1)
    comparison = compare_step(model, *small_step(model, seed))
    comparison.report.assert_right()
    geometry, weights = model.geometry, model.weights.layers[0].ffn
    logits = comparison.view("router").sum(0)[comparison.live]
    chosen = torch.topk(torch.sigmoid(logits) + weights.bias, geometry.experts_per_token).indices.unique()
    at = comparison.launch.workspace.distinct_count_at
    assert comparison.view("expert_list")[:, at].tolist() == [len(chosen)] * comparison.launch.tiling.programs
    assert comparison.view("expert_list")[0, : len(chosen)].tolist() == chosen.tolist()
