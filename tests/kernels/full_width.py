"""The model at its real widths on a GPU: what the GPU tests share, and a program for one step in a fresh process.

One geometry, one tiling and one longest context for all of them: they are constants of the compiled kernel, which takes
half a minute to compile. `python -m tests.kernels.full_width NAME` compiles and runs one of `RUNS` and prints what it
found as JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from glm53_mono.fault_watch import POLL_S, HostRecord, Watch
from glm53_mono.kernels import sync
from glm53_mono.reference.state import Caches, StepInputs
from tests.kernels import rig
from tests.kernels.compare import bits
from tests.kernels.rig import Model

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda"
LAYERS = 4
"""Three dense KDA layers, then an MLA layer with experts."""

EXPERTS = 32
MAX_TOKENS = 2**20 + 256
WEIGHTS_SEED = 53
PROCESSES_AT_ONCE = 5
LONGEST_S = 240
"""Seconds of a fresh process, its compilation included."""


@dataclass(frozen=True)
class Run:
    """One step of a fresh process."""

    lengths: list[int]
    tokens: int = 1
    padded: int = 0
    fused: bool = False
    layout: str = "linear"
    withholds: bool = False
    """One arrival at the first barrier is held back."""


RUNS = {
    "short": Run([1, 7, 300, 1023]),
    "8k": Run([8190, 8191, 8192, 8193]),
    "verify": Run([2049], tokens=4),
    "other layouts": Run([300, 2052], padded=1, fused=True, layout="tiled"),
    "withheld": Run([300], withholds=True),
}


def full_model(*, fused: bool = False) -> Model:
    """The same weights in every process."""
    return rig.random_model(LAYERS, seed=WEIGHTS_SEED, experts=EXPERTS, fused=fused, scale="full", device=DEVICE)


def full_step(
    model: Model, lengths: list[int], seed: int, *, tokens: int = 1, padded: int = 0, verify: bool = False,
    first_page: int = 1, layout: str = "linear",
) -> tuple[Caches, StepInputs]:  # fmt: skip
    """Caches as long requests leave them, no larger than they must be, and a step on them."""
    inputs = rig.step_inputs(
        model.geometry, lengths, tokens=tokens, seed=seed, max_tokens=MAX_TOKENS, padded=padded,
        verify=verify, first_page=first_page, compact=True, device=DEVICE,
    )  # fmt: skip
    caches = rig.random_caches(
        model.geometry, requests=len(lengths), pages=rig.pages_of(inputs, model.geometry), seed=seed,
        draft_tokens=tokens if verify else 0, layout=layout, device=DEVICE,
    )  # fmt: skip
    return caches, inputs


def start(name: str) -> subprocess.Popen[str]:
    """The run in a process of its own."""
    command = [sys.executable, "-m", "tests.kernels.full_width", name]
    # Other test modules of the run may have asked for the interpreter when they were imported.
    compiled = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.Popen(command, cwd=ROOT, env=compiled, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, output and errors of a run; it is killed if it takes minutes."""
    try:
        out, error = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, error


def digest(hidden: torch.Tensor, caches: Caches) -> str:
    """One number for every bit that a step wrote."""
    whole = hashlib.sha256()
    for tensor in (hidden, *(tensor for _, tensor in caches.tensors())):
        whole.update(bits(tensor).cpu().numpy().tobytes())
    return whole.hexdigest()


def main(name: str) -> None:
    """Runs one step under a server's watch, which says on stderr what a faulting launch left in host memory.

    CUDA reports a fault to the next call, ROCm may end the process by itself: only a thread that calls no device can
    speak on both.
    """
    logging.basicConfig()
    run = RUNS[name]
    model = full_model(fused=run.fused)
    caches, inputs = full_step(
        model, run.lengths, seed=1, tokens=run.tokens, padded=run.padded, verify=run.tokens > 1, layout=run.layout
    )
    launch = rig.prepare_launch(model, caches, inputs, backend="cuda")
    if run.withholds:
        launch.deadline_s = 0.2
        launch.view("words")[sync.ARRIVED.value] = -1
    Watch(HostRecord(launch.host_record), launch.phases, 0, launch.deadline_s, lambda: "", lambda: None).start()
    try:
        hidden = rig.run_step(launch, caches, inputs)
        torch.cuda.synchronize()
    except RuntimeError:
        time.sleep(10 * POLL_S)  # the watch looks that often, and ends with the process
        raise
    live = len(run.lengths) * run.tokens
    print(json.dumps({"digest": digest(hidden[:live], caches), "finite": bool(hidden[:live].isfinite().all())}))


if __name__ == "__main__":
    main(sys.argv[1])
