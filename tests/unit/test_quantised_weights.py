"""Descriptors of quantised matrices: what cannot be read is refused by its name, and mixes that no loop reads too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from glm53_mono.checkpoint.config import SCALES, checkpoint_geometry, model_config
from glm53_mono.cli.checkpoint import checkpoint_tensors
from glm53_mono.reference.weights import from_checkpoint
from glm53_mono.weights import bf16, fp8, mxfp4
from glm53_mono.weights.descriptor import Format, Matrix, Storage, WeightError
from glm53_mono.weights.formats import Formats, common_formats
from glm53_mono.weights.model import LayerWeights, with_matrices

CONFIG = model_config(8, 2, SCALES["small"], mtp=False)


def test_quantised_matrices_are_described() -> None:
    stack = torch.randn(3, 256, 128)
    for module, kind, size in ((fp8, Format.FP8, 256 * 128 + 8), (mxfp4, Format.MXFP4, 256 * 64 + 256 * 4)):
        values, scales = module.quantised(stack)
        matrix = module.matrix("experts", values, scales)
        assert (matrix.rows, matrix.columns, matrix.format, matrix.bytes) == (256, 128, kind, 3 * size)
        assert torch.equal(matrix.item(1).scales, scales[1])


def test_fp8_rounds_to_nearest_and_mxfp4_halfway_down() -> None:
    weights = torch.zeros(1, 32)
    weights[0, :4] = torch.tensor([6.0, -5.0, 0.26, 0.24])
    assert mxfp4.dequantised(*mxfp4.quantised(weights))[0, :4].tolist() == [6.0, -4.0, 0.5, 0.0]
    block = torch.zeros(128, 128)
    block[0, :2] = torch.tensor([448.0, -17.0])
    assert fp8.dequantised(*fp8.quantised(block))[0, :2].tolist() == [448.0, -16.0]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda v, s: (v, None), "down is FP8 and has no scales"),
        (
            lambda v, s: (v, s.T.contiguous()),
            r"the scales of down are torch.float32 \[1, 2\], not torch.float32 \[2, 1\]",
        ),
        (lambda v, s: (v, s[:0]), r"the scales of down are torch.float32 \[0, 1\]"),
        (lambda v, s: (v, s.bfloat16()), "the scales of down are torch.bfloat16"),
        (lambda v, s: (v, s.index_fill(0, torch.tensor([1]), float("nan"))), "the scales of down hold nan"),
        (lambda v, s: (v[:, :96], s), "down has 96 columns on this rank"),
        (lambda v, s: (v[:100], s), "down has 100 rows on this rank"),
        (lambda v, s: (v.float(), s), "down is torch.float32"),
        (lambda v, s: (v.view(torch.uint8).T.contiguous().T.view(torch.float8_e4m3fn), s), "down has strides"),
    ],
)
def test_fp8_that_cannot_be_read_is_named(spoil: Callable[..., Any], says: str) -> None:
    with pytest.raises(WeightError, match=says):
        fp8.matrix("down", *spoil(*fp8.quantised(torch.randn(256, 128))))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda v, s: (v, None), "down is MXFP4 and has no scales"),
        (lambda v, s: (v, s.T.contiguous()), r"the scales of down are torch.uint8 \[4, 64\]"),
        (lambda v, s: (v, s[:, :0]), r"the scales of down are torch.uint8 \[64, 0\]"),
        (
            lambda v, s: (v, s.index_fill(0, torch.tensor([1]), 255)),
            "the scales of down hold the byte 255, which is NaN",
        ),
        (lambda v, s: (v, s.index_fill(0, torch.tensor([1]), 249)), r"hold the byte 249, 2\^122: at most 248"),
        (lambda v, s: (v[:, :48], s), "down has 96 columns on this rank"),
        (lambda v, s: (v.view(torch.int8), s), "down is torch.int8"),
    ],
)
def test_mxfp4_that_cannot_be_read_is_named(spoil: Callable[..., Any], says: str) -> None:
    with pytest.raises(WeightError, match=says):
        mxfp4.matrix("down", *spoil(*mxfp4.quantised(torch.randn(64, 128))))


@pytest.fixture(scope="module")
def layers() -> tuple[LayerWeights[Matrix], ...]:
    return bf16.described(from_checkpoint(dict(checkpoint_tensors(CONFIG, 3)), checkpoint_geometry(CONFIG))).layers


def in_fp8(layers: tuple[LayerWeights[Matrix], ...], *names: str) -> tuple[LayerWeights[Matrix], ...]:
    """The layers with matrices of these names (`3.ffn.down`) in FP8."""

    def change(name: str, matrix: Matrix) -> Matrix:
        return fp8.matrix(name, *fp8.quantised(matrix.data)) if name.removeprefix("layers.") in names else matrix

    return with_matrices(layers, change, "layers")


def test_formats_are_those_of_the_matrices(layers: tuple[LayerWeights[Matrix], ...]) -> None:
    assert common_formats(layers) == Formats()
    assert Formats().described() == "bf16"
    found = common_formats(in_fp8(layers, "3.attention.query", "7.attention.query"))
    assert found == replace(Formats(), query=Storage(Format.FP8))
    assert found.described() == "bf16 but for FP8: query"


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("3.attention.query",), "layers.7.attention.query is BF16 and layers.3.attention.query is FP8"),
        ([f"{layer}.ffn.down" for layer in range(3, 8)], r"ffn.shared.down is BF16 and layers.3.ffn.down is FP8"),
        (("0.attention.output",), "layers.0.attention.output is FP8, the step reads it as BF16"),
        (("3.attention.indexer.pool_gate",), "pool_gate is FP8, the step reads it as BF16"),
    ],
)
def test_a_mix_that_no_loop_reads_is_named(
    layers: tuple[LayerWeights[Matrix], ...], names: tuple[str, ...], says: str
) -> None:
    with pytest.raises(WeightError, match=says):
        common_formats(in_fp8(layers, *names))
