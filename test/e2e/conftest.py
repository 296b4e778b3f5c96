"""The arms of the server tests: each is started once a session, runs the plan, and ends before the next one starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from test.e2e import scenario
from test.e2e.scenario import Plan, Results
from test.e2e.server import COUNTED, Answer, running

LAYERS, EXPERTS = 8, 16

ARMS = {
    "every size captured": (*COUNTED,),
    "padded rows": (*COUNTED, "--cuda-graph-bs-decode", "4", "8"),
    "no graphs": (*COUNTED, "--disable-cuda-graph"),
}
"""Arguments of the arms that run the kernel."""

CROWDED = ("--max-running-requests", str(scenario.CROWD), "--max-mamba-cache-size", str(5 * scenario.CROWD))
"""Arguments of every arm: room for `Plan.crowd`, whose steps no arm captures."""

RETRACTING = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "60"}
"""SGLang's own way to test retraction (scheduler.py: TEST_RETRACT)."""

PYTHON_FRONT = {"SGLANG_RUST_SERVER": "false"}
"""The Rust front of 0.5.23 takes no other `return_hidden_states` than true and false."""


@dataclass(frozen=True)
class Model:
    """A checkpoint to serve.

    Attributes:
        folder: where it is.
        real: whether it was named by GLM53_MONO_MODEL; else its weights are random.
        head: [vocab, hidden] fp32 on the GPU.
    """

    folder: Path
    real: bool
    head: torch.Tensor

    @property
    def vocab(self) -> int:
        """Token ids that its head knows."""
        return self.head.shape[0]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Model:
    """The model of GLM53_MONO_MODEL, or a synthetic one of 8 layers at the real widths (8 GB)."""
    named = os.environ.get("GLM53_MONO_MODEL")
    folder = Path(named) if named else tmp_path_factory.mktemp("model") / "synthetic"
    if not named:
        command = [sys.executable, "-c", "from glm53_mono.cli.main import app; app()", "checkpoint", str(folder)]
        sizes = ["--layers", str(LAYERS), "--experts", str(EXPERTS), "--device", "cuda"]
        subprocess.run([*command, *sizes, "--seed", str(pytestconfig.option.seed)], check=True)
    return Model(folder, named is not None, head_of(folder))


@pytest.fixture(scope="session")
def plan(model: Model, pytestconfig: pytest.Config) -> Plan:
    """The requests that every arm answers."""
    return scenario.draw(pytestconfig.option.seed, model.vocab)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the servers' logs are."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def off(model: Model, plan: Plan, logs: Path) -> Results:
    """What SGLang's own forward answers."""
    with running(model.folder, logs / "off.log", *CROWDED) as server:
        return scenario.run(server, plan, counts=False)


@pytest.fixture(scope="session", params=ARMS)
def on(request: pytest.FixtureRequest, off: Results, model: Model, plan: Plan, logs: Path) -> Results:
    """What the kernel answers, an arm at a time."""
    log_file = logs / f"{request.param.replace(' ', '-')}.log"
    with running(model.folder, log_file, *CROWDED, *ARMS[request.param]) as server:
        return scenario.run(server, plan, counts=True)


@dataclass(frozen=True)
class Unusual:
    """What a server answers that runs as few do.

    Attributes:
        passing: `Plan.passing`, where requests lose their caches every few steps and start again.
        last: the first forced request, with its last hidden state only.
        steps: by path and reason, since the server started.
        log: what the server had printed.
    """

    passing: list[Answer]
    last: Answer
    steps: dict[tuple[str, str], int]
    log: str


@pytest.fixture(scope="session")
def unusual(model: Model, plan: Plan, logs: Path) -> Unusual:
    """The kernel in a server that retracts, and whose HTTP front is the one that knows the mode `last`."""
    arguments = (*CROWDED, *COUNTED)
    with running(model.folder, logs / "unusual.log", *arguments, environment=RETRACTING | PYTHON_FRONT) as server:
        passing = server.generate_in_turn(plan.passing, plan.aborted)
        last = server.generate(replace(plan.forced[0], hidden="last"))
        return Unusual(passing, last, server.steps(), server.log)


def head_of(folder: Path) -> torch.Tensor:
    """The head of a checkpoint, [vocab, hidden] fp32 on the GPU."""
    from safetensors import safe_open

    weights = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    (name,) = (name for name in weights if name.endswith("lm_head.weight"))
    with safe_open(folder / weights[name], "pt", device="cuda") as file:
        return file.get_tensor(name).float()
