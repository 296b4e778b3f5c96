"""Between the ranks of one model: each leaves its partial sums in a buffer of its own that the others can read.

A column tile belongs to the same program on every rank, so a program has to do with nobody but its namesakes: it stores
its tiles' partial rows, raises a flag in every peer's buffer, waits for the peers' flags in its own, and adds up. No
grid barrier stands between.

A flag is the number of the reduce whose rows are there. Numbers only rise: a program keeps the count of its finished
reduces in the buffer from launch to launch, so that replays of a graph go on where the last one ended. Two halves of
the buffer take turns. A peer that raises its flag for a reduce has read all rows of the one before, and so whoever has
seen that flag may write the half which that one used.

Flags and rows are read and written at system scope alone: a poll that a cache may serve hangs on MI350.
"""

import triton
import triton.language as tl

from glm53_mono.geometry import MAX_ROWS
from glm53_mono.kernels.gemv import row_index
from glm53_mono.kernels.memory import pointer
from glm53_mono.kernels.record import Word, device
from glm53_mono.kernels.sync import (
    FAULT_EPOCHS,
    FAULT_FLAG,
    FAULT_PEER,
    FAULT_PHASE,
    FAULT_PROGRAM,
    drain,
    nap,
    now,
    program_barrier,
)

RANKS_OF_LINE = 8
"""int64 words of a 64-byte line: one flag for each rank there may be."""

HALVES = 2
"""Halves of a symmetric buffer, taken in turns."""

LINE = tl.constexpr(RANKS_OF_LINE)
LINE_BYTES = tl.constexpr(8 * RANKS_OF_LINE)
ROWS = tl.constexpr(MAX_ROWS)
TURNS = tl.constexpr(HALVES)
PEER_QUARTERS = tl.constexpr(3)
"""Quarters of the deadline that a wait for another rank has. With all four, a program that waits in its own grid for
one that waits for a rank could speak first, and name nobody."""
PEERS = device(Word.PEERS)
RANK = device(Word.RANK)


@triton.jit
def words_at(buffer, OFFSET: tl.constexpr):
    """int64 words OFFSET bytes into a symmetric buffer, whose address is an integer."""
    return (buffer + OFFSET).to(tl.pointer_type(tl.int64))


@triton.jit
def own_buffer(record):
    """Address of this rank's symmetric buffer."""
    return tl.load(pointer(record, PEERS, tl.int64) + tl.load(record + RANK))


@triton.jit
def finished_reduces(record, W: tl.constexpr):
    """Where this program keeps how many reduces it has finished; the one at hand is that many plus 1."""
    return words_at(own_buffer(record), W.symmetric.finished) + tl.program_id(0) * LINE


@triton.jit
def partial_rows(buffer, finished, W: tl.constexpr, G: tl.constexpr):
    """The partial rows, bf16 [8, hidden], of the reduce after so many finished ones in a symmetric buffer."""
    HALF_BYTES: tl.constexpr = 2 * ROWS * G.hidden
    rows = (buffer + W.symmetric.partials + half_of(finished) * HALF_BYTES).to(tl.pointer_type(tl.bfloat16))
    return tl.multiple_of(rows, 16)


@triton.jit
def half_of(finished):
    """Which half of every buffer the reduce after so many finished ones uses."""
    return finished % TURNS


@triton.jit
def leave_partial(record, tile, rows, values, COLUMNS: tl.constexpr, W: tl.constexpr, G: tl.constexpr):
    """Stores this rank's share of a tile, [8, COLUMNS], rounded to bf16 as what SGLang's all-reduce gets is."""
    column = (tile * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    row = row_index()[:, None]
    own = partial_rows(own_buffer(record), tl.load(finished_reduces(record, W)), W, G)
    tl.store(own + row * G.hidden + column, values.to(tl.bfloat16), mask=(row < rows) & (column < G.hidden))


@triton.jit
def sum_of_ranks(record, tile, rows, COLUMNS: tl.constexpr, W: tl.constexpr, G: tl.constexpr):
    """A tile's shares of all ranks, added in fp32 in the order of the ranks: the same bits on each, [8, COLUMNS]."""
    column = (tile * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    row = row_index()[:, None]
    table = pointer(record, PEERS, tl.int64)
    finished = tl.load(finished_reduces(record, W))
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    RANKS: tl.constexpr = G.tp_size
    for rank in tl.static_range(RANKS):
        share = partial_rows(tl.load(table + rank), finished, W, G)
        place = share + row * G.hidden + column
        total += tl.load(place, mask=(row < rows) & (column < G.hidden), other=0.0).to(tl.float32)
    return total


@triton.jit
def raise_flags(record, W: tl.constexpr, G: tl.constexpr, BACKEND: tl.constexpr):
    """Tells every peer's namesake that this program's partial rows are there; a program without a tile has none."""
    if tl.program_id(0) < W.mix_tiles:
        number = tl.load(finished_reduces(record, W)) + 1
        rank = tl.load(record + RANK)
        peer = tl.arange(0, G.tp_size)
        buffers = tl.load(pointer(record, PEERS, tl.int64) + peer)
        flags = words_at(buffers, W.symmetric.flags) + (tl.program_id(0) * LINE + rank)
        program_barrier(BACKEND)
        tl.atomic_xchg(flags, number + peer * 0, mask=peer != rank, sem="release", scope="sys")


@triton.jit
def poll(flags, rank, number, G: tl.constexpr):
    """The first peer whose flag is below `number`, tp_size if there is none, and that flag."""
    peer = tl.arange(0, G.tp_size)
    seen = tl.atomic_add(flags + peer, peer.to(tl.int64) * 0, mask=peer != rank, sem="acquire", scope="sys")
    late = tl.min(tl.where((peer != rank) & (seen < number), peer, G.tp_size), 0)
    return late, tl.sum(tl.where(peer == late, seen, 0), 0)


@triton.jit
def wait_for_peers(record, host_record, phase, deadline, W: tl.constexpr, G: tl.constexpr, BACKEND: tl.constexpr):
    """Waits until every peer's partial rows for this program's tiles are there; faults after its part of the deadline.

    deadline: nanoseconds that any wait of this launch may last.
    The interpreter looks once: whoever launches the ranks' phases in turn sees to it that the flags are raised.
    """
    if tl.program_id(0) < W.mix_tiles:
        rank = tl.load(record + RANK)
        number = tl.load(finished_reduces(record, W)) + 1
        own = own_buffer(record)
        flags = words_at(own, W.symmetric.flags) + tl.program_id(0) * LINE
        claim = words_at(own, W.symmetric.claim)
        until = now(BACKEND) + deadline * PEER_QUARTERS // 4
        late, seen = poll(flags, rank, number, G)
        if BACKEND == "interp":
            if late < G.tp_size:
                fault_for_peer(host_record, claim, phase, late, number, seen, BACKEND)
        else:
            while late < G.tp_size:
                nap(BACKEND)
                late, seen = poll(flags, rank, number, G)
                if late < G.tp_size:
                    if now(BACKEND) > until:
                        fault_for_peer(host_record, claim, phase, late, number, seen, BACKEND)
            tl.debug_barrier()


@triton.jit
def fault_for_peer(record, claim, phase, peer, expected, seen, BACKEND: tl.constexpr):
    """Writes which rank was waited for, then ends the kernel as `sync.fault` does.

    Many programs' waits end at once; the first one alone writes and faults, for the others would mix their lines in.
    """
    if tl.atomic_xchg(claim, 1, sem="acq_rel", scope="gpu") == 0:
        tl.store(record + FAULT_PROGRAM, tl.program_id(0))
        tl.store(record + FAULT_PHASE, phase)
        tl.store(record + FAULT_PEER, peer + 1)
        epochs = (record + FAULT_EPOCHS).to(tl.pointer_type(tl.int64), bitcast=True)
        tl.store(epochs, expected)
        tl.store(epochs + 1, seen)
        tl.atomic_xchg(record + FAULT_FLAG, 1, sem="release", scope="sys")
        drain(BACKEND)
        if BACKEND != "interp":
            tl.store(tl.full((), 0, tl.int64).to(tl.pointer_type(tl.int32)), 1)


@triton.jit
def finish_reduce(record, W: tl.constexpr, BACKEND: tl.constexpr):
    """Counts the reduce at hand as finished, once all threads of the program have read what they need of it."""
    if tl.program_id(0) < W.mix_tiles:
        program_barrier(BACKEND)
        place = finished_reduces(record, W)
        tl.store(place, tl.load(place) + 1)
