"""Two slow spots of Triton's interpreter; without them SGLang's kernels compute the same in two thirds of the time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


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
