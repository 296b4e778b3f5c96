"""What the demo runs: prompt, decode steps and verify rounds on SGLang's own forward, held against the fast sides."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from glm53_mono.cli.demo_plan import DRAFT_TOKENS, Plan, leading_matches
from glm53_mono.cli.parts import Scores, StepRunner, StepTrace, compare_caches, compare_steps
from glm53_mono.geometry import Geometry
from glm53_mono.reference import head
from glm53_mono.reference.state import Caches, StepInputs
from glm53_mono.reference.step import step
from glm53_mono.weights.model import ModelWeights

MakeRunner = Callable[[ModelWeights, Caches, Geometry], StepRunner]
"""Makes a fast side from the weights and the caches that SGLang's prompt left behind."""


@dataclass
class Outcome:
    """What the run produced."""

    scores: dict[str, Scores]
    """The table of parts of each fast side, by its name."""
    where: dict[str, str]
    """What ran each fast side."""
    tokens: list[list[int]]
    """Generated tokens of each request."""
    accept_lengths: list[list[int]] = field(default_factory=list)
    """For each verify round and request: tokens it yielded, the one after the last accepted draft included (1 to 4)."""
    drafts: int = 0
    """Drafts that the stand-in proposed."""
    right_drafts: int = 0
    """Those that came before its mistake on purpose."""
    accepted_drafts: int = 0

    @property
    def ok(self) -> bool:
        """Whether every part of every fast side kept to its bound."""
        return bool(self.scores) and all(scores.ok for scores in self.scores.values())


class Demo:
    """One run. `oracle` is the package `tests/oracle/sglang_cpu`, which alone knows SGLang."""

    def __init__(
        self,
        oracle: Any,
        model: Any,
        weights: ModelWeights,
        geometry: Geometry,
        plan: Plan,
        make_runners: Sequence[MakeRunner],
        seed: int,
    ) -> None:
        self.oracle, self.model = oracle, model
        self.weights, self.geometry, self.plan = weights, geometry, plan
        self.make_runners = make_runners
        self.random = random.Random(seed)

    def run(self, advance: Callable[[str], None]) -> Outcome:
        """Run the plan; `advance` is called with the name of each forward that begins."""
        advance("prompt")
        requests = self._requests()
        prompts = [self._random_tokens(length) for length in self.plan.prompt_tokens]
        prompt = self.oracle.batches.Batch.of("extend", requests, prompts)
        trace = self.model.forward(prompt)
        last_rows = torch.tensor(self.plan.prompt_tokens).cumsum(0) - 1
        newest = trace.logits[last_rows].argmax(-1).tolist()
        runners = [make(self.weights, self.model.caches.clone(), self.geometry) for make in self.make_runners]
        outcome = Outcome(
            scores={runner.name: Scores(runner.bounds) for runner in runners},
            where={runner.name: runner.where for runner in runners},
            tokens=[[token] for token in newest],
        )
        for number in range(self.plan.decode_steps):
            advance(f"decode {number + 1}")
            self._decode(requests, runners, outcome)
        for number in range(self.plan.verify_rounds):
            advance(f"verify {number + 1}")
            self._verify(requests, runners, outcome)
        return outcome

    def _decode(self, requests: list[Any], runners: list[StepRunner], outcome: Outcome) -> None:
        batch = self.oracle.batches.Batch.of("decode", requests, [tokens[-1:] for tokens in outcome.tokens])
        _, trace = self._step(batch, runners, outcome)
        for tokens, token in zip(outcome.tokens, trace.logits.argmax(-1).tolist(), strict=True):
            tokens.append(token)

    def _verify(self, requests: list[Any], runners: list[StepRunner], outcome: Outcome) -> None:
        newest = [tokens[-1] for tokens in outcome.tokens]
        drafts = self._drafts(requests, newest, outcome)
        rows = [[token, *chain] for token, chain in zip(newest, drafts, strict=True)]
        batch = self.oracle.batches.Batch.of("verify", requests, rows)
        inputs, trace = self._step(batch, runners, outcome)
        targets = trace.logits.argmax(-1).view(len(requests), DRAFT_TOKENS).tolist()
        accepted = [leading_matches(chain, target) for chain, target in zip(drafts, targets, strict=True)]
        self.model.commit(batch, accepted)
        for runner in runners:
            runner.commit(inputs, torch.tensor(accepted))
            compare_caches(outcome.scores[runner.name], self.geometry, runner.caches, self.model.caches, committed=True)
        for tokens, target, count in zip(outcome.tokens, targets, accepted, strict=True):
            tokens.extend(target[: count + 1])
        outcome.accept_lengths.append([count + 1 for count in accepted])
        outcome.accepted_drafts += sum(accepted)

    def _step(self, batch: Any, runners: list[StepRunner], outcome: Outcome) -> tuple[StepInputs, StepTrace]:
        trace = self.model.forward(batch)
        inputs = batch.step_inputs(self.model.req_to_token)
        for runner in runners:
            scores = outcome.scores[runner.name]
            compare_steps(scores, self.geometry, runner.step(inputs, trace), trace)
            committed = inputs.mode == "decode"
            compare_caches(scores, self.geometry, runner.caches, self.model.caches, committed=committed)
        return inputs, trace

    def _drafts(self, requests: list[Any], newest: list[int], outcome: Outcome) -> list[list[int]]:
        """Three drafts a request: the reference's own continuation, spoilt from a random draft on in most rounds."""
        chains = self._continuation(requests, newest)
        for chain in chains:
            right = self.random.randint(0, len(chain))
            outcome.drafts += len(chain)
            outcome.right_drafts += right
            if right < len(chain):
                chain[right] = (chain[right] + self.random.randrange(1, self.geometry.vocab)) % self.geometry.vocab
        return chains

    def _continuation(self, requests: list[Any], newest: list[int]) -> list[list[int]]:
        """The stand-in of NextN: the next greedy tokens, from the reference on a copy of SGLang's caches."""
        caches = self.model.caches.clone()
        chains: list[list[int]] = [[] for _ in requests]
        ahead = [replace(request, tokens=list(request.tokens)) for request in requests]
        tokens = newest
        for _ in range(DRAFT_TOKENS - 1):
            batch = self.oracle.batches.Batch.of("decode", ahead, [[token] for token in tokens])
            self.oracle.batches.enter_tables(self.model.runner, batch)
            hidden = step(batch.step_inputs(self.model.req_to_token), self.weights, caches, self.geometry)
            for request, token in zip(ahead, tokens, strict=True):
                request.tokens.append(token)
            tokens = head.logits(hidden, self.weights.head).argmax(-1).tolist()
            for chain, token in zip(chains, tokens, strict=True):
                chain.append(token)
        return chains

    def _requests(self) -> list[Any]:
        """Requests on rows, slots and pages out of order; a request has room for all that the plan may generate."""
        count, needed = len(self.plan.prompt_tokens), self.plan.pages(self.geometry.page_tokens)
        rows, slots = (self.random.sample(range(1, count + 1), count) for _ in range(2))
        pages = self.random.sample(range(1, sum(needed) + 1), sum(needed))
        return [
            self.oracle.batches.Request(row, slot, tuple(pages.pop() for _ in range(number)))
            for row, slot, number in zip(rows, slots, needed, strict=True)
        ]

    def _random_tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.geometry.vocab) for _ in range(count)]
