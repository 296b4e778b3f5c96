"""The repaired interpreter computes bf16 and fp8 as a GPU does; the one Triton ships does not.

Run as a script, it prints which probes the shipped interpreter gets right, as JSON: repairs stay in a process for good,
so the negative control needs a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    # Under pytest the conftest decides, before any kernel is declared.
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
import triton
import triton.language as tl
from packaging.version import Version
from triton.runtime.errors import InterpreterError

from glm53_mono.kernels import interpreter

ROOT = Path(__file__).resolve().parents[2]
N = 256
SEED = 20533


@triton.jit
def _round_trip(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def _arithmetic(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, a * b)
    tl.store(out + N + i, a + b)
    tl.store(out + 2 * N + i, a - b)
    tl.store(out + 3 * N + i, -a)
    tl.store(out + 4 * N + i, tl.where((a < b) & (a > -b), a, b))


@triton.jit
def _constant(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) * 0.3 + tl.full((N,), 1.7, tl.bfloat16))


@triton.jit
def _dot(x, y, out, M: tl.constexpr):
    i = tl.arange(0, M)
    at = i[:, None] * M + i[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


@triton.jit
def _reduce(x, out, N: tl.constexpr):
    values = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.sum(values, 0).to(tl.float32))
    tl.store(out + 1, tl.max(values, 0).to(tl.float32))
    tl.store(out + 2, tl.min(values, 0).to(tl.float32))
    tl.store(out + 3, tl.argmax(values, 0).to(tl.float32))


@triton.jit
def _runtime_float(x, factor, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) * factor)


@triton.jit
def _runtime_bool(x, double, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.where(double, 2.0, 1.0) * tl.load(x + i))


@triton.jit
def _fma(x, y, z, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.fma(tl.load(x + i), tl.load(y + i), tl.load(z + i)))


@triton.jit
def _drop_nan(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.maximum(tl.load(x + i), tl.load(y + i)))
    tl.store(out + N + i, tl.minimum(tl.load(x + i), tl.load(y + i)))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED + len(shape) + sum(shape)))


def _launch(kernel, expected: torch.Tensor, *inputs: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(expected)
    kernel[(1,)](*inputs, out, N=N)
    return out, expected


def _cast(dtype: torch.dtype, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    x = _random(N) * scale
    return _launch(_round_trip, x.to(dtype), x)


def _ties() -> tuple[torch.Tensor, torch.Tensor]:
    """Values exactly between two bf16 neighbours, an infinity, NaN, zeros and subnormals."""
    x = ((torch.arange(N) << 16) + 0x3F808000).to(torch.int32).view(torch.float32).clone()
    x[:6] = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 3.4e38])
    x[6:12] = torch.tensor([1e-39, -1e-39, 9.18e-41, 1e-45, 1.17e-38, -5e-41])
    return _launch(_round_trip, x.bfloat16(), x)


def _fp8_saturation() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1000, 1000, N)
    return _launch(_round_trip, x.clamp(-448, 448).to(torch.float8_e4m3fn), x)


def _every_fp8() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(N, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    return _launch(_round_trip, x.float(), x)


def _integer_to_bf16() -> tuple[torch.Tensor, torch.Tensor]:
    x = (_random(N) * 5000).to(torch.int32)
    return _launch(_round_trip, x.bfloat16(), x)


def _bf16_arithmetic() -> tuple[torch.Tensor, torch.Tensor]:
    a, b = _random(N).bfloat16(), _random(1, N)[0].bfloat16()
    return _launch(_arithmetic, torch.cat([a * b, a + b, a - b, -a, torch.where((a < b) & (a > -b), a, b)]), a, b)


def _bf16_constant() -> tuple[torch.Tensor, torch.Tensor]:
    x = _random(N).bfloat16()
    third, offset = torch.tensor(0.3).bfloat16(), torch.tensor(1.7).bfloat16()
    return _launch(_constant, x * third + offset, x)


def _narrow_dot(dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = (_random(16, 16) * scale).to(dtype), (_random(16, 16).T.contiguous() * scale).to(dtype)
    out = torch.empty(16, 16)
    _dot[(1,)](x, y, out, M=16)
    exact = (x.double() @ y.double()).float()
    return (out - exact).abs() <= 1e-5 * scale * scale, torch.ones(16, 16, dtype=torch.bool)


def _exact_dot() -> tuple[torch.Tensor, torch.Tensor]:
    x, y, out = _random(16, 16), _random(16, 16).T.contiguous(), torch.empty(16, 16)
    _dot[(1,)](x, y, out, M=16)
    return out, (x.double() @ y.double()).float()


def _bf16_reductions() -> tuple[torch.Tensor, torch.Tensor]:
    x = _random(N).bfloat16()
    whole = x.float()
    expected = torch.stack([whole.sum().bfloat16().float(), whole.max(), whole.min(), whole.argmax().float()])
    return _launch(_reduce, expected, x)


def _float_argument() -> tuple[torch.Tensor, torch.Tensor]:
    x = _random(N).bfloat16()
    return _launch(_runtime_float, x.float() * torch.tensor(0.3), x, 0.3)


def _bool_argument() -> tuple[torch.Tensor, torch.Tensor]:
    x = _random(N)
    return _launch(_runtime_bool, x * 2, x, True)


def _one_rounding() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = _random(N), _random(1, N)[0]
    z = -(x * y)
    return _launch(_fma, (x.double() * y.double() + z.double()).float(), x, y, z)


def _nan_dropped() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = _random(N), _random(1, N)[0]
    x[::3], y[1::3] = float("nan"), float("nan")
    return _launch(_drop_nan, torch.cat([torch.fmax(x, y), torch.fmin(x, y)]), x, y)


PROBES: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "fp32 to bf16": lambda: _cast(torch.bfloat16),
    "fp32 to bf16, ties and special values": _ties,
    "fp32 to e4m3": lambda: _cast(torch.float8_e4m3fn),
    "fp32 to e4m3, subnormal results": lambda: _cast(torch.float8_e4m3fn, 0.004),
    "fp32 to e4m3, saturating": _fp8_saturation,
    "fp32 to e5m2": lambda: _cast(torch.float8_e5m2),
    "e4m3 to fp32, every value": _every_fp8,
    "int32 to bf16": _integer_to_bf16,
    "bf16 arithmetic": _bf16_arithmetic,
    "bf16 constant": _bf16_constant,
    "bf16 dot": lambda: _narrow_dot(torch.bfloat16, 1.0),
    "e4m3 dot": lambda: _narrow_dot(torch.float8_e4m3fn, 0.004),
    "fp32 dot, summed exactly": _exact_dot,
    "bf16 reductions": _bf16_reductions,
    "run-time float": _float_argument,
    "run-time bool": _bool_argument,
    "fma rounds once": _one_rounding,
    "NaN dropped by maximum and minimum": _nan_dropped,
}

RIGHT_AS_SHIPPED = {"e4m3 dot"}
"""What the repairs must not break; every other probe fails without them."""

RIGHT_SINCE_TRITON_3_8 = {"run-time bool", "NaN dropped by maximum and minimum"}


def _is_right(name: str) -> bool:
    found, expected = PROBES[name]()
    return torch.equal(found.float().nan_to_num(12345.0), expected.float().nan_to_num(12345.0))


def _is_right_without_raising(name: str) -> bool:
    """A shipped interpreter may raise instead of answering; that counts as wrong."""
    try:
        return _is_right(name)
    except (InterpreterError, ValueError):
        return False


@pytest.fixture(scope="module")
def repaired() -> None:
    interpreter.repair()
    interpreter.repair()


@pytest.mark.parametrize("name", PROBES)
def test_repaired_interpreter_is_right(repaired: None, name: str) -> None:
    assert _is_right(name)


def test_shipped_interpreter_is_wrong() -> None:
    """Each probe fails on the interpreter as Triton ships it, so each repair is needed and each probe can fail."""
    answer = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    right = {name for name, is_right in json.loads(answer.stdout).items() if is_right}
    expected = set(RIGHT_AS_SHIPPED)
    if Version(triton.__version__) >= Version("3.8"):
        expected |= RIGHT_SINCE_TRITON_3_8
    assert right == expected


if __name__ == "__main__":
    print(json.dumps({name: _is_right_without_raising(name) for name in PROBES}))
