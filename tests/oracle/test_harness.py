"""The harness around SGLang: patches that go away again, batches that refuse what SGLang could not run, ties."""

from __future__ import annotations

import importlib
import inspect
import sys

import pytest
import torch

from tests.oracle.sglang_cpu import context

context.prepare_environment()

from glm53_mono.kernels.faster_interpreter import with_room_for_frames
from tests.oracle.sglang_cpu import patches, substitutes
from tests.oracle.sglang_cpu.batches import Batch, Request


def targets() -> dict[str, object]:
    found = {}
    for patch in patches.TABLE:
        module, _, path = patch.target.partition(":")
        owner = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        found[patch.target] = inspect.getattr_static(owner, name, None)
    return found


@pytest.mark.slow
def test_patches_change_every_target_and_go_away() -> None:
    with patches.applied():
        pass  # SGLang's modules have found the stand-ins, and can be imported without them from here on
    before, modules = targets(), {stand_in.module: sys.modules.get(stand_in.module) for stand_in in patches.STAND_INS}
    with patches.applied() as applied:
        during = targets()
        assert all(sys.modules[name] is not module for name, module in modules.items())
    assert [target for target in before if during[target] is before[target]] == []
    assert targets() == before
    assert {name: sys.modules.get(name) for name in modules} == modules
    assert all(change.reason for change in applied)


def test_triton_that_compiles_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(context.ContextError, match="in a process of its own"):
        context.prepare_environment()


@pytest.mark.parametrize(
    ("mode", "ids", "message"),
    [
        ("decode", [[1, 2]], r"a decode step cannot hold \[2\] tokens a request"),
        ("verify", [[1, 2], [1]], r"a verify step cannot hold \[1, 2\] tokens a request"),
        ("extend", [[]], "each needs at least one"),
        ("extend", [[1], [2], [3]], "2 requests got"),
        ("extend", [[1] * 300], r"request row 1: 300 tokens do not fit pages \(3,\)"),
    ],
)
def test_batches_refuse(mode: str, ids: list[list[int]], message: str) -> None:
    requests = [Request(1, 1, (3,)), Request(2, 2, (4,))][: max(1, min(2, len(ids)))]
    with pytest.raises(ValueError, match=message):
        Batch.of(mode, requests, ids)


def test_a_verify_batch_counts_committed_tokens_alone() -> None:
    request = Request(row=2, slot=1, pages=(5, 3), tokens=[0] * 255)
    batch = Batch.of("verify", [request], [[7, 8]])
    assert batch.seq_lens.tolist() == [255]
    assert batch.positions.tolist() == [255, 256]
    assert batch.out_cache_loc.tolist() == [5 * 256 + 255, 3 * 256]
    assert Batch.of("decode", [request], [[7]]).seq_lens.tolist() == [256]


def test_equal_scores_go_to_the_lower_pool() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [5.0, 1.0, 1.0, 9.0, 9.0]])
    picks = substitutes.pick_pools(scores, torch.tensor([5, 2]), 2)
    assert picks.tolist() == [[1, 2], [0, 1]]


def test_a_roomy_frame_passes_results_and_errors_on() -> None:
    assert with_room_for_frames(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        with_room_for_frames(lambda: 1 // 0)
