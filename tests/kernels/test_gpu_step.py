"""One launch a step at the real widths: parts within bounds, and the same bits however the step is run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels import full_width, rig
from tests.kernels.batches import BATCHES, assert_same_bits, run_in_batches
from tests.kernels.chains import run_chain
from tests.kernels.changes import changed
from tests.kernels.compare import bits, compare_step
from tests.kernels.full_width import full_step
from tests.kernels.rig import Model

pytestmark = pytest.mark.gpu

LENGTHS = [1, 255, 256, 1023, 2051, 2052, 4099, 8190]


@pytest.fixture(scope="module")
def model(compiled: None) -> Iterator[Model]:
    yield full_width.full_model()
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("lengths", "tokens", "padded"), [(LENGTHS, 1, 0), ([2051, 77], 1, 2), ([2049], 4, 1)], ids=str
)
def test_parts_are_within_bounds(model: Model, seed: int, lengths: list[int], tokens: int, padded: int) -> None:
    step = full_step(model, lengths, seed, tokens=tokens, padded=padded, verify=tokens > 1)
    compare_step(model, *step, backend="cuda").report.assert_right()


def test_other_layouts_are_within_bounds(compiled: None, seed: int) -> None:
    """The shared expert among the routed ones, index keys in tiles."""
    fused = full_width.full_model(fused=True)
    step = full_step(fused, [2052, 300], seed, padded=1, layout="tiled")
    compare_step(fused, *step, backend="cuda").report.assert_right()


@pytest.mark.parametrize(("lengths", "tokens"), [(LENGTHS, 1), ([2049], 4)], ids=str)
def test_one_launch_is_one_launch_a_phase(model: Model, seed: int, lengths: list[int], tokens: int) -> None:
    caches, inputs = full_step(model, lengths, seed, tokens=tokens, verify=tokens > 1)
    apart = caches.clone()
    hidden = rig.run_step(rig.prepare_launch(model, caches, inputs, backend="cuda"), caches, inputs)
    by_phase = rig.prepare_launch(model, apart, inputs, backend="cuda")
    expected = torch.full_like(hidden, float("nan"))
    by_phase.run_by_phase(*rig.step_of(inputs, rig.pools_of(apart)), expected)
    assert_same_bits((hidden, caches), (expected, apart))


def test_a_rows_bits_do_not_depend_on_the_others(model: Model, seed: int) -> None:
    step = full_step(model, LENGTHS, seed)
    expected = run_in_batches(model, *step, [list(range(8))], backend="cuda")
    for batches in (*BATCHES, [[row] for row in range(8)]):
        assert_same_bits(run_in_batches(model, *step, batches, backend="cuda"), expected)


@pytest.mark.parametrize(
    ("tokens", "lengths"),
    [(2, [2047, 2050, 3, 8190]), (3, [2049, 255]), (4, [2046, 4093]), (6, [0]), (8, [2045])],
    ids=["MTP1", "MTP2", "MTP3", "MTP5", "MTP7"],
)
def test_verify_equals_decode(model: Model, seed: int, tokens: int, lengths: list[int]) -> None:
    differing = run_chain(
        model, lengths, tokens, 6, seed, max_tokens=full_width.MAX_TOKENS, backend="cuda", device=full_width.DEVICE
    )
    assert not differing


def test_replayed_with_changed_inputs_100_times(model: Model, seed: int) -> None:
    """A captured launch reads each step's lengths, slots, tokens and padding where the capture saw the first one's."""
    generator = torch.Generator().manual_seed(seed)
    caches, inputs = full_step(model, LENGTHS[-4:], seed)
    eager_caches = caches.clone()
    launch = rig.prepare_launch(model, caches, inputs, backend="cuda")
    eager = rig.prepare_launch(model, eager_caches, inputs, backend="cuda")
    step = rig.step_of(inputs, rig.pools_of(caches))
    hidden, expected = (
        torch.empty(inputs.rows, model.geometry.hidden, dtype=torch.bfloat16, device=full_width.DEVICE)
        for _ in range(2)
    )
    launch.run(*step, hidden)
    eager.run(*rig.step_of(inputs, rig.pools_of(eager_caches)), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run(*step, hidden)
    longest = inputs.seq_lens.tolist()
    for _ in range(100):
        new = changed(inputs, longest, model, generator)
        for name, value in vars(inputs).items():
            if isinstance(value, torch.Tensor):
                value.copy_(getattr(new, name))
        graph.replay()
        eager.run(*rig.step_of(new, rig.pools_of(eager_caches)), expected)
        live = new.linear_active
        assert torch.equal(bits(hidden[live]), bits(expected[live]))
    assert_same_bits((hidden[live], caches), (expected[live], eager_caches))
