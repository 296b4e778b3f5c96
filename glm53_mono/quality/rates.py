"""How often something happens, how sure that is, and whether two arms differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

CONFIDENCE = 0.95
"""Of intervals; a difference is called significant below its complement."""

SIGNIFICANT = 1 - CONFIDENCE


@dataclass(frozen=True)
class Rate:
    """So many of so many.

    Raises:
        ValueError: more hits than trials, or less than none.
    """

    hits: int
    trials: int

    def __post_init__(self) -> None:
        if not 0 <= self.hits <= self.trials:
            raise ValueError(f"{self.hits} of {self.trials} is no rate")

    @property
    def share(self) -> float:
        """0 to 1; 0 where nothing was tried."""
        return self.hits / self.trials if self.trials else 0.0

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Wilson's score interval of the share (E. B. Wilson 1927, JASA 22:209-212); (0, 1) where nothing was tried.

        Args:
            confidence: that the true share is inside, above 0 and below 1.
        """
        if not self.trials:
            return 0.0, 1.0
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        scale = 1 + z**2 / self.trials
        middle = (self.share + z**2 / (2 * self.trials)) / scale
        half = z / scale * math.sqrt(self.share * (1 - self.share) / self.trials + z**2 / (4 * self.trials**2))
        return max(0.0, middle - half), min(1.0, middle + half)

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{self.hits} of {self.trials} ({self.share:.1%}, {CONFIDENCE:.0%} interval {low:.1%} to {high:.1%})"


def fisher_exact(first: Rate, second: Rate) -> float:
    """Probability of a difference at least as unlikely, if both rates were one: Fisher's exact test, two-sided.

    The sum of the hypergeometric probabilities of all tables with the same margins that are no likelier than this one,
    as scipy.stats.fisher_exact sums them.
    """
    hits, total = first.hits + second.hits, first.trials + second.trials
    everything = math.comb(total, hits)

    def ways(count: int) -> int:
        return math.comb(first.trials, count) * math.comb(second.trials, hits - count)

    seen = ways(first.hits)
    possible = range(max(0, hits - second.trials), min(hits, first.trials) + 1)
    # whole numbers: tables that are exactly as likely count without a tolerance
    return sum(way for count in possible if (way := ways(count)) <= seen) / everything
