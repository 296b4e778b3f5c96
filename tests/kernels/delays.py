"""The kernel with programs that start late: a wrapper of the tests, so the kernel itself knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from glm53_mono.kernels.monokernel import UNSPECIALIZED, monokernel
from glm53_mono.kernels.sync import nap, now
from glm53_mono.program import launch


@triton.jit(do_not_specialize=UNSPECIALIZED)
def delayed_monokernel(
    delays, records, workspace,
    input_ids, cache_slots, seq_lens, request_rows, state_slots, track_slots, track_mask, scratch_rows, req_to_token,
    hidden, host_record, rows, tokens, req_to_token_stride, ring_length, first, last, deadline,
    VERIFY: tl.constexpr, TILED: tl.constexpr, FUSED: tl.constexpr, TIMED: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, F: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """`monokernel`, program i of it `delays[i]` nanoseconds late (int64 [programs]); the interpreter has no clock."""
    start = now(BACKEND)
    until = start + tl.load(delays + tl.program_id(0))
    if BACKEND != "interp":
        while start < until:
            nap(BACKEND)
            start = now(BACKEND)
    monokernel(
        records, workspace,
        input_ids, cache_slots, seq_lens, request_rows, state_slots, track_slots, track_mask, scratch_rows,
        req_to_token, hidden, host_record, rows, tokens, req_to_token_stride, ring_length, first, last, deadline,
        VERIFY, TILED, FUSED, TIMED, W, G, T, F, BACKEND,
    )  # fmt: skip


class Delayed:
    """Stands in for the kernel where `Launch.run` starts it."""

    def __init__(self, delays: torch.Tensor) -> None:
        self._delays = delays

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *arguments, **constants: delayed_monokernel[grid](self._delays, *arguments, **constants)


@contextmanager
def late_starts(delays: torch.Tensor) -> Iterator[None]:
    """Launches inside start program i `delays[i]` nanoseconds late; launched a phase at a time, so in every phase."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "monokernel", Delayed(delays))
        yield
