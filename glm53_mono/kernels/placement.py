"""Where the programs of a grid run."""

import triton
import triton.language as tl

from glm53_mono.kernels.sync import die


@triton.jit
def placement(dies, BACKEND: tl.constexpr):
    """Every program stores the die that it runs on: int32 [programs]."""
    tl.store(dies + tl.program_id(0), die(BACKEND))
