"""Verify steps of the built runtime between SGLang's own: requests change sides in mid-generation, SGLang commits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.oracle.sglang_cpu import context

context.prepare_environment()

from glm53_mono import runtime
from glm53_mono.checkpoint.config import checkpoint_geometry
from glm53_mono.cli.checkpoint import checkpoint_tensors
from glm53_mono.geometry import MAX_ROWS
from glm53_mono.numerics import BOUNDS
from glm53_mono.reference.state import Caches
from glm53_mono.upstream.running import ServedStep
from tests.oracle.sglang_cpu.batches import Batch, Request
from tests.oracle.sglang_cpu.forward import SglangModel, serving
from tests.oracle.sglang_cpu.models import ONE_OF_EACH, small_config
from tests.oracle.sglang_cpu.recording import grow_synthetic_context
from tests.oracle.two_forwards import (
    built,
    cache_differences,
    near_ties_aside,
    new_tokens,
    ours,
    restore,
    too_far,
)

pytestmark = pytest.mark.slow

TOKENS = 4
"""Rows of a request: MTP3."""

CONFIG = small_config(ONE_OF_EACH, dense_layers=len(ONE_OF_EACH), index_topk=256)
"""No experts and few pools to choose from: over several steps a near-tie that falls the other way would move caches."""

GEOMETRY = checkpoint_geometry(CONFIG)

CLOSING = GEOMETRY.selected_pools * GEOMETRY.pool + GEOMETRY.pool + 1
"""A length beyond the border of selection after which the third row of a verify step closes a pool."""


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[SglangModel]:
    torch.set_num_threads(1)
    tensors = checkpoint_tensors(CONFIG, request.config.option.seed)
    with serving(CONFIG, tensors, requests=6, max_context=512, pages=8, draft_tokens=TOKENS) as model:
        yield model


@pytest.fixture(scope="module")
def verifying(served: SglangModel) -> Iterator[runtime.Runtime]:
    with built(served, ServedStep("target_verify", TOKENS)) as made:
        yield made


@pytest.fixture
def requests(served: SglangModel, seed: int) -> list[Request]:
    """At a page's border, in the middle of a pool, one that has just begun, and one that selects."""
    generator = torch.Generator().manual_seed(seed)
    places = (Request(4, 6, (2, 7)), Request(2, 3, (5,)), Request(1, 4, (3,)), Request(3, 5, (4, 6)))
    for request, length in zip(places, (254, 63, 2, CLOSING), strict=True):
        grow_synthetic_context(served, request, length, GEOMETRY, generator)
    return list(places)


@dataclass(frozen=True)
class Step:
    """A verify step of a plan: which requests, their tokens, and how many drafts of each are accepted."""

    requests: tuple[int, ...]
    tokens: list[list[int]]
    accepted: tuple[int, ...]


def planned(orders: Sequence[tuple[int, ...]], requests: list[Request], seed: int) -> list[Step]:
    """Random tokens, and accept counts of which every value occurs where there are as many requests as values."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(map(len, orders))
    values = torch.arange(count)[torch.randperm(count, generator=generator)] % TOKENS
    steps, first = [], 0
    for place, order in enumerate(orders):
        tokens = new_tokens(GEOMETRY, seed + place, [requests[i] for i in order], TOKENS)
        steps.append(Step(order, tokens, tuple(values[first : first + len(order)].tolist())))
        first += len(order)
    return steps


@dataclass(frozen=True)
class Run:
    """What a plan's steps returned, one below the other, and the caches behind the last commit."""

    hidden: torch.Tensor
    logits: torch.Tensor
    caches: Caches
    on_kernel: tuple[bool, ...]

    def differences(self, expected: Run) -> list[str]:
        """What is further from another run than it may be."""
        rows = near_ties_aside(self.hidden, expected.hidden)
        pairs = [
            ("hidden", self.hidden[rows], expected.hidden[rows], BOUNDS["step", "hidden"]),
            ("logits", self.logits[rows], expected.logits[rows], BOUNDS["step", "logits"]),
        ]
        return [*too_far(pairs), *cache_differences(GEOMETRY, expected.caches, self.caches)]


def run(
    served: SglangModel,
    made: runtime.Runtime | None,
    plan: list[Step],
    requests: list[Request],
    after_ours: Callable[[Caches], None] = lambda before: None,
) -> Run:
    """Runs a plan from the present caches, and puts them back.

    Args:
        made: runs the steps that fit into a launch; None leaves every step to SGLang.
        after_ours: called between a step of ours and its commit, with the caches from before the step.
    """
    start = served.caches.clone()
    own = [replace(request, tokens=list(request.tokens)) for request in requests]
    hidden, logits, on_kernel = [], [], []
    for step in plan:
        batch = Batch.of("verify", [own[i] for i in step.requests], step.tokens)
        fits = made is not None and len(step.requests) * TOKENS <= MAX_ROWS
        if fits:
            before = served.caches.clone()
            result: Any = ours(served, made, batch)
            hidden.append(result.hidden_states)
            logits.append(result.next_token_logits)
            after_ours(before)
        else:
            trace = served.forward(batch)
            hidden.append(trace.hidden)
            logits.append(trace.logits)
        on_kernel.append(fits)
        served.commit(batch, step.accepted)
    caches = served.caches.clone()
    restore(served, start)
    return Run(torch.cat(hidden), torch.cat(logits), caches, tuple(on_kernel))


def test_requests_move_between_the_kernel_and_sglang(
    served: SglangModel, verifying: runtime.Runtime, requests: list[Request], seed: int
) -> None:
    """Three requests are a step too wide, two or one fit: one goes to the other side, one of them comes back."""
    plan = planned([(0, 1), (1, 2, 0), (0,)], requests, seed)
    mixed = run(served, verifying, plan, requests)
    assert mixed.on_kernel == (True, False, True)
    assert mixed.differences(run(served, None, plan, requests)) == []


def test_what_the_other_side_would_miss_is_seen(
    served: SglangModel,
    verifying: runtime.Runtime,
    requests: list[Request],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: a launch that leaves the rings as they were, and one that swaps the requests' scratch rows."""
    plan = planned([(0, 1)], requests, seed)
    expected = run(served, None, plan, requests)

    def forget_rings(before: Caches) -> None:
        for name in ("ring_key", "ring_gate"):
            for ring, old in zip(getattr(served.caches, name), getattr(before, name), strict=True):
                ring.copy_(old)

    linear = served.backend.linear_attn_backend
    swapped = linear.verify_intermediate_state_indices.clone()
    swapped[:2] = torch.tensor([1, 0])
    monkeypatch.setattr(linear, "verify_intermediate_state_indices", swapped)
    found = run(served, verifying, plan, requests, forget_rings).differences(expected)
    for name in ("ring_key", "temporal"):
        assert any(line.startswith(name) for line in found), name


def test_padding_changes_nothing_and_the_draft_gets_single_streams(
    served: SglangModel, verifying: runtime.Runtime, requests: list[Request], seed: int
) -> None:
    """A request that a graph pads to two, in either of the modes in which SGLang asks for hidden states."""

    def pad(forward: Any, metadata: Any) -> None:
        """As SGLang fills a captured batch up: stale token ids, lengths of 1, slot -1, everything else 0."""

        def filled(tensor: torch.Tensor, count: int, value: int) -> torch.Tensor:
            return torch.cat((tensor, torch.full((count,), value, dtype=tensor.dtype)))

        forward.batch_size += 1
        forward.input_ids = filled(forward.input_ids, TOKENS, 2**40)
        forward.seq_lens = filled(forward.seq_lens, 1, 1)
        forward.req_pool_indices = filled(forward.req_pool_indices, 1, 0)
        for name in ("positions", "out_cache_loc"):
            setattr(forward, name, filled(getattr(forward, name), TOKENS, 0))
        metadata.mamba_cache_indices = filled(metadata.mamba_cache_indices, 1, -1)

    batch = Batch.of("verify", requests[2:3], new_tokens(GEOMETRY, seed, requests[2:3], TOKENS))
    before = served.caches.clone()
    alone = ours(served, verifying, batch, hidden_mode="LAST").hidden_states.clone()
    after = served.caches.clone()
    restore(served, before)
    padded = ours(served, verifying, batch, pad).hidden_states
    assert alone.shape == (TOKENS, GEOMETRY.hidden)
    assert padded.shape == (2 * TOKENS, GEOMETRY.hidden)
    assert torch.equal(padded[:TOKENS], alone)
    assert torch.isfinite(padded).all()
    for (name, expected), (_, found) in zip(after.tensors(), served.caches.tensors(), strict=True):
        assert torch.equal(found, expected), name
    restore(served, before)


def test_greedy_generation_with_drafts_is_greedy_generation_without(
    served: SglangModel, verifying: runtime.Runtime, requests: list[Request], seed: int
) -> None:
    """What LogitsProcessor gets is the same to the bit, and so are the tokens, whichever drafts are right.

    The first step's third row closes a pool and is rejected: the rows before the next one that closes it never see it.
    """
    request = requests[3]
    own = replace(request, tokens=list(request.tokens))
    start = served.caches.clone()
    tokens = new_tokens(GEOMETRY, seed, [request])[0]
    plain = []
    with built(served) as decoding:
        for _ in range(2 + TOKENS):
            result = ours(served, decoding, Batch.of("decode", [own], [tokens[-1:]]))
            own.tokens.append(tokens[-1])
            plain.append(result.hidden_states)
            tokens.append(int(result.next_token_logits.argmax()))
    restore(served, start)
    drafted: list[torch.Tensor] = []
    for wrong in (2, None):
        ids = tokens[len(drafted) : len(drafted) + TOKENS]
        if wrong is not None:
            ids[wrong] = (ids[wrong] + 1) % GEOMETRY.vocab
        batch = Batch.of("verify", [request], [ids])
        result = ours(served, verifying, batch)
        chosen = result.next_token_logits.argmax(1).tolist()
        accepted = next((i for i in range(TOKENS - 1) if chosen[i] != ids[i + 1]), TOKENS - 1)
        assert accepted == (TOKENS - 1 if wrong is None else wrong - 1)
        drafted += result.hidden_states[: accepted + 1].split(1)
        assert chosen[accepted] == tokens[len(drafted)]
        served.commit(batch, [accepted])
    assert torch.equal(torch.cat(drafted), torch.cat(plain))
