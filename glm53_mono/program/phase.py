"""A phase: what it does, the words of its record, and which regions it reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from glm53_mono.kernels.record import SCALES_BEHIND, Kind, Word
from glm53_mono.weights.descriptor import Matrix, checked_address
from glm53_mono.weights.model import MhcWeights

Value = Tensor | Matrix | int | None


@dataclass(frozen=True)
class Access:
    """Regions a phase touches. Between two barriers nothing may be both written by one program and read by another.

    `reads` may have been written by any program in an earlier phase; `writes` are read by others only in a later one;
    `owns` are read and written by the one program whose task owns the place (a column tile, a channel, a head, a row).
    `late` are those of `reads` and `writes` where programs that the next phase does not wait for (`monokernel`'s
    arrivals) may still be at work during it.
    """

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    owns: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Phase:
    """One phase of one layer; layer -1 is before the first."""

    kind: Kind
    layer: int
    access: Access
    words: Mapping[Word, Value] = field(default_factory=dict)
    streamed: tuple[Matrix, ...] = ()
    """Matrices that the phase reads once, whole (the experts: those that the rows chose)."""

    def record(self, length: int) -> list[int]:
        """The record's words."""
        words = [0] * length
        words[Word.KIND], words[Word.LAYER] = int(self.kind), self.layer
        for word, value in self.words.items():
            words[word] = _address(f"{self.kind.name} of layer {self.layer}, {word.name}", value)
            if isinstance(value, Matrix) and value.scales is not None:
                words[word + SCALES_BEHIND] = value.scales.data_ptr()
        return words


def _address(name: str, value: Value) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    if isinstance(value, Matrix):
        return value.address
    return checked_address(name, value)


MIX = Access(
    reads=frozenset({"streams", "mix"}),
    writes=frozenset({"mixed", "coefficients"}),
    late=frozenset({"mix", "coefficients"}),
)
UPDATE_READS = frozenset({"coefficients"})
UPDATE_OWNS = frozenset({"streams"})
UPDATE_WRITES = frozenset({"mix"})


def mix_phase(layer: int, mix: MhcWeights) -> Phase:
    """Reads the streams for a branch: its input, and the coefficients with which its output is written back."""
    return Phase(Kind.MIX, layer, MIX, {Word.MIX_SCALE: mix.scale, Word.MIX_BASE: mix.base, Word.MIX_NORM: mix.norm})
