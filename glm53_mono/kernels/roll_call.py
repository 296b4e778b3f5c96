"""How many programs a GPU holds at once, whatever its driver says: all of a grid wait for one another, for a while."""

import triton
import triton.language as tl

from glm53_mono.kernels.sync import nap, now

CLOSED = tl.constexpr(1 << 20)
"""Added to the count when somebody's patience ends; far more than programs."""


@triton.jit
def roll_call(count, seen, patience, BACKEND: tl.constexpr):
    """Every program counts itself, waits until all have or until one loses patience, and stores how many it saw.

    The least of these is how many were there at once: the first to go saw it before it made room for another one.

    Args:
        count: int32 [1], zero.
        seen: int32 [programs].
        patience: nanoseconds of a program.
    """
    deadline = now(BACKEND) + patience
    present = tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") + 1
    while present < tl.num_programs(0):
        nap(BACKEND)
        # threads read the clock apart and leave together: what they leave by is one thread's read of the count
        if now(BACKEND) >= deadline:
            tl.atomic_add(count, CLOSED, sem="release", scope="gpu")
        present = tl.atomic_add(count, 0, sem="acquire", scope="gpu")
    tl.store(seen + tl.program_id(0), present % CLOSED)
