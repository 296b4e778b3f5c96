"""The probes around the built runtime's steps, over SGLang's own pools, tables and plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracle.sglang_cpu import context

context.prepare_environment()

from glm53_mono import runtime
from glm53_mono.checkpoint.config import checkpoint_geometry
from glm53_mono.cli.checkpoint import checkpoint_tensors
from glm53_mono.probe.findings import Finding, Kind, read_findings, steps_probed
from glm53_mono.probe.observer import PROBE, InputProbe
from glm53_mono.upstream import model as upstream
from glm53_mono.upstream.running import ServedStep
from tests.oracle.sglang_cpu.batches import Batch, Request
from tests.oracle.sglang_cpu.forward import SglangModel, serving
from tests.oracle.sglang_cpu.models import ONE_OF_EACH, small_config
from tests.oracle.sglang_cpu.recording import grow_synthetic_context
from tests.oracle.two_forwards import DECODE, built, new_tokens, ours

pytestmark = pytest.mark.slow

TOKENS = 4
CONFIG = small_config(ONE_OF_EACH, dense_layers=len(ONE_OF_EACH))
GEOMETRY = checkpoint_geometry(CONFIG)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[SglangModel]:
    torch.set_num_threads(1)
    tensors = checkpoint_tensors(CONFIG, request.config.option.seed)
    with serving(CONFIG, tensors, requests=6, max_context=1024, pages=14, draft_tokens=TOKENS) as model:
        yield model


@pytest.fixture
def requests(served: SglangModel, seed: int) -> list[Request]:
    """At a page's border, far beyond it, and one that has just begun."""
    generator = torch.Generator().manual_seed(seed)
    places = (Request(4, 6, (2, 11)), Request(5, 2, (6, 14, 8, 5)), Request(1, 4, (3,)))
    for request, length in zip(places, (255, 769, 1), strict=True):
        grow_synthetic_context(served, request, length, GEOMETRY, generator)
    return list(places)


@contextmanager
def without_kernels(made: runtime.Runtime) -> Iterator[None]:
    """Launches that only fill the hidden states: what is around them is looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made.launch, "run_by_phase", lambda tensors, sizes, hidden: hidden.fill_(1.0))
        yield


@contextmanager
def probed(served: SglangModel, step: ServedStep) -> Iterator[tuple[runtime.Runtime, Callable[[], list[Finding]]]]:
    """The runtime as a server with the variable builds it, and what its probes have found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PROBE, "1")
        with built(served, step) as made:
            (probe,) = made._observers
            assert isinstance(probe, InputProbe)
            yield made, lambda: read_findings(probe.findings.host_numbers)
            assert steps_probed(probe.findings.host_numbers) > 0


def batch_of(mode: str, requests: list[Request], seed: int) -> Batch:
    return Batch.of(mode, requests, new_tokens(GEOMETRY, seed, requests, TOKENS if mode == "verify" else 1))


def another_state(forward: Any, metadata: Any) -> None:
    metadata.mamba_cache_indices[1] = metadata.mamba_cache_indices[0]


def late_lengths(forward: Any, metadata: Any) -> None:
    forward.seq_lens = forward.seq_lens - 1


def stale_slots(forward: Any, metadata: Any) -> None:
    forward.out_cache_loc = forward.out_cache_loc.roll(1)


FAULTS = {
    another_state: {Kind.SHARED_STATE},
    late_lengths: {Kind.POSITION, Kind.POOL_START, Kind.WRITE_SLOT},
    stale_slots: {Kind.WRITE_SLOT},
}


@pytest.mark.parametrize(("mode", "step"), [("decode", DECODE), ("verify", ServedStep("target_verify", TOKENS))])
def test_sglangs_steps_are_silent_and_spoilt_ones_are_not(
    served: SglangModel, requests: list[Request], seed: int, mode: str, step: ServedStep
) -> None:
    two = [requests[1], requests[0]]
    with probed(served, step) as (made, found):
        # the kernels' own numbers: latents and states that the step writes are finite and not zero
        ours(served, made, batch_of(mode, requests[2:], seed))
        assert found() == []
    for spoil, kinds in FAULTS.items():
        with probed(served, step) as (made, found), without_kernels(made):
            ours(served, made, batch_of(mode, two, seed))
            # nothing wrote the new tokens' latents, since no kernel ran
            assert {each.kind for each in found()} <= {Kind.WRITTEN_LATENT}
            ours(served, made, batch_of(mode, two, seed), spoil)
            assert kinds <= {each.kind for each in found()}, spoil.__name__


class Operations(TorchDispatchMode):
    """Takes down the operations that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operations(served: SglangModel, made: runtime.Runtime, batch: Batch) -> list[str]:
    """What a step asks of torch beside the launch itself and SGLang's logits."""
    seen = Operations()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made.launch, "run_by_phase", lambda tensors, sizes, hidden: None)
        patch.setattr(upstream, "logits", lambda model, ids, hidden, forward: hidden)
        forward = made.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            with seen:
                return forward(*args, **kwargs)

        patch.setattr(made, "forward", watched)
        ours(served, made, batch)
    return seen.names


def test_without_the_variable_a_step_launches_nothing_else(
    served: SglangModel, requests: list[Request], seed: int
) -> None:
    batch = batch_of("decode", requests, seed)
    with built(served) as made:
        operations(served, made, batch)  # the first step fills in the caches' addresses
        assert set(operations(served, made, batch)) <= {"aten.empty.memory_format", "aten.squeeze.dim"}
    with probed(served, DECODE) as (made, _):
        operations(served, made, batch)
        assert "aten.linalg_vector_norm.default" in operations(served, made, batch)
