"""The bounds are named as SGLang wants them, and the distance sees what it must see."""

from __future__ import annotations

import math

import pytest
import torch

from glm53_mono.numerics import BOUNDS, ONE_ROUNDING, Distance, distance, named_bounds


def sample(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_bounds_are_named_by_launch_output_and_metric() -> None:
    names = named_bounds()
    assert len(names) == 2 * len(BOUNDS)
    assert names["kda.state.rel"] == BOUNDS["kda", "state"].rel
    assert names["kda.state.max_abs"] == BOUNDS["kda", "state"].max_abs
    assert all(name.count(".") == 2 for name in names)


def test_the_bounds_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        BOUNDS["kda", "state"] = Distance(1.0, 1.0)


def test_equal_tensors_are_no_distance_apart(seed: int) -> None:
    assert distance(sample(seed, 8, 64), sample(seed, 8, 64)) == Distance(0.0, 0.0)


def test_both_metrics_are_in_units_of_the_root_mean_square() -> None:
    expected = torch.tensor([3.0, -3.0, 3.0, -3.0])
    actual = torch.tensor([3.0, -3.0, 3.0, -3.6])
    assert distance(actual, expected).max_abs == pytest.approx(0.2)
    assert distance(actual, expected).rel == pytest.approx(0.1)
    assert distance(1000 * actual, 1000 * expected).rel == pytest.approx(0.1)


def test_a_rounding_to_bf16_is_within_its_bound_and_to_fp8_is_not(seed: int) -> None:
    expected = sample(seed, 64, 1024)
    assert distance(expected.bfloat16(), expected).within(ONE_ROUNDING)
    assert not distance(expected.to(torch.float8_e4m3fn).float(), expected).within(ONE_ROUNDING)


def test_one_wrong_value_is_seen_by_max_abs_alone(seed: int) -> None:
    expected = sample(seed, 64, 1024)
    actual = expected.clone()
    actual[3, 5] += 0.5
    found = distance(actual, expected)
    assert found.rel < ONE_ROUNDING.rel
    assert not found.within(ONE_ROUNDING)


def test_a_small_error_everywhere_is_seen_by_rel_alone(seed: int) -> None:
    expected = sample(seed, 64, 1024)
    found = distance(expected * 1.005, expected)
    assert found.max_abs < ONE_ROUNDING.max_abs
    assert not found.within(ONE_ROUNDING)


@pytest.mark.parametrize("side", ["actual", "expected"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_are_beyond_any_bound(seed: int, side: str, value: float) -> None:
    spoilt = sample(seed, 4, 4)
    spoilt[0, 0] = value
    pair = (spoilt, sample(seed, 4, 4)) if side == "actual" else (sample(seed, 4, 4), spoilt)
    assert not distance(*pair).within(Distance(1e30, 1e30))


def test_the_same_infinity_on_both_sides_is_equal(seed: int) -> None:
    masked = sample(seed, 4, 4)
    masked[0, 0] = -math.inf
    assert distance(masked, masked.clone()) == Distance(0.0, 0.0)
    assert not distance(masked, -masked).within(Distance(1e30, 1e30))


def test_expected_zeros_are_their_own_unit() -> None:
    assert distance(torch.tensor([0.0, 0.5]), torch.zeros(2)).max_abs == 0.5


@pytest.mark.parametrize(("actual", "expected"), [((2, 3), (3, 2)), ((0,), (0,))])
def test_shapes_that_cannot_be_compared_are_refused(actual: tuple[int, ...], expected: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape"):
        distance(torch.zeros(actual), torch.zeros(expected))
