"""Records of a launch with one wrong word: wiring mistakes that need no other kernel, so captured graphs can have them.

A launch reads its records from the device each time. Words are given the value of another record or another word, or
an address one place before, so that whatever is read exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch

from glm53_mono.kernels.record import Kind, Word
from glm53_mono.program.launch import Launch


@dataclass(frozen=True)
class Spoil:
    """A wrong word in the first record of a kind.

    Attributes:
        name: what went wrong.
        kind, word: the record and the word.
        source: where its value comes from: (which record of the kind, word), or None for the place before its own.
        part, value: what the check must name, in the layer of that record.
        verify: whether the mistake shows in decode steps, in verify steps, or, with None, in both.
    """

    name: str
    kind: Kind
    word: Word
    source: tuple[int, Word] | None
    part: str
    value: str
    verify: bool | None = None


DRAFT_STATES = ("attention", "draft states", True)

SPOILS = (
    Spoil("the FFN's norm before attention", Kind.MIX, Word.MIX_NORM, (1, Word.MIX_NORM), "attention", "input"),
    Spoil("taps of another layer", Kind.KDA_PROJECT, Word.CONV, (1, Word.CONV), "attention", "state", False),
    Spoil("drafts' taps of another layer", Kind.KDA_PROJECT, Word.CONV, (1, Word.CONV), *DRAFT_STATES),
    Spoil("window of another slot", Kind.KDA_PROJECT, Word.CONV_POOL, None, "attention", "window", False),
    Spoil("state of another slot", Kind.KDA_DELTA, Word.STATE_POOL, None, "attention", "state", False),
    Spoil("drafts from another slot's state", Kind.KDA_DELTA, Word.STATE_POOL, None, *DRAFT_STATES),
    Spoil("decay of another layer", Kind.KDA_DELTA, Word.A_LOG, (1, Word.DT_BIAS), "attention", "state", False),
    Spoil("output of another layer", Kind.KDA_OUTPUT, Word.OUTPUT, (1, Word.OUTPUT), "attention", "output"),
    Spoil("pool gate for the key", Kind.MLA_PROJECT, Word.INDEX_KEY, (0, Word.INDEX_GATE), "attention", "ring keys"),
    Spoil("key for the pool gate", Kind.MLA_PROJECT, Word.INDEX_GATE, (0, Word.INDEX_KEY), "attention", "ring gates"),
    Spoil("latents a slot before", Kind.MLA_QUERY, Word.LATENT_POOL, None, "attention", "latent"),
    Spoil("ring of another request", Kind.MLA_QUERY, Word.RING_KEY, None, "attention", "ring keys"),
    Spoil("scores from another page", Kind.MLA_ABSORB, Word.INDEX_POOL, None, "attention", "chosen pools"),
    Spoil("attends a slot before", Kind.MLA_ATTEND, Word.LATENT_POOL, None, "attention", "output"),
    Spoil("down matrices of gate and up", Kind.EXPERTS, Word.SHARED_DOWN, (0, Word.EXPERTS_DOWN), "ffn", "output"),
)
"""Each is seen by comparing SGLang's parts."""


@contextmanager
def spoiled(launch: Launch, spoil: Spoil) -> Iterator[int]:
    """The launch, bound to its caches, with the mistake for as long as the block lasts; yields the layer to name."""
    records = [i for i, phase in enumerate(launch.phases) if phase.kind is spoil.kind]
    right = launch.records.clone()
    first = records[0]
    if spoil.source is None:
        cache = launch.phases[first].words[spoil.word]
        assert isinstance(cache, torch.Tensor)
        launch.records[first, spoil.word] -= prod(cache.shape[1:]) * cache.dtype.itemsize
    else:
        record, word = spoil.source
        launch.records[first, spoil.word] = right[records[record], word]
    try:
        yield launch.phases[first].layer
    finally:
        launch.records.copy_(right)
