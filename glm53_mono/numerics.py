"""How far a launch may be from SGLang's own path, part by part, and how that distance is measured.

Residual streams and 45 layers hide an 8 % error of one part behind a cosine of 0.999, so each part is bounded by
itself, given the other side's inputs, and by two metrics at once: `rel` sees a small error everywhere, `max_abs` a
large one in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Distance:
    """How far apart two tensors are, or may be, in units of the expected one's root mean square.

    Attributes:
        rel: relative root mean square error.
        max_abs: largest absolute error. Zero as a bound means bit equality.
    """

    rel: float
    max_abs: float

    def within(self, bound: Distance) -> bool:
        """Whether both metrics are bounded; a NaN is beyond any bound."""
        return self.rel <= bound.rel and self.max_abs <= bound.max_abs


ONE_ROUNDING = Distance(rel=3e-3, max_abs=4e-2)
"""An output rounded to bf16 once after sums in another order: a value near a rounding border moves by one step, which
is 2^-5 for values of 4 to 8 times the root mean square."""

TWO_ROUNDINGS = Distance(rel=6e-3, max_abs=1.3e-1)
"""The same behind an intermediate that is rounded to bf16 too. Outputs of attention reach 16 times the root mean square
of the step's rows, where the step is 2^-3 (6.8e-2 was seen on an H200, at a relative error of 5e-4)."""

FP32 = Distance(rel=1e-5, max_abs=1e-4)
"""fp32 sums in another order."""

BOUNDS: Mapping[tuple[str, str], Distance] = MappingProxyType(
    {
        ("mhc", "layer_input"): ONE_ROUNDING,
        ("mhc", "post"): FP32,
        ("mhc", "comb"): FP32,
        ("mhc", "streams"): ONE_ROUNDING,
        ("kda", "projection"): ONE_ROUNDING,
        # Windows keep the projection's output before the convolution.
        ("kda", "window"): ONE_ROUNDING,
        # 3e-4 with a chunked scan on one side (MODEL_MATH 2.6), 1e-7 between two recurrences; a value of the
        # convolution that rounds the other way moves single entries by up to 1.6e-2.
        ("kda", "state"): Distance(rel=1e-3, max_abs=1e-1),
        # 1.5e-3 to 2.8e-3 of a layer's output between SGLang's kernels and plain PyTorch.
        ("kda", "output"): TWO_ROUNDINGS,
        ("mla", "query"): TWO_ROUNDINGS,
        ("mla", "latent"): ONE_ROUNDING,
        # GPU kernels round exp(s - max) to bf16 before P V: 2e-3 (MODEL_MATH 3.1).
        ("mla", "attention"): Distance(rel=5e-3, max_abs=5e-2),
        ("mla", "output"): TWO_ROUNDINGS,
        # Keys and queries are fp8: a value near a rounding border moves by 2^-3 of itself.
        ("indexer", "query"): Distance(rel=1.5e-2, max_abs=4e-1),
        ("indexer", "weights"): Distance(rel=1e-4, max_abs=1e-3),
        ("indexer", "key"): Distance(rel=1.5e-2, max_abs=4e-1),
        ("indexer", "ring"): ONE_ROUNDING,
        # Given the same fp8 operands.
        ("indexer", "score"): FP32,
        ("dense", "output"): TWO_ROUNDINGS,
        ("router", "logits"): FP32,
        ("router", "weights"): FP32,
        ("experts", "output"): TWO_ROUNDINGS,
        ("head", "hidden"): ONE_ROUNDING,
        ("head", "logits"): ONE_ROUNDING,
        # 6e-3 to 8e-3 after two layers at the real widths; a step of eight layers has this much.
        ("step", "hidden"): Distance(rel=2e-2, max_abs=2e-1),
        ("step", "logits"): Distance(rel=2e-2, max_abs=2e-1),
    }
)
"""Bounds by launch and output."""


QUANTISED_ACTIVATIONS: Mapping[str, Distance] = MappingProxyType(
    {
        # e4m3 for each 128 inputs of a row, under a scale of its own: 3 bits behind the point, 2.6e-2.
        "fp8": Distance(rel=3e-2, max_abs=1.5e-1),
        # e2m1 for each 32 inputs: 1 bit behind the point, 1.15e-1.
        "mxfp4": Distance(rel=1.3e-1, max_abs=6e-1),
    }
)
"""How far one product on SGLang's own path for such weights (W8A8, W4A4) may be from ours.

SGLang rounds the activations of these products to the weights' format before it multiplies; the step keeps them in bf16
and rounds nothing but its output, so against the dequantised weights it is held to `BOUNDS` in every format. Where
SGLang dequantises weights itself it rounds them to bf16 (fp8_utils.py: block_quant_dequant), the step does not: 1e-3.
"""


def beside_rounded_activations(bound: Distance, *products: str) -> Distance:
    """A part's bound beside a path that rounds the activations of these products on the way: at most their errors' sum.

    Args:
        bound: of the part where both sides multiply bf16 activations.
        products: the format of each one's weights, a key of QUANTISED_ACTIVATIONS, or bf16, which adds nothing.
    """
    found = [QUANTISED_ACTIVATIONS[name] for name in products if name != "bf16"]
    return Distance(bound.rel + sum(each.rel for each in found), bound.max_abs + sum(each.max_abs for each in found))


def named_bounds() -> dict[str, float]:
    """The bounds as SGLang's `Numerics` wants them: `<launch>.<output>.<metric>`."""
    return {
        f"{launch}.{output}.{metric}": value
        for (launch, output), bound in BOUNDS.items()
        for metric, value in (("rel", bound.rel), ("max_abs", bound.max_abs))
    }


def distance(actual: torch.Tensor, expected: torch.Tensor) -> Distance:
    """Measure how far `actual` is from `expected`.

    Args:
        actual, expected: tensors of one shape and any floating dtype; compared in fp64.

    An expected tensor of zeros is its own unit 1. A NaN or an infinity on either side makes both metrics NaN or
    infinite, unless both sides hold the same infinity at the same place (masked scores).

    Raises:
        ValueError: the shapes differ or are empty.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shape {tuple(actual.shape)} is compared with {tuple(expected.shape)}")
    if not expected.numel():
        raise ValueError(f"shape {tuple(expected.shape)} has nothing to compare")
    actual, expected = actual.double(), expected.double()
    same_infinity = (actual == expected) & expected.isinf()
    actual, expected = actual.masked_fill(same_infinity, 0.0), expected.masked_fill(same_infinity, 0.0)
    unit = expected.square().mean().sqrt().item() or 1.0
    error = actual - expected
    return Distance(rel=error.square().mean().sqrt().item() / unit, max_abs=error.abs().max().item() / unit)
