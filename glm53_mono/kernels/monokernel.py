"""The persistent kernel: one launch runs a range of phases, with a grid barrier between two of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from glm53_mono.kernels.dense import dense_down, dense_up
from glm53_mono.kernels.embed import embed, embed_own_rows
from glm53_mono.kernels.head import head
from glm53_mono.kernels.indexer import must_select, select
from glm53_mono.kernels.kda import kda_delta, kda_project
from glm53_mono.kernels.memory import region
from glm53_mono.kernels.mhc import mix
from glm53_mono.kernels.mla import mla_absorb, mla_attend, mla_merge, mla_project, mla_query
from glm53_mono.kernels.moe import down, experts, router
from glm53_mono.kernels.output import output
from glm53_mono.kernels.peers import raise_flags, wait_for_peers
from glm53_mono.kernels.record import RECORD, Kind, Word, device
from glm53_mono.kernels.reduce import reduce_branch, reduce_embedding
from glm53_mono.kernels.sync import ALONE, arrive, leave, next_due, now, wait

WORDS_OF_RECORD = tl.constexpr(RECORD)
KIND = device(Word.KIND)
EMBED = device(Kind.EMBED)
MIX = device(Kind.MIX)
KDA_PROJECT = device(Kind.KDA_PROJECT)
KDA_DELTA = device(Kind.KDA_DELTA)
KDA_OUTPUT = device(Kind.KDA_OUTPUT)
ROUTER = device(Kind.ROUTER)
EXPERTS = device(Kind.EXPERTS)
DOWN = device(Kind.DOWN)
DENSE_UP = device(Kind.DENSE_UP)
DENSE_DOWN = device(Kind.DENSE_DOWN)
MLA_PROJECT = device(Kind.MLA_PROJECT)
MLA_QUERY = device(Kind.MLA_QUERY)
MLA_ABSORB = device(Kind.MLA_ABSORB)
MLA_SELECT = device(Kind.MLA_SELECT)
MLA_ATTEND = device(Kind.MLA_ATTEND)
MLA_MERGE = device(Kind.MLA_MERGE)
MLA_OUTPUT = device(Kind.MLA_OUTPUT)
HEAD = device(Kind.HEAD)
REDUCE = device(Kind.REDUCE)
REDUCE_EMBEDDING = device(Kind.REDUCE_EMBEDDING)


class StepTensors(NamedTuple):
    """What a launch reads of its step: tensors stay where SGLang keeps them, so a graph sees each step's values.

    Their dtypes choose the compiled kernel, so they are the same in every step.
    """

    input_ids: torch.Tensor
    """[rows] int64, token ids; padded rows may hold stale ones"""
    cache_slots: torch.Tensor
    """[rows] int64, slot of each row in the latent cache (`out_cache_loc`); 0 for a padded row"""
    seq_lens: torch.Tensor
    """[requests] int64, with the current token in decode, committed tokens in verify"""
    request_rows: torch.Tensor
    """[requests] int64, row in `req_to_token` and in the compress rings (`req_pool_indices`)"""
    state_slots: torch.Tensor
    """[requests] int32, slot of the recurrent state and the convolution window; below 1 for a padded request"""
    track_slots: torch.Tensor
    """[requests] int64, slot that a decode step copies state and window to for the prefix cache; negative for none"""
    track_mask: torch.Tensor
    """[requests] bool, the requests whose `track_slots` count in this step"""
    scratch_rows: torch.Tensor
    """[requests] int32, row in the verify scratch"""
    req_to_token: torch.Tensor
    """[request rows, max context] int32, cache slot of every token"""


class StepSizes(NamedTuple):
    """The sizes of a step, which a captured graph keeps."""

    rows: int
    tokens: int
    """rows of a request"""
    req_to_token_stride: int
    ring_length: int
    """entries of a request's compress ring"""


class Step(NamedTuple):
    """Both together, as device code hands them on."""

    input_ids: tl.tensor
    cache_slots: tl.tensor
    seq_lens: tl.tensor
    request_rows: tl.tensor
    state_slots: tl.tensor
    track_slots: tl.tensor
    track_mask: tl.tensor
    scratch_rows: tl.tensor
    req_to_token: tl.tensor
    req_to_token_stride: tl.tensor
    ring_length: tl.tensor
    tokens: tl.tensor


UNSPECIALIZED = (
    *StepTensors._fields,
    "rows",
    "tokens",
    "req_to_token_stride",
    "ring_length",
    "first",
    "last",
    "deadline",
)
"""Arguments that must not choose a compiled kernel by their value, or by their alignment: another width would compile,
and could differ in its bits. In a tuple Triton would look at them all the same, so they are arguments one by one.
"""


@triton.jit(do_not_specialize=UNSPECIALIZED)
def monokernel(
    records, workspace,
    input_ids, cache_slots, seq_lens, request_rows, state_slots, track_slots, track_mask, scratch_rows, req_to_token,
    hidden, host_record, rows, tokens, req_to_token_stride, ring_length, first, last, deadline,
    VERIFY: tl.constexpr, TILED: tl.constexpr, FUSED: tl.constexpr, TIMED: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, F: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Runs the phases [first, last) of the program in `records`.

    Args:
        records: int64 [phases, RECORD], written by `program.step`.
        workspace: uint8 [W.size]; `words` in it is zero at a launch's start, as the launch before left it.
        input_ids, ..., req_to_token: `StepTensors`.
        hidden: bf16 [rows, hidden], the step's result.
        host_record: int32 in mapped host memory; a fault when a deadline passes, and the launches served.
        rows, tokens, req_to_token_stride, ring_length: `StepSizes`.
        deadline: nanoseconds that any wait of this launch may last.
        VERIFY: committed state stays as it is, and what follows each row goes to the verify scratch.
        TILED: the index keys lie in 16 x 16 tiles, as on ROCm.
        FUSED: the shared expert is one more routed summand.
        TIMED: program 0 writes when it starts each phase into `clock`; for the bench.
        W, G, T, F: `Workspace`, `Geometry`, `Tiling` and `Formats`.
    """
    words = region(workspace, W.words, tl.int32)
    step = Step(
        input_ids,
        cache_slots,
        seq_lens,
        request_rows,
        state_slots,
        track_slots,
        track_mask,
        scratch_rows,
        req_to_token,
        req_to_token_stride,
        ring_length,
        tokens,
    )
    expected = 0
    due = 0
    role = ALONE
    selecting = must_select(step, rows, VERIFY, G)
    # without disable_licm every phase's index tensors are computed before the loop, held and spilled
    for phase in tl.range(first, last, disable_licm=True):
        record = records + phase * WORDS_OF_RECORD
        kind = tl.load(record + KIND)
        if (kind != MLA_SELECT) | selecting:
            awaited = expected
            if G.tp_size > 1:
                if adds_partials(kind):
                    # the rows that this program adds up were left by itself and its namesakes alone
                    awaited = 0
                    wait_for_peers(record, host_record, phase, deadline, W, G, BACKEND)
            if awaited > 0:
                wait(words, host_record, phase, role, awaited, now(BACKEND) + deadline, T.chiplets, BACKEND)
            if TIMED:
                if tl.program_id(0) == 0:
                    tl.store(region(workspace, W.clock, tl.int64) + phase, now(BACKEND))
            run_phase(record, kind, workspace, step, hidden, rows, VERIFY, TILED, FUSED, W, G, T, F, BACKEND)
            # nobody waits for the programs that have no row to mix
            arrivals = tl.num_programs(0)
            if kind == MIX:
                arrivals = tl.minimum(rows, arrivals)
            if G.tp_size > 1:
                if leaves_partials(kind):
                    arrivals = 0
                    raise_flags(record, W, G, BACKEND)
            expected += arrivals
            due = next_due(due, arrivals, T.chiplets)
            role = ALONE
            if tl.program_id(0) < arrivals:
                role = arrive(words, arrivals, due, T.chiplets, BACKEND)
    if TIMED:
        if tl.program_id(0) == 0:
            tl.store(region(workspace, W.clock, tl.int64) + last, now(BACKEND))
    leave(words, host_record, T.chiplets, BACKEND)


@triton.jit
def run_phase(
    record, kind, workspace, step, hidden, rows,
    VERIFY: tl.constexpr, TILED: tl.constexpr, FUSED: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, F: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """This program's tasks of one phase."""
    PLAIN: tl.constexpr = F.plain
    ATTENTION_OUTPUT: tl.constexpr = F.attention_output
    if kind == MIX:
        mix(workspace, record, rows, W, G)
    elif kind == KDA_PROJECT:
        kda_project(workspace, record, step, rows, VERIFY, W, G, T)
    elif kind == KDA_DELTA:
        kda_delta(workspace, record, step, rows, VERIFY, W, G)
    elif kind == KDA_OUTPUT:
        output(workspace, record, rows, G.kda_width, PLAIN, W, G, T, BACKEND)
    elif kind == ROUTER:
        router(workspace, record, rows, W, G, T, F, BACKEND)
    elif kind == EXPERTS:
        experts(workspace, record, step, rows, W, G, T, F, BACKEND)
    elif kind == DOWN:
        down(workspace, record, rows, FUSED, W, G, T, F, BACKEND)
    elif kind == MLA_PROJECT:
        mla_project(workspace, record, rows, W, G, T, F, BACKEND)
    elif kind == MLA_QUERY:
        mla_query(workspace, record, step, rows, VERIFY, TILED, W, G, T, F, BACKEND)
    elif kind == MLA_ABSORB:
        mla_absorb(workspace, record, step, rows, VERIFY, TILED, W, G, T)
    elif kind == MLA_SELECT:
        select(workspace, step, rows, VERIFY, W, G, T)
    elif kind == MLA_ATTEND:
        mla_attend(workspace, record, step, rows, VERIFY, W, G, T)
    elif kind == MLA_MERGE:
        mla_merge(workspace, record, step, rows, VERIFY, W, G, T, BACKEND)
    elif kind == MLA_OUTPUT:
        output(workspace, record, rows, G.mla_heads * G.v_head_dim, ATTENTION_OUTPUT, W, G, T, BACKEND)
    elif kind == DENSE_UP:
        dense_up(workspace, record, rows, W, G, T, F, BACKEND)
    elif kind == DENSE_DOWN:
        dense_down(workspace, record, rows, W, G, T, F, BACKEND)
    elif kind == EMBED:
        if G.tp_size == 1:
            embed(workspace, record, step.input_ids, rows, W, G, T)
        else:
            embed_own_rows(record, step.input_ids, rows, W, G, T)
    elif G.tp_size == 1:
        head(workspace, record, hidden, rows, W, G)
    elif kind == REDUCE:
        reduce_branch(workspace, record, rows, W, G, T, BACKEND)
    elif kind == REDUCE_EMBEDDING:
        reduce_embedding(workspace, record, rows, W, G, T, BACKEND)
    else:
        head(workspace, record, hidden, rows, W, G)


@triton.jit
def leaves_partials(kind):
    """Whether a phase leaves its output for the reduce that follows, where several ranks have a share of it."""
    attention = (kind == KDA_OUTPUT) | (kind == MLA_OUTPUT)
    return attention | (kind == DOWN) | (kind == DENSE_DOWN) | (kind == EMBED)


@triton.jit
def adds_partials(kind):
    """Whether a phase adds up what all ranks left in the phase before."""
    return (kind == REDUCE) | (kind == REDUCE_EMBEDDING)
