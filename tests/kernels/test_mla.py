"""Sparse attention: what the padding page holds does not matter, and saturated scores do not overflow."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import rig
from tests.kernels.compare import compare_step
from tests.kernels.rig import ONE_MLA, Model, tiny_model


@pytest.fixture
def model(seed: int) -> Model:
    return tiny_model(ONE_MLA, seed=seed, sinkhorn_iterations=1)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_the_padding_page_is_never_attended(model: Model, seed: int) -> None:
    """It is full of NaN, as is every slot behind the requests' last tokens."""
    lengths = [2, 65, 130]
    inputs = rig.step_inputs(model.geometry, lengths, tokens=1, seed=seed, max_tokens=256, padded=1)
    caches = rig.random_caches(model.geometry, requests=3, pages=4, seed=seed)
    for row, length in zip(inputs.req_pool_indices.tolist(), lengths, strict=False):
        behind = inputs.req_to_token[row, length:].long()
        caches.latent[0][behind] = float("nan")
    caches.latent[0][: model.geometry.page_tokens] = float("nan")
    compared = compare_step(model, caches, inputs)
    compared.report.assert_right()
    assert compared.hidden[:3].isfinite().all()


def test_scores_of_thousands(model: Model, seed: int) -> None:
    """One token takes all the attention; nothing overflows."""
    model.weights.layers[0].attention.latent_norm.mul_(100)
    inputs = rig.step_inputs(model.geometry, [60, 90], tokens=1, seed=seed, max_tokens=256)
    caches = rig.random_caches(model.geometry, requests=2, pages=3, seed=seed)
    for latent in caches.latent:
        latent.mul_(100)
    compared = compare_step(model, caches, inputs)
    compared.report.assert_right()
    assert torch.isfinite(compared.hidden).all()
