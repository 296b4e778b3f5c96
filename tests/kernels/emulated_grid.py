"""A grid of programs that run the barrier's device code and the kernel's loop as they stand, an access at a time.

Triton's interpreter runs a program to its end before the next one starts, so nobody can wait in it. Here every program
is a thread, the device code is Python that finds a stand-in for Triton, and a seed decides who makes the next access.
Memory is one and in order, and a program is one thread: what waves and a weaker memory do is the model's part
(`sync_model.py`).
"""

from __future__ import annotations

import inspect
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from glm53_mono.kernels import monokernel, roll_call, sync
from glm53_mono.kernels.record import RECORD, Kind, Word

WORDS, HOST, RECORDS, COUNT, SEEN = 1_000, 100_000, 200_000, 300_000, 300_001
"""Where the barrier's words, the host's record, the phases' records and what a roll call counts lie."""

DEADLINE, MOST_STEPS = 300, 2_000
"""Of each program on average. The grid's steps are the nanoseconds of its clock."""

SOURCE = Path(sync.__file__).read_text()
ROLL_CALL = Path(roll_call.__file__).read_text()


class Hang(AssertionError):
    """Programs wait for what never comes, and no deadline ends it."""


class Fault(Exception):
    """A program stored to address 0."""


class Address(int):
    """An address as device code handles it."""

    def __add__(self, other: int) -> Address:
        return Address(int(self) + int(other))

    __radd__ = __add__

    def to(self, *_: Any, **__: Any) -> Address:
        """A pointer of another type."""
        return self


@dataclass
class Grid:
    """Launches of the kernel's loop over phases that do nothing but check who came before.

    Attributes:
        kinds: of the phases.
        rows: of the step: that many programs arrive behind a mix.
        selects: whether the step must select pools; phases that do are skipped if not.
        source: of `sync.py`, or a wrong one.
        withholds: a program whose first arrival is lost.
        slots: programs that there is room for at once, if not for all: the others start as these leave.
        touched: how often each program made an atomic access to each word, by name and program.
    """

    programs: int
    chiplets: int
    kinds: Sequence[Kind] = (Kind.EMBED, Kind.MIX, Kind.KDA_PROJECT, Kind.KDA_DELTA, Kind.MIX, Kind.HEAD)
    rows: int = 1
    selects: bool = False
    seed: int = 0
    source: str = SOURCE
    withholds: int | None = None
    slots: int | None = None
    memory: dict[int, int] = field(default_factory=dict)
    touched: Counter[tuple[int, int]] = field(default_factory=Counter)
    steps: int = 0

    def launch(self) -> None:
        """Runs one launch.

        Raises:
            AssertionError: a program entered a phase before those that it waits for had left the last one.
            Fault: a deadline passed.
            Hang: and none did.
        """
        for phase, kind in enumerate(self.kinds):
            self.memory[RECORDS + phase * RECORD + int(Word.KIND)] = int(kind)
        self._left = [0] * len(self.kinds)
        kernel = self._kernel()
        arguments = dict.fromkeys(inspect.signature(kernel).parameters) | {
            "records": Address(RECORDS),
            "host_record": Address(HOST),
            "rows": self.rows,
            "first": 0,
            "last": len(self.kinds),
            "deadline": DEADLINE * self.programs,
            "W": SimpleNamespace(words=0),
            "G": SimpleNamespace(tp_size=1),
            "T": SimpleNamespace(chiplets=self.chiplets),
            "BACKEND": "emulated",
        }
        self._run_all(lambda: kernel(**arguments))

    def roll_call(self, source: str = ROLL_CALL) -> list[int]:
        """Runs `kernels/roll_call.py`, or a wrong one: how many programs each of them saw."""
        self.memory[COUNT] = 0
        names = self._device_code()
        exec(_without_imports(source), names)
        kernel = names["roll_call"]
        self._run_all(lambda: kernel(Address(COUNT), Address(SEEN), DEADLINE * self.programs, "emulated"))
        return [self.memory[SEEN + program] for program in range(self.programs)]

    def _run_all(self, program: Callable[[], None]) -> None:
        self._own = threading.local()
        self._random = random.Random(self.seed)
        self._failure: BaseException | None = None
        self._turns = [threading.Semaphore(0) for _ in range(self.programs)]
        self._stopped = threading.Semaphore(0)
        threads = [threading.Thread(target=self._run, args=(program, p), daemon=True) for p in range(self.programs)]
        self._alive = set(range(self.programs))
        for thread in threads:
            thread.start()
        while self._alive and self._failure is None:
            self._turns[self._random.choice(sorted(self._alive)[: self.slots])].release()
            self._stopped.acquire()
        if self._failure is not None:
            alive, self._alive = self._alive, set()
            for program in alive:
                self._turns[program].release()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def word(self, word: Any, chiplet: int = 0) -> int:
        """A word of the barrier, e.g. `sync.MET`, of a chiplet if it is one of several."""
        return self.memory.get(WORDS + word.value + chiplet * sync.LINE, 0)

    def words(self) -> dict[int, int]:
        """Every word of the barrier that is not zero, by its place."""
        end = WORDS + sync.barrier_words(self.chiplets)
        return {place - WORDS: value for place, value in self.memory.items() if WORDS <= place < end and value}

    def host(self, word: Any) -> int:
        """A word of the host's record."""
        return self.memory.get(HOST + word.value, 0)

    def _run(self, program: Callable[[], None], index: int) -> None:
        self._own.program = index
        self._turns[index].acquire()
        try:
            if self._alive:
                program()
        except BaseException as failure:
            self._failure = self._failure or failure
        self._alive.discard(index)
        self._stopped.release()

    def _turn(self) -> None:
        """Ends this program's step and waits for its next one."""
        self._stopped.release()
        self._turns[self._own.program].acquire()
        self.steps += 1
        if self._failure is not None or not self._alive:
            raise SystemExit
        if self.steps > MOST_STEPS * self.programs:
            raise Hang(f"{self.steps} steps: {self.words()}")

    def _access(self, place: int, change: Callable[[int], int]) -> int:
        self._turn()
        old = self.memory.get(place, 0)
        self.memory[place] = change(old)
        return old

    def _atomic(self, place: int, change: Callable[[int], int]) -> int:
        self.touched[place - WORDS, self._own.program] += 1
        return self._access(place, change)

    def _atomic_add(self, place: int, value: int, **_: str) -> int:
        if value and self._own.program == self.withholds:
            self.withholds = None
            value = 0
        return self._atomic(place, lambda old: old + value)

    def _store(self, place: int, value: int) -> None:
        if place == 0:
            raise Fault
        self._access(place, lambda _: value)

    def _phase(self, record: Address, kind: int, *_: Any) -> None:
        """Stands in for `run_phase`."""
        phase = (record - RECORDS) // RECORD
        run = [each for each, kind in enumerate(self.kinds[:phase]) if self.selects or kind != Kind.MLA_SELECT]
        if run:
            awaited = min(self.rows, self.programs) if self.kinds[run[-1]] == Kind.MIX else self.programs
            assert self._left[run[-1]] >= awaited, f"program {self._own.program} came early to phase {phase}"
        self._turn()
        # the programs that have no row to mix are not waited for
        self._left[phase] += kind != Kind.MIX or self._own.program < self.rows

    def _kernel(self) -> Callable[..., None]:
        names = self._device_code()
        names |= {
            "region": lambda *_: Address(WORDS),
            "Step": lambda *_: None,
            "must_select": lambda *_: self.selects,
            "run_phase": self._phase,
            "UNSPECIALIZED": (),
            **{name: getattr(monokernel, name).value for name in ("WORDS_OF_RECORD", "KIND", "MIX", "MLA_SELECT")},
        }
        exec(inspect.getsource(monokernel.monokernel.fn), names)
        return names["monokernel"]

    def _device_code(self) -> dict[str, Any]:
        """The names of `sync.py`, and what stands in for Triton."""

        def constexpr(value: Any) -> Any:
            return value

        language = SimpleNamespace(
            constexpr=constexpr,
            program_id=lambda _: self._own.program,
            num_programs=lambda _: self.programs,
            atomic_add=self._atomic_add,
            atomic_xchg=lambda place, value, **_: self._atomic(place, lambda _: value),
            load=lambda place: self._access(place, lambda old: old),
            store=self._store,
            where=lambda condition, yes, no: yes if condition else no,
            minimum=min,
            maximum=max,
            full=lambda *_: Address(0),
            range=lambda first, last, **_: range(first, last),
            static_range=range,
            debug_barrier=lambda: None,
            pointer_type=lambda _: None,
            int32=None,
            int64=None,
        )
        triton = SimpleNamespace(jit=lambda *function, **_: function[0] if function else lambda inner: inner)
        names: dict[str, Any] = {"triton": triton, "tl": language}
        exec(_without_imports(self.source), names)
        names["now"] = lambda _: self.steps
        return names


def _without_imports(source: str) -> str:
    """The device code alone: what it imports is stood in for."""
    return "\n".join(line for line in source.splitlines() if not line.startswith(("import ", "from ")))
