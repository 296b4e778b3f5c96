"""A launch under graph capture: one kernel node and nothing else, compiled before, counted on the device."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from glm53_mono.admission import AdmissionError
from glm53_mono.bindings import Unused, empty_step
from glm53_mono.capturing import settle
from glm53_mono.fault_watch import HostRecord
from glm53_mono.kernels.monokernel import StepSizes, StepTensors, monokernel
from glm53_mono.program.launch import Launch
from test.e2e.graph_nodes import nodes
from tests.kernels import rig

pytestmark = pytest.mark.gpu

REPLAYS = 100
MAX_TOKENS = 512
LENGTHS = (1, 5, 258, 300, 31, 256, 64, 2)


@dataclass(frozen=True)
class Prepared:
    """A launch on the GPU and its step."""

    launch: Launch
    tensors: StepTensors
    sizes: StepSizes

    def hidden(self) -> torch.Tensor:
        """A fresh output."""
        return torch.full(
            (self.sizes.rows, self.launch.geometry.hidden), torch.nan, dtype=torch.bfloat16, device="cuda"
        )


def prepare(model: rig.Model, rows: int, seed: int) -> Prepared:
    inputs = rig.decode_inputs(model.geometry, list(LENGTHS[:rows]), seed=seed, max_tokens=MAX_TOKENS, device="cuda")
    pages = 1 + rows * MAX_TOKENS // model.geometry.page_tokens
    caches = rig.random_caches(model.geometry, requests=rows, pages=pages, seed=seed, device="cuda")
    launch = rig.prepare_launch(model, caches, inputs, backend="cuda")
    return Prepared(launch, *rig.step_of(inputs, rig.pools_of(caches)))


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> rig.Model:
    return rig.random_model(5, seed=request.config.option.seed, device="cuda")


def compiled_kernels() -> int:
    kernels, *_ = monokernel.device_caches[torch.cuda.current_device()]
    return len(kernels)


def captured(prepared: Prepared, output: torch.Tensor, *, with_copy: bool = False) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        prepared.launch.run(prepared.tensors, prepared.sizes, output)
        if with_copy:
            output.clone()
    graph.instantiate()
    return graph


def test_no_width_compiles_and_a_graph_holds_one_kernel(model: rig.Model, seed: int) -> None:
    steps = [prepare(model, rows, seed) for rows in range(1, 9)]
    first = steps[0]
    first.launch.run(*empty_step(Unused.on(torch.device("cuda"))), first.hidden(), 0, 0)
    built = compiled_kernels()
    for prepared in steps:
        assert nodes(captured(prepared, prepared.hidden())) == [monokernel.__name__]
    assert compiled_kernels() == built
    # Negative control: a copy beside the launch is seen.
    assert len(nodes(captured(first, first.hidden(), with_copy=True))) == 2


def test_the_build_finds_its_launch_captured(model: rig.Model, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = prepare(model, 1, seed).launch
    launch.run(*empty_step(Unused.on(torch.device("cuda"))), torch.empty(1, model.geometry.hidden, device="cuda"), 0, 0)
    settle(launch)
    assert launch.cooperative
    # Negative control: a launch that ends up in no graph.
    monkeypatch.setattr(type(launch), "run", lambda *_: None)
    with pytest.raises(AdmissionError, match="a replay ran it 0 times"):
        settle(launch)


def test_replays_are_the_eager_launch_and_are_counted(model: rig.Model, seed: int) -> None:
    """Two launches over equal caches: one runs eagerly, one by replays of one graph, with tokens that change."""
    eager, replayed = prepare(model, 4, seed), prepare(model, 4, seed)
    record = HostRecord(replayed.launch.host_record)
    output = replayed.hidden()
    replayed.launch.run(replayed.tensors, replayed.sizes, output)
    eager.launch.run(eager.tensors, eager.sizes, eager.hidden())
    graph = captured(replayed, output)
    for step in range(REPLAYS):
        ids = torch.randint(0, model.geometry.vocab, (4,), generator=torch.Generator().manual_seed(seed + step))
        for side in (eager, replayed):
            side.tensors.input_ids.copy_(ids)
        graph.replay()
        expected = eager.hidden()
        eager.launch.run(eager.tensors, eager.sizes, expected)
        assert torch.equal(output, expected), f"replay {step}"
    torch.cuda.synchronize()
    assert record.served() == 1 + REPLAYS
    assert record.fault() is None
