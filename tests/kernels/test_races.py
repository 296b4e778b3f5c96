"""A verify step has no races: the same bits in any order and number of programs, and committed state kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glm53_mono.program.tiling import TILINGS
from tests.kernels import rig
from tests.kernels.compare import bits
from tests.kernels.delays import late_starts
from tests.kernels.grid import Order, backwards, program_order
from tests.kernels.in_place import delays_of_rolling_kernel
from tests.kernels.rig import EVERY_PHASE, ONE_KDA, Model, tiny_model

PROGRAMS = 5
LENGTHS, TOKENS = [66, 9], 3


def shuffled(seed: int) -> Order:
    """A random order."""

    def order(programs: int) -> Sequence[int]:
        return torch.randperm(programs, generator=torch.Generator().manual_seed(seed)).tolist()

    return order


def verified(
    model: Model, seed: int, *, programs: int = PROGRAMS, order: Order = range, starts: Any = late_starts
) -> dict[str, torch.Tensor]:
    """Hidden states and every cache behind a verify step, and the committed ones before it as `... before`.

    Args:
        starts: what makes the kernel start late, here by nothing; None runs the kernel as it is.
    """
    inputs = rig.step_inputs(model.geometry, LENGTHS, tokens=TOKENS, seed=seed, max_tokens=512, verify=True)
    pages = rig.pages_of(inputs, model.geometry)
    caches = rig.random_caches(model.geometry, requests=len(LENGTHS), pages=pages, seed=seed, draft_tokens=TOKENS)
    before = {f"{name} before": getattr(caches, name).clone() for name in ("conv", "temporal")}
    launch = rig.prepare_launch(model, caches, inputs, tiling=replace(TILINGS["interp"], programs=programs))
    with program_order(order), starts(torch.zeros(programs, dtype=torch.int64)) if starts else nullcontext():
        hidden = rig.run_step(launch, caches, inputs)
    return {"hidden": hidden, **dict(caches.tensors()), **before}


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """What two runs do not share, and what a run did not leave as it was."""
    names = [name for name, tensor in expected.items() if not torch.equal(bits(found[name]), bits(tensor))]
    changed = [
        name for name in ("conv", "temporal") if not torch.equal(bits(found[name]), bits(found[f"{name} before"]))
    ]
    return [*names, *(f"committed {name}" for name in changed)]


@pytest.mark.slow
def test_order_and_number_of_programs_do_not_matter(seed: int) -> None:
    """The interpreter runs one program after another: a wave of one, in orders that a GPU's waves may have too."""
    model = tiny_model(EVERY_PHASE, seed=7, sinkhorn_iterations=2)
    expected = verified(model, seed, starts=None)
    for programs, order in ((PROGRAMS, backwards), (PROGRAMS, shuffled(seed)), (1, range), (2, backwards)):
        assert differing(verified(model, seed, programs=programs, order=order), expected) == []


def test_a_window_rolled_in_place_is_found(seed: int, tmp_path: Path) -> None:
    model = tiny_model(ONE_KDA, seed=7, sinkhorn_iterations=2)
    right = verified(model, seed)
    with delays_of_rolling_kernel(tmp_path) as wrong:
        forward, backward = (
            verified(model, seed, order=order, starts=wrong.late_starts) for order in (range, backwards)
        )
    assert {"hidden", "intermediate_conv", "committed conv"} <= {*differing(forward, right)}
    assert "hidden" in differing(backward, forward)
