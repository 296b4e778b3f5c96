"""How two arms' answers to one prompt differ, and how far an answer is from what its server's prefill makes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

NEAR_TIE = 0.5
"""Two likeliest tokens that are closer, in log-probability, may change places between two right forwards: logits of
bf16 are stored in steps of 2^-5 to 2^-4, and forwards that sum in another order are some steps apart."""

MOST_APART = 0.25
"""Mean distance of an answer's log-probabilities, as decoded and as its prefill computes them. Right forwards are some
hundredths apart."""


class Outcome(StrEnum):
    """What became of two answers to one prompt."""

    SAME = "same"
    NEAR_TIE = "near-tie"
    DIVERGED = "diverged"


@dataclass(frozen=True)
class Difference:
    """Where two answers part.

    Attributes:
        outcome: diverged, unless one of the arms nearly chose the other's token.
        token: the first that differs; the length of the shorter answer if none does.
        gap: the smaller of the arms' distances between their two likeliest tokens there; NaN where it is not known.
    """

    outcome: Outcome
    token: int
    gap: float


def difference(
    first: Sequence[int], second: Sequence[int], first_gaps: Sequence[float], second_gaps: Sequence[float]
) -> Difference:
    """Compare two greedy answers.

    Args:
        first, second: token ids.
        first_gaps, second_gaps: of each token, the two likeliest ones' distance in log-probability; empty if not known,
            and then no difference is a near-tie.
    """
    shared = min(len(first), len(second))
    place = next((i for i in range(shared) if first[i] != second[i]), shared)
    if place == shared:
        # one that goes on where the other one ended has another token there
        same = len(first) == len(second)
        return Difference(Outcome.SAME if same else Outcome.DIVERGED, place, math.nan)
    gaps = [gaps[place] for gaps in (first_gaps, second_gaps) if place < len(gaps)]
    gap = min(gaps, default=math.nan)
    return Difference(Outcome.NEAR_TIE if gap <= NEAR_TIE else Outcome.DIVERGED, place, gap)


def mean_distance(decoded: Sequence[float], scored: Sequence[float]) -> float:
    """Mean distance of two lists of log-probabilities of one answer; infinite where one of them is no number.

    Raises:
        ValueError: they are not of one length.
    """
    distances = [abs(one - other) for one, other in zip(decoded, scored, strict=True)]
    if not all(map(math.isfinite, distances)):
        return math.inf
    return sum(distances) / len(distances) if distances else 0.0
