"""Three slow spots of Triton's interpreter; without them kernels compute the same in half the time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

FRAME_SLOTS = 33_000
"""Just over half of 512 KiB in pointers: CPython rounds the chunk up to that, and half of it stays free."""


def cached_dtype(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`interpreter._get_np_dtype`, which builds a table of all types for every value it makes."""
    import triton.language as tl

    of_scalar = functools.cache(original)

    def get_np_dtype(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return original(element) if isinstance(element, tl.pointer_type) else of_scalar(element)

    return get_np_dtype


def device_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """`InterpretedFunction.__call__`, which rebinds every builtin of `tl` for each call of a device function.

    Inside a launch they are bound already, unless the function sees a module of `tl` that its kernel does not see.
    """
    import triton.language as tl
    from triton.runtime.errors import InterpreterError

    @functools.cache
    def languages(function: Callable[..., Any]) -> tuple[Any, ...]:
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return tuple(module for module in modules if module in (tl, tl.core))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(tl.core.is_builtin(language.load) for language in languages(self.fn)):
            return original(self, *args, **kwargs)
        function = self.rewrite()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    return call


def with_room_for_frames(run: Callable[[], Result]) -> Result:
    """Call `run` where the frames of a few hundred nested calls fit into one chunk of CPython's frame stack.

    CPython maps a new chunk of 16 KiB when a call does not fit into the present one, and unmaps it when the call
    returns (CPython 3.11, Python/pystate.c, `push_chunk`). A loop that sits at such a border, as the interpreter's
    happens to do below pytest, pays two system calls and page faults for every call: 40 % of all time. One frame with
    very many local variables makes a chunk that is large enough for all frames above it.
    """
    return _roomy_frame()(run)


@functools.cache
def _roomy_frame() -> Callable[[Callable[[], Result]], Result]:
    unused = " = ".join(f"slot_{number}" for number in range(FRAME_SLOTS))
    scope: dict[str, Any] = {}
    exec(f"def roomy(run):\n    if False:\n        {unused} = None\n    return run()\n", scope)
    return scope["roomy"]
