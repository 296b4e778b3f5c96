"""What the environment may ask of the check."""

from __future__ import annotations

import pytest

from glm53_mono.check.settings import CHECK, FAIL, Settings


@pytest.mark.parametrize("value", [None, "", "0", "00", " "])
def test_nothing_is_asked(value: str | None) -> None:
    assert Settings.asked({} if value is None else {CHECK: value}) is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({CHECK: "1"}, Settings(1, keeps_sglang=False, raises=False)),
        ({CHECK: "100", FAIL: "raise"}, Settings(100, keeps_sglang=False, raises=True)),
        ({CHECK: "sglang", FAIL: "log"}, Settings(1, keeps_sglang=True, raises=False)),
    ],
)
def test_what_is_asked(environment: dict[str, str], expected: Settings) -> None:
    assert Settings.asked(environment) == expected


@pytest.mark.parametrize("environment", [{CHECK: "yes"}, {CHECK: "-1"}, {CHECK: "1.5"}, {CHECK: "1", FAIL: "stop"}])
def test_other_values_are_refused_by_name(environment: dict[str, str]) -> None:
    name = FAIL if FAIL in environment else CHECK
    with pytest.raises(ValueError, match=f"{name} is '{environment[name]}'"):
        Settings.asked(environment)
