"""What programs of one launch need of one another: the grid barrier, its deadline, and the fault when it passes.

The only file with inline assembly. `BACKEND` is "interp", "cuda" or "hip"; the interpreter runs one phase a launch and
never crosses a barrier.

Barrier words of the workspace, each on a cache line of its own (int32 index):
    ARRIVED   arrivals of this launch; monotonic within it
    LEFT      programs that have passed the last barrier; the last one resets both words, so a launch always starts at 0
    LAUNCHES  launches completed since the workspace was made, int64

Host record, int32 in mapped host memory, which a thread of the host reads without any call to the device:
    FAULT_*   who waited for what when a deadline passed; FAULT_FLAG is written last
    SERVED    LAUNCHES, int64, as the last launch left it
"""

import triton
import triton.language as tl

LINE = 64
ARRIVED = tl.constexpr(0)
LEFT = tl.constexpr(LINE)
LAUNCHES = tl.constexpr(2 * LINE)
WORDS = 3 * LINE

FAULT_PROGRAM = tl.constexpr(0)
FAULT_PHASE = tl.constexpr(1)
FAULT_EXPECTED = tl.constexpr(2)
FAULT_SEEN = tl.constexpr(3)
FAULT_FLAG = tl.constexpr(4)
SERVED = tl.constexpr(6)
HOST_WORDS = 8


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
def arrive(words, BACKEND: tl.constexpr):
    """This program has stored what it owes the others in this phase."""
    if BACKEND != "interp":
        program_barrier(BACKEND)
        tl.atomic_add(words + ARRIVED, 1, sem="release", scope="gpu")


@triton.jit
def wait(words, host_record, phase, expected, deadline, BACKEND: tl.constexpr):
    """Waits until `expected` arrivals; faults when the deadline (nanoseconds of `now`) passes."""
    if BACKEND != "interp":
        seen = tl.atomic_add(words + ARRIVED, 0, sem="acquire", scope="gpu")
        while seen < expected:
            nap(BACKEND)
            seen = tl.atomic_add(words + ARRIVED, 0, sem="acquire", scope="gpu")
            if seen < expected:
                if now(BACKEND) > deadline:
                    fault(host_record, phase, expected, seen)
        tl.debug_barrier()


@triton.jit
def fault(record, phase, expected, seen):
    """Writes who waited for what to host memory, then stores to address 0, as SGLang's binding promises."""
    tl.store(record + FAULT_PROGRAM, tl.program_id(0))
    tl.store(record + FAULT_PHASE, phase)
    tl.store(record + FAULT_EXPECTED, expected)
    tl.store(record + FAULT_SEEN, seen)
    tl.atomic_xchg(record + FAULT_FLAG, 1, sem="release", scope="sys")
    tl.store(tl.full((), 0, tl.int64).to(tl.pointer_type(tl.int32)), 1)


@triton.jit
def leave(words, host_record, BACKEND: tl.constexpr):
    """Ends a launch: the last program to leave zeroes the barrier for the next launch and counts this one."""
    if BACKEND != "interp":
        program_barrier(BACKEND)
        left = tl.atomic_add(words + LEFT, 1, sem="acq_rel", scope="gpu")
        if left == tl.num_programs(0) - 1:
            tl.store(words + ARRIVED, 0)
            tl.store(words + LEFT, 0)
            launches = (words + LAUNCHES).to(tl.pointer_type(tl.int64), bitcast=True)
            count = tl.load(launches) + 1
            tl.store(launches, count)
            tl.store((host_record + SERVED).to(tl.pointer_type(tl.int64), bitcast=True), count)
