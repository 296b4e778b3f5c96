"""One rank of two, each on a GPU of its own and in a process of its own, at the real widths.

`python -m tests.kernels.two_ranks RANK FOLDER RUN` prints what it found as JSON; the ranks' processes share FOLDER for
their rendezvous. What a faulting launch leaves in host memory is on stderr, as a server's watch prints it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm53_mono.exchange import SharedBuffers, exchange_buffers
from glm53_mono.fault_watch import POLL_S, HostRecord, Watch
from glm53_mono.kernels.monokernel import StepSizes, StepTensors
from glm53_mono.program.launch import Launch
from glm53_mono.program.step import step_phases
from glm53_mono.reference.state import Caches, StepInputs
from glm53_mono.weights import bf16
from tests.kernels import full_width, rig
from tests.kernels.changes import changed
from tests.kernels.full_width import digest
from tests.kernels.rig import Model
from tests.kernels.shards import shard_caches, shard_model

RANKS = 2
SEED = 1
LENGTHS = [300, 1023, 2052, 8190]
DEADLINE_S = 0.4
LATE_S = 1.0
REPLAYS = 1000
CYCLES = 100


def gather(value: Any) -> list[Any]:
    """Every rank's value, over gloo."""
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, value)
    return found


class Rank:
    """One rank's model, caches and launch, its buffer known to the other one."""

    def __init__(self, rank: int, whole: Model) -> None:
        self.model = shard_model(whole, rank, RANKS)
        caches, self.inputs = full_width.full_step(whole, LENGTHS, SEED)
        self.caches: Caches = shard_caches(caches, rank, RANKS)
        self.launch: Launch = rig.prepare_launch(self.model, self.caches, self.inputs, backend="cuda")
        self.buffers: SharedBuffers = exchange_buffers(self.launch.symmetric, rank, gather)
        weights, pools = bf16.described(self.model.weights), rig.pools_of(self.caches)
        self.launch.bind(step_phases(self.model.geometry, weights, pools, self.buffers.peers))
        self.watch = Watch(
            HostRecord(self.launch.host_record), self.launch.phases, rank, self.launch.deadline_s, str, lambda: None
        )
        self.watch.start()

    def step(self, inputs: StepInputs) -> tuple[StepTensors, StepSizes]:
        """A step's arguments."""
        return rig.step_of(inputs, rig.pools_of(self.caches))

    def close(self) -> None:
        """Unmaps the other rank's buffer."""
        self.watch.stop()
        self.buffers.close()


def one_step(own: Rank) -> Tensor:
    """The hidden states of one whole launch."""
    hidden = rig.run_step(own.launch, own.caches, own.inputs)
    torch.cuda.synchronize()
    return hidden


def replayed(own: Rank, whole: Model) -> str:
    """The answers to replays of one graph, each with other inputs, the same on both ranks."""
    generator = torch.Generator().manual_seed(SEED)
    hidden = torch.empty(own.inputs.rows, whole.geometry.hidden, dtype=torch.bfloat16, device=full_width.DEVICE)
    step = own.step(own.inputs)
    own.launch.run(*step, hidden)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own.launch.run(*step, hidden)
    longest, answers = own.inputs.seq_lens.tolist(), []
    for _ in range(REPLAYS):
        new = changed(own.inputs, longest, whole, generator)
        for name, value in vars(own.inputs).items():
            if isinstance(value, Tensor):
                value.copy_(getattr(new, name))
        graph.replay()
        answers.append(hidden[new.linear_active].clone())
    torch.cuda.synchronize()
    return digest(torch.cat(answers), replace(own.caches, conv=own.caches.conv[:0], temporal=own.caches.temporal[:0]))


def cycled(rank: int, whole: Model) -> list[int]:
    """Bytes allocated behind each build and teardown."""
    taken = []
    for _ in range(CYCLES):
        own = Rank(rank, whole)
        one_step(own)
        gather(None)
        own.close()
        del own
        torch.cuda.empty_cache()
        gather(None)
        taken.append(torch.cuda.memory_allocated())
    return taken


def main(rank: int, folder: Path, run: str) -> None:
    """One run of this rank."""
    logging.basicConfig()
    torch.cuda.set_device(rank)
    rendezvous = (folder / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    whole = full_width.full_model()
    if run == "cycles":
        print(json.dumps({"taken": cycled(rank, whole)}))
        return
    own = Rank(rank, whole)
    one_step(own)
    gather(None)
    if run == "replays":
        print(json.dumps({"digest": replayed(own, whole)}))
        return
    if rank == 1 and run == "killed":
        os._exit(3)
    if rank == 1 and run == "withheld":
        time.sleep(5 * DEADLINE_S)
        return
    if rank == 1 and run == "late":
        time.sleep(LATE_S)
    if run in ("killed", "withheld"):
        own.launch.deadline_s = DEADLINE_S
    started = time.monotonic()
    try:
        hidden = one_step(own)
    except RuntimeError:
        print(json.dumps({"ended_after_s": time.monotonic() - started}), flush=True)
        time.sleep(10 * POLL_S)  # the watch looks that often, and ends with the process
        raise
    print(json.dumps({"digest": digest(hidden, own.caches), "finite": bool(hidden.isfinite().all())}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
