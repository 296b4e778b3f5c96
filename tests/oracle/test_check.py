"""The check inside SGLang on the CPU: quiet on what is right, and mistakes named by layer, part and value."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import triton.language as tl

from tests.oracle.sglang_cpu import context

context.prepare_environment()

from glm53_mono import runtime
from glm53_mono.check.comparisons import Counts, Violation
from glm53_mono.check.settings import CHECK
from glm53_mono.check.step import CheckError
from glm53_mono.checkpoint.config import checkpoint_geometry
from glm53_mono.cli.checkpoint import checkpoint_tensors
from glm53_mono.kernels import dense, indexer, mhc, moe
from glm53_mono.kernels.memory import private
from glm53_mono.kernels.record import Kind, Word
from glm53_mono.numerics import BOUNDS
from glm53_mono.program.tiling import TILINGS
from glm53_mono.reference.state import Caches
from glm53_mono.upstream.running import ServedStep
from glm53_mono.upstream.step import attention_backends
from glm53_mono.upstream.tensors import UpstreamError
from tests.oracle.sglang_cpu.batches import Batch, Request
from tests.oracle.sglang_cpu.forward import SglangModel, serving
from tests.oracle.sglang_cpu.models import ONE_OF_EACH, small_config
from tests.oracle.sglang_cpu.recording import grow_synthetic_context
from tests.oracle.two_forwards import built, new_tokens, ours, restore
from tests.sources import Wrap, wrapped
from tests.spoiled_records import SPOILS, Spoil, spoiled

pytestmark = pytest.mark.slow

CONFIG = small_config(ONE_OF_EACH)
GEOMETRY = checkpoint_geometry(CONFIG)
DRAFT_TOKENS = 2
DECODE, VERIFY = ServedStep("decode", 1), ServedStep("target_verify", DRAFT_TOKENS)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[SglangModel]:
    torch.set_num_threads(1)
    tensors = checkpoint_tensors(CONFIG, request.config.option.seed)
    with serving(CONFIG, tensors, requests=6, max_context=1024, pages=14, draft_tokens=DRAFT_TOKENS) as model:
        yield model


@contextmanager
def checking(served: SglangModel, step: ServedStep, asked: str) -> Iterator[runtime.Runtime]:
    """The runtime under the check, bound to SGLang's caches; with a program for each tile of output, as on a GPU."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(CHECK, asked)
            patch.setitem(TILINGS, "interp", replace(TILINGS["interp"], programs=8))
            made = stack.enter_context(built(served, step))
        with forward_context(ForwardContext(attn_backend=served.backend)):
            made._bind(attention_backends())
        yield made


@pytest.fixture(scope="module")
def decoding(served: SglangModel) -> Iterator[runtime.Runtime]:
    with checking(served, DECODE, "1") as made:
        yield made


@pytest.fixture(scope="module")
def verifying(served: SglangModel) -> Iterator[runtime.Runtime]:
    with checking(served, VERIFY, "1") as made:
        yield made


@pytest.fixture
def requests(served: SglangModel, seed: int) -> list[Request]:
    """One that closes a page's last pool, and one that chooses among many pools and closes one too."""
    generator = torch.Generator().manual_seed(seed)
    places = (Request(4, 6, (2, 11)), Request(5, 2, (6, 14, 8, 5)))
    for request, length in zip(places, (255, 771), strict=True):
        grow_synthetic_context(served, request, length, GEOMETRY, generator)
    return list(places)


def batch_of(made: runtime.Runtime, requests: list[Request], seed: int) -> Batch:
    if made.check.verify:
        return Batch.of("verify", requests, new_tokens(GEOMETRY, seed, requests, DRAFT_TOKENS))
    return Batch.of("decode", requests, new_tokens(GEOMETRY, seed, requests))


def violations(made: runtime.Runtime, run: Any) -> list[Violation]:
    """The violations that `run` adds."""
    comparisons = made.check.comparisons
    before = comparisons.counts().violating
    run()
    return comparisons.violations(before, comparisons.counts().violating)


def same_caches(expected: Caches, found: Caches) -> list[str]:
    """Caches that differ in a bit; slot 0 of the states is padding, which SGLang's parts may write."""
    different = []
    for (name, one), (_, other) in zip(expected.tensors(), found.tensors(), strict=True):
        used = slice(None) if name.startswith(("latent", "index", "ring")) else (slice(None), slice(1, None))
        if not torch.equal(one[used], other[used]):
            different.append(name)
    return different


@pytest.mark.parametrize("arm", ["decoding", "verifying"])
def test_right_steps_have_no_violation_and_leave_what_an_unchecked_launch_leaves(
    arm: str, request: pytest.FixtureRequest, served: SglangModel, requests: list[Request], seed: int
) -> None:
    made = request.getfixturevalue(arm)

    def track(forward: Any, metadata: Any) -> None:
        """The second request's state is saved in slot 5; what SGLang holds for verify steps is not read there."""
        forward.mamba_track_mask = torch.tensor([False, True])
        metadata.mamba_track_indices = torch.tensor([1, 5])

    batch = batch_of(made, requests, seed)
    before, change = served.caches.clone(), None if made.check.verify else track
    hidden = ours(served, made, batch, change).hidden_states.clone()
    after = served.caches.clone()
    assert violations(made, lambda: None) == []
    found = made.check.comparisons.counts()
    assert (found.violating, found.compared) == (0, found.steps)
    restore(served, before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "_check", None)
        assert torch.equal(ours(served, made, batch, change).hidden_states, hidden)
    assert same_caches(after, served.caches) == []
    assert 0 < made.check.comparisons.worst(1, "attention", "output").rel < 1e-2, "the comparison measured nothing"


def test_padding_is_not_compared(
    served: SglangModel, decoding: runtime.Runtime, requests: list[Request], seed: int
) -> None:
    """A padded request has the caches' first places, full of NaN here: whatever either side makes of it is right."""
    padding, before = Request(0, 0, (0,)), served.caches.clone()
    served.caches.conv[:, 0] = torch.nan
    served.caches.temporal[:, 0] = torch.nan
    three = [requests[0], padding]
    batch = Batch.of("decode", three, new_tokens(GEOMETRY, seed, three))
    assert violations(decoding, lambda: ours(served, decoding, batch)) == []
    restore(served, before)


def test_the_server_may_go_on_with_sglangs_results(served: SglangModel, requests: list[Request], seed: int) -> None:
    with checking(served, DECODE, "sglang") as made:
        batch = batch_of(made, requests[:1], seed)
        before = served.caches.clone()
        trace = served.forward(batch)
        after = served.caches.clone()
        restore(served, before)
        # the trace has committed the token
        requests[0].tokens.pop()
        found = ours(served, made, batch)
        assert torch.equal(found.hidden_states, trace.hidden)
        assert same_caches(after, served.caches) == []
        assert made.check.comparisons.counts() == Counts(1, 1, 0, 0, 0)
        apart = made.check.comparisons.worst(GEOMETRY.layers, "whole forward", "logits")
        assert 0 < apart.rel < BOUNDS["step", "logits"].rel
        assert f"logits of the two whole forwards: relative error up to {apart.rel:.3g}" in made._check_watch.summary()


def named(found: list[Violation]) -> tuple[int, str, str]:
    """What the one violation names."""
    (violation,) = found
    return violation.comparison.layer, violation.comparison.part, violation.comparison.value


@contextmanager
def parts_alone(made: runtime.Runtime) -> Iterator[None]:
    """Without the launch behind the parts, for mistakes that the parts show: it takes as long as all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made.launch, "run_by_phase", lambda *_: None)
        yield


WIRED = [
    pytest.param(spoil, arm, id=f"{spoil.name}, {arm}")
    for spoil in SPOILS
    for arm in ("decoding", "verifying")
    if spoil.verify in (None, arm == "verifying")
]


@pytest.mark.parametrize(("spoil", "arm"), WIRED)
def test_wrong_wiring_is_named(
    spoil: Spoil, arm: str, request: pytest.FixtureRequest, served: SglangModel, requests: list[Request], seed: int
) -> None:
    made = request.getfixturevalue(arm)
    batch = batch_of(made, requests[1:], seed)
    with spoiled(made.launch, spoil) as layer, parts_alone(made):
        found = violations(made, lambda: ours(served, made, batch))
    assert named(found) == (layer, spoil.part, spoil.value)


def one_pool_twice(right: Any) -> Any:
    def emit_selected(scores: Any, out: Any, *rest: Any) -> None:
        right(scores, out, *rest)
        tl.store(out, tl.load(out + 1))

    return emit_selected


def no_coefficients(right: Any) -> Any:
    """The last layer's FFN finds in its coefficients whatever the workspace held."""
    calls = itertools.count()

    def mix_coefficients(workspace: Any, record: Any, row: Any, *rest: Any) -> None:
        last = int(tl.load(record + int(Word.LAYER))) == GEOMETRY.layers - 1
        if not last or next(calls) % 2 == 0:
            right(workspace, record, row, *rest)

    return mix_coefficients


def weights_reversed(right: Any) -> Any:
    def route(workspace: Any, record: Any, state_slots: Any, tokens: Any, rows: Any, W: Any, G: Any, *rest: Any) -> Any:
        count = right(workspace, record, state_slots, tokens, rows, W, G, *rest)
        weight = private(workspace, W.expert_weight, W.expert_weight_bytes, tl.float32)
        expert = tl.arange(0, W.experts_padded)
        own = tl.load(weight + expert)
        both_ends = tl.max(own, 0) + tl.min(tl.where(own > 0.0, own, 1.0), 0)
        tl.store(weight + expert, tl.where(own > 0.0, both_ends - own, 0.0))
        return count

    return route


def gate_and_up_swapped(right: Any) -> Any:
    return lambda gate, up, limit: right(up, gate, limit)


CODE = (
    (indexer, "emit_selected", one_pool_twice, (1, "attention", "chosen pools")),
    (mhc, "mix_coefficients", no_coefficients, (GEOMETRY.layers - 1, "ffn", "post")),
    (moe, "route", weights_reversed, (1, "ffn", "expert weights")),
    (dense, "clamped_swiglu", gate_and_up_swapped, (0, "ffn", "output")),
)
"""Mistakes in device code: module, function, the wrong one, and what must be named."""


@pytest.mark.parametrize(("module", "name", "wrong", "expected"), CODE, ids=[wrong.__name__ for _, _, wrong, _ in CODE])
def test_wrong_code_is_named(
    module: ModuleType,
    name: str,
    wrong: Wrap,
    expected: tuple[int, str, str],
    served: SglangModel,
    decoding: runtime.Runtime,
    requests: list[Request],
    seed: int,
) -> None:
    batch = batch_of(decoding, requests[1:], seed)
    with wrapped([(module, name, wrong)]), parts_alone(decoding):
        found = violations(decoding, lambda: ours(served, decoding, batch))
    assert named(found) == expected


def test_a_launch_that_is_not_its_phases_is_named(
    served: SglangModel, decoding: runtime.Runtime, requests: list[Request], seed: int
) -> None:
    """As after a missing barrier: one phase of the launch reads what another has not written yet."""
    launch = decoding.launch
    late = next(i for i, phase in enumerate(launch.phases) if phase.kind is Kind.KDA_PROJECT and phase.layer == 2)

    def hasty(tensors: Any, sizes: Any, hidden: torch.Tensor) -> None:
        for phase in (*range(late), late + 1, late, *range(late + 2, len(launch.phases))):
            launch.run(tensors, sizes, hidden, phase, phase + 1)

    batch = batch_of(decoding, requests[:1], seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "run_by_phase", hasty)
        found = violations(decoding, lambda: ours(served, decoding, batch))
    assert named(found) == (2, "launch", "state")


def test_nothing_is_checked_unless_asked(served: SglangModel) -> None:
    with built(served, DECODE) as made:
        assert made.check is None


def test_what_cannot_be_checked_is_refused_when_built(served: SglangModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK, "perhaps")
    with pytest.raises(ValueError, match="SGLANG_AMD_MONO_CHECK is 'perhaps'"), built(served, DECODE):
        pass
    monkeypatch.setenv(CHECK, "1")
    too_few = pytest.raises(CheckError, match="a launch of 3 programs keeps the output of as many tiles")
    with too_few, built(served, DECODE):
        pass


def test_experts_that_are_chosen_unseen_are_refused(
    served: SglangModel, decoding: runtime.Runtime, requests: list[Request], seed: int
) -> None:
    topk = served.model.model.layers[1].mlp.topk
    hook = topk.register_forward_hook(lambda _module, _arguments, output: output.router_logits)
    try:
        with pytest.raises(UpstreamError, match="layer 1 hands Tensor to its experts, which then choose unseen"):
            ours(served, decoding, batch_of(decoding, requests[:1], seed))
    finally:
        hook.remove()


def test_a_request_whose_row_of_the_table_passes_on_is_left_out(
    served: SglangModel, decoding: runtime.Runtime, requests: list[Request], seed: int
) -> None:
    """With overlapped scheduling: before the launch behind the parts, another request gets the second one's row."""
    launch, table = decoding.launch, served.req_to_token
    run = launch.run_by_phase

    def late(*arguments: Any) -> None:
        table[requests[1].row] = table[requests[0].row]
        run(*arguments)

    before = decoding.check.comparisons.counts().left_out
    for moves, left_out in ((run, 0), (late, 1)):
        batch = batch_of(decoding, requests, seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "run_by_phase", moves)
            assert violations(decoding, lambda batch=batch: ours(served, decoding, batch)) == []
        assert decoding.check.comparisons.counts().left_out == before + left_out
