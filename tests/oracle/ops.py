"""Comparing the reference with one operation of SGLang, and bugs that such a comparison must see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from glm53_mono.numerics import Distance, distance


class Draw:
    """Random tensors of the run's seed, which the header of the test run records, and a number of the test's own."""

    run_seed = 0
    """Set by the fixture `_fresh_draws` of this folder."""

    def __init__(self, number: int) -> None:
        self.generator = torch.Generator().manual_seed(self.run_seed + number)

    def fp32(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return mean + std * torch.randn(*shape, generator=self.generator)

    def bf16(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return self.fp32(*shape, std=std, mean=mean).bfloat16()


def assert_same_bits(name: str, found: Tensor, expected: Tensor) -> None:
    """Equal in shape, dtype and every value; NaN equals NaN."""
    assert found.shape == expected.shape and found.dtype == expected.dtype, (
        f"{name}: {found.dtype} {tuple(found.shape)} against {expected.dtype} {tuple(expected.shape)}"
    )
    equal = (found.float() == expected.float()) | (found.float().isnan() & expected.float().isnan())
    assert equal.all(), f"{name}: {(~equal).sum().item()} of {equal.numel()} values differ"


def assert_same_roundings(name: str, found: Tensor, expected: Tensor, *, odd: float = 2e-3) -> None:
    """Equal bf16 values, but for a share `odd` of them that sums in another order pushed over a rounding border.

    Such a value is one bf16 step away; 1e-6 of the whole tensor's size comes on top, for what cancelled.
    """
    assert found.shape == expected.shape and found.dtype == expected.dtype == torch.bfloat16, name
    found, expected = found.float(), expected.float()
    step = expected.abs() * 2**-7 + expected.square().mean().sqrt() * 1e-6
    differs = found != expected
    assert ((found - expected).abs() <= step).all(), f"{name}: a value differs by more than a rounding"
    assert differs.float().mean() <= odd, f"{name}: {differs.sum().item()} of {differs.numel()} values differ"


def assert_within(name: str, found: Tensor, expected: Tensor, *, rel: float, max_abs: float) -> None:
    """Both metrics of `glm53_mono.numerics.Distance` bounded, in units of the expected root mean square."""
    measured = distance(found, expected)
    assert measured.within(Distance(rel=rel, max_abs=max_abs)), (
        f"{name}: {measured} beyond rel {rel}, max_abs {max_abs}"
    )


@dataclass(frozen=True)
class SeededBug:
    """A wrong variant of one reference function, and the comparison that must turn red."""

    name: str
    owner: Any
    attribute: str
    wrong: Callable[..., Any]
    comparison: Callable[[], None]

    def assert_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The comparison, which holds without the bug (a test of its own), holds no longer."""
        monkeypatch.setattr(self.owner, self.attribute, self.wrong)
        with pytest.raises(AssertionError):
            self.comparison()


def bug_cases(bugs: list[SeededBug]) -> Any:
    """The parametrisation of a test over seeded bugs."""
    return pytest.mark.parametrize("bug", bugs, ids=[bug.name for bug in bugs])
