"""The probes of a step's inputs: silent on right steps, and each one red on the fault that it is for."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from glm53_mono.probe import observer, report, snapshot
from glm53_mono.probe.caches import scratch_bytes
from glm53_mono.probe.findings import Finding, Findings, Kind, read_findings, steps_probed
from glm53_mono.probe.observer import PROBE, InputProbe, probe_is_wanted
from glm53_mono.probe.snapshot import WINDOW
from glm53_mono.runtime import wanted_observers
from tests.logs import said
from tests.unit.probed_steps import COLUMNS, GEOMETRY, LENGTHS, OWN_PAGES, PAGE, POOL, ROWS, SLOTS, Made, made

NAN = float("nan")
CPU = torch.device("cpu")


def probed(*steps: Made) -> list[Finding]:
    """What the probes find in steps that follow one another."""
    probe = InputProbe(GEOMETRY, 0, CPU, COLUMNS)
    try:
        for each in steps:
            probe.before(each.step)
            probe.after(each.step, each.hidden)
        numbers = probe.findings.host_numbers.copy()
    finally:
        probe.close()
    assert steps_probed(numbers) == len(steps)
    return read_findings(numbers)


@pytest.fixture(params=["decode", "target_verify"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def test_right_steps_are_silent(mode: str, seed: int) -> None:
    assert probed(*[made(mode, seed)] * 3) == []


def test_warm_up_runs_are_silent(seed: int) -> None:
    """What SGLang runs before it captures graphs: padding alone, over caches that are all zero."""
    dummy = made("decode", seed)
    inputs = dummy.step.inputs
    for name in ("positions", "request_rows", "out_cache_loc", "state_slots", "req_to_token"):
        getattr(inputs, name).zero_()
    for caches in (dummy.step.pools.state, dummy.step.pools.latent, dummy.step.pools.index):
        for cache in caches:
            cache.zero_()
    assert probed(dummy) == []


def test_a_short_requests_zero_rows_are_no_finding(seed: int) -> None:
    short = made("decode", seed)
    _, page, _ = OWN_PAGES
    short.step.pools.latent[0][page[0] * PAGE + 5] = 0
    short.step.pools.state[0][3] = 0
    assert probed(short) == []


def replaced(name: str, place: int, value: int) -> Callable[[Made], None]:
    """A fault: one number of one tensor of the step."""
    return lambda spoilt: getattr(spoilt.step.inputs, name).view(-1).__setitem__(place, value)


def cached(name: str, layer: int, place: tuple[int, ...], value: float) -> Callable[[Made], None]:
    """A fault: one place of one layer's cache."""
    return lambda spoilt: getattr(spoilt.step.pools, name)[layer].__setitem__(place, value)


def table(row: int, column: int, value: int) -> Callable[[Made], None]:
    return lambda spoilt: spoilt.step.inputs.req_to_token.__setitem__((row, column), value)


def planned(name: str, place: int, value: int) -> Callable[[Made], None]:
    def spoil(spoilt: Made) -> None:
        getattr(spoilt.step.backends.sparse.forward_metadata.kpool_write_plan, name)[place] = value

    return spoil


def page_twice(spoilt: Made) -> None:
    """The third request's second page is its first one once more."""
    rows = spoilt.step.inputs.req_to_token
    rows[5, PAGE : 2 * PAGE] = rows[5, :PAGE]


def anothers_page(spoilt: Made) -> None:
    """The first request writes into the third one's second page, and its table says so too."""
    rows, written = spoilt.step.inputs.req_to_token, spoilt.step.inputs.out_cache_loc
    rows[4, PAGE : 2 * PAGE] = rows[5, PAGE : 2 * PAGE]
    tokens = spoilt.step.inputs.tokens_per_request
    written[:tokens] = rows[4, LENGTHS[0] : LENGTHS[0] + tokens]


def zero_scale(spoilt: Made) -> None:
    """The first pool of the third request's third page."""
    spoilt.step.pools.index[0].view(torch.float32)[8, GEOMETRY.page_pools * GEOMETRY.index_head_dim // 4] = 0


def spoilt_hidden(spoilt: Made) -> None:
    spoilt.hidden[-1 - spoilt.step.inputs.tokens_per_request, 3] = NAN


def written_latent(value: float) -> Callable[[Made], None]:
    return lambda spoilt: spoilt.step.pools.latent[-1].__setitem__(int(spoilt.step.inputs.out_cache_loc[0]), value)


FIRST_KDA, LAST_KDA = GEOMETRY.kda_layers[0], GEOMETRY.kda_layers[-1]
FIRST_DSA, LAST_DSA = GEOMETRY.dsa_layers[0], GEOMETRY.dsa_layers[-1]

FAULTS = {
    Kind.LENGTH: (replaced("seq_lens", 1, 5000), {"request": 1, "found": 5000, "expected": 1024}),
    Kind.POSITION: (replaced("positions", 0, 7), {"request": 0, "row": 0, "found": 7, "expected": LENGTHS[0]}),
    Kind.PADDING: (replaced("out_cache_loc", 0, 0), {"request": 0, "found": 6, "expected": 0}),
    Kind.REQUEST_ROW: (replaced("request_rows", 2, -1), {"request": 2, "found": -1, "expected": ROWS - 1}),
    Kind.STATE_SLOT: (replaced("state_slots", 2, SLOTS), {"request": 2, "found": SLOTS, "expected": SLOTS - 1}),
    Kind.SLOT: (table(4, PAGE, -1), {"request": 0, "token": PAGE, "found": -1}),
    Kind.SLOT_PLACE: (table(5, 300, 3 * PAGE + 45), {"request": 2, "token": 300, "expected": 3 * PAGE + 44}),
    Kind.DUPLICATE_PAGE: (page_twice, {"request": 2, "token": PAGE, "found": 1, "expected": 0}),
    Kind.WRITE_SLOT: (replaced("out_cache_loc", 0, 777), {"request": 0, "row": 0, "token": LENGTHS[0], "found": 777}),
    Kind.SHARED_ROW: (replaced("request_rows", 1, 4), {"request": 1, "found": 4, "expected": 0}),
    Kind.SHARED_STATE: (replaced("state_slots", 1, 6), {"request": 1, "found": 6, "expected": 0}),
    Kind.SHARED_SLOT: (
        lambda spoilt: spoilt.step.inputs.out_cache_loc.view(4, -1)[1].copy_(
            spoilt.step.inputs.out_cache_loc.view(4, -1)[0]
        ),
        {"expected": 0},
    ),
    Kind.SHARED_PAGE: (anothers_page, {"request": 0, "row": 0, "token": PAGE, "found": 3, "expected": 2}),
    Kind.ZERO_LATENT: (
        cached("latent", 0, (8 * PAGE + 100,), 0.0),
        {"request": 2, "layer": FIRST_DSA, "token": 2 * PAGE + 100, "found": 0, "expected": 0},
    ),
    Kind.ZERO_POOL: (zero_scale, {"request": 2, "layer": FIRST_DSA, "token": 2 * PAGE + POOL - 1, "found": 0}),
    Kind.ZERO_STATE: (cached("state", 0, (6,), 0.0), {"request": 0, "layer": FIRST_KDA, "found": 0}),
    Kind.READ_LATENT: (
        cached("latent", 0, (5 * PAGE + 62, 3), NAN),
        {"request": 1, "layer": FIRST_DSA, "token": 62, "expected": math.inf},
    ),
    Kind.READ_STATE: (cached("state", -1, (3, 0, 1, 2), NAN), {"request": 1, "layer": LAST_KDA}),
    Kind.READ_WINDOW: (cached("conv", -1, (3, 0, 1), math.inf), {"request": 1, "layer": LAST_KDA, "found": math.inf}),
    Kind.READ_RING: (
        lambda spoilt: spoilt.step.pools.ring_gate[0].__setitem__(
            (4, (LENGTHS[0] - 1) % spoilt.step.pools.ring_length, 9), NAN
        ),
        {"request": 0, "layer": FIRST_DSA, "token": LENGTHS[0] - 1},
    ),
    Kind.WRITTEN_LATENT: (written_latent(0.0), {"request": 0, "row": 0, "layer": LAST_DSA, "found": 0}),
    Kind.HIDDEN: (spoilt_hidden, {"request": 2, "expected": math.inf}),
    Kind.POOL_START: (planned("write_start", 2, 5), {"request": 2, "found": 5, "expected": LENGTHS[2]}),
}
"""A fault for each kind that both modes have, and where it must be found."""

DECODE_FAULTS = {
    Kind.TRACKED_STATE: (replaced("track_slots", 2, 3), {"request": 2, "found": 3, "expected": 1}),
    Kind.WRITTEN_STATE: (cached("state", 0, (2, 0, 0, 0), math.inf), {"request": 2, "layer": FIRST_KDA}),
}
VERIFY_FAULTS = {
    Kind.SHARED_SCRATCH: (replaced("scratch_rows", 2, 0), {"request": 2, "found": 0, "expected": 0}),
    Kind.POOL_LENGTH: (planned("pool_seqlens_per_q", 5, 1), {"request": 1, "row": 5, "found": 1, "expected": 16}),
    Kind.WRITTEN_STATE: (cached("state_scratch", 0, (2, 3, 0, 0, 0), NAN), {"request": 2, "layer": FIRST_KDA}),
}


def assert_found(fault: tuple[Callable[[Made], None], dict[str, float]], kind: Kind, mode: str, seed: int) -> None:
    spoil, expected = fault
    spoilt = made(mode, seed)
    spoil(spoilt)
    found = {each.kind: each for each in probed(made(mode, seed), spoilt)}
    assert kind in found, f"found only {sorted(each.name for each in found)}"
    assert {name: getattr(found[kind], name) for name in expected} == expected
    assert found[kind].step == 2


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.name)
def test_a_fault_is_found(kind: Kind, mode: str, seed: int) -> None:
    assert_found(FAULTS[kind], kind, mode, seed)


@pytest.mark.parametrize("kind", DECODE_FAULTS, ids=lambda kind: kind.name)
def test_a_fault_of_decode_is_found(kind: Kind, seed: int) -> None:
    assert_found(DECODE_FAULTS[kind], kind, "decode", seed)


@pytest.mark.parametrize("kind", VERIFY_FAULTS, ids=lambda kind: kind.name)
def test_a_fault_of_verify_is_found(kind: Kind, seed: int) -> None:
    assert_found(VERIFY_FAULTS[kind], kind, "target_verify", seed)


def test_every_probe_has_a_fault() -> None:
    assert {*FAULTS, *DECODE_FAULTS, *VERIFY_FAULTS} == set(Kind)


def test_faults_are_counted_and_the_last_is_kept(seed: int) -> None:
    spoilt = made("decode", seed)
    replaced("positions", 0, 7)(spoilt)
    replaced("positions", 2, 8)(spoilt)
    (found,) = probed(made("decode", seed), spoilt, spoilt)
    assert (found.count, found.step, found.row, found.found) == (4, 3, 0, 7)
    assert str(found) == (
        f"request 0, row 0: a position that does not follow from the length: 7, should be {LENGTHS[0]}"
    )


def test_the_window_comes_round(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step sees a part of a long prefix, and some steps see it all."""
    monkeypatch.setattr(snapshot, "WINDOW", 100)
    spoilt = made("decode", seed)
    cached("latent", 0, (8 * PAGE + 100,), 0.0)(spoilt)
    probe = InputProbe(GEOMETRY, 0, CPU, COLUMNS)
    seen = []
    for _ in range(16):
        probe.before(spoilt.step)
        probe.findings.publish()
        seen.append(len(read_findings(probe.findings.host_numbers)))
    probe.close()
    # committed tokens are 769, windows of 100 begin where the last one ended
    assert seen[:5] == [0] * 5 and seen[-1] == 1


def test_nothing_is_fetched_from_the_device_in_a_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would wait for the device: a graph could not be captured with it."""

    def waits(*args: object, **kwargs: object) -> None:
        raise AssertionError("a probe waits for the device")

    step = made("decode", seed)
    probe = InputProbe(GEOMETRY, 0, CPU, COLUMNS)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero"):
            patch.setattr(torch.Tensor, name, waits)
        patch.setattr(torch, "tensor", waits)
        probe.before(step.step)
        probe.after(step.step, step.hidden)
    probe.close()


def test_findings_are_printed_once_a_second_at_most(
    seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report.LOG_S == 1.0
    monkeypatch.setattr(report, "LOG_S", 0.05)
    spoilt = made("decode", seed)
    replaced("positions", 0, 7)(spoilt)
    probe = InputProbe(GEOMETRY, 3, CPU, COLUMNS)
    for _ in range(20):
        probe.before(spoilt.step)
        probe.after(spoilt.step, spoilt.hidden)
    (line, *more) = said(caplog, report.MARK)
    probe.close()
    assert line.startswith(f"glm53_mono: rank 3: {report.MARK} in ") and "position (" in line
    assert line.endswith(f": 7, should be {LENGTHS[0]}")
    everything = [record.getMessage() for record in caplog.records if report.MARK in record.getMessage()]
    assert "20 in all" in everything[-1] and len(everything) < 20
    assert len(more) < 20


def test_numbers_that_change_are_looked_at_again() -> None:
    class Changing(np.ndarray):
        looks = 0

        def copy(self, order: str = "C") -> np.ndarray:
            Changing.looks += 1
            return np.full(2, min(Changing.looks, 3))

    assert report.settled(np.zeros(2).view(Changing)).tolist() == [3, 3]


def test_memory_is_logged_before_it_is_taken(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoMemory(RuntimeError):
        pass

    def refuse(device: torch.device) -> Findings:
        raise NoMemory

    monkeypatch.setattr(observer, "Findings", refuse)
    with pytest.raises(NoMemory):
        InputProbe(GEOMETRY, 0, CPU, COLUMNS)
    assert f"{scratch_bytes(GEOMETRY, COLUMNS) / 2**20:.1f} MiB" in caplog.text and str(WINDOW) in caplog.text


@pytest.mark.parametrize(("value", "count"), [(None, 0), ("", 0), ("0", 0), ("1", 1)])
def test_the_variable_turns_the_probes_on(value: str | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv(PROBE, raising=False)
    else:
        monkeypatch.setenv(PROBE, value)
    observers = wanted_observers(GEOMETRY, 0, CPU, COLUMNS)
    for each in observers:
        each.close()
    assert len(observers) == count


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROBE, "yes")
    with pytest.raises(ValueError, match="SGLANG_AMD_MONO_PROBE is 'yes': 1 turns the probes on"):
        probe_is_wanted()


def test_a_finding_has_a_place_for_every_number() -> None:
    names = [field.name for field in dataclasses.fields(Finding)]
    assert names == ["kind", "count", "step", "request", "row", "layer", "token", "found", "expected"]
    logging.getLogger(__name__).debug("%s", names)
