"""The probes inside a captured graph: replays see each step's inputs, and nothing in a step waits for the device."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm53_mono.observers import ObservedStep
from glm53_mono.probe.findings import Kind, read_findings, steps_probed
from glm53_mono.probe.observer import InputProbe
from tests.unit.probed_steps import COLUMNS, GEOMETRY, Made, made

pytestmark = pytest.mark.gpu


def moved(value: Any) -> Any:
    """The same with every tensor on the GPU."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    return [tensor.cuda() for tensor in value] if isinstance(value, list) else value


def on_gpu(step: Made) -> Made:
    inputs, pools = (
        replace(part, **{field.name: moved(getattr(part, field.name)) for field in fields(part)})
        for part in (step.step.inputs, step.step.pools)
    )
    plan = step.step.backends.sparse.forward_metadata.kpool_write_plan
    planned = SimpleNamespace(**{name: moved(value) for name, value in vars(plan).items()})
    sparse = SimpleNamespace(forward_metadata=SimpleNamespace(kpool_write_plan=planned))
    return Made(ObservedStep(inputs, pools, replace(step.step.backends, sparse=sparse), None), step.hidden.cuda())


@pytest.mark.parametrize("mode", ["decode", "target_verify"])
def test_replays_see_each_steps_inputs(mode: str, seed: int) -> None:
    step = on_gpu(made(mode, seed))
    probe = InputProbe(GEOMETRY, 0, torch.device("cuda"), COLUMNS)

    def run() -> None:
        probe.before(step.step)
        probe.after(step.step, step.hidden)

    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert steps_probed(probe.findings.host_numbers) == 4
    assert read_findings(probe.findings.host_numbers) == []
    step.step.inputs.positions[0] = 7
    step.step.pools.state[0][2, 0, 0, 0] = float("nan")
    graph.replay()
    torch.cuda.synchronize()
    found = {each.kind: each for each in read_findings(probe.findings.host_numbers)}
    probe.close()
    assert {Kind.POSITION, Kind.READ_STATE} <= set(found)
    assert (found[Kind.POSITION].step, found[Kind.POSITION].found) == (5, 7)
