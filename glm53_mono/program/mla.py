"""The phases of an MLA layer's attention with its indexer."""

from __future__ import annotations

from glm53_mono.kernels.record import Kind, Word
from glm53_mono.program.phase import UPDATE_OWNS, UPDATE_READS, UPDATE_WRITES, Access, Phase, mix_phase
from glm53_mono.program.pools import Pools
from glm53_mono.weights.descriptor import Matrix
from glm53_mono.weights.model import MhcWeights, MlaWeights

PROJECT = Access(reads=frozenset({"mixed"}), writes=frozenset({"latents", "index_key", "index_gate", "head_weights"}))
QUERY = Access(
    reads=frozenset({"latents", "index_key", "index_gate"}),
    writes=frozenset({"query", "index_query", "latent_pool", "index_pool"}),
    owns=frozenset({"ring"}),
)
ABSORB = Access(
    reads=frozenset({"query", "index_query", "head_weights", "index_pool"}), writes=frozenset({"absorbed", "scores"})
)
SELECT = Access(reads=frozenset({"scores"}), writes=frozenset({"selected"}))
ATTEND = Access(
    reads=frozenset({"absorbed", "selected", "latent_pool"}),
    writes=frozenset({"partial", "partial_max", "partial_sum"}),
)
MERGE = Access(reads=frozenset({"partial", "partial_max", "partial_sum"}), writes=frozenset({"attended"}))
OUTPUT = Access(reads=UPDATE_READS | {"attended"}, writes=UPDATE_WRITES, owns=UPDATE_OWNS)


def mla_phases(
    layer: int, ordinal: int, weights: MlaWeights[Matrix], mix: MhcWeights, next_mix: MhcWeights, pools: Pools
) -> list[Phase]:
    """Phases of MLA layer `layer`, the `ordinal`-th of its kind in the pools. A launch skips SELECT if no row must."""
    w, index = weights, weights.indexer
    return [
        mix_phase(layer, mix),
        Phase(
            Kind.MLA_PROJECT,
            layer,
            PROJECT,
            {
                Word.LATENTS: w.query_latent,
                Word.INDEX_KEY: index.key,
                Word.INDEX_GATE: index.pool_gate,
                Word.HEAD_WEIGHTS: index.head_weights,
            },
            streamed=(w.query_latent, index.key, index.pool_gate),
        ),
        Phase(
            Kind.MLA_QUERY,
            layer,
            QUERY,
            {
                Word.QUERY: w.query,
                Word.INDEX_QUERY: index.query,
                Word.QUERY_NORM: w.query_norm,
                Word.LATENT_NORM: w.latent_norm,
                Word.KEY_NORM_WEIGHT: index.key_norm_weight,
                Word.KEY_NORM_BIAS: index.key_norm_bias,
                Word.POSITION_BIAS: index.position_bias,
                Word.LATENT_POOL: pools.latent[ordinal],
                Word.INDEX_POOL: pools.index[ordinal],
                Word.RING_KEY: pools.ring_key[ordinal],
                Word.RING_GATE: pools.ring_gate[ordinal],
            },
            streamed=(w.query, index.query),
        ),
        Phase(
            Kind.MLA_ABSORB,
            layer,
            ABSORB,
            {Word.KEY_UP: w.key_up, Word.INDEX_POOL: pools.index[ordinal]},
            streamed=(w.key_up,),
        ),
        Phase(Kind.MLA_SELECT, layer, SELECT),
        Phase(Kind.MLA_ATTEND, layer, ATTEND, {Word.LATENT_POOL: pools.latent[ordinal]}),
        Phase(Kind.MLA_MERGE, layer, MERGE, {Word.VALUE_UP: w.value_up}, streamed=(w.value_up,)),
        Phase(
            Kind.MLA_OUTPUT,
            layer,
            OUTPUT,
            {Word.OUTPUT: w.output, Word.UPDATE_FN: next_mix.fn},
            streamed=(w.output,),
        ),
    ]
