"""How far one arm's hidden states and tokens are from another's, near-ties counted apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from test.e2e.server import Answer

FLIP = 5.0
"""A row so many times further away than the median row has taken another expert or pool at a near-tie of its scores:
one of eight experts moves an output at once, rounding differences do so by degrees."""

MOST_FLIPS = 0.05
"""Share of rows that may have fallen the other way at a near-tie; SGLang's own two batch sizes are measured too."""

OWN_NOISE = 1.5
"""Times that the kernel may be further from SGLang than SGLang, in another batch size, is from itself."""


@dataclass(frozen=True)
class Rows:
    """Distances of one request's rows, relative to each row's length.

    Attributes:
        distances: [rows], in what was compared.
        overall: relative RMSE over the rows that are no flips.
        flips: rows that are.
    """

    distances: torch.Tensor
    overall: float
    flips: int

    @property
    def median(self) -> float:
        """Of all rows."""
        return self.distances.median().item()

    @property
    def flip_share(self) -> float:
        """Flips of a row."""
        return self.flips / len(self.distances)

    @property
    def growth(self) -> float:
        """Median of the last quarter over that of the first."""
        quarter = max(1, len(self.distances) // 4)
        return (self.distances[-quarter:].median() / self.distances[:quarter].median()).item()


def decoded(answer: Answer) -> torch.Tensor:
    """Hidden states of the tokens after the first, [tokens - 1, hidden] fp32.

    The first one's are the prompt's. A retracted request's prefill makes one token more: the last of its rows is that
    token's, as a decode step's would have been.
    """
    rows = [row[-1] if isinstance(row[0], list) else row for row in answer.hidden[1:]]
    return torch.tensor(rows, dtype=torch.float32)


def compare(found: Answer, expected: Answer, head: torch.Tensor) -> Rows:
    """Compare two arms' logits, computed from their hidden states, at the tokens before which both had the same.

    Args:
        head: [vocab, hidden] fp32 on the device that multiplies.

    Raises:
        ValueError: another number of rows, or none to compare.
    """
    return compare_all([found], [expected], head)


def compare_all(found: Sequence[Answer], expected: Sequence[Answer], head: torch.Tensor) -> Rows:
    """The same over several requests' rows."""
    pairs = [_comparable(*pair) for pair in zip(found, expected, strict=True)]
    own, other = (torch.cat(rows).to(head.device) for rows in zip(*pairs, strict=True))
    if not len(own):
        raise ValueError("no two answers begin with the same token: none of their hidden states can be compared")
    return compare_rows(own @ head.T, other @ head.T)


def _comparable(found: Answer, expected: Answer) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of both whose tokens until then are the same."""
    own, other = decoded(found), decoded(expected)
    if own.shape != other.shape or not len(own):
        raise ValueError(f"hidden states {tuple(own.shape)} are compared with {tuple(other.shape)}")
    same = _common(found.tokens, expected.tokens)
    return own[:same], other[:same]


def compare_rows(found: torch.Tensor, expected: torch.Tensor) -> Rows:
    """The same for [rows, width] values."""
    errors, lengths = (found - expected).norm(dim=1), expected.norm(dim=1)
    distances = errors / lengths
    steady = distances <= FLIP * distances.median()
    overall = (errors[steady].norm() / lengths[steady].norm()).item()
    return Rows(distances.cpu(), overall, int((~steady).sum()))


@dataclass(frozen=True)
class Continuation:
    """Two greedy continuations.

    Attributes:
        same: tokens until they differ, or all.
        gap: log-probability by which the expected arm preferred its token where they differ; None if they do not.
        logprob_error: largest difference of the common tokens' log-probabilities.
        logprob_median: median of them.
    """

    same: int
    gap: float | None
    logprob_error: float
    logprob_median: float


def compare_greedy(found: Answer, expected: Answer) -> Continuation:
    """Compare two continuations of one prompt up to their first difference."""
    same = _common(found.tokens, expected.tokens)
    gap = expected.top_gaps[same] if same < len(expected.tokens) else None
    pairs = zip(found.logprobs[:same], expected.logprobs[:same], strict=True)
    apart = [abs(a - b) for a, b in pairs] or [0.0]
    return Continuation(same, gap, max(apart), statistics.median(apart))


def wrong_answers(answer: Answer, *, unlikelier: float) -> tuple[Answer, Answer]:
    """Negative controls of a comparison: another token where it was surest, and tokens so much less likely.

    Args:
        answer: with its log-probabilities.
        unlikelier: taken from each of them.
    """
    surest = max(range(len(answer.tokens)), key=answer.top_gaps.__getitem__)
    other = [token + (place == surest) for place, token in enumerate(answer.tokens)]
    return (
        replace(answer, tokens=other),
        replace(answer, logprobs=[logprob - unlikelier for logprob in answer.logprobs]),
    )


def _common(found: Sequence[int], expected: Sequence[int]) -> int:
    for place, (own, other) in enumerate(zip(found, expected, strict=True)):
        if own != other:
            return place
    return len(expected)
