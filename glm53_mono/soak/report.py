"""What a soak's records say: how often an answer looks wrong, and whether two arms differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from glm53_mono.quality.divergence import Outcome, difference
from glm53_mono.quality.rates import Rate, fisher_exact
from glm53_mono.soak.run import FAILED, STARTED, TURN

Turns = Mapping[tuple[int, int], Mapping[str, Any]]
"""Answers by session and turn."""


@dataclass(frozen=True)
class ArmReport:
    """One arm.

    Attributes:
        name: a URL or a file.
        turns: answers that look wrong.
        sessions: sessions with such an answer.
        detectors: how many answers each detector found.
        deepest: tokens of the longest prompt.
        cached: share of the prompts' tokens that came from the prefix cache.
    """

    name: str
    turns: Rate
    sessions: Rate
    detectors: Mapping[str, int]
    deepest: int
    cached: float


@dataclass(frozen=True)
class Comparison:
    """Two arms' answers to the same prompts.

    Attributes:
        diverged: answers that differ where neither arm nearly chose the other's token.
        near_ties: answers that differ where one did.
        sessions_p, turns_p: Fisher's exact test of the two arms' rates.
    """

    diverged: Rate
    near_ties: int
    sessions_p: float
    turns_p: float


@dataclass(frozen=True)
class Report:
    """A run, or two recorded ones."""

    arms: Sequence[ArmReport]
    comparison: Comparison | None
    failures: Sequence[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether nothing looks wrong."""
        suspicious = any(arm.turns.hits for arm in self.arms)
        return not (suspicious or self.failures or (self.comparison and self.comparison.diverged.hits))

    def as_dict(self) -> dict[str, Any]:
        """Plain values with the rates' intervals, for JSON."""

        def plain(value: Any) -> Any:
            if isinstance(value, Rate):
                return asdict(value) | {"share": value.share, "interval": value.interval()}
            return value

        def shown(part: Any) -> dict[str, Any]:
            return {name: plain(value) for name, value in vars(part).items()}

        return {
            "clean": self.is_clean,
            "arms": [shown(arm) for arm in self.arms],
            "comparison": None if self.comparison is None else shown(self.comparison),
            "failures": list(self.failures),
        }


def report(arms: Mapping[str, Turns], failures: Iterable[str] = ()) -> Report:
    """Counts of one or two arms.

    Args:
        arms: by name.
        failures: what servers said instead of an answer.
    """
    reports = [_arm(name, turns) for name, turns in arms.items()]
    comparison = None
    if len(reports) == 2:
        one, other = reports
        diverged, near_ties = _compared(*arms.values())
        comparison = Comparison(
            diverged, near_ties, fisher_exact(one.sessions, other.sessions), fisher_exact(one.turns, other.turns)
        )
    return Report(reports, comparison, list(failures))


def turns_by_arm(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[tuple[int, int], Mapping[str, Any]]]:
    """The answers of a journal, arm by arm in the order in which they first come."""
    arms: dict[str, dict[tuple[int, int], Mapping[str, Any]]] = {}
    for record in records:
        if record["kind"] == TURN:
            arms.setdefault(record["arm"], {})[record["session"], record["turn"]] = record
    return arms


def failures_of(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """What servers said instead of an answer, since the run was last gone on with: that asks again for what failed."""
    failures: list[str] = []
    for record in records:
        if record["kind"] == STARTED:
            failures = []
        elif record["kind"] == FAILED:
            failures.append(record["reason"])
    return failures


def _arm(name: str, turns: Turns) -> ArmReport:
    wrong = {place for place, record in turns.items() if record["suspicions"]}
    sessions = {session for session, _ in turns}
    detectors = Counter(suspicion["detector"] for record in turns.values() for suspicion in record["suspicions"])
    prompts = sum(record["prompt_tokens"] for record in turns.values())
    return ArmReport(
        name,
        Rate(len(wrong), len(turns)),
        Rate(len({session for session, _ in wrong}), len(sessions)),
        dict(detectors.most_common()),
        max((record["prompt_tokens"] for record in turns.values()), default=0),
        sum(record["cached"] for record in turns.values()) / prompts if prompts else 0.0,
    )


def _compared(first: Turns, second: Turns) -> tuple[Rate, int]:
    """Answers that diverged of those that were compared, and near-ties.

    Two runs that were recorded apart go each their own way once they differ: only answers to one prompt are compared.
    """
    outcomes = Counter(
        difference(one["tokens"], other["tokens"], one["gaps"], other["gaps"]).outcome
        for place, one in first.items()
        if (other := second.get(place)) is not None and one["prompt"] == other["prompt"]
    )
    return Rate(outcomes[Outcome.DIVERGED], outcomes.total()), outcomes[Outcome.NEAR_TIE]
