"""Repairs of Triton's CPU interpreter, without which a kernel that touches bf16 or fp8 runs and is wrong.

Triton keeps bf16 and fp8 values in numpy arrays of their bit patterns (`triton/runtime/interpreter.py`,
`_get_np_dtype`) and forgets so in many places. `repair()` mends these defects of Triton 3.6 to 3.8:

1. a cast from fp32 to bf16 or fp8 truncates, where a GPU rounds to nearest even; fp8 does not saturate as sm_90 does;
2. a cast from an integer to bf16 stores the integer as a bit pattern, and an fp8 NaN becomes a number;
3. arithmetic, comparison, minimum, maximum, clamp and fma of two bf16 or fp8 operands work on the bit patterns;
4. `tl.dot` multiplies bf16 bit patterns;
5. sums, minima, maxima and scans over bf16 or fp8 reduce the bit patterns;
6. a bf16 or fp8 constant (`x * 0.5` with a bf16 `x`) raises, because the builder has no `get_bf16` and no `get_fp8*`;
7. a run-time float argument stays a Python number, which takes its operand's type; compiled Triton passes an fp32
scalar;
8. Triton 3.6 alone: a run-time bool argument raises; `tl.minimum`, `tl.maximum` and `tl.clamp` propagate NaN, where a
GPU drops it;
9. `tl.fma` rounds the product before it adds, where a GPU rounds once;
10. a row of an fp32 `tl.dot` has other bits in another place: numpy's sgemm sums the rows of one matrix in several
orders. Sums of products are fp64 here: of bf16 values exact but for operands 2^28 apart, so any order gives the same.
11. `tl.dot_scaled` reads a bf16 operand through fp16; mended for bf16 times scaled e2m1, which is all that is here.

It also takes the interpreter's slowest spots out (`faster_interpreter`), and the check of every integer sum for
overflow: tests on a GPU reach the sizes that could.

What stays: fp32 dots are exact where sm_90 may use TF32, programs of a grid run one after another, and inline assembly
is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

from glm53_mono.kernels.faster_interpreter import cached_dtype, device_call

_COMPARISONS = frozenset({np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal})


@dataclass(frozen=True)
class _Narrow:
    """A float format that numpy lacks: torch's type of the same bits, and the largest finite value to saturate at."""

    torch_dtype: torch.dtype
    bits: type[np.unsignedinteger]
    torch_bits: torch.dtype
    saturates_at: float | None


_NARROW = {
    tl.bfloat16: _Narrow(torch.bfloat16, np.uint16, torch.int16, None),
    tl.float8e4nv: _Narrow(torch.float8_e4m3fn, np.uint8, torch.uint8, 448.0),
    tl.float8e5: _Narrow(torch.float8_e5m2, np.uint8, torch.uint8, 57344.0),
}


def repair() -> None:
    """Mend the interpreter of this process for good; a second call changes nothing.

    Call it before the first launch of a kernel under `TRITON_INTERPRET=1`. It does not touch compiled kernels.
    """
    if InterpreterBuilder.cast_impl is _cast:
        return
    builder = InterpreterBuilder
    builder.create_fp_to_fp = _rounding_cast(builder.create_fp_to_fp)
    builder.cast_impl = _cast
    builder.binary_op = _binary(builder.binary_op)
    builder.unary_op = _unary(builder.unary_op)
    builder.create_dot = _dot
    builder.create_dot_scaled = _dot_scaled
    builder.create_fma = _fma
    builder.create_clampf = _clamp
    builder.create_minnumf = functools.partialmethod(builder.binary_op, op=np.fmin)
    builder.create_maxnumf = functools.partialmethod(builder.binary_op, op=np.fmax)
    builder.get_bf16 = functools.partialmethod(_constant, dtype=tl.bfloat16)
    builder.get_fp8e4nv = functools.partialmethod(_constant, dtype=tl.float8e4nv)
    builder.get_fp8e5 = functools.partialmethod(_constant, dtype=tl.float8e5)
    for owner, names in ((ReduceOps, ("sum", "min_max")), (ScanOps, ("cumsum", "cumprod"))):
        for name in names:
            setattr(owner, name, _reduction(getattr(owner, name)))
    interpreter._implicit_cvt = _argument(interpreter._implicit_cvt)
    interpreter._get_np_dtype = cached_dtype(interpreter._get_np_dtype)
    InterpretedFunction.__call__ = device_call(InterpretedFunction.__call__)
    unchecked = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = unchecked


def _is_narrow(dtype: tl.dtype) -> bool:
    return dtype.scalar in _NARROW


def _widen(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """The values of an array in the interpreter's storage: fp32 for bf16 and fp8, else the array itself."""
    narrow = _NARROW.get(dtype.scalar)
    if narrow is None:
        return data
    if narrow.bits is np.uint16:
        return (np.ascontiguousarray(data).astype(np.uint32) << 16).view(np.float32)
    return torch.from_numpy(np.array(data, dtype=np.uint8, copy=True)).view(narrow.torch_dtype).float().numpy()


def _narrow(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """The storage of values rounded to nearest even in `dtype`; values of a type that numpy has pass unchanged."""
    narrow = _NARROW.get(dtype.scalar)
    if narrow is None:
        return data
    values = torch.from_numpy(np.array(data, dtype=np.float32, copy=True))
    if narrow.saturates_at is not None:
        values = values.clamp(-narrow.saturates_at, narrow.saturates_at)
    return values.to(narrow.torch_dtype).view(narrow.torch_bits).numpy().view(narrow.bits)


def _cast(self: InterpreterBuilder, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
    values = _widen(src.data, src.dtype)
    stored = _narrow(values, dst_type) if _is_narrow(dst_type) else values.astype(interpreter._get_np_dtype(dst_type))
    return TensorHandle(stored, dst_type.scalar)


def _rounding_cast(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def create_fp_to_fp(
        self: InterpreterBuilder, src: TensorHandle, dst_type: tl.dtype, rounding_mode: Any
    ) -> TensorHandle:
        if rounding_mode == ir.ROUNDING_MODE.RTZ:
            return original(self, src, dst_type, rounding_mode)
        return _cast(self, src, dst_type)

    return create_fp_to_fp


def _binary(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def binary_op(
        self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., Any]
    ) -> TensorHandle:
        if not (_is_narrow(lhs.dtype) and _is_narrow(rhs.dtype)):
            return original(self, lhs, rhs, op)
        result = op(_widen(lhs.data, lhs.dtype), _widen(rhs.data, rhs.dtype))
        if op in _COMPARISONS:
            return TensorHandle(result, tl.int1)
        return TensorHandle(_narrow(result, lhs.dtype), lhs.dtype.scalar)

    return binary_op


def _unary(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def unary_op(self: InterpreterBuilder, arg: TensorHandle, op: Callable[..., Any]) -> TensorHandle:
        if not _is_narrow(arg.dtype):
            return original(self, arg, op)
        return TensorHandle(_narrow(op(_widen(arg.data, arg.dtype)), arg.dtype), arg.dtype.scalar)

    return unary_op


def _dot(
    self: InterpreterBuilder,
    a: TensorHandle,
    b: TensorHandle,
    d: TensorHandle,
    input_precision: Any,
    max_num_imprecise_acc: int,
) -> TensorHandle:
    accumulator = _widen(d.data, d.dtype)
    exact = np.float64 if accumulator.dtype == np.float32 else accumulator.dtype
    product = _widen(a.data, a.dtype).astype(exact) @ _widen(b.data, b.dtype).astype(exact)
    sums = (product + accumulator).astype(accumulator.dtype)
    return TensorHandle(_narrow(sums, d.dtype), d.dtype.scalar)


def _dot_scaled(
    self: InterpreterBuilder, a: TensorHandle, a_scale: TensorHandle | None, a_format: Any,
    b: TensorHandle, b_scale: TensorHandle | None, b_format: Any,
    fast_math: bool, a_k_pack: bool, b_k_pack: bool, d: TensorHandle,
) -> TensorHandle:  # fmt: skip
    """a bf16 [M, K], b packed e2m1 [K / 2, N], b_scale E8M0 [N, K / 32]; a scale of 0 is 0 and 255 NaN, as compiled."""
    if a_scale is not None or not (
        a.dtype.scalar == tl.bfloat16 and b_format == ir.ScaleDotElemTypeTY.E2M1 and b_k_pack
    ):
        raise NotImplementedError(f"dot_scaled of {a.dtype} and {b_format} is not mended")
    codes = np.stack((b.data & 15, b.data >> 4), 1).reshape(-1, b.data.shape[1])
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7] * np.where(codes >= 8, -1, 1)
    scales = (b_scale.data.astype(np.uint32) << 23).view(np.float32)
    scales = np.where(b_scale.data == 255, np.float32(np.nan), scales)
    weights = values.astype(np.float32) * np.repeat(scales.T, 32, axis=0)
    wide = TensorHandle(weights, tl.float32)
    return self.create_dot(TensorHandle(_widen(a.data, a.dtype), tl.float32), wide, d, None, 0)


def _fma(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    wide = [_widen(handle.data, handle.dtype) for handle in (x, y, z)]
    if wide[2].dtype == np.float32:
        exact = [values.astype(np.float64) for values in wide]
        return TensorHandle(_narrow((exact[0] * exact[1] + exact[2]).astype(np.float32), z.dtype), z.dtype.scalar)
    return TensorHandle(wide[0] * wide[1] + wide[2], z.dtype.scalar)


def _clamp(
    self: InterpreterBuilder, arg: TensorHandle, low: TensorHandle, high: TensorHandle, propagate_nans: Any
) -> TensorHandle:
    drops_nan = propagate_nans == ir.PROPAGATE_NAN.NONE
    at_least, at_most = (np.fmax, np.fmin) if drops_nan else (np.maximum, np.minimum)
    return self.binary_op(self.binary_op(arg, low, at_least), high, at_most)


def _constant(self: InterpreterBuilder, value: float, dtype: tl.dtype) -> TensorHandle:
    return TensorHandle(_narrow(np.array([value], dtype=np.float32), dtype), dtype)


def _reduction(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(self: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        values = input[0] if isinstance(input, tuple) else input
        if not _is_narrow(values.dtype):
            return original(self, input, *args, **kwargs)
        wide = self.to_tensor(_widen(values.handle.data, values.dtype), tl.float32)
        result = original(self, wide, *args, **kwargs)
        return _restored(self, result, values.dtype.scalar)

    return reduce


def _restored(ops: Any, result: Any, dtype: tl.dtype) -> Any:
    """A reduction's fp32 results as `dtype`; indices pass unchanged."""
    if isinstance(result, list | tuple):
        return type(result)(_restored(ops, item, dtype) for item in result)
    if result.dtype.scalar != tl.float32:
        return result
    bits = _narrow(result.handle.data, dtype)
    return ops.to_tensor(bits if isinstance(result.type, tl.block_type) else bits.item(), dtype)


def _argument(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def implicit_cvt(arg: Any) -> Any:
        if isinstance(arg, bool):
            return tl.tensor(TensorHandle(np.array([arg], dtype=np.bool_), tl.int1), tl.int1)
        if isinstance(arg, float):
            return tl.tensor(TensorHandle(np.array([arg], dtype=np.float32), tl.float32), tl.float32)
        return original(arg)

    return implicit_cvt
