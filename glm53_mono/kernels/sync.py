"""What programs of one launch need of one another: the grid barrier, its deadline, and the fault when it passes.

The only file with inline assembly. `BACKEND` is "interp", "cuda" or "hip"; the interpreter runs one phase a launch and
never crosses a barrier.

Barrier words of the workspace, each on a cache line of its own (int32 index):
    ARRIVED   arrivals of this launch; monotonic within it
    LEFT      programs that have passed the last barrier; the last one resets all words, so a launch always starts at 0
    LAUNCHES  launches completed since the workspace was made, int64
    MET       of each chiplet: its programs' arrivals in phases in which all programs arrive; monotonic in a launch
    RELEASED  of each chiplet, behind all MET: the arrivals that its programs may take as seen; monotonic in a launch,
              since one program writes it at a time

MET and RELEASED exist where a device has more than one chiplet. There the barrier is hierarchical: programs count
themselves on their chiplet's MET; the last of them leads: it reports them all to ARRIVED, waits for that, and then
releases its chiplet, whose other programs wait for RELEASED. Where few programs arrive there is nobody to meet: they
count on ARRIVED, and all wait for that. Programs are dealt to the chiplets in turn (`chiplet`). Where they are not,
lines travel between dies, and nothing else changes: every access is ordered at the scope of the device.

Host record, int32 in mapped host memory, which a thread of the host reads without any call to the device:
    FAULT_*   who waited for what when a deadline passed; FAULT_FLAG is written last
    SERVED    LAUNCHES, int64, as the last launch left it
    FAULT_PEER, FAULT_EPOCHS
              of a wait for another rank instead of the grid (`peers.py`): that rank plus 1; expected and seen, int64
"""

import triton
import triton.language as tl

LINE = 64
LINE_WORDS = tl.constexpr(LINE)
ARRIVED = tl.constexpr(0)
LEFT = tl.constexpr(LINE)
LAUNCHES = tl.constexpr(2 * LINE)
MET = tl.constexpr(3 * LINE)

ALONE = tl.constexpr(0)
LED = tl.constexpr(1)
LEADS = tl.constexpr(2)

FAULT_PROGRAM = tl.constexpr(0)
FAULT_PHASE = tl.constexpr(1)
FAULT_EXPECTED = tl.constexpr(2)
FAULT_SEEN = tl.constexpr(3)
FAULT_FLAG = tl.constexpr(4)
FAULT_PEER = tl.constexpr(5)
SERVED = tl.constexpr(6)
FAULT_EPOCHS = tl.constexpr(8)
HOST_WORDS = 12


def barrier_words(chiplets: int) -> int:
    """Words of the barrier of a device with so many chiplets."""
    return (3 + (2 * chiplets if chiplets > 1 else 0)) * LINE


@triton.jit
def chiplet(CHIPLETS: tl.constexpr):
    """The chiplet that this program is taken to run on: `isas.ISAS` has how many there are."""
    return tl.program_id(0) % CHIPLETS


@triton.jit
def chiplet_programs(index, CHIPLETS: tl.constexpr):
    """Programs of a chiplet."""
    return (tl.num_programs(0) + CHIPLETS - 1 - index) // CHIPLETS


@triton.jit
def met_word(words, index):
    """MET of a chiplet."""
    return words + MET + index * LINE_WORDS


@triton.jit
def released_word(words, index, CHIPLETS: tl.constexpr):
    """RELEASED of a chiplet."""
    return met_word(words, CHIPLETS + index)


@triton.jit
def now(BACKEND: tl.constexpr):
    """Nanoseconds of a clock that all programs share; 0 in the interpreter."""
    if BACKEND == "hip":
        # 100 MHz; tl.extra.hip.memrealtime waits on the wrong counter in Triton 3.6 to 3.9
        ticks = tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
        )
        return ticks * 10
    elif BACKEND == "cuda":
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    else:
        return tl.full((), 0, tl.int64)


@triton.jit
def nap(BACKEND: tl.constexpr):
    """Yields the issue slots for a moment while waiting."""
    if BACKEND == "hip":
        tl.inline_asm_elementwise("s_sleep 1\ns_mov_b32 $0, 0", "=s", [], dtype=tl.int32, is_pure=False, pack=1)
    elif BACKEND == "cuda":
        tl.inline_asm_elementwise("nanosleep.u32 20;\nmov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def die(BACKEND: tl.constexpr):
    """The die that this program runs on, counted from 0; other vendors' GPUs have one."""
    if BACKEND == "hip":
        return tl.inline_asm_elementwise(
            "s_getreg_b32 $0, hwreg(HW_REG_XCC_ID, 0, 4)", "=s", [], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.full((), 0, tl.int32)


@triton.jit
def drain(BACKEND: tl.constexpr):
    """Every wave waits for its own stores: on AMD a workgroup barrier alone does not."""
    if BACKEND == "hip":
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\ns_mov_b32 $0, 0", "=s", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def program_barrier(BACKEND: tl.constexpr):
    """Makes what this program's threads stored visible to all of its threads."""
    if BACKEND != "interp":
        drain(BACKEND)
        tl.debug_barrier()


@triton.jit
def next_due(due, arrivals, CHIPLETS: tl.constexpr):
    """What this program's chiplet will have counted in MET, after `due`, once `arrivals` more programs have arrived."""
    if CHIPLETS > 1:
        if arrivals == tl.num_programs(0):
            due += chiplet_programs(chiplet(CHIPLETS), CHIPLETS)
    return due


@triton.jit
def arrive(words, arrivals, due, CHIPLETS: tl.constexpr, BACKEND: tl.constexpr):
    """This program has stored what it owes the others in this phase.

    Args:
        arrivals: programs that arrive in this phase.
        due: of `next_due`, these included.

    Returns:
        What this program is at the wait behind it: ALONE, LED or LEADS.
    """
    role = ALONE
    if BACKEND != "interp":
        program_barrier(BACKEND)
        if CHIPLETS == 1:
            tl.atomic_add(words + ARRIVED, 1, sem="release", scope="gpu")
        elif arrivals < tl.num_programs(0):
            tl.atomic_add(words + ARRIVED, 1, sem="release", scope="gpu")
        else:
            role = LED
            own = chiplet(CHIPLETS)
            met = tl.atomic_add(met_word(words, own), 1, sem="acq_rel", scope="gpu") + 1
            if met == due:
                role = LEADS
                tl.atomic_add(words + ARRIVED, chiplet_programs(own, CHIPLETS), sem="release", scope="gpu")
    return role


@triton.jit
def wait(words, host_record, phase, role, expected, deadline, CHIPLETS: tl.constexpr, BACKEND: tl.constexpr):
    """Waits until `expected` arrivals; faults when the deadline (nanoseconds of `now`) passes.

    role: what the last `arrive` said; ALONE where this program had nothing to do.
    """
    if BACKEND != "interp":
        word = words + ARRIVED
        if CHIPLETS > 1:
            # an offset: in this kernel Triton 3.8 fails on an address that a branch chooses
            word += tl.where(role == LED, released_word(0, chiplet(CHIPLETS), CHIPLETS), 0)
        seen = tl.atomic_add(word, 0, sem="acquire", scope="gpu")
        while seen < expected:
            nap(BACKEND)
            seen = tl.atomic_add(word, 0, sem="acquire", scope="gpu")
            if seen < expected:
                if now(BACKEND) > deadline:
                    fault(host_record, phase, expected, arrivals_seen(words, seen, CHIPLETS), BACKEND)
        if CHIPLETS > 1:
            if role == LEADS:
                # its own stores come before: it has none but a fault's record
                program_barrier(BACKEND)
                tl.atomic_xchg(released_word(words, chiplet(CHIPLETS), CHIPLETS), expected, sem="release", scope="gpu")
        tl.debug_barrier()


@triton.jit
def arrivals_seen(words, seen, CHIPLETS: tl.constexpr):
    """Arrivals so far: `seen` of a flat barrier; of a hierarchical one what is reported, and what waits to be."""
    if CHIPLETS > 1:
        seen = tl.atomic_add(words + ARRIVED, 0, sem="acquire", scope="gpu")
        for each in tl.static_range(CHIPLETS):
            met = tl.atomic_add(met_word(words, each), 0, sem="acquire", scope="gpu")
            seen += met % tl.maximum(chiplet_programs(each, CHIPLETS), 1)
    return seen


@triton.jit
def fault(record, phase, expected, seen, BACKEND: tl.constexpr):
    """Writes who waited for what to host memory, then stores to address 0, as SGLang's binding promises."""
    tl.store(record + FAULT_PROGRAM, tl.program_id(0))
    tl.store(record + FAULT_PHASE, phase)
    tl.store(record + FAULT_EXPECTED, expected)
    tl.store(record + FAULT_SEEN, seen)
    tl.atomic_xchg(record + FAULT_FLAG, 1, sem="release", scope="sys")
    drain(BACKEND)
    tl.store(tl.full((), 0, tl.int64).to(tl.pointer_type(tl.int32)), 1)


@triton.jit
def leave(words, host_record, CHIPLETS: tl.constexpr, BACKEND: tl.constexpr):
    """Ends a launch: the last program to leave zeroes the barrier for the next launch and counts this one."""
    if BACKEND != "interp":
        program_barrier(BACKEND)
        left = tl.atomic_add(words + LEFT, 1, sem="acq_rel", scope="gpu")
        if left == tl.num_programs(0) - 1:
            tl.store(words + ARRIVED, 0)
            tl.store(words + LEFT, 0)
            if CHIPLETS > 1:
                for word in tl.static_range(2 * CHIPLETS):
                    tl.store(met_word(words, word), 0)
            launches = (words + LAUNCHES).to(tl.pointer_type(tl.int64), bitcast=True)
            count = tl.load(launches) + 1
            tl.store(launches, count)
            tl.store((host_record + SERVED).to(tl.pointer_type(tl.int64), bitcast=True), count)
