"""The scalar formulas of the device code against the reference's, on every value that could differ."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from glm53_mono.kernels import numerics
from glm53_mono.numerics import ONE_ROUNDING, distance
from glm53_mono.reference import numerics as reference
from glm53_mono.reference.dense import clamped_swiglu

LIMIT = 10.0


@triton.jit
def _scale(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, numerics.fp8_scale(tl.load(x + i)))


@triton.jit
def _ordered(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, numerics.ordered_key(tl.load(x + i)).to(tl.int64))


@triton.jit
def _swiglu(gate, up, out, LIMIT: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, numerics.clamped_swiglu(tl.load(gate + i), tl.load(up + i), LIMIT).to(tl.bfloat16))


@triton.jit
def _signs(out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i[:, None] * N + i[None, :], numerics.hadamard_signs(N, N))


def every_bf16(first: int, last: int) -> Tensor:
    """Values whose bf16 bit patterns are [first, last), as fp32; a power of two of them."""
    return (torch.arange(first, last, dtype=torch.int32) << 16).view(torch.float32)


def test_fp8_scale_of_every_absmax() -> None:
    absmax = every_bf16(0, 0x8000)[:0x7F80]
    absmax = torch.cat((absmax, torch.ones(0x8000 - len(absmax))))
    found = torch.empty_like(absmax)
    _scale[(1,)](absmax, found, N=len(absmax))
    _, expected = reference.quantise_fp8(absmax[:, None].bfloat16())
    normal = expected <= 2.0**127
    assert normal.sum() > 0x7F00
    assert torch.equal(found[normal], expected[normal])


def test_keys_order_as_the_numbers_do() -> None:
    values = torch.tensor(
        [float("-inf"), -3e38, -1.0, -1e-38, -1e-45, -0.0, 0.0, 1e-45, 1e-38, 1.0, 3e38, float("inf")]
    )
    values = torch.cat((values, torch.full((4,), float("inf"))))
    keys = torch.empty(len(values), dtype=torch.int64)
    _ordered[(1,)](values, keys, N=len(values))
    assert (keys[1:12] > keys[:11]).all()
    assert keys.min() >= 0


def test_swiglu_at_its_clamp() -> None:
    """Gates and ups on both sides of the limit, at it, and where exp overflows; no lower clamp on the gate."""
    values = torch.tensor(
        [-200.0, -100.0, -10.06, -10.0, -1e-3, -0.0, 0.0, 1e-39, 1.0, 9.94, 10.0, 10.04, 10.06, 11.0, 1e3, 3e38]
    )
    gate, up = (grid.flatten().contiguous() for grid in torch.meshgrid(values, values, indexing="ij"))
    found = torch.empty(len(gate), dtype=torch.bfloat16)
    _swiglu[(1,)](gate, up, found, LIMIT=LIMIT, N=len(gate))
    expected = clamped_swiglu(torch.cat((gate, up)).bfloat16(), LIMIT)
    assert distance(found, expected).within(ONE_ROUNDING)
    clamped = found.view(len(values), len(values))
    assert torch.equal(clamped[-4:], clamped[10].expand(4, -1))
    assert torch.equal(clamped[:, -4:], clamped[:, 10:11].expand(-1, 4))


@pytest.mark.parametrize("width", [16, 128])
def test_hadamard_signs_are_sylvesters(width: int) -> None:
    found = torch.empty(width, width)
    _signs[(1,)](found, N=width)
    expected = torch.ones(1, 1)
    while len(expected) < width:
        expected = torch.cat((torch.cat((expected, expected), 1), torch.cat((expected, -expected), 1)))
    assert torch.equal(found, expected)
