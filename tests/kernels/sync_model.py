"""The barrier of `kernels/sync.py` as a small machine, every run of which can be looked at.

Programs sit on dies: what a wave stores waits in that wave's queue, goes in any order to the die's cache, and from
there to memory only when somebody writes the cache back. What a program has once loaded it may load again from that
cache until it is invalidated. Atomics happen in memory, those that bring nothing back some time after they are issued.
Between two launches all queues and caches are written back and dropped, as between two kernels of a stream.

Which die a program is on is one thing, and which chiplet the barrier takes it to be on another: unless told otherwise
each has a die of its own, which is the worst that a wrong map can do.

Phases hand data on through two sets of places in turn, so that a place is written anew while an old value of it may
still lie in a reader's cache. Every value tells its launch and phase, so a stale one is seen when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

ARRIVED, LEFT, LAUNCHES = "arrived", "left", "launches"
MET, RELEASED = "met on chiplet ", "released on chiplet "
Value = int
Place = str
Cells = tuple[tuple[Place, Value], ...]


@dataclass(frozen=True)
class Protocol:
    """What programs do at a barrier; the defaults are `kernels/sync.py`, each other value is a bug."""

    drains: bool = True
    """every wave waits for its own stores before the waves meet"""
    meets: bool = True
    """the waves of a program meet before one of them releases"""
    releases: bool = True
    """an arrival writes the chiplet's cache back first"""
    acquires: bool = True
    """a wait drops the chiplet's cache once it has seen the arrivals"""
    counts_absent: bool = False
    """a wait counts the programs that have no task in a phase of few rows"""
    absent_arrive: bool = False
    """programs that have no task arrive all the same"""
    resets: str = "last to leave"
    """or "first to leave", "last to arrive" (at the last barrier that is waited for), "nobody" """
    resets_chiplets: bool = True
    """who resets the device's words resets those of the chiplets"""
    meets_release: bool = True
    """an arrival on a chiplet writes the cache back as one on the device does, whoever shares that cache"""
    leads: str = "last"
    """who leads a chiplet: the last to arrive on it, or the "first" """
    reports_all: bool = True
    """a leader reports all that met, not itself alone"""
    releases_early: bool = False
    """a leader releases its chiplet before it has seen the arrivals of the others"""
    few_meet: bool = False
    """the programs of a phase of few rows count themselves on their chiplets too"""


class Op(NamedTuple):
    """One step of a wave: what it does, where, and with what number."""

    name: str
    place: Place = ""
    number: int = 0
    adds: int = 1
    """what an arrival counts"""
    skips: int = 0
    """steps that are left out, by "meet on chiplet" and "if leading" where the wave does not lead"""


class Thread(NamedTuple):
    """A wave: its next step, its stores that have not reached the die's cache, and whether it leads its chiplet."""

    at: int
    queue: Cells
    leads: bool = False


class State(NamedTuple):
    """Everything."""

    threads: tuple[Thread, ...]
    caches: tuple[tuple[Cells, frozenset[Place]], ...]
    """Of each die: what it holds, and which of that is newer than memory."""
    memory: Cells


class Violation(Exception):
    """A run that went wrong, in one sentence."""


@dataclass(frozen=True)
class Model:
    """Launches of a few programs.

    Attributes:
        programs: of the grid.
        waves: of a program; the last one stores a phase's data, the first one arrives.
        arrivals: of each phase, how many programs have a task in it.
        launches: one after another.
        chiplets: that the barrier is hierarchical over; with one it is flat.
        dies: of each program, if not one each.
    """

    protocol: Protocol
    programs: int = 2
    waves: int = 2
    arrivals: tuple[int, ...] = (2, 1, 2, 2)
    launches: int = 2
    chiplets: int = 1
    dies: tuple[int, ...] | None = None

    @property
    def words(self) -> list[Place]:
        """What a launch must find at zero."""
        each = range(self.chiplets if self.chiplets > 1 else 0)
        return [ARRIVED, LEFT, *(f"{row}{chiplet}" for row in (MET, RELEASED) for chiplet in each)]

    def die(self, program: int) -> int:
        """Whose cache a program uses."""
        return program if self.dies is None else self.dies[program]

    def explore(self) -> int:
        """Looks at every run; returns how many states there are.

        Raises:
            Violation: a stale read, words that a launch does not find at zero, lost launches, or a deadlock.
        """
        codes = [self._code(program, wave) for program in range(self.programs) for wave in range(self.waves)]
        start = State(tuple(Thread(0, ()) for _ in codes), self._empty(), _cells(dict.fromkeys(self.words, 0)))
        seen, waiting = {start}, [start]
        while waiting:
            state = waiting.pop()
            following = list(self._next(state, codes))
            if not following:
                self._check_end(state, codes)
            for each in following:
                if each not in seen:
                    seen.add(each)
                    waiting.append(each)
        return len(seen)

    def _empty(self) -> tuple[tuple[Cells, frozenset[Place]], ...]:
        return ((((), frozenset())),) * self.programs

    def _code(self, program: int, wave: int) -> list[Op]:
        code: list[Op] = []
        for launch in range(self.launches):
            expected = due = 0
            for phase, arrivals in enumerate(self.arrivals):
                if phase:
                    code += self._wait(program, wave, self.arrivals[phase - 1], expected)
                if program < arrivals:
                    code += self._work(program, wave, launch, phase)
                expected += self.programs if self.protocol.counts_absent else arrivals
                due += self._met(program) if arrivals == self.programs else 0
                if program < arrivals or self.protocol.absent_arrive:
                    code += self._together()
                    if wave == 0 and self.chiplets > 1:
                        code += self._arrive_by_chiplet(program, arrivals, due)
                    elif wave == 0:
                        code += self._arrive(phase == len(self.arrivals) - 2)
            code += [*self._together(), *([Op("leave")] if wave == 0 else []), Op("end")]
        return code

    def _work(self, program: int, wave: int, launch: int, phase: int) -> Iterator[Op]:
        """A task: the first wave reads what the last phase's programs wrote, the last wave writes."""
        if wave == 0 and phase:
            for other in range(self.arrivals[phase - 1]):
                if other != program:
                    yield Op("load", _data(phase - 1, other), self._stamp(launch, phase - 1))
        if wave == self.waves - 1:
            yield Op("store", _data(phase, program), self._stamp(launch, phase))

    def _stamp(self, launch: int, phase: int) -> int:
        return 1 + launch * len(self.arrivals) + phase

    def _together(self) -> list[Op]:
        drain = [Op("drain")] if self.protocol.drains else []
        return drain + ([Op("meet")] if self.protocol.meets else [])

    def _arrive(self, last_awaited: bool) -> list[Op]:
        code = [Op("write back")] if self.protocol.releases else []
        return [*code, Op("arrive", ARRIVED, int(last_awaited))]

    def _met(self, program: int) -> int:
        """Programs of a program's chiplet."""
        return len(range(program % self.chiplets, self.programs, self.chiplets))

    def _arrive_by_chiplet(self, program: int, arrivals: int, due: int) -> list[Op]:
        """Counts acquire nothing here, unlike those of `sync.py`: nothing is read behind them."""
        bug = self.protocol
        back = [Op("write back")] if bug.releases else []
        if arrivals < self.programs and not bug.few_meet:
            return [*back, Op("arrive", ARRIVED)]
        reports = self._met(program) if bug.reports_all else 1
        report = [*back, Op("arrive", ARRIVED, adds=reports)]
        last = due if bug.leads == "last" else due - self._met(program) + 1
        met = Op("meet on chiplet", f"{MET}{program % self.chiplets}", last, skips=len(report))
        return [*(back if bug.meets_release else []), met, *report]

    def _wait(self, program: int, wave: int, arrivals: int, expected: int) -> list[Op]:
        if wave:
            return [Op("meet")]
        invalidate = [Op("invalidate")] if self.protocol.acquires else []
        if self.chiplets == 1 or arrivals < self.programs:
            return [Op("poll", ARRIVED, expected), *invalidate, Op("meet")]
        released = f"{RELEASED}{program % self.chiplets}"
        led = [Op("poll", released, expected), *invalidate]
        back = [Op("write back")] if self.protocol.releases else []
        leads = [Op("poll", ARRIVED, expected), *invalidate, *back, Op("store", released, expected)]
        if self.protocol.releases_early:
            leads = [*back, Op("store", released, expected), Op("poll", ARRIVED, expected), *invalidate]
        return [Op("if leading", skips=1 + len(leads)), *leads, Op("skip", skips=len(led)), *led, Op("meet")]

    def _next(self, state: State, codes: list[list[Op]]) -> Iterator[State]:
        """The states that one step leads to; a step that nobody else could notice or prevent goes alone."""
        steps = [codes[i][thread.at] if thread.at < len(codes[i]) else None for i, thread in enumerate(state.threads)]
        for index, op in enumerate(steps):
            if op and op.name in ("store", "invalidate", "drain", "meet", "skip", "if leading"):
                after = self._private(state, index, op, steps)
                if after is not None:
                    yield after
                    return
        if all(op and op.name == "end" for op in steps):
            yield self._between_launches(state)
            return
        for index, op in enumerate(steps):
            if op:
                after = self._visible(state, index, op)
                if after is not None:
                    yield after
            for place, value in state.threads[index].queue:
                yield self._commit(state, index, place, value)

    def _private(self, state: State, index: int, op: Op, steps: list[Op | None]) -> State | None:
        thread, program = state.threads[index], index // self.waves
        die = self.die(program)
        if op.name == "store":
            return _stepped(state, index, queue=_cells(dict(thread.queue) | {op.place: op.number}))
        if op.name in ("skip", "if leading"):
            return _stepped(state, index, steps=1 + (0 if op.name == "if leading" and thread.leads else op.skips))
        if op.name == "drain":
            return None if thread.queue else _stepped(state, index)
        if op.name == "invalidate":
            held, dirty = state.caches[die]
            kept = _cells({place: value for place, value in held if place in dirty})
            return _stepped(state._replace(caches=_put(state.caches, die, (kept, dirty))), index)
        mates = range(program * self.waves, (program + 1) * self.waves)
        if any(steps[mate] is None or steps[mate].name != "meet" for mate in mates):
            return None
        for mate in mates:
            state = _stepped(state, mate)
        return state

    def _visible(self, state: State, index: int, op: Op) -> State | None:
        memory, program = dict(state.memory), index // self.waves
        die = self.die(program)
        held, dirty = dict(state.caches[die][0]), state.caches[die][1]
        if op.name == "load":
            value = held.get(op.place, memory.get(op.place, 0))
            if value != op.number:
                raise Violation(f"stale read: program {program} reads {value} from {op.place} instead of {op.number}")
            return _stepped(_cached(state, die, held | {op.place: value}, dirty), index)
        if op.name == "write back":
            if state.threads[index].queue:
                return None
            after = state._replace(memory=_cells(memory | {place: held[place] for place in dirty}))
            return _stepped(_cached(after, die, held, frozenset()), index)
        if op.name == "arrive":
            memory[ARRIVED] += op.adds
            if op.number and self.protocol.resets == "last to arrive" and memory[ARRIVED] == sum(self.arrivals[:-1]):
                memory[ARRIVED] = 0
            return _stepped(state._replace(memory=_cells(memory)), index)
        if op.name == "meet on chiplet":
            memory[op.place] += 1
            leads = memory[op.place] == op.number
            after = state._replace(memory=_cells(memory))
            return _stepped(after, index, steps=1 + (0 if leads else op.skips), leads=leads)
        if op.name == "poll":
            return _stepped(state, index) if memory[op.place] >= op.number else None
        if op.name == "leave":
            return self._leave(state, index)
        return None

    def _leave(self, state: State, index: int) -> State:
        """The atomic of `leave`, and the plain stores of the program that resets."""
        memory = dict(state.memory)
        left = memory[LEFT]
        memory[LEFT] += 1
        after = _stepped(state._replace(memory=_cells(memory)), index)
        stores: dict[Place, Value] = {}
        last = left == self.programs - 1
        if last:
            stores = {LEFT: 0, LAUNCHES: memory.get(LAUNCHES, 0) + 1}
        if {"last to leave": last, "first to leave": left == 0}.get(self.protocol.resets, False):
            counted = [word for word in self.words if word != LEFT]
            stores |= dict.fromkeys(counted if self.protocol.resets_chiplets else [ARRIVED], 0)
        thread = after.threads[index]
        queue = _cells(dict(thread.queue) | stores)
        return after._replace(threads=_put(after.threads, index, thread._replace(queue=queue)))

    def _commit(self, state: State, index: int, place: Place, value: Value) -> State:
        """A store reaches the die's cache; the words' lines are written through, as atomics need them in memory."""
        thread, die = state.threads[index], self.die(index // self.waves)
        queue = _cells({other: number for other, number in thread.queue if other != place})
        after = state._replace(threads=_put(state.threads, index, thread._replace(queue=queue)))
        if place in (*self.words, LAUNCHES):
            return after._replace(memory=_cells(dict(state.memory) | {place: value}))
        held, dirty = state.caches[die]
        return _cached(after, die, dict(held) | {place: value}, dirty | {place})

    def _between_launches(self, state: State) -> State:
        memory = dict(state.memory)
        for held, dirty in state.caches:
            memory |= {place: value for place, value in held if place in dirty}
        for thread in state.threads:
            memory |= dict(thread.queue)
        kept = {word: memory[word] for word in self.words if memory[word]}
        if kept:
            raise Violation(f"lost reset: a launch ends with {kept}")
        threads = tuple(Thread(thread.at + 1, ()) for thread in state.threads)
        return State(threads, self._empty(), _cells(memory))

    def _check_end(self, state: State, codes: list[list[Op]]) -> None:
        stuck = [i for i, thread in enumerate(state.threads) if thread.at < len(codes[i])]
        if stuck:
            names = ", ".join(f"program {i // self.waves} at {codes[i][state.threads[i].at].name!r}" for i in stuck[:3])
            words = {word: value for word, value in state.memory if word in self.words}
            raise Violation(f"deadlock: {names} with {words}")
        memory = dict(state.memory)
        if memory.get(LAUNCHES) != self.launches:
            raise Violation(f"lost count: {memory.get(LAUNCHES)} after {self.launches} launches")


def _data(phase: int, program: int) -> Place:
    return f"{'even' if phase % 2 == 0 else 'odd'} data of program {program}"


def _cells(values: dict[Place, Value]) -> Cells:
    return tuple(sorted(values.items()))


def _put(items: tuple, index: int, item: object) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


def _cached(state: State, die: int, held: dict[Place, Value], dirty: frozenset[Place]) -> State:
    return state._replace(caches=_put(state.caches, die, (_cells(held), dirty)))


def _stepped(state: State, index: int, steps: int = 1, **changes: object) -> State:
    thread = state.threads[index]
    after = thread._replace(at=thread.at + steps, **changes)
    return state._replace(threads=_put(state.threads, index, after))


def broken(model: Model, **bug: object) -> Model:
    """The same model with a bug in its protocol."""
    return replace(model, protocol=replace(model.protocol, **bug))
