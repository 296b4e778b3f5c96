"""Dequantisation as SGLang does it, bit for bit: every byte, and every scale byte of MXFP4."""

from __future__ import annotations

import torch

from tests.oracle.sglang_cpu import context

context.prepare_environment()

from glm53_mono.weights import fp8, mxfp4


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of fp32 values, one pattern for every NaN."""
    return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor).view(torch.int32)


def test_fp8_blocks_are_dequantised_as_sglang_does(seed: int) -> None:
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    values = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(torch.float8_e4m3fn)
    scales = torch.rand(2, 2, generator=torch.Generator().manual_seed(seed)) * 1e-2
    expected = block_quant_dequant(values, scales, [128, 128], torch.bfloat16)
    assert torch.equal(bits(fp8.dequantised(values, scales).bfloat16().float()), bits(expected.float()))
    assert not torch.equal(bits(fp8.dequantised(values, scales.T).bfloat16().float()), bits(expected.float()))


def test_mxfp4_is_dequantised_as_sglang_does() -> None:
    from sglang.srt.layers.quantization.mxfp4_tensor import MXFP4QuantizeUtil

    values = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    expected = MXFP4QuantizeUtil.dequantize(values, torch.float32, scales, [32])
    assert torch.equal(bits(mxfp4.dequantised(values, scales)), bits(expected))
    swapped = (values >> 4) | (values << 4)
    assert not torch.equal(bits(mxfp4.dequantised(swapped, scales)), bits(expected))
