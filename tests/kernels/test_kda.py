"""KDA layers: states kept for the prefix cache, and drafts of several requests."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import rig
from tests.kernels.compare import bits, compare_step
from tests.kernels.rig import ONE_KDA, Model, tiny_model

TRACKED, FREE = 5, 6


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(ONE_KDA, seed=13, sinkhorn_iterations=1)


def test_a_tracked_request_leaves_state_and_window_in_its_track_slot(model: Model, seed: int) -> None:
    """Live and wanted: kept. A slot of -1, or a padded request's stale slot: nothing is written."""
    inputs = rig.step_inputs(model.geometry, [7, 8], tokens=1, seed=seed, max_tokens=256, padded=1)
    caches = rig.random_caches(model.geometry, requests=FREE, pages=3, seed=seed)
    before = caches.clone()
    launch = rig.prepare_launch(model, caches, inputs)
    track = torch.tensor([TRACKED, -1, FREE], dtype=torch.int32)
    hidden = torch.empty(inputs.rows, model.geometry.hidden, dtype=torch.bfloat16)
    launch.run_by_phase(*rig.step_of(inputs, rig.pools_of(caches), track), hidden)
    own = int(inputs.mamba_slots[0])
    for after, old in ((caches.temporal, before.temporal), (caches.conv, before.conv)):
        assert torch.equal(bits(after[:, TRACKED]), bits(after[:, own]))
        assert not torch.equal(bits(after[:, own]), bits(old[:, own]))
        written = {TRACKED, *inputs.mamba_slots[:2].tolist()}
        for slot in set(range(after.shape[1])) - written:
            assert torch.equal(bits(after[:, slot]), bits(old[:, slot])), slot


@pytest.mark.parametrize(("requests", "tokens"), [(4, 2), (2, 4), (1, 8)], ids=str)
def test_drafts_of_several_requests(model: Model, seed: int, requests: int, tokens: int) -> None:
    """The scratch is by place in the batch, the committed window and state by slot; a padded request leaves both."""
    inputs = rig.step_inputs(
        model.geometry, list(range(requests - 1)) or [5], tokens=tokens, seed=seed, max_tokens=256, verify=True,
        padded=int(requests > 1),
    )  # fmt: skip
    caches = rig.random_caches(model.geometry, requests=requests, pages=5, seed=seed, draft_tokens=tokens)
    compare_step(model, caches, inputs).report.assert_right()
