"""MLA: SGLang's Triton sparse attention at the real head size against the reference.

SGLang's decode kernels (`triton_sparse_mla*.py`) hold their accumulators in tuples, which the interpreter cannot run.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from glm53_mono.checkpoint.config import checkpoint_geometry, model_config
from glm53_mono.reference import mla
from tests.oracle.ops import Draw, SeededBug, assert_same_roundings, assert_within, bug_cases

pytestmark = pytest.mark.usefixtures("sglang_ops")

SEED = 6
HEADS = 16
GEOMETRY = checkpoint_geometry(model_config())
SCALE = GEOMETRY.qk_head_dim**-0.5
WIDTH = 192
"""Columns of the selection; SGLang's kernel wants a multiple of its block of keys."""
ROTARY_TAIL = 64


@dataclass(frozen=True)
class Case:
    """Queries, a cache, and rows that select all columns, some, one, and an early token beside a late one."""

    query: Tensor
    cache: Tensor
    slots: Tensor

    def reference(self, *, round_probabilities: bool) -> Tensor:
        return mla.sparse_attention(
            self.query, self.cache, self.slots.long(), SCALE, round_probabilities=round_probabilities
        )


def case() -> Case:
    draw = Draw(SEED)
    slots = torch.stack([torch.randperm(400, generator=draw.generator)[:WIDTH] for _ in range(4)]).int()
    slots[1, 70:] = -1
    slots[2, 1:] = -1
    slots[3, 2:] = -1
    return Case(draw.bf16(4, HEADS, GEOMETRY.latent), draw.bf16(400, 1, GEOMETRY.latent), slots)


def _padded(values: Tensor) -> Tensor:
    """The kernel insists on a rotary tail beside the latent; a tail of zeros adds nothing to a score."""
    return torch.nn.functional.pad(values, (0, ROTARY_TAIL))


def compare_attention() -> None:
    """With probabilities rounded as the kernel rounds them; its blocks of keys have maxima of their own."""
    from sglang.kernels.ops.attention.dsa.triton_sparse_mla_prefill import sparse_mla_prefill

    c = case()
    found = sparse_mla_prefill(_padded(c.query), _padded(c.cache), c.slots, SCALE, GEOMETRY.latent)
    rounded, exact = c.reference(round_probabilities=True), c.reference(round_probabilities=False)
    assert_same_roundings("output of one block", rounded[2:], found[2:], odd=5e-4)
    assert_within("output", rounded, found, rel=5e-4, max_abs=1e-2)
    assert_within("output, probabilities unrounded", exact, found, rel=2e-3, max_abs=4e-2)


def test_reference_equals_sglang() -> None:
    compare_attention()


def _scale_twice(query: Tensor, cache: Tensor, slots: Tensor, scale: float, *, attention=mla.sparse_attention, **how):
    return attention(query, cache, slots, scale * scale, **how)


def _padding_attended(
    query: Tensor, cache: Tensor, slots: Tensor, scale: float, *, attention=mla.sparse_attention, **how
):
    return attention(query, cache, slots.clamp(min=0), scale, **how)


def _last_column_dropped(
    query: Tensor, cache: Tensor, slots: Tensor, scale: float, *, attention=mla.sparse_attention, **how
):
    chosen = (slots >= 0).sum(-1, keepdim=True)
    last = torch.arange(slots.shape[1]) == chosen - 1
    return attention(query, cache, slots.masked_fill(last & (chosen > 1), -1), scale, **how)


SEEDED_BUGS = [
    SeededBug("scale applied twice", mla, "sparse_attention", _scale_twice, compare_attention),
    SeededBug("padding attended as slot 0", mla, "sparse_attention", _padding_attended, compare_attention),
    SeededBug("last chosen token dropped", mla, "sparse_attention", _last_column_dropped, compare_attention),
]


@bug_cases(SEEDED_BUGS)
def test_seeded_bug_is_seen(bug: SeededBug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.assert_seen(monkeypatch)
