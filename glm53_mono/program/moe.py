"""The phases of a sparse FFN: router with the shared expert's first half, routed experts, down."""

from __future__ import annotations

from glm53_mono.kernels.record import Kind, Word
from glm53_mono.program.phase import UPDATE_OWNS, UPDATE_READS, UPDATE_WRITES, Access, Phase, mix_phase
from glm53_mono.weights.descriptor import Matrix
from glm53_mono.weights.model import DenseWeights, MhcWeights, MoeWeights

ROUTER = Access(reads=frozenset({"mixed"}), writes=frozenset({"router", "expert_wide"}))
EXPERTS = Access(reads=frozenset({"router", "mixed"}), writes=frozenset({"expert_wide"}))
DOWN = Access(reads=UPDATE_READS | {"expert_wide"}, writes=UPDATE_WRITES, owns=UPDATE_OWNS)


def moe_phases(layer: int, weights: MoeWeights[Matrix], mix: MhcWeights, next_mix: MhcWeights | None) -> list[Phase]:
    """Phases of a sparse FFN; `next_mix` is the next layer's attention mix, None after the last layer."""
    shared = weights.shared or DenseWeights(weights.gate_up.item(-1), weights.down.item(-1))
    return [
        mix_phase(layer, mix),
        Phase(
            Kind.ROUTER,
            layer,
            ROUTER,
            {Word.GATE: weights.router, Word.SHARED_UP: shared.gate_up},
            streamed=(weights.router,),
        ),
        Phase(
            Kind.EXPERTS,
            layer,
            EXPERTS,
            {
                Word.EXPERTS_UP: weights.gate_up,
                Word.GATE_BIAS: weights.bias,
                Word.EXPERTS_DOWN: weights.down,
                Word.SHARED_DOWN: shared.down,
            },
            streamed=(weights.gate_up,),
        ),
        Phase(
            Kind.DOWN,
            layer,
            DOWN,
            # of the matrices only their scales' addresses are read here
            {
                Word.UPDATE_FN: next_mix.fn if next_mix else None,
                Word.EXPERTS_DOWN: weights.down,
                Word.SHARED_DOWN: shared.down,
            },
            streamed=(weights.down,),
        ),
    ]
