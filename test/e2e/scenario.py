"""What every arm does: the same random requests, whose tokens are forced where hidden states are compared."""

from __future__ import annotations

import random
from dataclasses import dataclass

from test.e2e.server import Answer, Generation, Server, grown

FORCED_STEPS = 256
"""Steps over which a difference would have to grow if it grew."""

LENGTHS = (1, 5, 250, 2000)
"""Prompt tokens: the start, a page's end and the border of selection (2,052) are crossed while decoding."""

FEWEST_FORCED_STEPS = (FORCED_STEPS - 1) * (1 + len(LENGTHS))
"""Decode steps of the forced requests if all those together share each step; prefill makes each one's first token."""

CROWD = 64
"""Requests of a step in another batch size: up to eight rows, SGLang's GEMMs sum alike."""

TRACK_INTERVAL = 256
"""Tokens between two states that SGLang keeps for the prefix cache (--mamba-track-interval)."""


@dataclass(frozen=True)
class Plan:
    """The requests of a run.

    Attributes:
        forced: prompts of `LENGTHS` with the tokens that follow; run together.
        crowd: run beside `forced` where SGLang is compared with itself in another batch size.
        greedy: prompts whose continuation is the model's own.
        turns: a session: each turn's new prompt tokens and its forced answer.
        passing: requests with forced answers that come and go one after another.
        aborted: requests that end in the middle, among those.
    """

    forced: tuple[Generation, ...]
    crowd: tuple[Generation, ...]
    greedy: tuple[Generation, ...]
    turns: tuple[tuple[list[int], list[int]], ...]
    passing: tuple[Generation, ...]
    aborted: tuple[Generation, ...]


@dataclass(frozen=True)
class Results:
    """What one arm answered.

    Attributes:
        together: `Plan.forced` in one batch.
        alone: the same, one at a time.
        crowded: the same beside `Plan.crowd`; empty with the kernel, which serves no such step.
        greedy: `Plan.greedy` in one batch.
        turns: the session's turns, all but the first with their history before them.
        passing: `Plan.passing`.
        steps: of the whole plan, by path and reason; empty without the kernel.
        log: what the server had printed.
    """

    together: list[Answer]
    alone: list[Answer]
    crowded: list[Answer]
    greedy: list[Answer]
    turns: list[Answer]
    passing: list[Answer]
    steps: dict[tuple[str, str], int]
    log: str


def draw(seed: int, vocab: int) -> Plan:
    """Fresh random requests."""
    source = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [source.randrange(16, vocab) for _ in range(count)]

    # The first answer crosses two track boundaries: the second turn starts from a state that a decode step has kept.
    answers = (TRACK_INTERVAL + 150, TRACK_INTERVAL, 40, 40)
    others = range(CROWD - len(LENGTHS))
    return Plan(
        forced=tuple(Generation(tokens(n), FORCED_STEPS, forced=tokens(FORCED_STEPS), hidden=True) for n in LENGTHS),
        # they begin sooner and end later
        crowd=tuple(Generation(tokens(30), FORCED_STEPS + 64) for _ in others),
        greedy=tuple(Generation(tokens(n), 128, hidden=True, logprobs=True) for n in (3, 40, 700)),
        passing=tuple(
            Generation(tokens(n), 40 + n % 50, forced=tokens(40 + n % 50), hidden=True)
            for n in (10, 300, 33, 520, 4, 77)
        ),
        aborted=tuple(Generation(tokens(n), 400) for n in (50, 270)),
        turns=tuple((tokens(200 if turn == 0 else 30), tokens(n)) for turn, n in enumerate(answers)),
    )


def run(server: Server, plan: Plan, *, counts: bool) -> Results:
    """Run the plan on a server.

    Args:
        counts: whether the server has the kernel's metrics.
    """
    before = server.steps() if counts else {}
    for generation in plan.forced:
        # Once without hidden states: those of a long prompt are a hundred megabytes, those of a cached one are not.
        server.generate(Generation(generation.prompt, 1))
    together = server.generate_together(plan.forced)
    alone = [server.generate(generation) for generation in plan.forced]
    crowded = [] if counts else server.generate_together([*plan.crowd, *plan.forced])[len(plan.crowd) :]
    greedy = server.generate_together(plan.greedy)
    turns, history = [], []
    for new, answer in plan.turns:
        history += new
        turns.append(server.generate(Generation(history, len(answer), forced=answer, hidden=True)))
        history += answer
    passing = server.generate_in_turn(plan.passing, plan.aborted)
    steps = grown(server.steps(), before) if counts else {}
    return Results(together, alone, crowded, greedy, turns, passing, steps, server.log)
