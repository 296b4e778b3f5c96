"""One decode step in several launches: a row's bits must not depend on which rows share its launch."""

from __future__ import annotations

import torch

from glm53_mono.reference.state import Caches, StepInputs
from tests.kernels import rig
from tests.kernels.compare import bits
from tests.kernels.rig import Model

BATCHES = (
    [[6], [7, 5, 3, 1, 0, 2, 4]],
    [[6, 0], [1, 7, 4, 2, 5, 3]],
    [[3, 4, 1], [7, 6, 0, 2, 5]],
    [[1], [5, 2, 7, 0], [3, 6, 4]],
)
"""Eight requests in launches of one to seven."""


def run_in_batches(
    model: Model, caches: Caches, inputs: StepInputs, batches: list[list[int]], backend: str = "interp"
) -> tuple[torch.Tensor, Caches]:
    """A decode step's requests in launches of some of them each: hidden states in the step's order, and the caches."""
    caches = caches.clone()
    launch = rig.prepare_launch(model, caches, inputs, backend=backend)
    hidden = torch.empty(inputs.rows, model.geometry.hidden, dtype=torch.bfloat16, device=inputs.input_ids.device)
    for batch in batches:
        hidden[batch] = rig.run_step(launch, caches, rig.of_requests(inputs, batch))
    return hidden, caches


def assert_same_bits(found: tuple[torch.Tensor, Caches], expected: tuple[torch.Tensor, Caches]) -> None:
    """Two answers of `run_in_batches` are one."""
    assert torch.equal(bits(found[0]), bits(expected[0]))
    for (name, tensor), (_, right) in zip(found[1].tensors(), expected[1].tensors(), strict=True):
        assert torch.equal(bits(tensor), bits(right)), name
