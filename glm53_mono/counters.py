"""Which steps the kernel served and which fell back to SGLang's forward, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from glm53_mono.upstream.hooks import SeenStep
from glm53_mono.upstream.running import ServedStep

MODES = {"decode": "DECODE", "target_verify": "TARGET_VERIFY"}
"""SGLang's name of the forward mode of each kind of served step."""

DRAFT_REASONS = {"EXTEND": "draft prefill", "DRAFT_EXTEND_V2": "draft extend"}
"""Reason of a draft model's step by its forward mode; the others make the draft tokens."""

DRAFT = "draft"


class Fallbacks:
    """Counts the steps that SGLang's forward ran, by reason.

    Args:
        step: what routed steps look like.
        widths: the rows of the steps that SGLang routes here.
    """

    def __init__(self, step: ServedStep, widths: Collection[int]) -> None:
        self._step = step
        self._widths = frozenset(widths)
        self._counts: Counter[str] = Counter()

    def see(self, step: SeenStep) -> None:
        """Takes note of a step that a runner just ran."""
        reason = self._reason(step)
        if reason is not None:
            self.count(reason)

    def count(self, reason: str) -> None:
        """One step more fell back for this reason."""
        self._counts[reason] += 1

    def by_reason(self) -> dict[str, int]:
        """The counts so far."""
        return dict(self._counts)

    def _reason(self, step: SeenStep) -> str | None:
        if step.is_draft:
            return DRAFT_REASONS.get(step.mode, DRAFT)
        if step.mode != MODES[self._step.mode]:
            return step.mode.lower().replace("_", " ")
        if step.tokens_per_request != self._step.tokens_per_request:
            return f"{step.tokens_per_request} tokens a request"
        if step.rows not in self._widths:
            return f"{step.rows} rows"
        return None


def shown(served: int, fallbacks: dict[str, int]) -> str:
    """One line for the log."""
    total = sum(fallbacks.values())
    parts = ", ".join(f"{count} {reason}" for reason, count in sorted(fallbacks.items(), key=lambda item: -item[1]))
    return f"{served} launches served, {total} steps fell back" + (f" ({parts})" if parts else "")
