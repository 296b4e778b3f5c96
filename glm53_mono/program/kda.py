"""The phases of a KDA layer's attention: project, delta rule, output."""

from __future__ import annotations

from glm53_mono.program.phase import UPDATE_OWNS, UPDATE_READS, UPDATE_WRITES, Access, Phase, mix_phase
from glm53_mono.program.pools import Pools
from glm53_mono.program.record import Kind, Word
from glm53_mono.weights.model import KdaWeights, MixWeights

PROJECT = Access(
    reads=frozenset({"mixed"}), writes=frozenset({"qkv", "gates", "conv_scratch"}), owns=frozenset({"conv"})
)
DELTA = Access(
    reads=frozenset({"qkv", "gates"}), writes=frozenset({"attended", "state_scratch"}), owns=frozenset({"state"})
)
OUTPUT = Access(reads=UPDATE_READS | {"attended"}, writes=UPDATE_WRITES, owns=UPDATE_OWNS)


def kda_phases(
    layer: int, ordinal: int, weights: KdaWeights, mix: MixWeights, next_mix: MixWeights, pools: Pools
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
                Word.F_A: weights.f_a,
                Word.G_A: weights.g_a,
                Word.CONV: weights.taps,
                Word.CONV_POOL: pools.conv[ordinal],
                Word.CONV_SCRATCH: pools.conv_scratch[ordinal] if scratch else None,
            },
            streamed=(weights.qkv, weights.beta, weights.f_a, weights.g_a),
        ),
        Phase(
            Kind.KDA_DELTA,
            layer,
            DELTA,
            {
                Word.F_B: weights.f_b,
                Word.G_B: weights.g_b,
                Word.A_LOG: weights.a_log,
                Word.DT_BIAS: weights.dt_bias,
                Word.O_NORM: weights.output_norm,
                Word.STATE_POOL: pools.state[ordinal],
                Word.STATE_SCRATCH: pools.state_scratch[ordinal] if scratch else None,
            },
            streamed=(weights.f_b, weights.g_b),
        ),
        Phase(
            Kind.KDA_OUTPUT,
            layer,
            OUTPUT,
            {Word.OUTPUT: weights.output, Word.UPDATE_FN: next_mix.fn},
            streamed=(weights.output,),
        ),
    ]
