"""Last phase: the streams' mean and the final norm; logits stay with SGLang's LogitsProcessor."""

import triton
import triton.language as tl

from glm53_mono.kernels.memory import pointer, region
from glm53_mono.kernels.numerics import bf16
from glm53_mono.kernels.record import Word, device

FINAL_NORM = device(Word.FINAL_NORM)


@triton.jit
def head(workspace, record, hidden, rows, W: tl.constexpr, G: tl.constexpr):
    """hidden[row] = RMSNorm(bf16(mean of the four streams)), bf16 [rows, hidden]. Task: one row (MODEL_MATH 1)."""
    streams = region(workspace, W.streams, tl.bfloat16)
    HIDDEN: tl.constexpr = G.hidden
    column = tl.arange(0, HIDDEN)
    norm = tl.load(pointer(record, FINAL_NORM, tl.bfloat16) + column).to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        total = tl.zeros([HIDDEN], tl.float32)
        for stream in tl.static_range(4):
            total += tl.load(streams + (row * 4 + stream) * G.hidden + column).to(tl.float32)
        mean = bf16(total * 0.25)
        normed = mean * tl.rsqrt(tl.sum(mean * mean, 0) / G.hidden + G.rms_eps) * norm
        tl.store(hidden + row * G.hidden + column, normed.to(tl.bfloat16))
