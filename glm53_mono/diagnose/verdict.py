"""What the arms' answers say about each hypothesis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from glm53_mono.diagnose.arms import CONTROL, Arm
from glm53_mono.diagnose.trial import ANSWER, STATE, Ended
from glm53_mono.quality.rates import SIGNIFICANT, Rate, fisher_exact


class Ruling(StrEnum):
    """What became of a hypothesis."""

    IMPLICATED = "implicated"
    RULED_OUT = "ruled out"
    OPEN = "open"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Verdict:
    """One row of the table.

    Attributes:
        arm: its name.
        hypothesis: what it puts to the test.
        ruling: what became of it.
        evidence: why, in one sentence.
        symptomatic, answers: of the arm.
    """

    arm: str
    hypothesis: str
    ruling: Ruling
    evidence: str
    symptomatic: int
    answers: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def judge(records: Sequence[Mapping[str, Any]], arms: Sequence[Arm]) -> list[Verdict]:
    """A verdict for the control and for each arm.

    Args:
        records: of a `Trial`'s journal.
        arms: that were to run, the control left out.
    """
    control = _rate(records, CONTROL)
    states = {record["arm"]: record for record in records if record["kind"] == STATE}
    return [_control(records, states, control), *(_verdict(records, states, control, arm) for arm in arms)]


def _control(records: Sequence[Mapping[str, Any]], states: Mapping[str, Any], control: Rate) -> Verdict:
    state = states.get(CONTROL.name)
    if state is None or state["ended"] != Ended.DONE:
        ruling, evidence = Ruling.NOT_RUN, _why_not_run(state)
    elif control.hits:
        kinds = Counter(symptom["detector"] for record in _answers(records, CONTROL) for symptom in record["symptoms"])
        seen = ", ".join(f"{name} {count}" for name, count in kinds.most_common())
        ruling, evidence = Ruling.IMPLICATED, f"{control} look wrong: {seen}"
    else:
        ruling, evidence = Ruling.OPEN, f"{control} look wrong: nothing to explain with these requests"
    return Verdict(CONTROL.name, CONTROL.hypothesis, ruling, evidence, control.hits, control.trials)


def _verdict(records: Sequence[Mapping[str, Any]], states: Mapping[str, Any], control: Rate, arm: Arm) -> Verdict:
    own, state = _rate(records, arm), states.get(arm.name)

    def ruled(ruling: Ruling, evidence: str) -> Verdict:
        return Verdict(arm.name, arm.hypothesis, ruling, evidence, own.hits, own.trials)

    if state is not None and state["finding_count"]:
        count, first = state["finding_count"], state["findings"][0]
        return ruled(Ruling.IMPLICATED, f"{count} lines in the server's log, the first: {first}")
    if state is None or state["ended"] != Ended.DONE:
        return ruled(Ruling.NOT_RUN, _why_not_run(state))
    if not control.hits:
        return ruled(Ruling.OPEN, f"{own} here, none as it is: there is nothing to explain")
    compared = f"{own} here, {control.hits} of {control.trials} as it is"
    if arm.mark is not None:
        if not state["watched"]:
            return ruled(Ruling.OPEN, f"{compared}, but nothing in the server's log says that it watched its steps")
        if own.hits:
            return ruled(Ruling.RULED_OUT, f"{compared}, and nothing in the server's log")
        return ruled(Ruling.OPEN, f"{compared}: the symptom did not show while the server watched itself")
    chance = fisher_exact(own, control)
    if own.share < control.share and chance < SIGNIFICANT:
        return ruled(Ruling.IMPLICATED, f"{compared} (p = {chance:.2g}): without it the symptom is rarer")
    if own.hits:
        return ruled(Ruling.RULED_OUT, f"{compared} (p = {chance:.2g}): the symptom does not need it")
    return ruled(Ruling.OPEN, f"{compared} (p = {chance:.2g}): too few answers to tell")


def _why_not_run(state: Mapping[str, Any] | None) -> str:
    if state is None:
        return "out of time; the same command goes on from here"
    if state["ended"] == Ended.NOTHING:
        return state["reason"]
    first, *rest = str(state["reason"]).strip().splitlines()
    last = f" {rest[-1].strip()}" if rest else ""
    return f"{first}{last}"


def _answers(records: Sequence[Mapping[str, Any]], arm: Arm) -> list[Mapping[str, Any]]:
    return [record for record in records if record["kind"] == ANSWER and record["arm"] == arm.name]


def _rate(records: Sequence[Mapping[str, Any]], arm: Arm) -> Rate:
    answers = _answers(records, arm)
    return Rate(sum(bool(record["symptoms"]) for record in answers), len(answers))
