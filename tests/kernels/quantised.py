"""Models whose matrices are stored in other formats than bf16, as the published checkpoints and AITER store them."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from glm53_mono.weights import bf16, fp8, mxfp4
from glm53_mono.weights.copies import relaid
from glm53_mono.weights.descriptor import Format, Layout, Matrix, Storage
from glm53_mono.weights.formats import Formats
from glm53_mono.weights.published import with_storage
from tests.kernels.rig import TINY, Model

TINY_BLOCKS = replace(TINY, q_rank=128, expert_width=128)
"""Whole blocks of 128 in every matrix."""

TINY_TILES = replace(TINY_BLOCKS, expert_width=256)
"""Whole blocks of 8 scales, of 256 columns, in the matrices of the experts."""

STORE = {
    Format.FP8: (fp8.matrix, fp8.quantised, fp8.dequantised),
    Format.MXFP4: (mxfp4.matrix, mxfp4.quantised, mxfp4.dequantised),
}


def stored_as(model: Model, formats: Formats) -> Model:
    """The model with its matrices quantised and laid out so; what they stand for is the reference's."""
    packed: dict[str, tuple[Tensor, Tensor]] = {}

    def pack(name: str, tensor: Tensor, storage: Storage) -> Matrix:
        if storage.format == Format.BF16:
            return bf16.matrix(name, tensor)
        describe, quantise, _ = STORE[storage.format]
        packed[name] = quantise(tensor)
        matrix = describe(name, *packed[name])
        return matrix if storage.layout == Layout.LINEAR else relaid(matrix, storage.layout)

    def unpack(name: str, tensor: Tensor, storage: Storage) -> Tensor:
        if storage.format == Format.BF16:
            return tensor
        _, _, dequantise = STORE[storage.format]
        return dequantise(*packed[name])

    stored = with_storage(model.weights, formats, pack)
    return Model(model.geometry, with_storage(model.weights, formats, unpack), stored)
