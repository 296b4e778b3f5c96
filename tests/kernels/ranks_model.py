"""What `kernels/peers.py` does between ranks, on the machine of `sync_model`: every run of it can be looked at.

A program of the model is a rank here: the namesakes of one tile have to do with nobody else. Each sits on a chiplet of
its own, whose cache holds what it stored and what it read of a peer. A place tells the reduce that its value is of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.kernels.sync_model import Model, Op, Place, Protocol, State, Violation, _cells, _stepped


@dataclass(frozen=True)
class RanksProtocol(Protocol):
    """What a rank's program does at a reduce; the defaults are `kernels/peers.py`, each other value is a bug."""

    halves: int = 2
    """of the buffer, taken in turns"""
    accepts: int = 0
    """flags that many reduces old do"""
    restarts: bool = False
    """a launch counts its reduces from 1 again"""
    reads_first: bool = True
    """a flag says that the rows of the reduce before are read, and so is raised after that"""


@dataclass(frozen=True)
class RanksModel(Model):
    """Ranks that each leave rows, tell the others, and read theirs, some reduces a launch.

    Attributes:
        programs: ranks.
        reduces: of a launch.
    """

    protocol: RanksProtocol = RanksProtocol()
    reduces: int = 2

    def _code(self, program: int, wave: int) -> list[Op]:
        code: list[Op] = []
        total = self.launches * self.reduces
        for stamp in range(1, total + 1):
            number = (stamp - 1) % self.reduces + 1 if self.protocol.restarts else stamp
            late_reads = [] if self.protocol.reads_first else list(self._read(program, wave, stamp - 1))
            code += self._leave_rows(program, wave, stamp)
            code += self._raise(program, wave, number)
            code += [] if self.protocol.reads_first else self._wait(wave, number, program)
            code += late_reads
            if self.protocol.reads_first:
                code += self._wait(wave, number, program)
                code += list(self._read(program, wave, stamp))
            code += self._together()
        return code

    def _leave_rows(self, program: int, wave: int, stamp: int) -> list[Op]:
        return [Op("store", self._rows(program, stamp), stamp)] if wave == self.waves - 1 else []

    def _raise(self, program: int, wave: int, number: int) -> list[Op]:
        code = self._together()
        if wave == 0:
            code += [Op("write back")] if self.protocol.releases else []
            code += [Op("raise", _flag(peer, program), number) for peer in self._peers(program)]
        return code

    def _wait(self, wave: int, expected: int, program: int = 0) -> list[Op]:
        code = []
        if wave == 0:
            code = [Op("poll", _flag(program, peer), expected - self.protocol.accepts) for peer in self._peers(program)]
            code += [Op("invalidate")] if self.protocol.acquires else []
        return [*code, Op("meet")]

    def _read(self, program: int, wave: int, stamp: int) -> Iterator[Op]:
        if wave == 0 and stamp:
            for peer in self._peers(program):
                yield Op("load", self._rows(peer, stamp), stamp)

    def _peers(self, program: int) -> list[int]:
        return [peer for peer in range(self.programs) if peer != program]

    def _rows(self, program: int, stamp: int) -> Place:
        return f"half {stamp % self.protocol.halves} of rank {program}"

    def _visible(self, state: State, index: int, op: Op) -> State | None:
        memory = dict(state.memory)
        if op.name == "raise":
            if state.threads[index].queue:
                return None
            return _stepped(state._replace(memory=_cells(memory | {op.place: op.number})), index)
        if op.name == "poll":
            return _stepped(state, index) if memory.get(op.place, 0) >= op.number else None
        return super()._visible(state, index, op)

    def _check_end(self, state: State, codes: list[list[Op]]) -> None:
        stuck = [i for i, thread in enumerate(state.threads) if thread.at < len(codes[i])]
        if stuck:
            raise Violation(f"deadlock: rank {stuck[0] // self.waves} at {codes[stuck[0]][state.threads[stuck[0]].at]}")


def _flag(of: int, by: int) -> Place:
    return f"flag of rank {of} by rank {by}"
