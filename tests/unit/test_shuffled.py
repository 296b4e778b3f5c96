"""AITER's orders of weights and scales, against AITER's own functions and against the formulas that kernels address."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from glm53_mono.weights import fp8, mxfp4, shuffled
from glm53_mono.weights.descriptor import Layout, WeightError
from tests.aiter_wheel import function_of

SHAPES = [(16, 32), (48, 96), (256, 128), (3, 32, 64)]
SCALE_SHAPES = [(256, 8), (512, 24), (2, 256, 16)]


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def as_sglang_shuffles_weights(values: Tensor) -> Tensor:
    """A matrix or a stack of them (fp8.py, quark_w4a4_mxfp4_moe.py: process_weights_after_loading)."""
    return function_of("aiter/ops/shuffle.py", "shuffle_weight")(values, (16, 16))


def as_sglang_shuffles_scales(scales: Tensor) -> Tensor:
    """All experts' scales below one another (quark_w4a4_mxfp4_moe.py: process_weights_after_loading)."""
    e8m0_shuffle = function_of("aiter/utility/fp4_utils.py", "e8m0_shuffle")
    return e8m0_shuffle(scales.flatten(0, -2)).view(scales.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_weights_lie_as_aiter_lays_them(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = drawn(shape, seed).view(dtype)
    expected = as_sglang_shuffles_weights(values).view(torch.uint8)
    found = shuffled.shuffled(values)
    assert (found.shape, found.dtype) == (values.shape, dtype)
    assert torch.equal(found.view(torch.uint8), expected)
    assert torch.equal(shuffled.unshuffled(found).view(torch.uint8), values.view(torch.uint8))
    assert not torch.equal(expected, values.view(torch.uint8)) or values.numel() <= 512


@pytest.mark.parametrize("shape", SCALE_SHAPES, ids=str)
def test_scales_lie_as_aiter_lays_them(seed: int, shape: tuple[int, ...]) -> None:
    scales = drawn(shape, seed)
    found = shuffled.shuffled_scales(scales)
    assert torch.equal(found, as_sglang_shuffles_scales(scales))
    assert torch.equal(shuffled.unshuffled_scales(found), scales)
    assert not torch.equal(found, scales)


def weight_place(row: Tensor, byte: Tensor, row_bytes: int) -> Tensor:
    return row // 16 * 16 * row_bytes + byte // 16 * 256 + row % 16 * 16 + byte % 16


def scale_place(row: Tensor, column: Tensor, columns: int) -> Tensor:
    block = row // 32 * (columns // 8) + column // 8
    return block * 256 + column % 4 * 64 + row % 16 * 4 + column % 8 // 4 * 2 + row % 32 // 16


@pytest.mark.parametrize(
    ("place", "order", "shape"),
    [(weight_place, as_sglang_shuffles_weights, (64, 160)), (scale_place, as_sglang_shuffles_scales, (512, 24))],
    ids=["weights", "scales"],
)
def test_the_formulas_are_aiters_orders(
    seed: int, place: Callable[..., Tensor], order: Callable[..., Tensor], shape: tuple[int, int]
) -> None:
    """The formulas of the docstring, as `kernels.layout` computes them."""
    values = drawn(shape, seed)
    row, column = torch.meshgrid(*(torch.arange(size) for size in shape), indexing="ij")
    places = place(row, column, shape[1]).flatten()
    lying = order(values).flatten()
    assert torch.equal(lying[places], values.flatten())
    assert not torch.equal(lying[places.roll(1)], values.flatten())


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((24, 64), "down has 24 rows on this rank, AITER's layout wants a multiple of 16"),
        ((32, 48), "down has 48 bytes a row on this rank, AITER's layout wants a multiple of 32"),
    ],
)
def test_what_has_no_whole_tiles_is_named(shape: tuple[int, int], says: str) -> None:
    with pytest.raises(WeightError, match=says):
        shuffled.check_weights("down", torch.zeros(shape, dtype=torch.uint8))


def test_shuffled_matrices_are_described() -> None:
    values, scales = fp8.quantised(torch.randn(2, 256, 128))
    found = fp8.matrix("down", shuffled.shuffled(values), scales, Layout.SHUFFLED)
    assert str(found.storage) == "shuffled FP8" and found.item(1).storage == found.storage
    values, scales = mxfp4.quantised(torch.randn(2, 64, 256))
    found = mxfp4.matrix("down", shuffled.shuffled(values), shuffled.shuffled_scales(scales), Layout.SHUFFLED)
    assert str(found.storage) == "shuffled MXFP4" and found.bytes == 2 * (64 * 128 + 64 * 8)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((48, 256), "the scales' tensor of down has 48 rows on this rank, AITER's layout wants a multiple of 32"),
        ((64, 128), "the scales' tensor of down has 4 scales a row on this rank, AITER's layout wants a multiple of 8"),
    ],
)
def test_scales_that_aiter_would_pad_are_named(shape: tuple[int, int], says: str) -> None:
    with pytest.raises(WeightError, match=says):
        mxfp4.matrix("down", *mxfp4.quantised(torch.randn(shape)), Layout.SHUFFLED)
