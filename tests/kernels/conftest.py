"""The interpreter as the kernel tests want it: repaired, exact in its products, and without its slowest spots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def interpreter_ready(pytestconfig: pytest.Config) -> Iterator[None]:
    if pytestconfig.option.markexpr == "gpu":
        yield
        return
    import numpy as np
    import torch
    from triton.runtime import interpreter

    from glm53_mono.kernels.interpreter import repair
    from tests.oracle.sglang_cpu import faster_interpreter

    torch.set_num_threads(1)
    repair()
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore", invalid="ignore"):
        patch.setattr(interpreter, "_get_np_dtype", faster_interpreter.cached_dtype(interpreter._get_np_dtype))
        called = faster_interpreter.device_call(interpreter.InterpretedFunction.__call__)
        patch.setattr(interpreter.InterpretedFunction, "__call__", called)
        builder = interpreter.InterpreterBuilder
        patch.setattr(builder, "create_dot", exact_dot(builder.create_dot))
        # Every integer sum is done again in int64 to see whether it overflowed; the GPU tests reach those sizes.
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield


def exact_dot(right: Callable[..., Any]) -> Callable[..., Any]:
    """A dot whose rows do not depend on where they stand: numpy's sgemm sums the rows of one matrix in several orders.

    Products of bf16 values added in fp64 are exact but for operands 2^28 apart, so any order gives the same bits.
    """
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    from glm53_mono.kernels.interpreter import _widen

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if d.data.dtype != np.float32:
            return right(self, a, b, d, *rest)
        wide = [_widen(handle.data, handle.dtype).astype(np.float64) for handle in (a, b, d)]
        return TensorHandle((wide[0] @ wide[1] + wide[2]).astype(np.float32), d.dtype)

    return create_dot


@pytest.fixture(scope="session")
def compiled() -> None:
    """Every variant that the GPU tests launch lies in Triton's cache: compiled side by side, a process each."""
    from tests.kernels import full_width

    for process in [full_width.start(name) for name in ("short", "verify", "other layouts")]:
        status, _, error = full_width.finished(process)
        assert status == 0, error
