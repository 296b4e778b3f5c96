"""The benchmark's verify steps on SGLang's real model, pools and dispatch on the CPU; only graphs are missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.oracle.sglang_cpu import context

context.prepare_environment()

from glm53_mono import runtime
from glm53_mono.checkpoint.config import checkpoint_geometry
from glm53_mono.cli import bench as cli
from glm53_mono.cli import bench_measure
from glm53_mono.cli.bench import Only, parse_options
from glm53_mono.cli.bench_times import Timing
from glm53_mono.cli.checkpoint import checkpoint_tensors
from glm53_mono.cli.step_bytes import step_bytes
from glm53_mono.kernels.monokernel import StepSizes
from glm53_mono.spec import SPEC
from glm53_mono.upstream import bench_runner, running
from glm53_mono.upstream.bench_runner import MONOKERNEL, SGLANG, BenchError, BenchRunner
from glm53_mono.upstream.model import step_weights
from glm53_mono.upstream.monokernel import Plan, ShapeKey
from glm53_mono.upstream.running import ServedStep
from test.e2e.mtp_round import environment_of
from tests.oracle import two_forwards
from tests.oracle.sglang_cpu.context import PAGE_TOKENS
from tests.oracle.sglang_cpu.forward import SglangModel, serving
from tests.oracle.sglang_cpu.models import ONE_OF_EACH, small_config
from tests.oracle.test_bench_runner import NoGraphs, count_launch, make_bench_runner
from tests.oracle.two_forwards import DECODE

pytestmark = pytest.mark.slow

TOKENS = 4
"""Rows of a request: MTP3."""

VERIFY = ServedStep("target_verify", TOKENS)
CONFIG = small_config(ONE_OF_EACH)
GEOMETRY = checkpoint_geometry(CONFIG)
REQUESTS, PAGES = 2, 6
LENGTH = 300
"""More tokens than are selected, and past a page's border."""


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[SglangModel]:
    torch.set_num_threads(1)
    tensors = checkpoint_tensors(CONFIG, request.config.option.seed)
    with serving(CONFIG, tensors, requests=REQUESTS, max_context=512, pages=PAGES, draft_tokens=TOKENS) as model:
        make_bench_runner(model, PAGES)
        yield model


@pytest.fixture(scope="module")
def built(served: SglangModel) -> Iterator[runtime.Runtime]:
    with two_forwards.built(served, VERIFY) as made:
        yield made


@pytest.fixture
def bench(served: SglangModel, built: runtime.Runtime, seed: int) -> Iterator[BenchRunner]:
    """A runner whose model SGLang's own binding has dressed up for verify steps."""
    from sglang.srt.kernel_plugins.amd import binding

    keys = frozenset(ShapeKey("target_verify", requests, TOKENS) for requests in (1, 2))
    binding._install_forward(model=served.model, built=built, served=keys, spec=SPEC)
    runner = served.runner
    bench = BenchRunner(runner, {MONOKERNEL: bench_runner._Arm(runner.decode_cuda_graph_runner, served.backend)})
    bench_measure.fill_caches(bench, MONOKERNEL, GEOMETRY, torch.Generator().manual_seed(seed))
    yield bench
    del served.model.forward


def draw(seed: int, rows: int) -> torch.Tensor:
    return torch.randint(GEOMETRY.vocab, (rows,), generator=torch.Generator().manual_seed(seed))


def logits_of(bench: BenchRunner, served: SglangModel, forward: Callable[..., Any], batch: Any) -> torch.Tensor:
    """[rows, vocab] fp32 that a forward returns for a batch; the caches stay as they were."""
    before = served.caches.clone()
    with torch.no_grad(), bench.context(MONOKERNEL):
        served.backend.init_forward_metadata(batch)
        logits = forward(batch.input_ids, batch.positions, batch).next_token_logits.float()
    two_forwards.restore(served, before)
    return logits


def test_a_verify_batch_has_a_place_for_every_draft(bench: BenchRunner, served: SglangModel) -> None:
    ids = torch.arange(2 * TOKENS)
    # a page's border falls between the second and the third row, then before the first, then the shortest context
    for length in (PAGE_TOKENS - 1, PAGE_TOKENS + 1, 2):
        batch = bench.step_batch(VERIFY, ids, length)
        with bench.context(MONOKERNEL):
            served.backend.init_forward_metadata(batch)
            tensors, sizes = bench.built.arguments_of(batch)
        assert (sizes.rows, sizes.tokens, batch.batch_size) == (2 * TOKENS, TOKENS, 2)
        assert batch.forward_mode.is_target_verify() and batch.spec_info.num_tokens_per_req == TOKENS
        assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [length - 1] * 2
        places = list(range(length - 1, length - 1 + TOKENS))
        assert batch.positions.tolist() == 2 * places
        table = served.runner.req_to_token_pool.req_to_token[tensors.request_rows]
        assert torch.equal(table[:, places].flatten().long(), tensors.cache_slots)
        whole = table[:, : places[-1] + 1]
        assert whole.min() >= PAGE_TOKENS, "page 0 pads"
        assert whole.unique().numel() == whole.numel()
        assert tensors.scratch_rows[:2].tolist() == [0, 1]
        assert tensors.state_slots.min() > 0 and tensors.state_slots.unique().numel() == 2


def test_what_no_verify_step_can_be_is_refused(bench: BenchRunner) -> None:
    with pytest.raises(BenchError, match="a context of 1 token: before a verify step a token must be committed"):
        bench.verify_batch(torch.zeros(TOKENS, dtype=torch.int64), TOKENS, 1)
    with pytest.raises(BenchError, match="a context of 9003 tokens: the server's longest is"):
        bench.verify_batch(torch.zeros(TOKENS, dtype=torch.int64), TOKENS, 9000)
    with pytest.raises(BenchError, match="3 requests take 3 state slots of 2: raise --max-mamba-cache-size"):
        bench.verify_batch(torch.zeros(3 * TOKENS, dtype=torch.int64), TOKENS, 2)


def test_both_forwards_verify_and_agree(bench: BenchRunner, served: SglangModel, seed: int) -> None:
    """The dispatch sends the batch to ours; what it stands for is SGLang's forward: the two agree but for rounding."""
    dispatch = served.model.forward
    ids = draw(seed, 2 * TOKENS)
    found = logits_of(bench, served, dispatch, bench.verify_batch(ids, TOKENS, LENGTH))
    expected = logits_of(bench, served, dispatch.__wrapped__, bench.verify_batch(ids, TOKENS, LENGTH))
    # a near-tie of a router may send a row elsewhere, and with it those behind it
    assert far_apart(found, expected) < 3e-2
    assert not torch.equal(found, expected), "the same forward ran twice"
    wrong = logits_of(bench, served, dispatch, bench.verify_batch(ids.roll(1), TOKENS, LENGTH))
    assert far_apart(wrong, expected) > 0.3


def far_apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative distance of the median row."""
    return ((found - expected).norm(dim=1) / expected.norm(dim=1)).median().item()


def test_the_first_row_is_the_decode_step_of_the_same_context(
    bench: BenchRunner, served: SglangModel, seed: int
) -> None:
    """To the bit: `context` means the same in both kinds of step, and a launch of one row is a decode step's work."""
    ids = draw(seed, TOKENS)
    verified = logits_of(bench, served, served.model.forward, bench.verify_batch(ids, TOKENS, LENGTH))
    with two_forwards.built(served, DECODE) as decoding:
        forward = lambda ids, positions, batch: decoding.forward(
            Plan(key=ShapeKey("decode", 1, 1)), ids, positions, batch
        )
        decoded, later = (
            logits_of(bench, served, forward, bench.step_batch(DECODE, ids[:1], length))
            for length in (LENGTH, LENGTH + 1)
        )
    assert torch.equal(verified[:1], decoded)
    assert not torch.equal(verified[:1], later)


@pytest.fixture
def counted(bench: BenchRunner, served: SglangModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StepSizes]]:
    """Sizes of the launches that graphs replay; a GPU's graphs, clock and count are stood in for."""
    runner, replayed = served.runner, []

    def forward(batch: Any) -> Any:
        runner.attn_backend.init_forward_metadata(batch)
        graphs = runner.decode_cuda_graph_runner
        graphs.bs = next(size for size in graphs.capture_bs if size >= batch.batch_size)
        graphs.launched()
        return SimpleNamespace(can_run_graph=True, logits_output=None)

    def graph_of(run: Any) -> Callable[[], None]:
        if not hasattr(run, "args"):
            return launched

        def replay() -> None:
            replayed.append(run.args[1])
            launched()

        return replay

    def times_of(replays: Any, steps: int) -> dict[str, Timing]:
        for _ in range(bench_measure.WARM_UPS + steps):
            for replay in replays.values():
                replay()
        return {name: Timing.of([1.0] * steps) for name in replays}

    launched = lambda: count_launch(bench.built)
    monkeypatch.setattr(runner, "forward", forward)
    monkeypatch.setattr(bench_measure, "times_of", times_of)
    monkeypatch.setattr(bench_measure, "graph_of", graph_of)
    bench._arms[MONOKERNEL] = replace(bench._arms[MONOKERNEL], graphs=NoGraphs(launched))
    bench._arms[SGLANG] = replace(bench._arms[MONOKERNEL], graphs=NoGraphs())
    yield replayed


def test_the_first_rows_are_a_server_of_fewer_drafts(bench: BenchRunner, served: SglangModel, seed: int) -> None:
    """The launch that is measured is to the bit that of a batch of so many drafts; of other rows it is not."""
    ids = draw(seed, 2 * TOKENS)
    with torch.no_grad(), bench.context(MONOKERNEL):
        batch = bench.verify_batch(ids, TOKENS, LENGTH)
        served.backend.init_forward_metadata(batch)
        first = bench_measure.first_rows(*bench.built.arguments_of(batch), 2)
        chosen = ids.view(2, TOKENS)[:, :2].flatten()
        whole, fewer, wrong = (
            bench.built.arguments_of(bench.verify_batch(rows, tokens, LENGTH))
            for rows, tokens in ((ids, TOKENS), (chosen, 2), (ids[: 2 * 2], 2))
        )
    assert first[1] == fewer[1] != whole[1]
    # both give back the places of the batch before: they get the same ones
    assert all(torch.equal(*pair) for pair in zip(first[0], fewer[0], strict=True))
    assert not torch.equal(first[0].input_ids, wrong[0].input_ids)


def test_launches_by_rows_are_those_of_fewer_drafts(
    bench: BenchRunner, counted: list[StepSizes], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    weights, requests = step_weights(bench.model, GEOMETRY, {}), 2
    bench._arms[MONOKERNEL].graphs.capture_bs = (1, 2)

    def measured() -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        return bench_measure.measure_rows(
            bench, weights, GEOMETRY, VERIFY, requests=requests, context=LENGTH, steps=2, generator=generator
        )

    costs = measured()
    assert [(cost.requests, cost.tokens) for cost in costs] == [(requests, tokens) for tokens in (1, 2, 3, 4)]
    assert [(sizes.rows, sizes.tokens) for sizes in counted[:TOKENS]] == [
        (requests * tokens, tokens) for tokens in (1, 2, 3, 4)
    ]
    assert len(counted) == TOKENS * (bench_measure.WARM_UPS + 2)
    layers = GEOMETRY.layers - GEOMETRY.dense_layers
    chosen, fewest = costs[0].distinct_experts, GEOMETRY.experts_per_token
    assert len(chosen) == layers and all(fewest <= count <= requests * fewest for count in chosen)
    for fewer, more in pairwise(costs):
        assert all(one <= other for one, other in zip(fewer.distinct_experts, more.distinct_experts, strict=True))
    assert sum(costs[-1].distinct_experts) > sum(costs[0].distinct_experts), "four rows chose what one would"
    for cost in costs:
        assert cost.bytes == step_bytes(GEOMETRY, weights, [LENGTH] * requests, cost.distinct_experts, cost.tokens)
    monkeypatch.setattr(bench_measure, "distinct_experts", lambda *launch: costs[0].distinct_experts)
    monkeypatch.setattr(bench_measure, "graph_of", lambda run: lambda: None)
    with pytest.raises(BenchError, match="the kernel ran 0 of 20 steps"):
        measured()
    bench._arms[MONOKERNEL].graphs.launched = lambda: None
    with pytest.raises(BenchError, match="the kernel ran 0 of 1 steps"):
        measured()


def test_a_run_of_the_bench(
    bench: BenchRunner, counted: list[StepSizes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    """MTP3 at two requests, from the options to the JSON: the step in both arms, and the launches by rows."""
    weights = step_weights(bench.model, GEOMETRY, {})
    bench._arms[SGLANG].graphs.capture_bs = bench._arms[MONOKERNEL].graphs.capture_bs = (1, 2)
    monkeypatch.setattr(bench_measure, "copy_bandwidth", lambda: 4e12)
    said: list[str] = []
    for module in (running, bench_measure):
        monkeypatch.setattr(module, "served_step", lambda: VERIFY)
    monkeypatch.setattr(BenchRunner, "capture_own_forward", lambda runner: said.append("captured"))
    options = parse_options("8", str(LENGTH), 2, Only.BOTH, None, seed, tmp_path / "out.json")
    server = SimpleNamespace(monokernel=True)
    report = cli._measure(bench, server, (MONOKERNEL, SGLANG), options, {"device": "none"}, said.append)
    assert said.count("captured") == 1
    (point,) = report.points
    assert (point.rows, point.launched.served) == (2 * TOKENS, 2 * (bench_measure.WARM_UPS + 2))
    assert [arm.graphs.replayed for arm in bench._arms.values()] == [[(None, 2)] * (bench_measure.WARM_UPS + 2)] * 2
    found = point.launched.distinct_experts
    assert point.launched.bytes == step_bytes(GEOMETRY, weights, [LENGTH] * 2, found, TOKENS)
    assert point.launched.bytes != step_bytes(GEOMETRY, weights, [LENGTH] * 2 * TOKENS, found)
    assert [cost.shape for cost in report.by_rows] == [(2, LENGTH)] * TOKENS
    assert len(counted) == TOKENS * (bench_measure.WARM_UPS + 2)
    assert json.loads(options.json.read_text()) == json.loads(json.dumps(report.as_dict()))
    assert report.rows_table().row_count == TOKENS
    assert f"launches of 2 requests by rows, {LENGTH} tokens" in said
    report = cli._measure(bench, server, (SGLANG,), options, {}, said.append)
    assert report.by_rows == [] and list(report.points[0].arms) == [SGLANG]


# Rounds in a server


def test_sglang_simulates_the_length_by_these_variables() -> None:
    """Its environment has them, and its way to draw a length knows the method."""
    from sglang.srt.environ import envs
    from sglang.srt.speculative.spec_utils import sample_simulated_acc_len

    given = environment_of(3.0)
    assert all(hasattr(envs, name) for name in given) and not hasattr(envs, "SGLANG_SIMULATE_LENGTH")
    length, method = given["SGLANG_SIMULATE_ACC_LEN"], given["SGLANG_SIMULATE_ACC_METHOD"]
    assert sample_simulated_acc_len(float(length), method, 4) == 3
    with pytest.raises(ValueError, match="Invalid simulate_acc_method"):
        sample_simulated_acc_len(float(length), "expected", 4)
