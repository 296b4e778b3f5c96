"""What every arm with drafts does: greedy requests in loads that fit a launch and in loads that do not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from test.e2e.server import Answer, Generation, Server, grown

LONG = 2000
"""Tokens over which a state would drift if it did."""

AT_ONCE = 2
"""Requests whose MTP3 steps fit a launch."""


@dataclass(frozen=True)
class Plan:
    """The requests of a run, all greedy.

    Attributes:
        fitting: run `AT_ONCE` at a time, or one at a time.
        long: runs beside `passing`.
        passing: come and go one after another, so that steps have 1 to 6 requests and change sides.
        watched: one at a time, with their hidden states.
    """

    fitting: tuple[Generation, ...]
    long: Generation
    passing: tuple[Generation, ...]
    watched: tuple[Generation, ...]


@dataclass(frozen=True)
class Results:
    """What one arm answered.

    Attributes:
        fitting, long, passing, watched: as in `Plan`.
        long_scores: the long answer's log-probabilities as the same server's prefill computes them.
        fitting_steps: by path and reason, those of `fitting` and `watched`; empty without the kernel.
        steps: likewise, of the whole plan.
        log: everything the server printed until then.
    """

    fitting: list[Answer]
    long: Answer
    long_scores: list[float]
    passing: list[Answer]
    watched: list[Answer]
    fitting_steps: dict[tuple[str, str], int]
    steps: dict[tuple[str, str], int]
    log: str

    @property
    def answers(self) -> list[Answer]:
        """All of them."""
        return [*self.fitting, self.long, *self.passing, *self.watched]


def draw(seed: int, vocab: int) -> Plan:
    """Random requests. Drafts cross pool and page borders everywhere, and the border of selection (2,052 tokens)."""
    source = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [source.randrange(16, vocab) for _ in range(count)]

    return Plan(
        fitting=tuple(Generation(tokens(n), 128, logprobs=True) for n in (3, 700, 250, 2000)),
        long=Generation(tokens(30), LONG, logprobs=True),
        passing=tuple(Generation(tokens(n), 60 + n % 50, logprobs=True) for n in (10, 300, 33, 520, 4)),
        watched=tuple(Generation(tokens(n), 128, hidden=True, logprobs=True) for n in (40, 2000)),
    )


def run(server: Server, plan: Plan, *, at_once: int, counts: bool) -> Results:
    """Run the plan on a server.

    Args:
        at_once: requests of `Plan.fitting` that run together.
        counts: whether the server has the kernel's metrics.
    """
    before = server.steps() if counts else {}
    fitting = [
        answer
        for first in range(0, len(plan.fitting), at_once)
        for answer in server.generate_together(plan.fitting[first : first + at_once])
    ]
    watched = watched_answers(server, plan)
    between = server.steps() if counts else {}
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(server.generate, plan.long)
        passing = server.generate_in_turn(plan.passing, ())
        long_answer = long.result()
    scores = server.score(plan.long.prompt, long_answer.tokens)
    after = server.steps() if counts else {}
    return Results(
        fitting,
        long_answer,
        scores,
        passing,
        watched,
        grown(between, before),
        grown(after, before),
        server.log,
    )


def watched_answers(server: Server, plan: Plan) -> list[Answer]:
    """`Plan.watched`, each first without hidden states: those of a long prompt are a hundred megabytes."""
    for generation in plan.watched:
        server.generate(Generation(generation.prompt, 1))
    return [server.generate(generation) for generation in plan.watched]


def accept_length(answers: Sequence[Answer]) -> float:
    """Tokens of a verify step, the one after the last accepted draft included."""
    return sum(len(answer.tokens) for answer in answers) / verify_steps(answers)


def verify_steps(answers: Sequence[Answer]) -> int:
    """Verify steps of all answers."""
    return sum(answer.verify_steps for answer in answers)
