"""The phases of a dense FFN."""

from __future__ import annotations

from glm53_mono.kernels.record import Kind, Word
from glm53_mono.program.phase import UPDATE_OWNS, UPDATE_READS, UPDATE_WRITES, Access, Phase, mix_phase
from glm53_mono.weights.descriptor import Matrix
from glm53_mono.weights.model import DenseWeights, MhcWeights

UP = Access(reads=frozenset({"mixed"}), writes=frozenset({"wide"}))
DOWN = Access(reads=UPDATE_READS | {"wide"}, writes=UPDATE_WRITES, owns=UPDATE_OWNS)


def dense_phases(
    layer: int, weights: DenseWeights[Matrix], mix: MhcWeights, next_mix: MhcWeights | None
) -> list[Phase]:
    """Gate and up, then down; `next_mix` is the next layer's attention mix, None after the last layer."""
    return [
        mix_phase(layer, mix),
        Phase(Kind.DENSE_UP, layer, UP, {Word.DENSE: weights.gate_up}, streamed=(weights.gate_up,)),
        Phase(
            Kind.DENSE_DOWN,
            layer,
            DOWN,
            {Word.DENSE: weights.down, Word.UPDATE_FN: next_mix.fn if next_mix else None},
            streamed=(weights.down,),
        ),
    ]
