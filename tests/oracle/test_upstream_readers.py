"""The readers of `glm53_mono.upstream` on SGLang's own model, pools and backends: what they return and refuse."""

from __future__ import annotations

import pkgutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.oracle.sglang_cpu import context

context.prepare_environment()

from glm53_mono.checkpoint.config import checkpoint_geometry
from glm53_mono.cli.checkpoint import checkpoint_tensors
from glm53_mono.upstream.hooks import DRAFT_REPLAYS, FORWARD, SeenStep, watch_steps
from glm53_mono.upstream.model import (
    embedding_shard,
    final_norm,
    hands_out_hidden_states,
    model_layers,
    tensor_parallel_rank,
)
from glm53_mono.upstream.pools import compress_ring, index_pool, kda_layer_cache, latent_pool
from glm53_mono.upstream.running import metrics_are_on
from glm53_mono.upstream.step import Backends, StepBindings, attention_backends, step_inputs
from glm53_mono.upstream.tensors import UpstreamError
from glm53_mono.weights.model import DenseWeights, KdaWeights, MlaWeights, MoeWeights
from tests.oracle.sglang_cpu import batches
from tests.oracle.sglang_cpu.batches import Batch, Request
from tests.oracle.sglang_cpu.forward import SglangModel, serving
from tests.oracle.sglang_cpu.models import ONE_OF_EACH, small_config

DRAFT_TOKENS = 4
CONFIG = small_config(ONE_OF_EACH)
GEOMETRY = checkpoint_geometry(CONFIG)
KDA, DSA, LAST_KDA = range(3)


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    return dict(checkpoint_tensors(CONFIG, request.config.option.seed))


@pytest.fixture(scope="module")
def served(checkpoint: dict[str, torch.Tensor]) -> Iterator[SglangModel]:
    with serving(CONFIG, checkpoint.items(), requests=3, max_context=512, pages=6, draft_tokens=DRAFT_TOKENS) as model:
        yield model


def two_requests() -> tuple[Request, Request]:
    """Rows, slots and pages in different orders, and lengths on either side of a page's end."""
    return Request(2, 3, (4, 2), list(range(5, 275))), Request(1, 1, (5,), list(range(5, 35)))


def bind(served: SglangModel, batch: Batch, change: Callable[[Any, Backends], None] | None = None) -> StepBindings:
    """What a step's forward would read, after `change` has spoilt something."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    batches.enter_tables(served.runner, batch)
    forward = batches.forward_batch(served.runner, batch)
    served.backend.init_forward_metadata(forward)
    with forward_context(ForwardContext(attn_backend=served.backend)):
        backends = attention_backends()
        if change is not None:
            change(forward, backends)
        return step_inputs(forward, backends)


@pytest.fixture
def backends(served: SglangModel) -> Backends:
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    with forward_context(ForwardContext(attn_backend=served.backend)):
        return attention_backends()


def decode() -> Batch:
    return Batch.of("decode", two_requests(), [[7], [8]])


def verify() -> Batch:
    return Batch.of("verify", two_requests(), [[7, 8, 9, 10], [11, 12, 13, 14]])


@pytest.mark.parametrize(("batch", "mode"), [(decode(), "decode"), (verify(), "target_verify")])
def test_a_step_is_bound(served: SglangModel, batch: Batch, mode: str) -> None:
    step = bind(served, batch)
    assert (step.mode, step.requests, step.tokens_per_request) == (mode, 2, batch.tokens_per_request)
    assert step.rows == len(batch.flat_ids)
    for bound, expected in (
        (step.input_ids, batch.flat_ids),
        (step.positions, batch.positions),
        (step.request_rows, batch.rows),
        (step.seq_lens, batch.seq_lens),
        (step.out_cache_loc, batch.out_cache_loc),
        (step.state_slots, batch.slots.to(torch.int32)),
    ):
        assert torch.equal(bound, expected)
    # A token's slot follows from its request's row alone.
    rows = step.request_rows.repeat_interleave(step.tokens_per_request)
    assert torch.equal(step.req_to_token[rows, step.positions].long(), step.out_cache_loc)
    assert step.track_slots is None and step.track_mask is None
    if mode == "decode":
        assert step.scratch_rows is None
    else:
        assert step.scratch_rows[:2].tolist() == [0, 1]


def spoil_dtype(forward: Any, backends: Backends) -> None:
    forward.seq_lens = forward.seq_lens.to(torch.int32)


def spoil_shape(forward: Any, backends: Backends) -> None:
    forward.out_cache_loc = forward.out_cache_loc[:1]


def spoil_stride(forward: Any, backends: Backends) -> None:
    forward.positions = torch.zeros(2 * len(forward.positions), dtype=torch.int64)[::2]


def spoil_mode(forward: Any, backends: Backends) -> None:
    forward.forward_mode = type(forward.forward_mode).EXTEND


def spoil_rows(forward: Any, backends: Backends) -> None:
    forward.input_ids = forward.input_ids.repeat(3)


def spoil_slots(forward: Any, backends: Backends) -> None:
    backends.linear.forward_metadata.mamba_cache_indices = None


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (spoil_dtype, "forward_batch.seq_lens is torch.int32, not torch.int64"),
        (spoil_shape, "forward_batch.out_cache_loc has shape [1], not [2]"),
        (spoil_stride, "forward_batch.positions has strides [2], not [1]"),
        (spoil_mode, "not DECODE or TARGET_VERIFY"),
        (spoil_rows, "forward_batch has 6 rows for 2 requests in a decode step"),
        (spoil_slots, "ForwardMetadata.mamba_cache_indices is None, not a tensor"),
    ],
)
def test_a_step_that_cannot_be_read_is_refused(served: SglangModel, spoil: Callable, says: str) -> None:
    with pytest.raises(UpstreamError) as caught:
        bind(served, decode(), spoil)
    assert says in str(caught.value)


def test_a_commit_that_leaves_the_state_behind_is_refused(served: SglangModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.backend.linear_attn_backend, "accept_lens_pool", torch.ones(4))
    with pytest.raises(UpstreamError, match="accept_lens_pool is set"):
        bind(served, verify())


def test_caches_are_the_servers_own(served: SglangModel, backends: Backends) -> None:
    own = served.caches
    for ordinal, layer in enumerate((KDA, LAST_KDA)):
        cache = kda_layer_cache(backends, layer, GEOMETRY)
        assert cache.conv.data_ptr() == own.conv[ordinal].data_ptr()
        assert cache.temporal.data_ptr() == own.temporal[ordinal].data_ptr()
        assert cache.intermediate_ssm.data_ptr() == own.intermediate_ssm[ordinal].data_ptr()
        assert cache.intermediate_conv.data_ptr() == own.intermediate_conv[ordinal].data_ptr()
        assert cache.intermediate_ssm.shape[1] == DRAFT_TOKENS
    assert latent_pool(backends, DSA, GEOMETRY).data_ptr() == own.latent[0].data_ptr()
    assert index_pool(backends, DSA, GEOMETRY).data_ptr() == own.index[0].data_ptr()
    ring = compress_ring(backends, DSA, GEOMETRY)
    assert (ring.keys.data_ptr(), ring.scores.data_ptr()) == (own.ring_key[0].data_ptr(), own.ring_gate[0].data_ptr())
    assert ring.keys.shape[1] == GEOMETRY.pool + DRAFT_TOKENS


def test_caches_of_another_layout_are_refused(backends: Backends) -> None:
    with pytest.raises(UpstreamError, match=r"conv state of layer 0 has shape"):
        kda_layer_cache(backends, KDA, replace(GEOMETRY, kda_heads=GEOMETRY.kda_heads + 1))
    with pytest.raises(UpstreamError, match=r"latent cache of layer 1 has shape"):
        latent_pool(backends, DSA, replace(GEOMETRY, latent=GEOMETRY.latent + 128))
    with pytest.raises(UpstreamError, match=r"DSATokenToKVPool.page_size is 256, not 128"):
        latent_pool(backends, DSA, replace(GEOMETRY, page_tokens=128))
    with pytest.raises(UpstreamError, match=r"index keys of layer 1 has shape"):
        index_pool(backends, DSA, replace(GEOMETRY, page_tokens=512))
    with pytest.raises(UpstreamError, match=r"layer 0 is not among the DSA layers \[1\]"):
        compress_ring(backends, KDA, GEOMETRY)


def test_the_newer_sglang_hands_out_the_state_itself(backends: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    older = kda_layer_cache(backends, LAST_KDA, GEOMETRY)

    def state_layer_cache(layer_id: int) -> Any:
        state = backends.request_pool.mamba2_layer_cache(layer_id)
        return SimpleNamespace(conv=[state.conv[0].clone()], temporal=state.temporal)

    monkeypatch.setattr(backends.linear, "state_layer_cache", state_layer_cache, raising=False)
    newer = kda_layer_cache(backends, LAST_KDA, GEOMETRY)
    assert newer.temporal.data_ptr() == older.temporal.data_ptr()
    assert newer.conv.data_ptr() != older.conv.data_ptr()
    assert newer.intermediate_ssm is None and newer.intermediate_conv is None


def test_weights_are_the_checkpoints(served: SglangModel, checkpoint: dict[str, torch.Tensor]) -> None:
    def loaded(name: str) -> torch.Tensor:
        return checkpoint[f"model.language_model.{name}"]

    layers = model_layers(served.model, GEOMETRY, {})
    kinds = [(type(layer.attention), type(layer.ffn)) for layer in layers]
    assert kinds == [(KdaWeights, DenseWeights), (MlaWeights, MoeWeights), (KdaWeights, MoeWeights)]

    kda, width = layers[KDA].attention, GEOMETRY.kda_width
    part = "layers.0.self_attn."
    for row, name in enumerate(("q", "k", "v")):
        assert torch.equal(kda.qkv.data[row * width : (row + 1) * width], loaded(f"{part}{name}_proj.weight"))
        conv = loaded(f"{part}{name}_conv1d.weight").squeeze(1).float()
        assert torch.equal(kda.taps[row * width : (row + 1) * width], conv)
    for own, name in (
        (kda.beta.data, "b_proj"),
        (kda.decay_down.data, "f_a_proj"),
        (kda.gate_down.data, "g_a_proj"),
        (kda.decay_up.data, "f_b_proj"),
        (kda.gate_up.data, "g_b_proj"),
        (kda.output.data, "o_proj"),
        (kda.output_norm, "o_norm"),
    ):
        assert torch.equal(own, loaded(f"{part}{name}.weight")), name
    assert torch.equal(kda.a_log, loaded(f"{part}A_log").flatten())
    assert torch.equal(layers[KDA].ffn_mhc.fn, loaded("layers.0.hc_ffn_fn").float())
    assert torch.equal(layers[KDA].attention_mhc.base, loaded("layers.0.hc_attn_base"))

    mla, part = layers[DSA].attention, "layers.1.self_attn."
    absorbed = loaded(f"{part}kv_b_proj.weight").unflatten(0, (GEOMETRY.mla_heads, -1))
    assert torch.equal(mla.key_up.data.transpose(1, 2), absorbed[:, : GEOMETRY.qk_head_dim])
    assert torch.equal(mla.value_up.data, absorbed[:, GEOMETRY.qk_head_dim :])
    assert torch.equal(mla.query_latent.data[: GEOMETRY.q_rank], loaded(f"{part}q_a_proj.weight"))
    assert torch.equal(mla.query_latent.data[GEOMETRY.q_rank :], loaded(f"{part}kv_a_proj_with_mqa.weight"))
    assert torch.equal(mla.indexer.query.data, loaded(f"{part}indexer.wq_b.weight"))
    assert torch.equal(mla.indexer.pool_gate.data, loaded(f"{part}indexer.index_kpool_compress_gate"))
    assert torch.equal(mla.indexer.position_bias, loaded(f"{part}indexer.index_kpool_compress_ape").float())

    experts, part = layers[DSA].ffn, "layers.1.mlp."
    gate_up = torch.cat([loaded(f"{part}experts.3.{name}_proj.weight") for name in ("gate", "up")])
    assert torch.equal(experts.gate_up.data[3], gate_up)
    assert torch.equal(experts.down.data[3], loaded(f"{part}experts.3.down_proj.weight"))
    assert torch.equal(experts.shared.down.data, loaded(f"{part}shared_experts.down_proj.weight"))
    assert torch.equal(experts.bias, loaded(f"{part}gate.e_score_correction_bias"))

    shard = embedding_shard(served.model, GEOMETRY)
    assert (shard.first_token, shard.end_token) == (0, GEOMETRY.vocab)
    assert torch.equal(shard.weight.data, loaded("embed_tokens.weight"))
    assert torch.equal(final_norm(served.model, GEOMETRY), loaded("norm.weight"))
    assert tensor_parallel_rank() == (0, 1)


def test_hidden_states_of_layers_are_noticed(served: SglangModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hands_out_hidden_states(served.model)
    monkeypatch.setattr(served.model.model, "layers_to_capture", [2])
    assert hands_out_hidden_states(served.model)


def test_weights_of_another_layout_are_refused(served: SglangModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UpstreamError, match=r"model\.layers has 3 layers, the config 4"):
        model_layers(served.model, replace(GEOMETRY, layers=4), {})
    with pytest.raises(UpstreamError, match=r"model\.layers\.0\.self_attn is Glm5NextLinearAttention, not Deepseek"):
        model_layers(served.model, replace(GEOMETRY, kda_layers=(2,), dsa_layers=(0, 1)), {})
    with pytest.raises(UpstreamError, match=r"model\.layers\.1\.mlp\.gate\.weight has shape"):
        model_layers(served.model, replace(GEOMETRY, experts=GEOMETRY.experts + 1), {})
    down = served.model.model.layers[KDA].mlp.down_proj
    monkeypatch.setattr(down.weight, "data", down.weight.data.to(torch.float16))
    with pytest.raises(UpstreamError, match=r"model\.layers\.0\.mlp\.down_proj\.weight is torch\.float16"):
        model_layers(served.model, GEOMETRY, {})


def test_the_fused_shared_expert_is_a_row_more(served: SglangModel, monkeypatch: pytest.MonkeyPatch) -> None:
    moe = served.model.model.layers[DSA].mlp
    monkeypatch.setattr(moe, "num_fused_shared_experts", 1)
    with pytest.raises(UpstreamError, match="fuses 1 shared experts and has shared_experts"):
        model_layers(served.model, GEOMETRY, {})
    monkeypatch.setattr(moe, "shared_experts", None)
    with pytest.raises(UpstreamError, match=r"experts\.w13_weight has shape \[8, "):
        model_layers(served.model, GEOMETRY, {})


@pytest.fixture
def unhooked_runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner class that nothing hooks yet, whose forward says that a graph ran the step."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins.hook_registry import HookRegistry

    result = SimpleNamespace(can_run_graph=True)
    monkeypatch.setattr(ModelRunner, "forward", lambda self, forward_batch, *args, **kwargs: result)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return ModelRunner


def step_of(mode: str, requests: int, tokens: int) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(forward_mode=ForwardMode[mode], batch_size=requests, input_ids=torch.zeros(tokens))


def test_every_step_of_a_runner_is_seen(unhooked_runner: Any) -> None:
    seen: list[SeenStep] = []
    assert watch_steps(seen.append, drafts=False) == []
    target = SimpleNamespace(is_draft_worker=False, decode_cuda_graph_runner=SimpleNamespace(bs=4))
    draft = SimpleNamespace(is_draft_worker=True, decode_cuda_graph_runner=None)
    assert unhooked_runner.forward(target, step_of("TARGET_VERIFY", 2, 8)).can_run_graph
    unhooked_runner.forward(draft, forward_batch=step_of("DECODE", 2, 2))
    unhooked_runner.forward(target, step_of("EXTEND", 2, 301))
    # A graph pads decode and verify steps of the target, and only those.
    assert seen == [
        SeenStep("TARGET_VERIFY", 4, 4, False),
        SeenStep("DECODE", 2, 1, True),
        SeenStep("EXTEND", 2, 151, False),
    ]
    assert seen[0].rows == 16


def test_replays_of_the_draft_model_are_seen(unhooked_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass through no runner's forward."""
    draft, extend = (pkgutil.resolve_name(target.rpartition(".")[0]) for target in DRAFT_REPLAYS)
    monkeypatch.setattr(draft, "execute", lambda self, forward_batch: "drafts")
    monkeypatch.setattr(extend, "execute", lambda self, forward_batch, select_index: "states")
    seen: list[SeenStep] = []
    assert watch_steps(seen.append, drafts=True) == []
    drafts = step_of("DECODE", 2, 2)
    drafts.input_ids = None
    assert draft.execute(SimpleNamespace(), drafts) == "drafts"
    assert extend.execute(SimpleNamespace(), step_of("DRAFT_EXTEND_V2", 2, 8), None) == "states"
    assert seen == [SeenStep("DECODE", 2, 1, True), SeenStep("DRAFT_EXTEND_V2", 2, 1, True)]


def test_a_runner_that_another_plugin_has_hooked_is_not_watched(unhooked_runner: Any) -> None:
    assert watch_steps(lambda step: None, drafts=False) == []
    assert watch_steps(lambda step: None, drafts=False) == [FORWARD]


@pytest.mark.parametrize(
    ("enabled", "everywhere", "writing"), [(False, True, []), (True, False, [0]), (True, True, [0, 1])]
)
def test_metrics_are_written_where_sglang_writes_its_own(
    monkeypatch: pytest.MonkeyPatch, enabled: bool, everywhere: bool, writing: list[int]
) -> None:
    from sglang.srt import runtime_context

    observability = SimpleNamespace(enable_metrics=enabled, enable_metrics_for_all_schedulers=everywhere)
    monkeypatch.setattr(runtime_context, "get_observability", lambda: observability)
    assert [rank for rank in (0, 1) if metrics_are_on(rank)] == writing
