"""Contexts of 262,143 to 1,048,576 tokens, in pools so large that offsets pass 2^31 in elements and in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from glm53_mono.geometry import Geometry
from glm53_mono.reference.state import Caches
from tests.kernels import full_width, rig
from tests.kernels.compare import bits, compare_step
from tests.kernels.full_width import full_step
from tests.kernels.rig import Model

pytestmark = pytest.mark.gpu

LENGTHS = [262143, 262144, 262148, 1048576]


@pytest.fixture(scope="module")
def model(compiled: None) -> Iterator[Model]:
    yield full_width.full_model()
    torch.cuda.empty_cache()


def test_long_contexts_are_within_bounds(model: Model, seed: int) -> None:
    compare_step(model, *full_step(model, LENGTHS, seed), backend="cuda").report.assert_right()


def test_a_request_may_lie_anywhere(model: Model, seed: int) -> None:
    """The same requests on low pages and on pages whose latents and index keys lie beyond 2^31: the same bits."""
    geometry = model.geometry
    first_page = 2**31 // geometry.index_page_bytes + 1
    assert first_page * geometry.page_tokens * geometry.latent > 2**31
    near, inputs = full_step(model, LENGTHS, seed)
    moved = rig.step_inputs(
        geometry, LENGTHS, tokens=1, seed=seed, max_tokens=full_width.MAX_TOKENS, first_page=first_page, compact=True,
        device=full_width.DEVICE,
    )  # fmt: skip
    far = relocated(near, geometry, first_page - 1)
    found = rig.run_step(rig.prepare_launch(model, far, moved, backend="cuda"), far, moved)
    expected = rig.run_step(rig.prepare_launch(model, near, inputs, backend="cuda"), near, inputs)
    assert torch.equal(bits(found), bits(expected))
    for here, there in zip([*near.latent, *near.index], [*far.latent, *far.index], strict=True):
        assert torch.equal(bits(here), bits(there[-len(here) :]))


def relocated(caches: Caches, geometry: Geometry, pages: int) -> Caches:
    """The caches with every page `pages` further on; what lies before is left as the allocator gave it."""

    def moved(tensor: torch.Tensor, rows_of_page: int) -> torch.Tensor:
        larger = torch.empty(
            (len(tensor) + pages * rows_of_page, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device
        )
        larger[-len(tensor) :] = tensor
        return larger

    return replace(
        caches.clone(),
        latent=[moved(latent, geometry.page_tokens) for latent in caches.latent],
        index=[moved(index, 1) for index in caches.index],
    )
