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
VALUES = {Format.BF16: tl.bfloat16, Format.FP8: tl.float8e4nv, Format.MXFP4: tl.uint8}
"""As a loop loads them; two of MXFP4 at once."""
SCALES = tl.constexpr(SCALES_BEHIND)
NARROW_DEPTH = 512
"""K chunk of narrow values: two products of a pair of FP8 blocks each. Four take 205 of the 227 KB of sm_90."""


@triton.constexpr_function
def chunk_depth(depth, columns, stored_as):
    """The K chunk of a matrix with so many columns, `depth` of bf16."""
    return math.gcd(depth if stored_as.format == Format.BF16 else NARROW_DEPTH, columns)


@triton.constexpr_function
def value_type(stored_as):
    """The dtype as which a loop loads values."""
    return VALUES[stored_as.format]


@triton.constexpr_function
def matrix_items(rows, columns, stored_as):
    """Items of `value_type` in one matrix of a stack."""
    return rows * columns // (2 if stored_as.format == Format.MXFP4 else 1)


@triton.constexpr_function
def matrix_bytes(rows, columns, stored_as):
    """Bytes of one matrix of a stack, without its scales."""
    return matrix_items(rows, columns, stored_as) * VALUES[stored_as.format].primitive_bitwidth // 8


@triton.constexpr_function
def scale_bytes(rows, columns, stored_as):
    """Bytes of the scales of one matrix of a stack."""
    if stored_as.format == Format.FP8:
        return 4 * (rows // FP8_BLOCK) * (columns // FP8_BLOCK)
    return rows * (columns // MXFP4_BLOCK) if stored_as.format == Format.MXFP4 else 0


@triton.jit
def matrix_in(record, word, STORAGE: tl.constexpr):
    """The matrix that a word of the record points to, and its scales' address: int64, 0 for bf16."""
    return address_of(tl.load(record + word), value_type(STORAGE)), tl.load(record + word + SCALES)


@triton.jit
def add_chunk(
    acc, x, stride, rows, matrix, scales, row, first, K: tl.constexpr, DEPTH: tl.constexpr, STORAGE: tl.constexpr,
    BACKEND: tl.constexpr,
):  # fmt: skip
    """As `gemv.add_chunk`; matrix, scales: as of `matrix_in`. STORAGE: a `Storage`."""
    if STORAGE.format == BF16:
        return gemv.add_chunk(acc, x, stride, rows, matrix, row, first, K, DEPTH)
    elif STORAGE.format == FP8:
        # an expert's scales may begin at any multiple of four bytes
        block_scales = scales.to(tl.pointer_type(tl.float32))
        return fp8.add_chunk(acc, x, stride, rows, matrix, block_scales, row, first, K, DEPTH, STORAGE.layout, BACKEND)
    else:
        block_scales = address_of(scales, tl.uint8)
        return mxfp4.add_chunk(
            acc, x, stride, rows, matrix, block_scales, row, first, K, DEPTH, STORAGE.layout, BACKEND
        )
