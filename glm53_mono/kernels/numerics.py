"""Scalar formulas of the model, and the roundings that SGLang's path has."""

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)
SMALLEST_ABSMAX = tl.constexpr(1e-4)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) in fp32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """x sigmoid(x) in fp32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def bf16(x):
    """Rounds fp32 to the nearest bf16 and returns fp32."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def clamped_swiglu(gate, up, LIMIT: tl.constexpr):
    """silu(min(gate, LIMIT)) * clamp(up, -LIMIT, LIMIT); fp32 in, rounded to bf16 before the clamp."""
    gate = tl.minimum(bf16(gate), LIMIT)
    up = tl.minimum(tl.maximum(bf16(up), -LIMIT), LIMIT)
    return silu(gate) * up


@triton.jit
def fp8_scale(absmax):
    """The power of two 2^ceil(log2(max(absmax, 1e-4) / 448)) from the bits of the quotient, exact at powers of two."""
    ratio = tl.maximum(absmax, SMALLEST_ABSMAX) / FP8_MAX
    bits = ratio.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp8(x, scale):
    """e4m3 of x / scale, saturated."""
    return tl.minimum(tl.maximum(x / scale, -FP8_MAX), FP8_MAX).to(tl.float8e4nv)


@triton.jit
def hadamard_signs(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The +1/-1 matrix of Sylvester's order as fp32 [ROWS, COLUMNS]; symmetric."""
    both = tl.arange(0, ROWS)[:, None] & tl.arange(0, COLUMNS)[None, :]
    both = both ^ (both >> 4)
    both = both ^ (both >> 2)
    both = both ^ (both >> 1)
    return 1.0 - 2.0 * (both & 1).to(tl.float32)


@triton.jit
def ordered_key(x):
    """An unsigned key that orders like the fp32 x, -0 below +0."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
