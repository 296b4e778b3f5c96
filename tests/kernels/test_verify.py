"""A verify launch is its draft tokens' decode launches, bit for bit: outputs, states, windows, latents, keys, rings."""

from __future__ import annotations

import pytest

from tests.kernels.chains import run_chain
from tests.kernels.rig import EVERY_PHASE, tiny_model
from tests.kernels.seeded_bugs import DRAFTS_APART

CHAINS = [
    pytest.param(2, [66, 254, 3], 2, id="MTP1, 3 requests"),
    pytest.param(3, [66, 252], 1, id="MTP2, 2 requests"),
    pytest.param(4, [65, 251], 1, id="MTP3, 2 requests"),
    pytest.param(6, [0], 1, id="MTP5, 1 request"),
    pytest.param(8, [253], 1, id="MTP7, 1 request"),
]
"""Tokens of a request, committed lengths, rounds. Drafts close pools, begin pages, and are the first to select."""


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "lengths", "rounds"), CHAINS)
def test_verify_equals_decode(seed: int, tokens: int, lengths: list[int], rounds: int) -> None:
    model = tiny_model(EVERY_PHASE, seed=seed, sinkhorn_iterations=2)
    assert not run_chain(model, lengths, tokens, rounds, seed)


def test_drafts_that_do_not_see_one_another_are_found(seed: int) -> None:
    model = tiny_model(DRAFTS_APART.pattern, seed=seed, sinkhorn_iterations=2)
    with DRAFTS_APART.seeded():
        assert "hidden" in run_chain(model, [9], 2, 1, seed)
