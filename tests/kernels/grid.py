"""A hold on the interpreter's grid: the order in which programs run, and which bytes each of them reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, interpreter_builder

from glm53_mono.kernels import monokernel
from glm53_mono.program.launch import Launch
from glm53_mono.reference.state import Caches

Order = Callable[[int], Sequence[int]]
"""The order in which the programs of a grid of that size run."""


@contextmanager
def program_order(order: Order) -> Iterator[None]:
    """Programs run in another order: what depends on it is a race.

    The interpreter runs programs 0, 1, ... to their ends; here the i-th to run is told that it is program order[i].
    """
    right = InterpreterBuilder.set_grid_idx

    def set_grid_idx(self: InterpreterBuilder, x: int, y: int, z: int) -> None:
        right(self, order(self.grid_dim[0])[x], y, z)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "set_grid_idx", set_grid_idx)
        yield


def backwards(programs: int) -> Sequence[int]:
    """Last program first."""
    return range(programs)[::-1]


def interleaved(programs: int) -> Sequence[int]:
    """Odd programs, then even ones."""
    return [*range(1, programs, 2), *range(0, programs, 2)]


@dataclass(frozen=True)
class Place:
    """A named piece of memory; a private one belongs in equal shares to the programs."""

    name: str
    start: int
    stop: int
    share: int | None = None


Recorded = dict[tuple[str, int], list[tuple[int, np.ndarray]]]
"""By place and program: the bytes of an element, and the addresses of elements."""


@dataclass
class Accesses:
    """What each program of a launch read and wrote in named places."""

    places: list[Place]
    reads: Recorded = field(default_factory=dict)
    writes: Recorded = field(default_factory=dict)

    def note(self, into: Recorded, program: int, pointers: Any, mask: np.ndarray) -> None:
        """Files a load's or a store's addresses under their places; weights and the step's inputs have none."""
        # the interpreter's masks may be integers, with which numpy would pick rows
        taken = np.broadcast_to(pointers.data, mask.shape)[mask.astype(bool)]
        first = np.ravel(taken).astype(np.int64)
        if not len(first):
            return
        low, high = first.min(), first.max()
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        for place in self.places:
            if low < place.stop and high >= place.start:
                own = first[(first >= place.start) & (first < place.stop)]
                into.setdefault((place.name, program), []).append((size, own))

    def names(self, kind: Recorded) -> set[str]:
        """The places that any program read or wrote."""
        return {name for name, _ in kind}

    def of_programs(self, wanted: Callable[[int], bool]) -> Accesses:
        """The accesses of some programs alone."""
        return Accesses(
            self.places,
            {key: parts for key, parts in self.reads.items() if wanted(key[1])},
            {key: parts for key, parts in self.writes.items() if wanted(key[1])},
        )

    def and_then(self, later: Accesses) -> Accesses:
        """Both, as one stretch without a barrier."""
        union = Accesses(self.places)
        for part in (self, later):
            for mine, theirs in ((union.reads, part.reads), (union.writes, part.writes)):
                for key, arrays in theirs.items():
                    mine[key] = [*mine.get(key, []), *arrays]
        return union

    def races(self) -> list[str]:
        """Places where one program wrote a byte that another one read or wrote."""
        found = []
        for name in sorted(self.names(self.writes)):
            sizes = {size for kind in (self.reads, self.writes) for size, _ in _parts(kind, name)}
            unit = sizes.pop() if len(sizes) == 1 else 1
            writes, reads = _by_program(self.writes, name, unit), _by_program(self.reads, name, unit)
            for writer, written in writes.items():
                for other in sorted({*writes, *reads} - {writer}):
                    for verb, theirs in (("wrote", writes.get(other)), ("read", reads.get(other))):
                        if theirs is not None and len(np.intersect1d(written, theirs, assume_unique=True)):
                            found.append(f"{name}: program {writer} wrote what program {other} {verb}")
        return found

    def trespasses(self) -> list[str]:
        """Private places where a program left its own share."""
        found = []
        for place in self.places:
            if place.share is None:
                continue
            for kind in (self.reads, self.writes):
                for (name, program), parts in kind.items():
                    owners = {owner for _, at in parts for owner in np.unique((at - place.start) // place.share)}
                    if name == place.name and owners != {program}:
                        found.append(f"{place.name}: program {program} left its share")
        return found


def _parts(kind: Recorded, name: str) -> list[tuple[int, np.ndarray]]:
    return [part for (place, _), parts in kind.items() if place == name for part in parts]


def _by_program(kind: Recorded, name: str, unit: int) -> dict[int, np.ndarray]:
    """The distinct addresses that each program touched, of every `unit` bytes."""

    def addresses(size: int, first: np.ndarray) -> np.ndarray:
        return first if size == unit else (np.unique(first)[:, None] + np.arange(0, size, unit)).ravel()

    return {
        program: np.unique(np.concatenate([addresses(*part) for part in parts]))
        for (place, program), parts in kind.items()
        if place == name
    }


@contextmanager
def recorded(places: list[Place]) -> Iterator[Accesses]:
    """Every load and store of the launches inside, by program and place."""
    accesses = Accesses(places)
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def create_masked_load(self: InterpreterBuilder, pointers: Any, mask: Any, *rest: Any) -> Any:
        accesses.note(accesses.reads, self.grid_idx[0], pointers, mask.data)
        return load(self, pointers, mask, *rest)

    def create_masked_store(self: InterpreterBuilder, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        accesses.note(accesses.writes, self.grid_idx[0], pointers, mask.data)
        return store(self, pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", create_masked_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", create_masked_store)
        yield accesses


@contextmanager
def arrivals() -> Iterator[set[int]]:
    """The programs that arrive at the barrier behind each phase of the launches inside; here the grid's end stands."""
    arrived: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monokernel, "arrive", lambda *_: arrived.add(interpreter_builder.grid_idx[0]))
        yield arrived


CACHE_NAMES = {
    "conv": "conv",
    "temporal": "state",
    "intermediate_conv": "conv_scratch",
    "intermediate_ssm": "state_scratch",
    "latent": "latent_pool",
    "index": "index_pool",
    "ring_key": "ring",
    "ring_gate": "ring",
}
"""How the phases' access sets call the caches."""


def places_of(launch: Launch, caches: Caches, hidden: Any) -> list[Place]:
    """The workspace's regions, the caches and the step's result, under the names that phases declare."""
    start = launch.buffer.data_ptr()
    places = [_place("hidden", hidden)]
    for region in launch.workspace.regions:
        count = launch.workspace.programs if region.private else 1
        stop = start + region.offset + region.bytes * count
        places.append(Place(region.name, start + region.offset, stop, region.bytes if region.private else None))
    for name, tensor in caches.tensors():
        places.append(_place(CACHE_NAMES[name.partition(".")[0]], tensor))
    return places


def _place(name: str, tensor: Any) -> Place:
    return Place(name, tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
