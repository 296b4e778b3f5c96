"""How long a run of the demo is, and how many drafts a round accepts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DRAFT_TOKENS = 4
"""Tokens of a request's verify step under MTP3: the last sampled token and three drafts."""


@dataclass(frozen=True)
class Plan:
    """How long the demo runs."""

    prompt_tokens: tuple[int, ...]
    """Length of each request's prompt; as many requests as numbers."""
    decode_steps: int
    verify_rounds: int

    @property
    def steps(self) -> int:
        """Forwards of SGLang's model, the prompt's included."""
        return 1 + self.decode_steps + self.verify_rounds

    @property
    def contexts(self) -> list[int]:
        """Tokens that each request has at most, drafts of the last round included."""
        generated = 1 + self.decode_steps + DRAFT_TOKENS * self.verify_rounds
        return [prompt + generated for prompt in self.prompt_tokens]

    def pages(self, page_tokens: int) -> list[int]:
        """KV pages that each request needs."""
        return [math.ceil(context / page_tokens) for context in self.contexts]


def leading_matches(drafts: Sequence[int], targets: Sequence[int]) -> int:
    """How many drafts the model itself would have sampled, greedily and in order: draft k answers to target k."""
    for count, (draft, target) in enumerate(zip(drafts, targets, strict=False)):
        if draft != target:
            return count
    return len(drafts)
