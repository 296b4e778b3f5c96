"""The built runtime inside SGLang on the CPU: model, pools, attention backends and LogitsProcessor are the real ones.

Each step runs twice from the same caches, by SGLang's own forward and by ours in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.oracle.sglang_cpu import context

context.prepare_environment()

from glm53_mono import bindings, runtime
from glm53_mono.checkpoint.config import checkpoint_geometry
from glm53_mono.cli.checkpoint import checkpoint_tensors
from glm53_mono.reference.state import Caches
from glm53_mono.upstream.running import ServedStep
from glm53_mono.upstream.tensors import UpstreamError
from tests.oracle import two_forwards
from tests.oracle.sglang_cpu.batches import Batch, Request
from tests.oracle.sglang_cpu.forward import SglangModel, serving
from tests.oracle.sglang_cpu.models import ONE_OF_EACH, small_config
from tests.oracle.sglang_cpu.recording import grow_synthetic_context
from tests.oracle.two_forwards import both, built, ours, restore

pytestmark = pytest.mark.slow

DRAFT_TOKENS = 4
CONFIG = small_config(ONE_OF_EACH)
GEOMETRY = checkpoint_geometry(CONFIG)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[SglangModel]:
    torch.set_num_threads(1)
    tensors = checkpoint_tensors(CONFIG, request.config.option.seed)
    with serving(CONFIG, tensors, requests=6, max_context=1024, pages=14, draft_tokens=DRAFT_TOKENS) as model:
        yield model


@pytest.fixture(scope="module")
def decoding(served: SglangModel) -> Iterator[runtime.Runtime]:
    with built(served) as made:
        yield made


@pytest.fixture
def requests(served: SglangModel, seed: int) -> list[Request]:
    """Three requests at a page's border, at the border of selection and far beyond it, and one that has just begun."""
    generator = torch.Generator().manual_seed(seed)
    places = (Request(4, 6, (2, 11)), Request(2, 3, (13,)), Request(5, 2, (6, 14, 8, 5)), Request(1, 4, (3,)))
    for request, length in zip(places, (255, 67, 769, 1), strict=True):
        grow_synthetic_context(served, request, length, GEOMETRY, generator)
    return list(places)


def new_tokens(seed: int, requests: Sequence[Request], count: int = 1) -> list[list[int]]:
    return two_forwards.new_tokens(GEOMETRY, seed, requests, count)


def differences(trace: Any, result: Any, after: Caches, found: Caches) -> list[str]:
    return two_forwards.differences(GEOMETRY, trace, result, after, found)


def test_decode_steps_are_sglangs(
    served: SglangModel, decoding: runtime.Runtime, requests: list[Request], seed: int
) -> None:
    first, second, third, fourth = requests
    for step, order in enumerate(([third, first, fourth, second], [second], [fourth, third])):
        batch = Batch.of("decode", order, new_tokens(seed + step, order))
        assert differences(*both(served, decoding, batch)) == []


def swap_requests(forward: Any, metadata: Any) -> None:
    metadata.mamba_cache_indices = metadata.mamba_cache_indices.flip(0).contiguous()


def shift_lengths(forward: Any, metadata: Any) -> None:
    forward.seq_lens = forward.seq_lens - 1


def other_tokens(forward: Any, metadata: Any) -> None:
    forward.input_ids = forward.input_ids.flip(0).contiguous()


def test_a_wrong_binding_is_seen(
    served: SglangModel, decoding: runtime.Runtime, requests: list[Request], seed: int
) -> None:
    pair = [requests[1], requests[3]]
    batch = Batch.of("decode", pair, new_tokens(seed, pair))
    before = served.caches.clone()
    trace, result, after, found = both(served, decoding, batch)
    assert differences(trace, result, after, found) == []
    for bug in (swap_requests, shift_lengths, other_tokens):
        restore(served, before)
        wrong = ours(served, decoding, batch, bug)
        assert differences(trace, wrong, after, served.caches) != [], bug.__name__


def test_padded_rows_change_nothing(
    served: SglangModel, decoding: runtime.Runtime, requests: list[Request], seed: int
) -> None:
    def pad(forward: Any, metadata: Any) -> None:
        """As SGLang fills a captured batch up: stale token ids, lengths of 1, slot -1, everything else 0."""

        def filled(tensor: torch.Tensor, value: int) -> torch.Tensor:
            return torch.cat((tensor, torch.full((2,), value, dtype=tensor.dtype)))

        forward.batch_size += 2
        forward.input_ids = filled(forward.input_ids, 2**40)
        forward.seq_lens = filled(forward.seq_lens, 1)
        for name in ("positions", "req_pool_indices", "out_cache_loc"):
            setattr(forward, name, filled(getattr(forward, name), 0))
        metadata.mamba_cache_indices = filled(metadata.mamba_cache_indices, -1)

    pair = [requests[1], requests[3]]
    batch = Batch.of("decode", pair, new_tokens(seed, pair))
    before = served.caches.clone()
    alone = ours(served, decoding, batch).hidden_states.clone()
    after = served.caches.clone()
    restore(served, before)
    padded = ours(served, decoding, batch, pad).hidden_states
    assert padded.shape == (4, GEOMETRY.hidden)
    assert torch.equal(padded[:2], alone)
    assert torch.isfinite(padded).all()
    for (name, expected), (_, found) in zip(after.tensors(), served.caches.tensors(), strict=True):
        assert torch.equal(found, expected), name


def test_states_are_kept_for_the_prefix_cache_as_sglang_keeps_them(
    served: SglangModel, decoding: runtime.Runtime, requests: list[Request], seed: int
) -> None:
    """Slot 5 is free and tracks the first request; the second has a slot that is not due, the third none at all."""

    def track(forward: Any, metadata: Any) -> None:
        forward.mamba_track_mask = torch.tensor([True, False, True])
        metadata.mamba_track_indices = torch.tensor([5, 1, -1])

    batch = Batch.of("decode", requests[:3], new_tokens(seed, requests[:3]))
    before = served.caches.clone()
    ours(served, decoding, batch, track)
    for name in ("conv", "temporal"):
        old, new = getattr(before, name), getattr(served.caches, name)
        assert torch.equal(new[:, 5], new[:, 6]) and not torch.equal(new[:, 5], old[:, 5]), name
        assert torch.equal(new[:, 1], old[:, 1]) and torch.equal(new[:, 0], old[:, 0]), name

    linear = served.backend.linear_attn_backend
    restore(served, before)
    own = served.caches
    kept = SimpleNamespace(mamba_track_mask=torch.tensor([True, False, False]), batch_size=3)
    linear.forward_metadata.mamba_track_indices = torch.tensor([5, 1, -1])
    slots = linear.forward_metadata.mamba_cache_indices
    linear._track_mamba_state_decode(kept, own.conv, own.temporal, slots, layer_id=GEOMETRY.kda_layers[-1])
    assert torch.equal(own.temporal[:, 5], before.temporal[:, 6])
    assert torch.equal(own.conv[:, 5], before.conv[:, 6])
    assert torch.equal(own.temporal[:, 1], before.temporal[:, 1])


def test_hidden_states_are_a_tensor_of_each_forward(
    served: SglangModel, decoding: runtime.Runtime, requests: list[Request], seed: int
) -> None:
    batches = [Batch.of("decode", requests[3:], [[token]]) for token in new_tokens(seed, requests[3:], count=2)[0]]
    results = [ours(served, decoding, batch).hidden_states for batch in batches]
    assert results[0].data_ptr() != results[1].data_ptr()
    assert not torch.equal(results[0], results[1])
    workspace = decoding._launch.buffer
    first, last = workspace.data_ptr(), workspace.data_ptr() + workspace.numel()
    assert all(not first <= result.data_ptr() < last for result in results)


def test_a_step_with_embeddings_runs_the_models_own_forward(
    served: SglangModel, decoding: runtime.Runtime, requests: list[Request], seed: int
) -> None:
    batch = Batch.of("decode", requests[3:], new_tokens(seed, requests[3:]))
    embeds = served.model.model.embed_tokens.weight[batch.flat_ids]
    before, counted = served.caches.clone(), decoding.fallbacks().get(runtime.EMBEDS, 0)
    trace = served.forward(batch)
    restore(served, before)
    result = ours(served, decoding, batch, input_embeds=embeds)
    assert torch.equal(result.hidden_states, trace.hidden)
    assert decoding.fallbacks()[runtime.EMBEDS] == counted + 1


def test_what_a_launch_was_not_built_for_is_refused(
    served: SglangModel, decoding: runtime.Runtime, requests: list[Request], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch.of("decode", requests[:1], new_tokens(seed, requests[:1]))
    drafts = Batch.of("verify", requests[:1], new_tokens(seed, requests[:1], DRAFT_TOKENS))
    with pytest.raises(
        UpstreamError, match="a target_verify step of 4 tokens a request was routed to a launch of decode"
    ):
        ours(served, decoding, drafts)
    with monkeypatch.context() as patch:
        patch.setattr(served.model.model, "layers_to_capture", [1])
        with pytest.raises(UpstreamError, match="hidden states of inner layers"):
            ours(served, decoding, batch)
    ours(served, decoding, batch)
    with monkeypatch.context() as patch:
        patch.setattr(served.backend, "token_to_kv_pool", SimpleNamespace())
        with pytest.raises(UpstreamError, match="not those of the first step"):
            ours(served, decoding, batch)


def test_a_context_longer_than_the_workspace_is_refused(
    served: SglangModel, requests: list[Request], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch.of("decode", requests[:1], new_tokens(seed, requests[:1]))
    monkeypatch.setattr(runtime, "longest_context", lambda hf_config: 128)
    with built(served) as made, pytest.raises(UpstreamError, match="room for 1024 tokens a request"):
        ours(served, made, batch)


def test_verify_steps_are_sglangs(served: SglangModel, requests: list[Request], seed: int) -> None:
    pair = [requests[0], requests[3]]
    batch = Batch.of("verify", pair, new_tokens(seed, pair, DRAFT_TOKENS))
    with built(served, ServedStep("target_verify", DRAFT_TOKENS)) as made:
        before = served.caches.clone()
        trace, result, after, found = both(served, made, batch)
        assert torch.equal(found.temporal, before.temporal) and torch.equal(found.conv, before.conv)
        # SGLang's unfused pair moves the window on before the commit, which then sets it (kda_backend.py:1533-1544)
        after.conv.copy_(before.conv)
        assert differences(trace, result, after, found) == []
    with pytest.raises(UpstreamError, match="holds 4 draft tokens a request, the steps have 3"):
        bindings.bind_pools(_backends(served), GEOMETRY, ServedStep("target_verify", DRAFT_TOKENS - 1))


def _backends(served: SglangModel) -> Any:
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    from glm53_mono.upstream.step import attention_backends

    with forward_context(ForwardContext(attn_backend=served.backend)):
        return attention_backends()
