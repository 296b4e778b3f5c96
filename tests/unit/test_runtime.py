"""What surrounds a launch: the counts, the fault's line, the records, and that no step compiles a kernel of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from glm53_mono import fault_watch, runtime
from glm53_mono.bindings import Unused, bind_step, check_context, empty_step
from glm53_mono.checkpoint.config import checkpoint_geometry, model_config
from glm53_mono.counters import Fallbacks, shown
from glm53_mono.fault_watch import Fault, HostRecord, LaunchFault, Watch
from glm53_mono.geometry import MAX_ROWS
from glm53_mono.kernels import sync
from glm53_mono.kernels.monokernel import UNSPECIALIZED, StepSizes, StepTensors, monokernel
from glm53_mono.kernels.record import Kind
from glm53_mono.program.phase import Access, Phase
from glm53_mono.runtime import Runtime
from glm53_mono.upstream import model as upstream
from glm53_mono.upstream.hooks import SeenStep
from glm53_mono.upstream.running import ServedStep
from glm53_mono.upstream.step import StepBindings
from glm53_mono.upstream.tensors import UpstreamError
from tests.logs import said

PHASES = [Phase(Kind.EMBED, -1, Access()), Phase(Kind.KDA_DELTA, 7, Access())]


def test_steps_that_fall_back_are_counted_by_reason() -> None:
    fallbacks = Fallbacks(ServedStep("decode", 1), (4, 8))
    for mode, requests, tokens, is_draft in (
        ("DECODE", 4, 1, False),
        ("DECODE", 8, 1, False),
        ("DECODE", 16, 1, False),
        ("EXTEND", 2, 151, False),
        ("EXTEND", 1, 3, False),
        ("EXTEND", 2, 151, True),
        ("DRAFT_EXTEND_V2", 1, 4, True),
        ("DECODE", 1, 1, True),
        ("TARGET_VERIFY", 1, 4, False),
    ):
        fallbacks.see(SeenStep(mode, requests, tokens, is_draft))
    fallbacks.count("input embeddings")
    assert fallbacks.by_reason() == {
        "16 rows": 1,
        "extend": 2,
        "draft prefill": 1,
        "draft extend": 1,
        "draft": 1,
        "target verify": 1,
        "input embeddings": 1,
    }
    assert shown(7, fallbacks.by_reason()).startswith("7 launches served, 8 steps fell back (2 extend, ")


def test_verify_steps_of_another_width_fall_back() -> None:
    fallbacks = Fallbacks(ServedStep("target_verify", 4), (4, 8))
    for requests, tokens in ((1, 4), (2, 4), (3, 4), (2, 2)):
        fallbacks.see(SeenStep("TARGET_VERIFY", requests, tokens, False))
    assert fallbacks.by_reason() == {"12 rows": 1, "2 tokens a request": 1}


@pytest.fixture
def words() -> torch.Tensor:
    return torch.zeros(sync.HOST_WORDS, dtype=torch.int32)


def write_fault(words: torch.Tensor, program: int, phase: int, expected: int, seen: int) -> None:
    """What `kernels.sync.fault` stores, in its order."""
    for place, value in (
        (sync.FAULT_PROGRAM, program),
        (sync.FAULT_PHASE, phase),
        (sync.FAULT_EXPECTED, expected),
        (sync.FAULT_SEEN, seen),
        (sync.FAULT_FLAG, 1),
    ):
        words[place.value] = value


def test_the_record_is_read_as_the_kernel_writes_it(words: torch.Tensor) -> None:
    record = HostRecord(words)
    assert record.fault() is None and record.served() == 0
    words.numpy()[sync.SERVED.value : sync.SERVED.value + 2].view(np.int64)[0] = 2**40 + 3
    assert record.served() == 2**40 + 3
    write_fault(words, program=17, phase=1, expected=264, seen=263)
    assert record.fault() == Fault(program=17, phase=1, expected=264, seen=263)
    record.clear()
    assert record.fault() is None and record.served() == 0


@pytest.fixture
def watch(words: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watch, list[int]]]:
    """A watch that reports often, and the number that it reports."""
    monkeypatch.setattr(fault_watch, "REPORT_S", 0.05)
    monkeypatch.setattr(fault_watch, "METRICS_S", 0.05)
    counts = [0]
    made = Watch(
        HostRecord(words),
        PHASES,
        rank=3,
        deadline_s=30.0,
        counts=lambda: f"{counts[0]} served",
        update_metrics=lambda: logging.getLogger("metrics").debug("%d in the metrics", counts[0]),
    )
    made.start()
    yield made, counts
    made.stop()


def test_a_fault_is_printed_once_in_one_line(
    words: torch.Tensor, watch: tuple[Watch, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    write_fault(words, program=17, phase=1, expected=264, seen=263)
    expected = (
        "glm53_mono: rank 3, program 17 waited 30 s before phase 1 (KDA_DELTA of layer 7): 263 of 264 arrivals, "
        "1 missing; it now faults the GPU at address 0"
    )
    assert said(caplog, "rank 3") == [expected]
    time.sleep(5 * fault_watch.POLL_S)
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL]


def write_fault_of_peer(words: torch.Tensor, peer: int, expected: int, seen: int) -> None:
    """What `kernels.peers.fault_for_peer` stores, in its order."""
    words[sync.FAULT_PROGRAM.value] = 5
    words[sync.FAULT_PHASE.value] = 1
    words[sync.FAULT_PEER.value] = peer + 1
    words.numpy()[sync.FAULT_EPOCHS.value :].view(np.int64)[:] = expected, seen
    words[sync.FAULT_FLAG.value] = 1


def test_a_rank_that_is_waited_for_in_vain_is_named(
    words: torch.Tensor, watch: tuple[Watch, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Counts of reduces outgrow 32 bits within hours."""
    write_fault_of_peer(words, peer=0, expected=2**33 + 1, seen=2**33)
    assert HostRecord(words).fault() == Fault(program=5, phase=1, expected=2**33 + 1, seen=2**33, peer=0)
    expected = (
        "glm53_mono: rank 3, program 5 waited 22.5 s before phase 1 (KDA_DELTA of layer 7): rank 0 has not left its "
        "rows of reduce 8589934593, the last that it left are those of reduce 8589934592; it now faults the GPU at "
        "address 0"
    )
    assert said(caplog, "rank 3") == [expected]


@pytest.mark.parametrize(
    ("checked", "says"),
    [("", "its weights are on another device"), ("1", "SGLANG_AMD_MONO_CHECK compares whole parts")],
)
def test_a_rank_that_cannot_be_built_tells_the_others(checked: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for its buffer; one rank alone has nobody to tell."""

    def unprepared(*_: Any) -> Any:
        raise UpstreamError("its weights are on another device")

    told: list[Any] = []
    monkeypatch.setenv("SGLANG_AMD_MONO_CHECK", checked)
    monkeypatch.setattr(runtime, "_prepared", unprepared)
    monkeypatch.setattr(runtime.Geometry, "from_config", lambda *_: None)
    monkeypatch.setattr(upstream, "gather_from_ranks", lambda value: told.append(value) or [])
    monkeypatch.setattr(upstream, "tensor_parallel_rank", lambda: (1, 2))
    with pytest.raises((UpstreamError, ValueError), match=says):
        runtime.build(None, None, None)
    ((failure, size, handle),) = told
    assert says in failure and (size, handle) == (0, None)
    monkeypatch.setattr(upstream, "tensor_parallel_rank", lambda: (0, 1))
    with pytest.raises(UpstreamError, match="its weights are on another device"):
        runtime.build(None, None, None)
    assert len(told) == 1


def test_no_step_starts_behind_a_fault(words: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the record and the GPU's fault a launch could still be asked for; it would only add to the confusion."""
    made = object.__new__(Runtime)
    made._record = HostRecord(words)
    made._watch = Watch(made._record, PHASES, 3, 30.0, lambda: "", lambda: None)
    monkeypatch.setattr(runtime, "has_embeds", lambda *_: pytest.fail("a step begins"))
    write_fault_of_peer(words, peer=2, expected=7, seen=6)
    with pytest.raises(LaunchFault, match="rank 2 has not left its rows of reduce 7"):
        made.forward(None, None, None, None)
    made._record.clear()
    with pytest.raises(pytest.fail.Exception, match="a step begins"):
        made.forward(None, None, None, None)


def test_the_thread_calls_no_device(
    words: torch.Tensor,
    watch: tuple[Watch, list[int]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_tensor(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the watching thread calls torch")

    write = words.numpy()
    for name in ("item", "__getitem__", "cpu", "to"):
        monkeypatch.setattr(torch.Tensor, name, no_tensor)
    write[sync.FAULT_FLAG.value] = 1
    assert said(caplog, "phase 0 (EMBED of layer -1)")


def test_metrics_that_fail_do_not_end_the_watch(
    words: torch.Tensor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_watch, "METRICS_S", 0.01)

    def no_room() -> None:
        raise OSError("No space left on device")

    made = Watch(HostRecord(words), PHASES, 3, 30.0, counts=lambda: "", update_metrics=no_room)
    made.start()
    try:
        assert said(caplog, "metrics no more") == ["glm53_mono: rank 3: its steps are counted in the metrics no more"]
        assert "No space left on device" in caplog.text
        words[sync.FAULT_FLAG.value] = 1
        assert said(caplog, "phase 0 (EMBED of layer -1)")
    finally:
        made.stop()


def test_counts_are_reported_when_they_change(watch: tuple[Watch, list[int]], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    time.sleep(0.15)
    assert not caplog.records
    watch[1][0] = 12
    assert said(caplog, "served")[0] == "glm53_mono: rank 3: 12 served"


def test_metrics_are_kept_up_to_date(watch: tuple[Watch, list[int]], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    watch[1][0] = 31
    assert said(caplog, "31 in the metrics")


def step(rows: int, *, offset: int = 0, tracked: bool = False) -> StepBindings:
    """A decode step whose tensors start `offset` elements into larger ones."""

    def part(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        count = int(np.prod(shape))
        return torch.zeros(offset + count, dtype=dtype)[offset:].view(shape)

    int64, int32 = torch.int64, torch.int32
    return StepBindings(
        mode="decode",
        requests=rows,
        tokens_per_request=1,
        input_ids=part(int64, rows),
        positions=part(int64, rows),
        request_rows=part(int64, rows),
        seq_lens=part(int64, rows),
        out_cache_loc=part(int64, rows),
        req_to_token=part(int32, 4, 16 * rows),
        state_slots=part(int32, rows),
        track_slots=part(int64, rows) if tracked else None,
        track_mask=part(torch.bool, rows) if tracked else None,
        scratch_rows=None,
    )


def kernel_key(tensors: StepTensors, sizes: StepSizes, **hints: Any) -> str:
    """What Triton chooses a compiled kernel by, on sm_90."""
    kernel = JITFunction(monokernel.fn, **hints)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    anything = torch.zeros(16, dtype=torch.uint8)
    flags = dict.fromkeys(("VERIFY", "TILED", "FUSED", "TIMED", "W", "G", "T", "F", "BACKEND"), 0)
    _, chosen, _ = binder(anything, anything, *tensors, anything, anything, *sizes, 0, 9, 5 * 10**9, **flags)
    return str(chosen)


STEPS = [
    step(rows, offset=offset, tracked=tracked)
    for rows in range(1, 9)
    for offset in (0, 1, 3)
    for tracked in (False, True)
]


def test_every_step_runs_the_kernel_that_the_build_compiled() -> None:
    unused = Unused.on(torch.device("cpu"))
    hints = {"do_not_specialize": UNSPECIALIZED}
    wanted = kernel_key(*empty_step(unused), **hints)
    assert {kernel_key(*bind_step(each, unused, ring_length=8), **hints) for each in STEPS} == {wanted}
    # Negative control: Triton's defaults compile anew for widths and alignments.
    assert len({kernel_key(*bind_step(each, unused, ring_length=8)) for each in STEPS}) > 4


def test_what_a_step_lacks_is_stood_in_for() -> None:
    unused = Unused.on(torch.device("cpu"))
    tensors, sizes = bind_step(step(MAX_ROWS), unused, ring_length=8)
    assert (tensors.track_slots < 0).all() and not tensors.track_mask.any()
    assert len(tensors.track_slots) == len(tensors.track_mask) == len(tensors.scratch_rows) == MAX_ROWS
    assert sizes == StepSizes(rows=8, tokens=1, req_to_token_stride=128, ring_length=8)


def test_requests_may_not_outgrow_the_workspace() -> None:
    geometry = checkpoint_geometry(model_config(4, 8, "small", mtp=False))
    backends = SimpleNamespace(request_pool=SimpleNamespace(req_to_token=torch.zeros(2, 516)))
    check_context(backends, SimpleNamespace(max_pools=129), geometry)
    with pytest.raises(UpstreamError, match="room for 516 tokens a request, the launch's workspace for 512"):
        check_context(backends, SimpleNamespace(max_pools=128), geometry)


def fused_projections(geometry: Any, generator: torch.Generator) -> dict[str, SimpleNamespace]:
    """A KDA layer's projections in each of the forms that SGLang has (glm5_next.py: Glm5NextLinearAttention)."""
    heads, width, rank, hidden = geometry.kda_heads, geometry.kda_width, geometry.kda_head_dim, geometry.hidden

    def linear(weight: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(weight=weight)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    everything = normal(3 * width + heads + 2 * rank, hidden)
    gates = everything[3 * width :].clone()
    up = normal(2, width, rank)
    common = {
        "qkv_conv1d": linear(torch.randn(3 * width, 1, geometry.conv_taps, generator=generator)),
        "A_log": torch.randn(1, 1, heads, 1, generator=generator),
        "dt_bias": torch.randn(width, generator=generator),
        "o_norm": linear(normal(rank)),
        "o_proj": linear(normal(hidden, width)),
    }
    qkv = linear(everything[: 3 * width].clone())
    return {
        "all fused": SimpleNamespace(
            do_fuse_qkvbfg=True,
            fuse_bfg=False,
            fused_qkvbfg_a_proj=linear(everything),
            fused_fg_b_proj=linear(up),
            **common,
        ),
        "gates fused": SimpleNamespace(
            do_fuse_qkvbfg=False,
            fuse_bfg=True,
            qkv_proj=qkv,
            fused_bfg_a_proj=linear(gates),
            fused_fg_b_proj=linear(up),
            **common,
        ),
        "separate": SimpleNamespace(
            do_fuse_qkvbfg=False,
            fuse_bfg=False,
            qkv_proj=qkv,
            b_proj=linear(gates[:heads].clone()),
            f_a_proj=linear(gates[heads : heads + rank].clone()),
            g_a_proj=linear(gates[heads + rank :].clone()),
            f_b_proj=linear(up[0].clone()),
            g_b_proj=linear(up[1].clone()),
            **common,
        ),
    }


def test_the_three_forms_of_the_kda_projections_are_the_same_matrices(seed: int) -> None:
    geometry = checkpoint_geometry(model_config(4, 8, "small", mtp=False))
    forms = fused_projections(geometry, torch.Generator().manual_seed(seed))
    read = {name: upstream._kda(form, "layer", geometry) for name, form in forms.items()}
    wanted = vars(read.pop("separate"))
    for name, weights in read.items():
        for part, value in vars(weights).items():
            own, other = (getattr(side, "data", side) for side in (value, wanted[part]))
            assert torch.equal(own, other), (name, part)
    swapped = forms["all fused"]
    swapped.fused_fg_b_proj = SimpleNamespace(weight=swapped.fused_fg_b_proj.weight.flip(0))
    wrong = upstream._kda(swapped, "layer", geometry)
    assert not torch.equal(wrong.decay_up.data, wanted["decay_up"].data)


def test_records_are_filled_for_the_pools_and_for_no_other_phases() -> None:
    from glm53_mono.program.launch import Launch

    launch = SimpleNamespace(phases=PHASES, records=torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="1 phases are bound to a launch of 2"):
        Launch.bind(launch, PHASES[:1])
    with pytest.raises(ValueError, match="or in another order"):
        Launch.bind(launch, [PHASES[0], replace(PHASES[1], layer=8)])
