"""Hyper-connections on streams of zeros, denormals and large values."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import rig
from tests.kernels.compare import compare_step
from tests.kernels.rig import Pattern, tiny_model

DENSE_KDA = Pattern(kda_layers=(0,), layers=1, dense_layers=1)


@pytest.mark.parametrize("value", [0.0, 1e-39, 3e4], ids=["zeros", "denormals", "large values"])
def test_streams_of(seed: int, value: float) -> None:
    """The embedding's size is the streams': the branch's own output is all there is to see beside zeros."""
    model = tiny_model(DENSE_KDA, seed=seed)
    embedding = model.weights.embedding
    embedding.copy_((embedding.float().sign() * value).bfloat16())
    inputs = rig.step_inputs(model.geometry, [1, 2], tokens=1, seed=seed, max_tokens=256)
    caches = rig.random_caches(model.geometry, requests=2, pages=3, seed=seed)
    caches.conv.zero_()
    caches.temporal.zero_()
    compared = compare_step(model, caches, inputs)
    compared.report.assert_right()
    assert compared.hidden.isfinite().all()
    if value == 0.0:
        assert torch.equal(compared.hidden, torch.zeros_like(compared.hidden))
