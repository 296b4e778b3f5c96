"""The phases of a KDA layer's attention: project, delta rule, output."""

from __future__ import annotations

from glm53_mono.kernels.record import Kind, Word
from glm53_mono.program.phase import UPDATE_OWNS, UPDATE_READS, UPDATE_WRITES, Access, Phase, mix_phase
from glm53_mono.program.pools import Pools
from glm53_mono.weights.descriptor import Matrix
from glm53_mono.weights.model import KdaWeights, MhcWeights

PROJECT = Access(
    reads=frozenset({"mixed"}), writes=frozenset({"qkv", "gates", "conv_scratch"}), owns=frozenset({"conv"})
)
DELTA = Access(
    reads=frozenset({"qkv", "gates"}), writes=frozenset({"attended", "state_scratch"}), owns=frozenset({"state"})
)
OUTPUT = Access(reads=UPDATE_READS | {"attended"}, writes=UPDATE_WRITES, owns=UPDATE_OWNS)


def kda_phases(
    layer: int, ordinal: int, weights: KdaWeights[Matrix], mix: MhcWeights, next_mix: MhcWeights, pools: Pools
) -> list[Phase]:
    """Phases of KDA layer `layer`, the `ordinal`-th of its kind in the pools."""
    scratch = pools.conv_scratch is not None
    return [
        mix_phase(layer, mix),
        Phase(
            Kind.KDA_PROJECT,
            layer,
            PROJECT,
            {
                Word.QKV: weights.qkv,
                Word.BETA: weights.beta,
                Word.F_A: weights.decay_down,
                Word.G_A: weights.gate_down,
                Word.CONV: weights.taps,
                Word.CONV_POOL: pools.conv[ordinal],
                Word.CONV_SCRATCH: pools.conv_scratch[ordinal] if scratch else None,
            },
            streamed=(weights.qkv, weights.beta, weights.decay_down, weights.gate_down),
        ),
        Phase(
            Kind.KDA_DELTA,
            layer,
            DELTA,
            {
                Word.F_B: weights.decay_up,
                Word.G_B: weights.gate_up,
                Word.A_LOG: weights.a_log,
                Word.DT_BIAS: weights.dt_bias,
                Word.O_NORM: weights.output_norm,
                Word.STATE_POOL: pools.state[ordinal],
                Word.STATE_SCRATCH: pools.state_scratch[ordinal] if scratch else None,
            },
            streamed=(weights.decay_up, weights.gate_up),
        ),
        Phase(
            Kind.KDA_OUTPUT,
            layer,
            OUTPUT,
            {Word.OUTPUT: weights.output, Word.UPDATE_FN: next_mix.fn},
            streamed=(weights.output,),
        ),
    ]
