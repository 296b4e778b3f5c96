"""Phases share nothing but what a barrier stands between.

Shown by the accesses that they declare, by what their programs touch, and by the results of another program order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from glm53_mono.kernels import kda
from glm53_mono.kernels.record import Kind
from glm53_mono.program.launch import Launch
from glm53_mono.program.phase import Access, Phase
from glm53_mono.program.reduce import ADDS_PARTIALS, LEAVES_PARTIALS, with_reduces
from glm53_mono.program.tiling import TILINGS
from glm53_mono.reference.state import Caches, StepInputs
from tests.kernels import rig
from tests.kernels.compare import bits
from tests.kernels.grid import (
    Accesses,
    Order,
    Place,
    arrivals,
    backwards,
    interleaved,
    places_of,
    program_order,
    recorded,
)
from tests.kernels.rig import EVERY_PAIR, EVERY_PHASE, Model, tiny_model

PROGRAMS = 5
"""More than the tests' rows, so that some programs have no row to mix, and none divides the tiles evenly."""

INPUT_CACHES = frozenset({"latent_pool", "index_pool"})
"""What phases read of earlier steps; state, windows and rings are owned, and read by their owner alone."""

STEPS = [
    pytest.param([4, 68, 256], 1, id="decode"),
    pytest.param([66], 4, id="verify"),
]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(EVERY_PHASE, seed=7, sinkhorn_iterations=2)


def prepared(model: Model, lengths: list[int], tokens: int, seed: int) -> tuple[Launch, Caches, StepInputs]:
    verify = tokens > 1
    inputs = rig.step_inputs(model.geometry, lengths, tokens=tokens, seed=seed, max_tokens=512, verify=verify)
    pages, drafts = rig.pages_of(inputs, model.geometry), tokens if verify else 0
    caches = rig.random_caches(model.geometry, requests=len(lengths), pages=pages, seed=seed, draft_tokens=drafts)
    tiling = replace(TILINGS["interp"], programs=PROGRAMS)
    return rig.prepare_launch(model, caches, inputs, tiling=tiling), caches, inputs


def violations(phases: list[Phase]) -> list[str]:
    """Where declared accesses break the rules: something is read where it is written, or never written before."""
    found, known = [], set(INPUT_CACHES)
    before: Phase | None = None
    for phase in between_barriers(phases):
        name, access = f"{phase.kind.name} of layer {phase.layer}", phase.access
        found += [f"{name} reads and writes {place}" for place in sorted(access.reads & access.writes)]
        found += [
            f"{name} owns {place} and shares it" for place in sorted(access.owns & (access.reads | access.writes))
        ]
        found += [f"{name} reads {place}, which nothing wrote" for place in sorted(access.reads - known)]
        still = before.access if before else Access()
        changed = access.writes | access.owns
        written, read = still.late & still.writes & (access.reads | changed), still.late & still.reads & changed
        found += [f"{name} touches {place}, which is still being written" for place in sorted(written)]
        found += [f"{name} changes {place}, which is still being read" for place in sorted(read)]
        known |= access.writes
        before = phase
    return found


def between_barriers(phases: list[Phase]) -> list[Phase]:
    """A phase that adds up what the ranks left, and the one before: no barrier stands between them."""
    found: list[Phase] = []
    for phase in phases:
        if phase.kind not in ADDS_PARTIALS:
            found.append(phase)
            continue
        left, added = found.pop(), phase.access
        assert left.kind in LEAVES_PARTIALS
        both = Access(left.access.reads | added.reads, left.access.writes | added.writes, left.access.owns | added.owns)
        found.append(replace(left, access=both))
    return found


def test_accesses_of_ranks_obey_the_rules(model: Model) -> None:
    """A rank's phases touch what those of a rank alone do, its share of the buffer that others read besides."""
    phases = prepared(model, [5], 1, seed=1)[0].phases
    shared = list(with_reduces(phases, None))
    assert not violations(shared)
    for alone, split in zip(phases, between_barriers(shared), strict=True):
        more = {"partials"} if alone.kind in LEAVES_PARTIALS else set()
        for name in ("reads", "writes", "late"):
            assert getattr(split.access, name) == getattr(alone.access, name), alone.kind
        assert split.access.owns == alone.access.owns | more, alone.kind


def test_declared_accesses_obey_the_rules(model: Model) -> None:
    """With the selection and, as in a step where no row must select, without it."""
    longer = tiny_model(EVERY_PAIR, seed=7)
    for each in (model, longer):
        phases = prepared(each, [5], 1, seed=1)[0].phases
        assert not violations(phases)
        unselected = [phase for phase in phases if phase.kind != Kind.MLA_SELECT]
        # Then attention takes all pools, and the list is not read (`attend_tokens`).
        assert {line.partition(" reads ")[2] for line in violations(unselected)} <= {"selected, which nothing wrote"}


@pytest.mark.parametrize(
    ("kind", "access", "words"),
    [
        (Kind.KDA_DELTA, {"reads": {"attended"}}, "reads and writes attended"),
        (Kind.DOWN, {"reads": {"streams"}}, "owns streams and shares it"),
        (Kind.EMBED, {"reads": {"mixed"}}, "reads mixed, which nothing wrote"),
        (Kind.ROUTER, {"reads": {"coefficients"}}, "touches coefficients, which is still being written"),
        (Kind.DENSE_UP, {"writes": {"mix"}}, "changes mix, which is still being read"),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else None,
)
def test_a_declared_violation_is_found(model: Model, kind: Kind, access: dict[str, set[str]], words: str) -> None:
    phases = prepared(model, [5], 1, seed=1)[0].phases
    at = next(index for index, phase in enumerate(phases) if phase.kind == kind)
    right = phases[at].access
    more = {name: getattr(right, name) | places for name, places in access.items()}
    phases[at] = replace(phases[at], access=replace(right, **more))
    assert any(words in line for line in violations(phases))


def audited(launch: Launch, caches: Caches, inputs: StepInputs) -> Iterator[tuple[Phase, Accesses, set[int]]]:
    """Each phase with what its programs touched, and the programs that the next phase waits for."""
    hidden = torch.empty(inputs.rows, launch.geometry.hidden, dtype=torch.bfloat16)
    step = rig.step_of(inputs, rig.pools_of(caches))
    for index, phase in enumerate(launch.phases):
        with recorded(places_of(launch, caches, hidden)) as accesses, arrivals() as arrived:
            launch.run(*step, hidden, index, index + 1)
        yield phase, accesses, arrived


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "tokens"), STEPS)
def test_programs_touch_what_is_declared_and_nothing_of_one_another(
    model: Model, seed: int, lengths: list[int], tokens: int
) -> None:
    launch, caches, inputs = prepared(model, lengths, tokens, seed)
    private = {region.name for region in launch.workspace.regions if region.private}
    unawaited: Accesses | None = None
    for phase, accesses, arrived in audited(launch, caches, inputs):
        name, access = f"{phase.kind.name} of layer {phase.layer}", phase.access
        assert arrived == set(range(inputs.rows if access.late else PROGRAMS)), name
        assert not accesses.races(), name
        assert not accesses.trespasses(), name
        assert accesses.names(accesses.reads) - private <= access.reads | access.owns, name
        assert accesses.names(accesses.writes) - private <= access.writes | access.owns, name
        if unawaited is not None:
            assert not unawaited.and_then(accesses).races(), f"{name} and the phase before"
        unawaited = accesses.of_programs(lambda program, arrived=arrived: program not in arrived)
        touched_late = accesses.names(unawaited.reads) | accesses.names(unawaited.writes)
        assert touched_late - private <= access.late, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "tokens", "order"),
    [
        pytest.param([68, 7], 1, backwards, id="decode, backwards"),
        pytest.param([66], 3, interleaved, id="verify, odd first"),
    ],
)
def test_program_order_does_not_matter(model: Model, seed: int, lengths: list[int], tokens: int, order: Order) -> None:
    expected = run_in_order(model, lengths, tokens, seed, range)
    found = run_in_order(model, lengths, tokens, seed, order)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))


def run_in_order(model: Model, lengths: list[int], tokens: int, seed: int, order: Order) -> list[torch.Tensor]:
    """Hidden states and every cache behind a step whose programs ran in that order."""
    launch, caches, inputs = prepared(model, lengths, tokens, seed)
    hidden = torch.empty(inputs.rows, model.geometry.hidden, dtype=torch.bfloat16)
    with program_order(order):
        launch.run_by_phase(*rig.step_of(inputs, rig.pools_of(caches)), hidden)
    return [hidden, *(tensor for _, tensor in caches.tensors())]


def test_a_race_is_found(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delta rule that writes its output over what other heads have yet to read."""
    launch, caches, inputs = prepared(model, [9, 4], 1, seed=3)
    right, attended, qkv = kda.region, launch.workspace.attended, launch.workspace.qkv

    def region(workspace: Any, offset: int, dtype: Any) -> Any:
        return right(workspace, qkv if offset == attended else offset, dtype)

    monkeypatch.setattr(kda, "region", region)
    delta = next(index for index, phase in enumerate(launch.phases) if phase.kind == Kind.KDA_DELTA)
    hidden = torch.empty(inputs.rows, model.geometry.hidden, dtype=torch.bfloat16)
    step = rig.step_of(inputs, rig.pools_of(caches))
    for phase in range(delta):
        launch.run(*step, hidden, phase, phase + 1)
    results = []
    for order in (range, backwards):
        buffer, state = launch.buffer.clone(), caches.temporal.clone()
        with program_order(order), recorded(places_of(launch, caches, hidden)) as accesses:
            launch.run(*step, hidden, delta, delta + 1)
        assert any(line.startswith("qkv") for line in accesses.races())
        results.append(bits(caches.temporal).clone())
        launch.buffer.copy_(buffer)
        caches.temporal.copy_(state)
    assert not torch.equal(*results)


def test_a_program_outside_its_share_is_found(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile kept in program 0's share by every program."""
    from glm53_mono.kernels import mhc
    from glm53_mono.kernels.memory import region

    monkeypatch.setattr(mhc, "private", lambda workspace, offset, _bytes, dtype: region(workspace, offset, dtype))
    launch, caches, inputs = prepared(model, [9], 1, seed=3)
    for phase, accesses, _ in audited(launch, caches, inputs):
        if phase.kind == Kind.KDA_OUTPUT:
            assert any(line.startswith("tile") for line in accesses.trespasses())
            return
    pytest.fail("the step has no KDA_OUTPUT phase")


def test_a_store_that_is_masked_off_touches_nothing() -> None:
    """Whatever type the mask has in the interpreter."""
    words = TensorHandle(np.arange(64, 128, 4, dtype=np.uint64).reshape(4, 4), tl.pointer_type(tl.float32))
    for dtype in (np.bool_, np.int8, np.int32):
        accesses = Accesses([Place("words", 0, 1024)])
        accesses.note(accesses.writes, 0, words, np.zeros((4, 4), dtype))
        assert not accesses.writes
        accesses.note(accesses.writes, 0, words, np.eye(4, dtype=dtype))
        ((size, first),) = accesses.writes["words", 0]
        assert size == 4 and first.tolist() == [64, 84, 104, 124]
