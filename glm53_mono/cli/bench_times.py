"""Milliseconds of one thing over many replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one thing over many replays."""

    median_ms: float
    least_ms: float
    most_ms: float

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Timing:
        """Summarises single times."""
        return cls(median(milliseconds), min(milliseconds), max(milliseconds))
