"""The whole step: every phase in order, and the table of records that a launch reads."""

from __future__ import annotations

import torch
from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.kernels.record import RECORD, Kind, Word
from glm53_mono.program.dense import dense_phases
from glm53_mono.program.kda import kda_phases
from glm53_mono.program.mla import mla_phases
from glm53_mono.program.moe import moe_phases
from glm53_mono.program.phase import UPDATE_WRITES, Access, Phase
from glm53_mono.program.pools import Pools
from glm53_mono.program.reduce import with_reduces
from glm53_mono.program.symmetric import Peers
from glm53_mono.weights.descriptor import Matrix
from glm53_mono.weights.model import DenseWeights, KdaWeights, StepWeights

EMBED = Access(writes=UPDATE_WRITES | {"streams"})
HEAD = Access(reads=frozenset({"streams"}), writes=frozenset({"hidden"}))


def step_phases(
    geometry: Geometry, weights: StepWeights[Matrix], pools: Pools, peers: Peers | None = None
) -> list[Phase]:
    """Every phase of a decode or verify step, from the embedding to the final norm.

    Args:
        peers: of a model that several ranks share; None as long as their buffers are not exchanged.
    """
    layers = weights.layers
    phases = [
        Phase(
            Kind.EMBED,
            -1,
            EMBED,
            {
                Word.EMBEDDING: weights.embedding,
                Word.FIRST_TOKEN: weights.first_token,
                Word.TOKENS: weights.embedding.rows,
                Word.UPDATE_FN: layers[0].attention_mhc.fn,
            },
        )
    ]
    for index, layer in enumerate(layers):
        following = layers[index + 1].attention_mhc if index + 1 < len(layers) else None
        if isinstance(layer.attention, KdaWeights):
            ordinal = geometry.kda_layers.index(index)
            phases += kda_phases(index, ordinal, layer.attention, layer.attention_mhc, layer.ffn_mhc, pools)
        else:
            ordinal = geometry.dsa_layers.index(index)
            phases += mla_phases(index, ordinal, layer.attention, layer.attention_mhc, layer.ffn_mhc, pools)
        if isinstance(layer.ffn, DenseWeights):
            phases += dense_phases(index, layer.ffn, layer.ffn_mhc, following)
        else:
            phases += moe_phases(index, layer.ffn, layer.ffn_mhc, following)
    phases.append(Phase(Kind.HEAD, len(layers), HEAD, {Word.FINAL_NORM: weights.norm}))
    return phases if geometry.tp_size == 1 else list(with_reduces(phases, peers))


def write_records(phases: list[Phase], device: torch.device | str) -> Tensor:
    """The launch's table, int64 [phases, RECORD]."""
    return torch.tensor([phase.record(RECORD) for phase in phases], dtype=torch.int64, device=device)
