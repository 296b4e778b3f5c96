"""A verify step at the real widths whose programs start late, in any order, or are few: always the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glm53_mono.program.tiling import TILINGS
from tests.kernels import full_width, rig
from tests.kernels.compare import bits
from tests.kernels.delays import late_starts
from tests.kernels.full_width import DEVICE, full_step
from tests.kernels.in_place import delays_of_rolling_kernel
from tests.kernels.rig import ISAS, Model

pytestmark = pytest.mark.gpu

LENGTHS, TOKENS = [2046, 4093], 4
"""Eight rows, the border of selection and of a page among them."""

TILING = TILINGS[ISAS["hip" if torch.version.hip else "cuda"]]
PROGRAMS = TILING.programs
FEW = 7
"""Programs that share every phase's tasks instead: many tasks each, and all of them resident anywhere."""

STEP_NS = 20_000
"""Between the starts of two programs that follow one another: longer than a program's share of most phases."""

JITTER_NS = 200_000


@pytest.fixture(scope="module")
def model(compiled: None) -> Iterator[Model]:
    yield full_width.full_model()
    torch.cuda.empty_cache()


def verified(
    model: Model, seed: int, delays: torch.Tensor | None = None, *, programs: int = PROGRAMS, by_phase: bool = False,
    starts: Any = late_starts,
) -> list[torch.Tensor]:  # fmt: skip
    """Hidden states and every cache behind a verify step.

    Args:
        delays: nanoseconds by which each program starts late, int64 [programs]; None runs the kernel as it is.
        by_phase: a launch for each phase, so that programs start late in each.
        starts: what makes a kernel start late.
    """
    caches, inputs = full_step(model, LENGTHS, seed, tokens=TOKENS, verify=True)
    launch = rig.prepare_launch(model, caches, inputs, backend="cuda", tiling=replace(TILING, programs=programs))
    hidden = torch.full((inputs.rows, model.geometry.hidden), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    step = rig.step_of(inputs, rig.pools_of(caches))
    with nullcontext() if delays is None else starts(delays.to(DEVICE)):
        if by_phase:
            launch.run_by_phase(*step, hidden)
        else:
            launch.run(*step, hidden)
    torch.cuda.synchronize()
    return [hidden, *(tensor for _, tensor in caches.tensors())]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))


def ascending() -> torch.Tensor:
    """Program 0 first, and one after another."""
    return torch.arange(PROGRAMS) * STEP_NS


def test_random_start_delays_do_not_matter(model: Model, seed: int) -> None:
    expected = verified(model, seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(10):
        delays = torch.randint(0, JITTER_NS, (PROGRAMS,), generator=generator)
        for by_phase in (False, True):
            assert same(verified(model, seed, delays, by_phase=by_phase), expected)


def test_programs_one_after_another_in_any_order(model: Model, seed: int) -> None:
    expected = verified(model, seed)
    shuffled = torch.randperm(PROGRAMS, generator=torch.Generator().manual_seed(seed))
    for delays in (ascending(), ascending().flip(0), ascending()[shuffled]):
        assert same(verified(model, seed, delays, by_phase=True), expected)


def test_few_programs_compute_the_same(model: Model, seed: int) -> None:
    expected = verified(model, seed)
    for by_phase in (False, True):
        assert same(verified(model, seed, programs=FEW, by_phase=by_phase), expected)


def test_a_window_rolled_in_place_is_found(model: Model, seed: int, tmp_path: Path) -> None:
    with delays_of_rolling_kernel(tmp_path) as wrong:
        forward, backward = (
            verified(model, seed, delays, by_phase=True, starts=wrong.late_starts)
            for delays in (ascending(), ascending().flip(0))
        )
    assert not torch.equal(bits(forward[0]), bits(backward[0]))
