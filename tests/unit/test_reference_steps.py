"""Random decode and verify steps leave every cache as a token-by-token run leaves it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.reference.state import Caches, StepInputs
from glm53_mono.reference.step import commit, step
from glm53_mono.weights.model import ModelWeights
from tests.unit.reference_serving import Request, Server, tiny_model

STEPS = 300
REQUESTS = 3
DRAFT_TOKENS = 4
PAGES_EACH = 4
Commit = Callable[[Caches, StepInputs, Tensor], None]


ROUNDING = 1e-2
"""Relative RMSE, and share of differing bytes, that a rounding or two can cause. PyTorch's vectorised functions and the
rest of a vector round differently, so a value's last bit may depend on its place in the batch; in most draws none does.
"""


def assert_but_for_roundings(name: str, found: Tensor, expected: Tensor) -> None:
    """Equal, but for what a last bit that depends on the batch can bring about."""
    if expected.dtype == torch.uint8:
        assert (found != expected).sum() <= ROUNDING * expected.numel(), f"{name} differs"
        return
    apart = (found.double() - expected.double()).norm()
    assert apart <= ROUNDING * expected.double().norm(), f"{name} differs"


@pytest.fixture(scope="module")
def model(pytestconfig: pytest.Config) -> tuple[ModelWeights, Geometry]:
    torch.set_num_threads(1)
    return tiny_model(pytestconfig.option.seed)


class Comparison:
    """A server under test beside one that decodes the same tokens one by one."""

    def __init__(self, weights: ModelWeights, geometry: Geometry, seed: int) -> None:
        self.weights, self.geometry = weights, geometry
        self.random = random.Random(seed)
        self.tested, self.plain = (
            Server.open(geometry, requests=REQUESTS, pages_each=PAGES_EACH, draft_tokens=DRAFT_TOKENS, seed=seed)
            for _ in range(2)
        )
        self.texts = [
            [self.random.randrange(geometry.vocab) for _ in range(PAGES_EACH * geometry.page_tokens)]
            for _ in range(REQUESTS)
        ]

    def run_step(self, commit_drafts: Commit) -> None:
        """One random step of a random batch, then the plain run of the tokens it kept, then the comparison."""
        chosen = self.random.sample(range(REQUESTS), self.random.randint(1, REQUESTS))
        order = [*chosen, *[None] * self.random.randint(0, 2)]
        self.random.shuffle(order)
        if self.random.random() < 0.5:
            hidden = self._decode(order)
            kept = dict.fromkeys(chosen, 1)
        else:
            hidden, kept = self._verify(order, commit_drafts)
        plain_hidden = self._catch_up(kept)
        for number in chosen:
            assert_but_for_roundings(f"hidden of {number}", hidden[number][: kept[number]], plain_hidden[number])
            self._compare(number)

    def _decode(self, order: list[int | None]) -> dict[int, Tensor]:
        batch = [self._entry(self.tested, number, 1) for number in order]
        hidden = step(self.tested.inputs("decode", batch), self.weights, self.tested.caches, self.geometry)
        for number in order:
            if number is not None:
                self.tested.requests[number].committed += 1
        return {number: hidden[i : i + 1] for i, number in enumerate(order) if number is not None}

    def _verify(self, order: list[int | None], commit_drafts: Commit) -> tuple[dict[int, Tensor], dict[int, int]]:
        """Drafts right up to a random one, wrong after it; at times a request keeps nothing, as an aborted one."""
        accepted = [self.random.randint(-1, DRAFT_TOKENS - 1) for _ in order]
        batch = []
        for number, last in zip(order, accepted, strict=True):
            request, tokens = self._entry(self.tested, number, DRAFT_TOKENS)
            wrong = [(token + 1) % self.geometry.vocab for token in tokens[last + 1 :]]
            batch.append((request, [*tokens[: last + 1], *wrong]))
        inputs = self.tested.inputs("target_verify", batch)
        hidden = step(inputs, self.weights, self.tested.caches, self.geometry).unflatten(0, (-1, DRAFT_TOKENS))
        commit_drafts(self.tested.caches, inputs, torch.tensor(accepted))
        kept = {number: last + 1 for number, last in zip(order, accepted, strict=True) if number is not None}
        for number, count in kept.items():
            self.tested.requests[number].committed += count
        return {number: hidden[i] for i, number in enumerate(order) if number is not None}, kept

    def _entry(self, server: Server, number: int | None, count: int) -> tuple[Request | None, list[int]]:
        if number is None:
            return None, [self.random.randrange(-5, 10 * self.geometry.vocab) for _ in range(count)]
        start = server.requests[number].committed
        return server.requests[number], self.texts[number][start : start + count]

    def _catch_up(self, kept: dict[int, int]) -> dict[int, Tensor]:
        hidden: dict[int, list[Tensor]] = {number: [] for number in kept}
        for token in range(max(kept.values())):
            behind = [number for number, count in kept.items() if count > token]
            batch = [self._entry(self.plain, number, 1) for number in behind]
            rows = step(self.plain.inputs("decode", batch), self.weights, self.plain.caches, self.geometry)
            for number, row in zip(behind, rows, strict=True):
                self.plain.requests[number].committed += 1
                hidden[number].append(row)
        nothing = torch.empty(0, self.geometry.hidden, dtype=torch.bfloat16)
        return {number: torch.stack(rows) if rows else nothing for number, rows in hidden.items()}

    def _compare(self, number: int) -> None:
        tested, plain = (server.committed_state(server.requests[number]) for server in (self.tested, self.plain))
        for name, expected in plain.items():
            assert_but_for_roundings(f"{name} of request {number}", tested[name], expected)


@pytest.mark.slow
def test_random_steps_equal_a_token_by_token_run(model: tuple[ModelWeights, Geometry], seed: int) -> None:
    comparison = Comparison(*model, seed=seed)
    for _ in range(STEPS):
        comparison.run_step(commit)
    assert min(request.committed for request in comparison.tested.requests) > 256, "every request crosses a page"


def _commit_one_draft_more(caches: Caches, inputs: StepInputs, accepted: Tensor) -> None:
    commit(caches, inputs, (accepted + 1).clamp(max=DRAFT_TOKENS - 1))


def _commit_windows_alone(caches: Caches, inputs: StepInputs, accepted: Tensor) -> None:
    states = caches.temporal.clone()
    commit(caches, inputs, accepted)
    caches.temporal.copy_(states)


def _commit_by_slot(caches: Caches, inputs: StepInputs, accepted: Tensor) -> None:
    """Reads the scratch by mamba slot instead of by batch position."""
    active = (accepted >= 0) & inputs.linear_active
    slots = inputs.mamba_slots[active].long()
    rows = slots.clamp(max=caches.intermediate_ssm.shape[1] - 1)
    caches.temporal[:, slots] = caches.intermediate_ssm[:, rows, accepted[active]]
    caches.conv[:, slots] = caches.intermediate_conv[:, rows, accepted[active]]


@pytest.mark.parametrize("seeded_bug", [_commit_one_draft_more, _commit_windows_alone, _commit_by_slot])
def test_a_wrong_commit_is_seen(model: tuple[ModelWeights, Geometry], seed: int, seeded_bug: Commit) -> None:
    comparison = Comparison(*model, seed=seed)
    with pytest.raises(AssertionError):
        for _ in range(20):
            comparison.run_step(seeded_bug)
