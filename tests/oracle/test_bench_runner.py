"""The benchmark's batches and arms on SGLang's real model, pools and dispatch on the CPU; only graphs are missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.oracle.sglang_cpu import context

context.prepare_environment()

from glm53_mono import runtime
from glm53_mono.bindings import bind_pools
from glm53_mono.checkpoint.config import checkpoint_geometry
from glm53_mono.cli import bench_measure
from glm53_mono.cli.bench_report import Point
from glm53_mono.cli.bench_times import Timing
from glm53_mono.cli.checkpoint import checkpoint_tensors
from glm53_mono.kernels import sync
from glm53_mono.kernels.record import Kind
from glm53_mono.numerics import BOUNDS
from glm53_mono.program.launch import Launch
from glm53_mono.program.pools import Pools
from glm53_mono.spec import SPEC
from glm53_mono.upstream import bench_runner
from glm53_mono.upstream.bench_runner import MONOKERNEL, SGLANG, BenchError, BenchRunner
from glm53_mono.upstream.model import step_weights
from glm53_mono.upstream.monokernel import BuildContext, ShapeKey
from glm53_mono.upstream.running import served_step
from glm53_mono.upstream.step import attention_backends
from test.e2e.forced_steps import Requests, apart, copies, each_step, outcome, restore, walk
from test.e2e.routing import sglangs_choice
from tests.oracle.sglang_cpu.context import PAGE_TOKENS
from tests.oracle.sglang_cpu.forward import SglangModel, serving
from tests.oracle.sglang_cpu.models import ONE_OF_EACH, small_config
from tests.oracle.two_forwards import DECODE

pytestmark = pytest.mark.slow

CONFIG = small_config(ONE_OF_EACH)
GEOMETRY = checkpoint_geometry(CONFIG)
REQUESTS, PAGES, MAX_CONTEXT = 4, 8, 1024


class NoGraphs:
    """Stands for an arm's captured graphs: it counts replays.

    Args:
        launched: called at each, as a device does where the kernel is in the graph.
    """

    capture_bs = (1, 3, REQUESTS)

    def __init__(self, launched: Callable[[], None] = lambda: None) -> None:
        self.launched = launched
        self.bs = 0
        self.replayed: list[tuple[object, int]] = []
        self._replay_graph_key: object = None
        self.backend = self

    def replay(self, key: object, batch: Any) -> None:
        self.replayed.append((key, batch.batch_size))
        self.launched()


def count_launch(built: runtime.Runtime) -> None:
    """One launch more in the host record, where a GPU counts its launches and the interpreter does not."""
    built.launch.host_record.view(torch.int64)[sync.SERVED.value // 2] += 1


def make_bench_runner(model: SglangModel, pages: int) -> None:
    """Gives the model's runner what the bench takes of a real one; `pages` of its pool, the padding one not counted."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    runner = model.runner
    runner.model = model.model
    runner.attn_backend = model.backend
    runner.decode_cuda_graph_runner = NoGraphs()
    runner.token_to_kv_pool_allocator = PagedTokenToKVPoolAllocator(
        pages * PAGE_TOKENS, PAGE_TOKENS, torch.bfloat16, "cpu", runner.token_to_kv_pool, need_sort=False
    )


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[SglangModel]:
    torch.set_num_threads(1)
    tensors = checkpoint_tensors(CONFIG, request.config.option.seed)
    with serving(CONFIG, tensors, requests=REQUESTS, max_context=MAX_CONTEXT, pages=PAGES, draft_tokens=1) as model:
        make_bench_runner(model, PAGES)
        yield model


@pytest.fixture(scope="module")
def built(served: SglangModel) -> Iterator[runtime.Runtime]:
    building = BuildContext(isa="interp", widths=tuple(range(1, 9)), deadline_s=5.0, copies={})
    made = runtime.build(served.model, served.runner.model_config.hf_config, building)
    yield made
    made.close()


@pytest.fixture
def bench(served: SglangModel, built: runtime.Runtime, seed: int) -> Iterator[BenchRunner]:
    """A runner whose model SGLang's own binding has dressed up."""
    from sglang.srt.kernel_plugins.amd import binding

    keys = frozenset(ShapeKey("decode", rows, 1) for rows in range(1, 9))
    binding._install_forward(model=served.model, built=built, served=keys, spec=SPEC)
    runner = served.runner
    bench = BenchRunner(runner, {MONOKERNEL: bench_runner._Arm(runner.decode_cuda_graph_runner, served.backend)})
    bench_measure.fill_caches(bench, MONOKERNEL, GEOMETRY, torch.Generator().manual_seed(seed))
    yield bench
    del served.model.forward


def step_of(bench: BenchRunner, served: SglangModel, ids: torch.Tensor, length: int) -> tuple[Any, Any, Any]:
    """A batch whose metadata the backend has prepared, and the arguments of its launch."""
    batch = bench.decode_batch(ids, length)
    with bench.context(MONOKERNEL):
        served.backend.init_forward_metadata(batch)
        return batch, *bench.built.arguments_of(batch)


def test_a_batch_has_places_of_its_own_for_every_token(bench: BenchRunner, served: SglangModel) -> None:
    for length in (300, 1, 256):
        batch, tensors, sizes = step_of(bench, served, torch.tensor([3, 1, 4]), length)
        table = served.runner.req_to_token_pool.req_to_token[tensors.request_rows, :length]
        assert table.min() >= PAGE_TOKENS, "page 0 pads"
        assert table.unique().numel() == 3 * length
        assert torch.equal(table[:, -1].long(), tensors.cache_slots)
        assert tensors.state_slots.min() > 0 and tensors.state_slots.unique().numel() == 3
        assert (sizes.rows, sizes.tokens) == (3, 1)
        assert batch.positions.tolist() == [length - 1] * 3 and batch.seq_lens.tolist() == [length] * 3


def test_both_forwards_take_the_batch_and_agree(bench: BenchRunner, served: SglangModel) -> None:
    """The dispatch sends it to ours; what it stands for is SGLang's forward: the two agree but for rounding."""
    ids = torch.tensor([7, 11, 13])
    caches = served.caches.clone()
    dispatch = served.model.forward
    found = []
    for forward in (dispatch, dispatch.__wrapped__):
        for (_, own), (_, before) in zip(served.caches.tensors(), caches.tensors(), strict=True):
            own.copy_(before)
        batch, *_ = step_of(bench, served, ids, 300)
        with torch.no_grad(), bench.context(MONOKERNEL):
            found.append(forward(batch.input_ids, batch.positions, batch).next_token_logits.float())
    apart = (found[0] - found[1]).norm(dim=1) / found[1].norm(dim=1)
    # a near-tie of a router may send one of three rows elsewhere
    assert apart.median() < 3e-2, apart
    assert not torch.equal(found[0], found[1]), "the same forward ran twice"


def routed(served: SglangModel) -> list[int]:
    """Distinct experts of each layer that routes, from what SGLang's FFNs were last given and its own routers."""
    counts = []
    for layer in range(GEOMETRY.dense_layers, GEOMETRY.layers):
        gate = served.model.model.layers[layer].mlp.gate
        logits = served._seen[layer]["ffn_in"].float() @ gate.weight.float().T
        choice = logits.sigmoid() + gate.e_score_correction_bias
        counts.append(choice.topk(GEOMETRY.experts_per_token, dim=1).indices.unique().numel())
    return counts


def test_distinct_experts_are_those_of_the_routers(bench: BenchRunner, served: SglangModel, seed: int) -> None:
    rows = torch.randint(GEOMETRY.vocab, (3,), generator=torch.Generator().manual_seed(seed))
    batch, tensors, sizes = step_of(bench, served, rows, 40)
    caches = served.caches.clone()
    hidden = torch.empty((len(rows), GEOMETRY.hidden), dtype=torch.bfloat16)
    found = bench_measure.distinct_experts(bench.built.launch, tensors, sizes, hidden)
    for (_, own), (_, before) in zip(served.caches.tensors(), caches.tensors(), strict=True):
        own.copy_(before)
    with torch.no_grad(), bench.context(MONOKERNEL):
        bench.model.forward.__wrapped__(batch.input_ids, batch.positions, batch)
    expected = routed(served)
    # a near-tie of a router may fall the other way, in one layer and row
    assert sum(abs(one - other) for one, other in zip(found, expected, strict=True)) <= 1, (found, expected)
    assert max(found) > GEOMETRY.experts_per_token, "three rows chose what one would"


def test_an_idle_launch_touches_nothing(bench: BenchRunner, served: SglangModel) -> None:
    launch = bench.built.launch
    _, tensors, sizes = step_of(bench, served, torch.tensor([5]), 40)
    idle = bench_measure.idle_launch(launch)
    assert len(idle.phases) == len(launch.phases) and idle.buffer is launch.buffer
    launch.poison()
    caches, workspace = served.caches.clone(), launch.buffer.clone()
    hidden = torch.full((1, GEOMETRY.hidden), float("nan"), dtype=torch.bfloat16)
    for index in range(3):
        idle.run(tensors, sizes._replace(rows=0), hidden, index, index + 1)
    assert torch.equal(launch.buffer, workspace) and hidden.isnan().all()
    for (name, own), (_, before) in zip(served.caches.tensors(), caches.tensors(), strict=True):
        assert torch.equal(own, before), name
    launch.run(tensors, sizes, hidden, 0, 1)
    assert not torch.equal(launch.buffer, workspace), "a phase with work does touch the workspace"


def test_a_point_has_every_arm_the_launch_and_its_bytes(
    bench: BenchRunner, served: SglangModel, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    runner = served.runner

    def forward(batch: Any) -> Any:
        """As SGLang's runner does it: metadata, then the graph of the captured size that holds the batch."""
        runner.attn_backend.init_forward_metadata(batch)
        graphs = runner.decode_cuda_graph_runner
        graphs.bs = next(size for size in graphs.capture_bs if size >= batch.batch_size)
        graphs._replay_graph_key = ("key", graphs.bs)
        graphs.launched()
        return SimpleNamespace(can_run_graph=True, logits_output=None)

    def times_of(replays: Any, steps: int) -> dict[str, Timing]:
        for replay in replays.values():
            for _ in range(bench_measure.WARM_UPS + steps):
                replay()
        return {name: Timing.of([float(steps)] * steps) for name in replays}

    monkeypatch.setattr(runner, "forward", forward)
    monkeypatch.setattr(bench_measure, "times_of", times_of)
    launched = lambda: count_launch(bench.built)
    monkeypatch.setattr(bench_measure, "graph_of", lambda run: launched)
    bench._arms[MONOKERNEL] = replace(bench._arms[MONOKERNEL], graphs=NoGraphs(launched))
    bench._arms[SGLANG] = replace(bench._arms[MONOKERNEL], graphs=NoGraphs())
    shape = {"weights": step_weights(bench.model, GEOMETRY, {}), "geometry": GEOMETRY, "context": 300, "steps": 4}
    shape["step"] = DECODE

    def measured(arms: tuple[str, ...], rows: int, launch: bool) -> Point:
        generator = torch.Generator().manual_seed(seed)
        return bench_measure.measure_point(
            bench, arms, **shape, rows=rows, launch=launch, phases=False, generator=generator
        )

    point, replays = measured((MONOKERNEL, SGLANG), 1, True), bench_measure.WARM_UPS + 4
    assert {name: timing.median_ms for name, timing in point.arms.items()} == {MONOKERNEL: 4.0, SGLANG: 4.0}
    assert [arm.graphs.replayed for arm in bench._arms.values()] == [[(("key", 1), 1)] * replays] * 2
    assert point.launched.served == 2 * replays, "in the step's graph, and alone"
    assert point.ratio == 1.0
    assert point.launched.distinct_experts == (GEOMETRY.experts_per_token,) * (GEOMETRY.layers - GEOMETRY.dense_layers)
    assert point.launched.bytes.index_keys > 0, "300 tokens are more than are selected"
    assert point.launched.barriers.count == len(bench.built.launch.phases) - 1
    alone = measured((SGLANG,), 3, False)
    assert alone.launched is None and alone.ratio is None and list(alone.arms) == [SGLANG]
    with pytest.raises(BenchError, match=r"2 requests have no graph of their own; captured: \(1, 3, 4\)"):
        measured((SGLANG,), 2, False)
    bench._arms[MONOKERNEL].graphs.launched = lambda: None
    with pytest.raises(BenchError, match="the kernel ran 0 of 1 steps"):
        measured((MONOKERNEL, SGLANG), 1, True)
    bench._arms[MONOKERNEL].graphs.launched = launched
    monkeypatch.setattr(bench_measure, "graph_of", lambda run: lambda: None)
    with pytest.raises(BenchError, match=f"the kernel ran {replays} of {2 * replays} steps"):
        measured((MONOKERNEL, SGLANG), 1, True)


def test_barriers_are_one_less_than_the_phases_that_run(bench: BenchRunner) -> None:
    phases = bench.built.launch.phases
    selections = sum(phase.kind is Kind.MLA_SELECT for phase in phases)
    assert selections > 0
    assert bench_measure.barriers_of(bench.built.launch, selects=False) == len(phases) - selections - 1


def test_sglangs_forward_is_captured_without_ours_and_ours_put_back(
    bench: BenchRunner, served: SglangModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, dispatch = served.runner, served.model.forward
    seen = []
    second = NoGraphs()

    def backends() -> None:
        runner.attn_backend = "another backend"

    def capture() -> None:
        seen.append(served.model.forward)
        runner.decode_cuda_graph_runner = second

    monkeypatch.setattr(runner, "init_attention_backends", backends, raising=False)
    monkeypatch.setattr(runner, "init_decode_cuda_graph", capture, raising=False)
    bench.capture_own_forward()
    assert seen == [dispatch.__wrapped__] and seen[0].__func__ is type(served.model).forward
    assert served.model.forward is dispatch
    assert bench._arms[SGLANG].graphs is second and bench._arms[SGLANG].backend == "another backend"
    assert bench._arms[MONOKERNEL].backend is served.backend
    runner.attn_backend = served.backend

    def broken() -> None:
        raise RuntimeError("no memory for graphs")

    monkeypatch.setattr(runner, "init_decode_cuda_graph", broken)
    with pytest.raises(RuntimeError, match="no memory"):
        bench.capture_own_forward()
    assert served.model.forward is dispatch
    runner.attn_backend = served.backend


def test_what_the_pools_cannot_hold_is_refused(bench: BenchRunner) -> None:
    with pytest.raises(BenchError, match="4 requests of 1024 tokens take 4096 cache slots of 2048: raise --max-total"):
        bench.decode_batch(torch.zeros(4, dtype=torch.int64), 1024)
    with pytest.raises(BenchError, match="5 requests take 5 state slots of 4: raise --max-mamba-cache-size"):
        bench.decode_batch(torch.zeros(5, dtype=torch.int64), 1)
    with pytest.raises(BenchError, match="a context of 9000 tokens: the server's longest is"):
        bench.decode_batch(torch.zeros(1, dtype=torch.int64), 9000)


def test_drawn_weights_pass_through_the_dummy_loader(
    served: SglangModel, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model_config = ModelConfig(str(tmp_path), language_only=True)
    dummy = loader.DummyModelLoader(LoadConfig(load_format="dummy"))

    def load() -> Any:
        return dummy.load_model(model_config=model_config, device_config=DeviceConfig("cpu"))

    original = loader.initialize_dummy_weights
    with bench_runner._drawn_weights(lambda: checkpoint_tensors(CONFIG, pytestconfig.option.seed)):
        drawn = dict(load().named_parameters())
    assert loader.initialize_dummy_weights is original
    own = dict(served.model.named_parameters())
    text = [name for name in own if not name.startswith("visual.")]
    assert [name for name in text if not torch.equal(drawn[name], own[name])] == []
    plain = dict(load().named_parameters())
    assert not torch.equal(plain["lm_head.weight"], own["lm_head.weight"])


Forwards = dict[str, Callable[..., Any]]


@pytest.fixture
def forwards(bench: BenchRunner, served: SglangModel, monkeypatch: pytest.MonkeyPatch) -> Forwards:
    """What each arm runs in the place of its graphs; to be changed. Whole launches are counted as on a GPU."""
    runner, dispatch = served.runner, served.model.forward
    graphs = {MONOKERNEL: NoGraphs(), SGLANG: NoGraphs()}
    forwards = {MONOKERNEL: dispatch, SGLANG: dispatch.__wrapped__}
    for name, of_arm in graphs.items():
        bench._arms[name] = replace(bench._arms[MONOKERNEL], graphs=of_arm)

    def forward(batch: Any) -> Any:
        runner.attn_backend.init_forward_metadata(batch)
        arm = next(name for name in graphs if graphs[name] is runner.decode_cuda_graph_runner)
        graphs[arm].bs = batch.batch_size
        with torch.no_grad(), bench.context(arm):
            logits = forwards[arm](batch.input_ids, batch.positions, batch)
        return SimpleNamespace(can_run_graph=True, logits_output=logits)

    right = Launch.run_by_phase

    def counted(launch: Launch, *arguments: Any) -> None:
        right(launch, *arguments)
        count_launch(bench.built)

    monkeypatch.setattr(Launch, "run_by_phase", counted)
    monkeypatch.setattr(runner, "forward", forward)
    return forwards


def pools_of(bench: BenchRunner) -> Pools:
    with bench.context(MONOKERNEL):
        return bind_pools(attention_backends(), GEOMETRY, served_step())


def requests_of(seed: int, contexts: tuple[int, ...], rows: int) -> Requests:
    generator = torch.Generator().manual_seed(seed)
    return Requests(torch.randint(GEOMETRY.vocab, (2, rows), generator=generator), contexts)


def rolled(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that mixes its rows' tokens up."""

    def other_tokens(input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> Any:
        batch.input_ids = input_ids.roll(1)
        return dispatch(batch.input_ids, positions, batch)

    return other_tokens


def test_walks_find_a_forward_that_is_off(
    bench: BenchRunner, served: SglangModel, forwards: Forwards, seed: int
) -> None:
    """The comparison that the GPU tests run for 256 steps: within bounds as it is, beyond them with a bug."""
    requests, pools = requests_of(seed, (254, 300), 2), pools_of(bench)
    before = copies(pools)
    expected = walk(bench, SGLANG, pools, before, requests, 2)
    right = apart(walk(bench, MONOKERNEL, pools, before, requests, 2), expected)
    # a near-tie of a router may send a row elsewhere; the other is as close as a step of few layers is
    assert min(right.logits) < BOUNDS["step", "logits"].rel, right
    assert min(right.state) < 1e-2 and min(right.windows) < 1e-2, right
    forwards[MONOKERNEL] = rolled(served.model.forward)
    wrong = apart(walk(bench, MONOKERNEL, pools, before, requests, 2), expected)
    assert min(wrong.logits) > 10 * BOUNDS["step", "logits"].rel, wrong
    assert min(wrong.state) > 1e-2 and min(wrong.windows) > 1e-1, wrong


def test_each_step_is_told_from_one_that_is_off(
    bench: BenchRunner, served: SglangModel, forwards: Forwards, seed: int
) -> None:
    """Rows that were routed alike are close; a router that has changed parts rows far from any tie."""
    requests, pools = requests_of(seed, (254, 300, 9), REQUESTS), pools_of(bench)
    before = copies(pools)
    with sglangs_choice(served.model, GEOMETRY.experts, REQUESTS) as choice:
        right, own = each_step(bench, pools, requests, choice, REQUESTS)
        assert right.rows == own.rows == 6
        assert right.alike_rows >= 3 and 0 < right.alike < BOUNDS["step", "logits"].rel, right
        assert right.widest_gap is not None and right.widest_gap < 0.1, right
        assert own.alike <= BOUNDS["step", "logits"].rel, own
        restore(pools, before)
        bias = served.model.model.layers[GEOMETRY.layers - 1].mlp.gate.e_score_correction_bias
        forwards[SGLANG] = with_bias(forwards[SGLANG], bias, bias.flip(0))
        wrong, _ = each_step(bench, pools, requests, choice, REQUESTS)
    assert wrong.alike_rows < wrong.rows and wrong.widest_gap is not None and wrong.widest_gap > 0.1, wrong
    assert wrong.overall > 2 * right.alike, wrong


def with_bias(forward: Callable[..., Any], bias: torch.Tensor, other: torch.Tensor) -> Callable[..., Any]:
    """A forward that sees another router's bias."""

    def changed(input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> Any:
        kept = bias.clone()
        bias.data.copy_(other)
        try:
            return forward(input_ids, positions, batch)
        finally:
            bias.data.copy_(kept)

    return changed


def test_forced_steps_are_the_kernels(bench: BenchRunner, served: SglangModel, forwards: Forwards, seed: int) -> None:
    """Every step of its own and none of SGLang's: outputs that agree would not tell."""
    requests, pools = requests_of(seed, (9, 14), 2), pools_of(bench)
    kernels, sglangs = forwards[MONOKERNEL], forwards[SGLANG]
    with sglangs_choice(served.model, GEOMETRY.experts, REQUESTS) as choice:
        assert len(outcome(bench, pools, requests, choice, 2).walk.logits) == 2
        forwards[MONOKERNEL] = sglangs
        with pytest.raises(BenchError, match="the kernel ran 0 of 1 steps"):
            outcome(bench, pools, requests, choice, 2)
        forwards[MONOKERNEL], forwards[SGLANG] = kernels, kernels
        with pytest.raises(BenchError, match="the kernel ran 2 of 0 steps"):
            outcome(bench, pools, requests, choice, 2)
