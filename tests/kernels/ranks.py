"""All ranks of a model in one process and on one device: their phases take turns, so no launch waits for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from glm53_mono.checkpoint.config import Scale
from glm53_mono.fault_watch import Fault, HostRecord
from glm53_mono.kernels.monokernel import StepSizes, StepTensors
from glm53_mono.program.launch import Launch
from glm53_mono.program.phase import Phase
from glm53_mono.program.reduce import ADDS_PARTIALS
from glm53_mono.program.step import step_phases
from glm53_mono.program.symmetric import Peers
from glm53_mono.program.tiling import TILINGS, Tiling
from glm53_mono.reference.state import Caches, StepInputs
from glm53_mono.weights import bf16
from tests.kernels import rig
from tests.kernels.compare import Comparison, Report, bits
from tests.kernels.rig import Model
from tests.kernels.shards import gather_caches, shard_caches, shard_model

REPLICATED = (
    *("streams", "mix", "coefficients", "mixed", "router", "latents", "index_key", "index_gate", "head_weights"),
    *("index_query", "selected"),
)
"""Regions of the workspace that hold the same bits on every rank."""

INTERPRETER_TILING = replace(TILINGS["interp"], programs=2)
"""A program for each column tile of the smallest models: fewer programs, fewer times that each rank routes."""

Turn = tuple[int, int]
"""A rank, and the phase that it runs."""

Order = Callable[[list[Phase], int], Iterator[Turn]]


def scale_of(ranks: int) -> Scale:
    """The interpreter's smallest sizes that so many ranks can share: a head each, and the narrowest expert."""
    narrowest = 32 * ranks
    return replace(rig.TINY, heads=ranks, expert_width=narrowest, dense_width=narrowest)


class Faulted(Exception):
    """A launch that recorded a fault: the rank that waited, and what it recorded."""

    def __init__(self, rank: int, fault: Fault) -> None:
        super().__init__(f"rank {rank}: {fault}")
        self.rank, self.fault = rank, fault


def lockstep(phases: list[Phase], ranks: int) -> Iterator[Turn]:
    """Every rank runs a phase before any runs the next."""
    return ((rank, phase) for phase in range(len(phases)) for rank in range(ranks))


def one_ahead(leader: int) -> Order:
    """That rank runs as far as the others' flags let it, then the next one, and so on."""

    def order(phases: list[Phase], ranks: int) -> Iterator[Turn]:
        done = [0] * ranks
        turns = [(leader + i) % ranks for i in range(ranks)]
        while min(done) < len(phases):
            rank = next(rank for rank in turns if _may_run(phases, done, rank))
            yield rank, done[rank]
            done[rank] += 1

    return order


def _may_run(phases: list[Phase], done: Sequence[int], rank: int) -> bool:
    """Whether a rank's next phase would not wait: a reduce needs what every rank left in the phase before."""
    at = done[rank]
    return at < len(phases) and (phases[at].kind not in ADDS_PARTIALS or min(done) >= at)


@dataclass
class Ranks:
    """A launch of each rank, over shards of `caches`; made by `prepare`."""

    caches: Caches
    shards: list[Caches]
    launches: list[Launch]

    @classmethod
    def prepare(
        cls, model: Model, caches: Caches, inputs: StepInputs, ranks: int, *, backend: str = "interp",
        tiling: Tiling | None = None, models: list[Model] | None = None,
    ) -> Ranks:  # fmt: skip
        """Launches on poisoned workspaces, their symmetric buffers made known to one another.

        `models` are the ranks' parts of `model`; left out, they are cut from it.
        """
        if tiling is None and backend == "interp":
            tiling = INTERPRETER_TILING
        shards = [shard_caches(caches, rank, ranks) for rank in range(ranks)]
        if models is None:
            models = [shard_model(model, rank, ranks) for rank in range(ranks)]
        launches = [
            rig.prepare_launch(own, shard, inputs, backend=backend, tiling=tiling)
            for own, shard in zip(models, shards, strict=True)
        ]
        addresses = [launch.symmetric.data_ptr() for launch in launches]
        for rank, launch in enumerate(launches):
            peers = Peers.of_addresses(rank, addresses, inputs.input_ids.device)
            weights = models[rank].stored or bf16.described(models[rank].weights)
            launch.bind(step_phases(models[rank].geometry, weights, rig.pools_of(shards[rank]), peers))
        return cls(caches, shards, launches)

    def steps(self, inputs: StepInputs) -> list[tuple[StepTensors, StepSizes]]:
        """The step's arguments, by rank."""
        return [rig.step_of(inputs, rig.pools_of(shard)) for shard in self.shards]

    def new_hidden(self, inputs: StepInputs) -> list[Tensor]:
        """A result for each rank, full of NaN."""
        width = self.launches[0].geometry.hidden
        return [
            torch.full((inputs.rows, width), float("nan"), dtype=torch.bfloat16, device=inputs.input_ids.device)
            for _ in self.launches
        ]

    def run_step(self, inputs: StepInputs, order: Order = lockstep) -> list[Tensor]:
        """Every rank's hidden states, bf16 [rows, hidden]; the whole caches go in and come out.

        Raises:
            Faulted: a launch waited for a flag that was not raised.
        """
        ranks = len(self.launches)
        for rank, shard in enumerate(self.shards):
            for (_, own), (_, now) in zip(
                shard.tensors(), shard_caches(self.caches, rank, ranks).tensors(), strict=True
            ):
                own.copy_(now)
        for launch in self.launches:
            launch.poison()
        hidden, steps = self.new_hidden(inputs), self.steps(inputs)
        for rank, phase in order(self.launches[0].phases, ranks):
            self.run_phase(rank, steps[rank], hidden[rank], phase)
        gather_caches(self.caches, self.shards)
        return hidden

    def run_phase(self, rank: int, step: tuple[StepTensors, StepSizes], hidden: Tensor, phase: int) -> None:
        """One phase of one rank.

        Raises:
            Faulted: likewise.
        """
        launch = self.launches[rank]
        launch.run(*step, hidden, phase, phase + 1)
        fault = HostRecord(launch.host_record).fault()
        if fault is not None:
            raise Faulted(rank, fault)


def differing_ranks(ranks: Ranks, hidden: Sequence[Tensor]) -> list[str]:
    """What not all ranks hold with the same bits behind a step."""
    found = [f"hidden of rank {rank}" for rank, own in enumerate(hidden) if not _same(own, hidden[0])]
    for name in REPLICATED:
        first = ranks.launches[0].view(name)
        found += [
            f"{name} of rank {rank}"
            for rank, launch in enumerate(ranks.launches)
            if not _same(launch.view(name), first)
        ]
    for rank, shard in enumerate(ranks.shards):
        for name in ("latent", "index", "ring_key", "ring_gate"):
            pairs = zip(getattr(shard, name), getattr(ranks.shards[0], name), strict=True)
            found += [f"{name} of rank {rank}" for own, first in pairs if not _same(own, first)]
    return found


def _same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(bits(found), bits(expected))


@dataclass
class RanksComparison(Comparison):
    """A step of several ranks, phase by phase, against the reference of the whole model."""

    ranks: Ranks | None = None

    @classmethod
    def of_ranks(
        cls, model: Model, caches: Caches, inputs: StepInputs, ranks: int, *, backend: str = "interp",
        models: list[Model] | None = None,
    ) -> RanksComparison:  # fmt: skip
        """Launches of so many ranks; `caches` moves on."""
        own = Ranks.prepare(model, caches, inputs, ranks, backend=backend, models=models)
        step, hidden = own.steps(inputs)[0], own.new_hidden(inputs)
        # each rank rounds its share, so the interpreter's own bounds would be too narrow
        made = cls(model, caches, inputs, own.launches[0], step, hidden[0], Report({}), ranks=own)
        made._hidden, made._steps = hidden, own.steps(inputs)
        return made

    def run(self, phases: range) -> None:
        """Runs phases on all ranks in lockstep, and notes whether they hold the same bits."""
        for phase in phases:
            for rank in range(len(self.ranks.launches)):
                self.ranks.run_phase(rank, self._steps[rank], self._hidden[rank], phase)
        gather_caches(self.caches, self.ranks.shards)
        same = not differing_ranks(self.ranks, self._hidden)
        self.report.add_bits(-1, "ranks", "replicated", are_same=same)

    def view(self, name: str) -> Tensor:
        """A region; of the heads' regions all ranks' parts side by side."""
        if name == "absorbed":
            return torch.cat([launch.view(name) for launch in self.ranks.launches], 1)
        return self.launch.view(name)

    def flat(self, name: str, width: int) -> Tensor:
        """All ranks' columns side by side."""
        rows, own = self.inputs.rows, width // len(self.ranks.launches)
        parts = [launch.view(name).flatten()[: rows * own].view(rows, own) for launch in self.ranks.launches]
        return torch.cat(parts, 1)
