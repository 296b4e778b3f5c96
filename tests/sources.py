"""What several tests ask of source texts and of modules."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def defined(source: str) -> set[str]:
    """Names of functions, classes and class fields that a source text defines."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


@contextmanager
def wrapped(wraps: Iterable[tuple[ModuleType, str, Wrap]]) -> Iterator[None]:
    """Functions of modules wrapped, each by its own wrap, for as long as the block lasts; a missing name raises."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, wrap in wraps:
            patch.setattr(module, name, wrap(getattr(module, name)))
        yield
