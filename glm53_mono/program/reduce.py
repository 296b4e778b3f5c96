"""Where the ranks' shares are added up: a phase after each one that leaves them.

A column tile belongs to the same program in both phases and on every rank, so no grid barrier stands between the two
(`kernels.peers`): for what programs touch they are one phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from glm53_mono.kernels.record import Kind, Word
from glm53_mono.program.phase import UPDATE_OWNS, UPDATE_READS, UPDATE_WRITES, Access, Phase
from glm53_mono.program.symmetric import Peers

LEAVES_PARTIALS = frozenset({Kind.EMBED, Kind.KDA_OUTPUT, Kind.MLA_OUTPUT, Kind.DENSE_DOWN, Kind.DOWN})
"""Phases whose output each rank has a share of; what `monokernel.leaves_partials` tells on the device."""

ADDS_PARTIALS = frozenset({Kind.REDUCE, Kind.REDUCE_EMBEDDING})

PARTIALS = frozenset({"partials"})
REDUCE = Access(reads=UPDATE_READS, writes=UPDATE_WRITES, owns=UPDATE_OWNS | PARTIALS)
REDUCE_EMBEDDING = Access(writes=UPDATE_WRITES | {"streams"}, owns=PARTIALS)


def with_reduces(phases: Iterable[Phase], peers: Peers | None) -> Iterator[Phase]:
    """The phases of one rank among several: what the branches end with is left, then added up and written back.

    Args:
        phases: as of a rank that has the whole model.
        peers: None while the buffers are not exchanged; their addresses are 0 then.
    """
    words = {} if peers is None else {Word.PEERS: peers.table, Word.RANK: peers.rank}
    for phase in phases:
        if phase.kind not in LEAVES_PARTIALS:
            yield phase
            continue
        own = {word: value for word, value in phase.words.items() if word != Word.UPDATE_FN}
        left = Access(reads=phase.access.reads - UPDATE_READS, owns=PARTIALS)
        yield replace(phase, access=left, words=own | words)
        is_embedding = phase.kind == Kind.EMBED
        yield Phase(
            Kind.REDUCE_EMBEDDING if is_embedding else Kind.REDUCE,
            phase.layer,
            REDUCE_EMBEDDING if is_embedding else REDUCE,
            {Word.UPDATE_FN: phase.words[Word.UPDATE_FN]} | words,
        )
