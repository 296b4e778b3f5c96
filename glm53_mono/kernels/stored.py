"""Weights as they are stored: addresses out of a record, and the one place that asks for a matrix's format."""

import math

import triton
import triton.language as tl

from glm53_mono.geometry import FP8_BLOCK, MXFP4_BLOCK
from glm53_mono.kernels import fp8, gemv, mxfp4
from glm53_mono.kernels.memory import address_of
from glm53_mono.kernels.record import SCALES_BEHIND, device
from glm53_mono.weights.descriptor import Format

BF16 = device(Format.BF16)
FP8 = device(Format.FP8)
BITS = {Format.BF16: 16, Format.FP8: 8, Format.MXFP4: 4}
"""Of one value."""
SCALES = tl.constexpr(SCALES_BEHIND)
NARROW_DEPTH = 512
"""K chunk of narrow values: two products of a pair of FP8 blocks each. Four take 205 of the 227 KB of sm_90."""


@triton.constexpr_function
def chunk_depth(depth, columns, stored_as):
    """The K chunk of a matrix with so many columns, `depth` of bf16."""
    return math.gcd(depth if stored_as.format == Format.BF16 else NARROW_DEPTH, columns)


@triton.constexpr_function
def matrix_bytes(rows, columns, stored_as):
    """Bytes of one matrix of a stack, without its scales."""
    return rows * columns * BITS[stored_as.format] // 8


@triton.constexpr_function
def scale_bytes(rows, columns, stored_as):
    """Bytes of the scales of one matrix of a stack."""
    if stored_as.format == Format.FP8:
        return 4 * (rows // FP8_BLOCK) * (columns // FP8_BLOCK)
    return rows * (columns // MXFP4_BLOCK) if stored_as.format == Format.MXFP4 else 0


@triton.jit
def matrix_in(record, word):
    """Addresses of the matrix that a word of the record holds, and of its scales; int64, the latter 0 for bf16."""
    return tl.load(record + word), tl.load(record + word + SCALES)


@triton.jit
def add_chunk(
    acc, x, stride, rows, matrix, scales, row, first, K: tl.constexpr, DEPTH: tl.constexpr, STORAGE: tl.constexpr
):
    """As `gemv.add_chunk`; matrix, scales: addresses, as of `matrix_in`. STORAGE: a `Storage`."""
    if STORAGE.format == BF16:
        return gemv.add_chunk(acc, x, stride, rows, address_of(matrix, tl.bfloat16), row, first, K, DEPTH)
    elif STORAGE.format == FP8:
        values = address_of(matrix, tl.float8e4nv)
        # an expert's scales may begin at any multiple of four bytes
        block_scales = scales.to(tl.pointer_type(tl.float32))
        return fp8.add_chunk(acc, x, stride, rows, values, block_scales, row, first, K, DEPTH, STORAGE.layout)
    else:
        packed, block_scales = address_of(matrix, tl.uint8), address_of(scales, tl.uint8)
        return mxfp4.add_chunk(acc, x, stride, rows, packed, block_scales, row, first, K, DEPTH, STORAGE.layout)
