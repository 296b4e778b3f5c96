"""A server of two ranks with the monokernel against the same server without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from test.e2e import scenario
from test.e2e.compare import compare_all
from test.e2e.conftest import CROWDED, Model
from test.e2e.scenario import FEWEST_FORCED_STEPS, Plan, Results
from test.e2e.server import COUNTED, running
from test.e2e.test_glm53_flash_server import assert_close, assert_served, own_noise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host"),
]

TWO_RANKS = ("--tp", "2")


@pytest.fixture(scope="module")
def off_shared(model: Model, plan: Plan, logs: Path) -> Results:
    """What SGLang's own two ranks answer."""
    with running(model.folder, logs / "off-two-ranks.log", *CROWDED, *TWO_RANKS) as server:
        return scenario.run(server, plan, counts=False)


@pytest.fixture(scope="module")
def on_shared(off_shared: Results, model: Model, plan: Plan, logs: Path) -> Results:
    """What the kernel answers on two ranks."""
    with running(model.folder, logs / "on-two-ranks.log", *CROWDED, *TWO_RANKS, *COUNTED) as server:
        return scenario.run(server, plan, counts=True)


class TestMonokernelRanks:
    """Decode steps of two ranks."""

    def test_both_ranks_served_the_steps(self, on_shared: Results) -> None:
        for rank in range(2):
            assert f"glm53_mono: active (rank {rank} of 2" in on_shared.log
            assert f"glm53_mono: rank {rank}, program" not in on_shared.log
        assert_served(on_shared.steps, FEWEST_FORCED_STEPS)

    def test_logits_agree(self, on_shared: Results, off_shared: Results, model: Model) -> None:
        own = own_noise(off_shared, model.head)
        assert_close(compare_all(on_shared.together, off_shared.together, model.head), own, "together on two ranks")
        assert_close(compare_all(on_shared.alone, off_shared.alone, model.head), own, "alone on two ranks")

    def test_requests_may_come_and_go(self, on_shared: Results, off_shared: Results, model: Model) -> None:
        own = own_noise(off_shared, model.head)
        assert_close(compare_all(on_shared.passing, off_shared.passing, model.head), own, "passing on two ranks")
