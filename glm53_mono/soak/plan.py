"""What a soak's sessions hold: turns of tool output that repeats itself, and questions about it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from glm53_mono.client.http import Limits

SYSTEM = "[gMASK]<sop><|system|>\nYou watch a build farm. Tools report to you; say in a few sentences what changed.\n"
TOOL = "<|observation|>\n"
QUESTION = "\n<|user|>\nWhat changed since the last report, and what would you look at first?<|assistant|>\n"

SHORTEST_DEPTH = 1024
"""Tokens of a session that is worth the name."""

MARGIN = 512
"""Tokens that a server keeps for itself, and in which the questions and the passers-by's ends fit."""

PASSING_PROMPT = (5, 600)
"""Tokens of a passer-by's prompt, at least and at most."""

PASSING_TOKENS = (8, 64)
"""Tokens of a passer-by's answer, likewise."""

HOSTS = ("atlas", "borea", "ceres", "dione", "elara", "fauna", "gaia", "hydra")
STATES = ("passed", "failed", "queued", "running", "skipped", "timed out")
STAGES = ("configure", "compile", "unit", "package", "upload", "deploy", "smoke")


class PlanError(ValueError):
    """Sessions that do not fit the server; the message is one line."""


@dataclass(frozen=True)
class Plan:
    """Sessions of a run.

    Attributes:
        seed: of everything random.
        sessions: how many.
        parallel: at once.
        turns: of a session, at most.
        depth: tokens of a session, its answers included, at most.
        answer: tokens of an answer, at most.
    """

    seed: int
    sessions: int
    parallel: int
    turns: int
    depth: int
    answer: int

    def fitted(self, limits: Limits) -> Plan:
        """The same with sessions that fit the server, all parallel ones and a passer-by at once.

        Raises:
            PlanError: not even short ones do.
        """
        passing = PASSING_PROMPT[1] + PASSING_TOKENS[1]
        room = (limits.together - passing) // self.parallel - MARGIN
        depth = min(self.depth, limits.request - self.answer - MARGIN, room)
        if depth < max(SHORTEST_DEPTH, 2 * self.answer):
            raise PlanError(
                f"the server takes {limits.request} tokens a request and {limits.together} at once, which leaves "
                f"{depth} for each of {self.parallel} sessions at once: take fewer (--parallel) or shorter answers "
                "(--answer)"
            )
        return Plan(self.seed, self.sessions, self.parallel, self.turns, depth, self.answer)

    @property
    def turn_tokens(self) -> int:
        """Tokens of a turn's tool output, so that the turns together are as deep as a session."""
        return max(1, self.depth // self.turns - self.answer)

    def turn(self, session: int, turn: int, encode: Callable[[str], list[int]]) -> list[int]:
        """What a turn adds to the prompt: token ids of about `turn_tokens`.

        The same report comes again and again with a few lines changed, as a tool's output does.
        """
        source = random.Random(f"{self.seed} {session}")
        lines = [_line(source) for _ in range(8)]
        changes = random.Random(f"{self.seed} {session} {turn}")
        text = SYSTEM if turn == 0 else ""
        ids = encode(text + TOOL)
        question = encode(QUESTION)
        while len(ids) + len(question) < self.turn_tokens:
            lines[changes.randrange(len(lines))] = _line(changes)
            ids += encode("[\n" + ",\n".join(lines) + "\n]\n")
        return ids + question

    def passer_by(self, source: random.Random, encode: Callable[[str], list[int]]) -> tuple[list[int], int]:
        """A short request that joins a running batch: token ids of its prompt, and tokens to generate."""
        wanted, ids = source.randint(*PASSING_PROMPT), encode(SYSTEM)
        while len(ids) < wanted:
            ids += encode(_line(source) + "\n")
        return ids[:wanted], source.randint(*PASSING_TOKENS)


def _line(source: random.Random) -> str:
    host, stage, state = source.choice(HOSTS), source.choice(STAGES), source.choice(STATES)
    job, seconds = source.randrange(10_000), source.randrange(900)
    return f'  {{"host": "{host}", "job": {job}, "stage": "{stage}", "state": "{state}", "seconds": {seconds}}}'
