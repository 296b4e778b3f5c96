"""What looks wrong in an answer by itself: it repeats, it shows control tokens, its characters turn into others."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm53_mono.checkpoint.tokenizer import HIDDEN_TOKENS

LONGEST_PERIOD = 128
"""Tokens of a passage that repeats, at most."""

FEWEST_REPEATS = 6
SHORTEST_RUN = 96
"""Tokens that a repeating passage covers at least: rulers, tables and lists of zeros repeat a little less."""

FOREIGN_TOKENS = (*HIDDEN_TOKENS, "<tool_response>", "</tool_response>")
"""Tokens that stand in prompts alone, but for one that ends an answer."""

WINDOW = 240
"""Characters whose classes are counted together."""

MOST_SHIFT = 0.6
"""Share of a window's characters that would have to be of another class to look like what came before."""

MOST_BROKEN = 0.02
"""Share of a window's characters that may be no characters at all: an answer may quote one."""

BROKEN = "no character"


@dataclass(frozen=True)
class Suspicion:
    """Something that looks wrong.

    Attributes:
        detector: its name.
        detail: what, in words.
        token: of the answer, where it starts; None where that is not known.
    """

    detector: str
    detail: str
    token: int | None = None


def suspicions(tokens: Sequence[int], text: str, earlier: str) -> list[Suspicion]:
    """Everything that looks wrong in an answer.

    Args:
        tokens: its ids.
        text: its text, special tokens shown.
        earlier: what the same session's answers, or the same kind of answers, said before; may be empty.
    """
    found = (repetition(tokens), control_tokens(text), broken_characters(text), class_shift(text, earlier))
    return [suspicion for suspicion in found if suspicion is not None]


def repetition(tokens: Sequence[int]) -> Suspicion | None:
    """A passage of up to `LONGEST_PERIOD` tokens that comes again and again, one after the other."""
    ids = np.asarray(tokens, dtype=np.int64)
    for period in range(1, min(LONGEST_PERIOD, len(ids) // FEWEST_REPEATS) + 1):
        same = ids[period:] == ids[:-period]
        start, length = _longest_run(same)
        covered = length + period
        if covered >= max(SHORTEST_RUN, FEWEST_REPEATS * period):
            detail = f"{period} tokens repeat {covered // period} times from token {start}"
            return Suspicion("repetition", detail, start)
    return None


def control_tokens(text: str) -> Suspicion | None:
    """Tokens in an answer that only prompts have; one at its very end ends it."""
    body = text.rstrip()
    for token in FOREIGN_TOKENS:
        body = body.removesuffix(token)
    found = Counter(re.findall("|".join(map(re.escape, FOREIGN_TOKENS)), body))
    if not found:
        return None
    return Suspicion("control tokens", ", ".join(f"{token} x {count}" for token, count in found.most_common()))


def broken_characters(text: str) -> Suspicion | None:
    """Replacement and control characters, of which a window has more than `MOST_BROKEN`."""
    for window in _windows(text):
        share = _classes(window).get(BROKEN, 0.0)
        if share > MOST_BROKEN:
            return Suspicion("broken characters", f"{share:.0%} of {WINDOW} characters are none: {window[:40]!r}")
    return None


def class_shift(text: str, earlier: str) -> Suspicion | None:
    """A window whose characters are of other classes than those before it: letters of a script, digits, punctuation.

    What came before is `earlier` and the answer's own start, if together they fill a window.
    """
    reference = earlier
    for window in _windows(text):
        if len(reference) >= WINDOW:
            before, now = _classes(reference), _classes(window)
            shift = sum(max(0.0, share - before.get(name, 0.0)) for name, share in now.items())
            if shift > MOST_SHIFT:
                name = max(now, key=lambda name: now[name] - before.get(name, 0.0))
                was = before.get(name, 0.0)
                detail = f"{now[name]:.0%} {name} in {WINDOW} characters, {was:.0%} before: {window[:40]!r}"
                return Suspicion("character classes", detail)
        reference += window
    return None


def _windows(text: str) -> list[str]:
    """The whole windows of a text; the last one ends with it."""
    if len(text) < WINDOW:
        return []
    starts = [*range(0, len(text) - WINDOW, WINDOW), len(text) - WINDOW]
    return [text[start : start + WINDOW] for start in starts]


def _classes(text: str) -> dict[str, float]:
    """Shares of a text's classes of characters; white space is none."""
    counted = Counter(_class_of(character) for character in text if not character.isspace())
    total = counted.total()
    return {name: count / total for name, count in counted.items()}


def _class_of(character: str) -> str:
    category = unicodedata.category(character)
    if character == "\ufffd" or category in ("Cc", "Cn", "Co", "Cs"):
        return BROKEN
    if category.startswith(("L", "M")):
        return f"{unicodedata.name(character, 'UNKNOWN').split()[0]} letters"
    return "digits" if category.startswith("N") else "punctuation"


def _longest_run(same: np.ndarray) -> tuple[int, int]:
    """Start and length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
    starts, ends = edges[::2], edges[1::2]
    if not len(starts):
        return 0, 0
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest] - starts[longest])
