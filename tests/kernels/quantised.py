"""Models whose matrices are stored in other formats than bf16, as the published checkpoints and AITER store them."""

from __future__ import annotations

from dataclasses import replace

from glm53_mono.weights.formats import Formats
from glm53_mono.weights.model import with_matrices
from glm53_mono.weights.packed import packed, unpacked
from glm53_mono.weights.published import with_storage
from tests.kernels.rig import TINY, Model

TINY_BLOCKS = replace(TINY, q_rank=128, expert_width=128)
"""Whole blocks of 128 in every matrix."""

TINY_TILES = replace(TINY_BLOCKS, expert_width=256)
"""Whole blocks of 8 scales, of 256 columns, in the matrices of the experts."""


def stored_as(model: Model, formats: Formats) -> Model:
    """The model with its matrices quantised and laid out so; what they stand for is the reference's."""
    stored = with_storage(model.weights, formats, packed)
    return Model(model.geometry, with_matrices(stored, lambda _, matrix: unpacked(matrix)), stored)
