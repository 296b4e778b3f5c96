"""The words of a phase record: what the builder writes and the kernel reads, named once.

A record is RECORD int64 words. The first two are common, UPDATE_FN is there for phases that update the streams, PEERS
and RANK for those that leave or add partial sums of several ranks; the rest belongs to one kind of phase.
"""

from enum import IntEnum

import triton.language as tl

RECORD = 24
"""Words of a record: a multiple of 8, so that each starts on a 64-byte line."""

SCALES_BEHIND = 11
"""A matrix's scales are so many words behind the matrix, where its format has any."""


class Kind(IntEnum):
    """What a phase does."""

    EMBED = 0
    KDA_PROJECT = 1
    KDA_DELTA = 2
    KDA_OUTPUT = 3
    ROUTER = 4
    EXPERTS = 5
    DOWN = 6
    DENSE_UP = 7
    DENSE_DOWN = 8
    MLA_PROJECT = 9
    MLA_QUERY = 10
    MLA_ABSORB = 11
    MLA_SELECT = 12
    MLA_ATTEND = 13
    MLA_MERGE = 14
    MLA_OUTPUT = 15
    HEAD = 16
    MIX = 17
    REDUCE = 18
    REDUCE_EMBEDDING = 19


class Word(IntEnum):
    """Places in a record. Words of different kinds share places."""

    KIND = 0
    LAYER = 1
    MIX_SCALE = 2
    MIX_BASE = 3
    MIX_NORM = 4
    UPDATE_FN = 5
    PEERS = 22
    RANK = 23

    EMBEDDING = 6
    FIRST_TOKEN = 7
    TOKENS = 8

    QKV = 6
    BETA = 7
    F_A = 8
    G_A = 9
    CONV = 10
    CONV_POOL = 11
    CONV_SCRATCH = 12

    F_B = 6
    G_B = 7
    A_LOG = 8
    DT_BIAS = 9
    O_NORM = 10
    STATE_POOL = 11
    STATE_SCRATCH = 12

    OUTPUT = 6

    GATE = 6
    SHARED_UP = 7

    EXPERTS_UP = 6
    GATE_BIAS = 7

    EXPERTS_DOWN = 8
    SHARED_DOWN = 9

    DENSE = 6

    LATENTS = 6
    INDEX_KEY = 7
    INDEX_GATE = 8
    HEAD_WEIGHTS = 9

    QUERY = 6
    INDEX_QUERY = 7
    QUERY_NORM = 8
    LATENT_NORM = 9
    KEY_NORM_WEIGHT = 10
    KEY_NORM_BIAS = 11
    POSITION_BIAS = 12
    LATENT_POOL = 13
    INDEX_POOL = 14
    RING_KEY = 15
    RING_GATE = 16

    KEY_UP = 6
    VALUE_UP = 6

    FINAL_NORM = 6


def device(word: Word | Kind) -> tl.constexpr:
    """The constant as the kernels use it."""
    return tl.constexpr(int(word))
