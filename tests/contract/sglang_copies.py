"""Copies of SGLang's source with one seeded change each, for tests that want to see the contract break."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

from glm53_mono.upstream.source import SourceTree

Edit = Callable[[str], str]


def changed_copy(pristine: SourceTree, folder: Path, edits: dict[str, Edit]) -> SourceTree:
    """A tree like `pristine`, with copies of some modules changed; the others are not parsed again.

    Args:
        edits: module name -> its new text from its old.
    """
    root = folder / "sglang"
    for module, edit in edits.items():
        source = pristine.path(module)
        old = source.read_text(encoding="utf-8")
        new = edit(old)
        assert new != old, f"the edit of {module} changed nothing"
        copy = root / source.relative_to(pristine.root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(new, encoding="utf-8")
    kept = {name: parsed for name, parsed in pristine.modules.items() if name not in edits}
    return SourceTree(root=root, modules=kept)


def replacing(old: str, new: str, *, inside: str | None = None) -> Edit:
    """Replace a pattern once, within the class or `Class.method` named by `inside`."""

    def edit(text: str) -> str:
        start, end = _span(text, inside) if inside else (0, len(text))
        changed, count = re.subn(old, new, text[start:end], count=1)
        assert count == 1, f"{old!r} does not occur in {inside or 'the module'}"
        return text[:start] + changed + text[end:]

    return edit


def moving(method: str, *, from_class: str, to_class: str | None) -> Edit:
    """Move a method to another class of the file, or take it away where that is None."""

    def edit(text: str) -> str:
        start, end = _span(text, f"{from_class}.{method}")
        body = text[start:end]
        text = text[:start] + "    pass\n" + text[end:]
        return text if to_class is None else adding(body, to_class=to_class)(text)

    return edit


def adding(body: str, *, to_class: str) -> Edit:
    """Append statements, indented by four, to a class."""

    def edit(text: str) -> str:
        _, end = _span(text, to_class)
        return f"{text[:end]}\n{body}{text[end:]}"

    return edit


def composed(*edits: Edit) -> Edit:
    """One edit after the other."""

    def edit(text: str) -> str:
        for step in edits:
            text = step(text)
        return text

    return edit


def _span(text: str, path: str) -> tuple[int, int]:
    """Offsets of a class or function, its decorators included, by dotted name."""
    body: list[ast.stmt] = ast.parse(text).body
    node = None
    for name in path.split("."):
        node = next(child for child in body if getattr(child, "name", None) == name)
        body = node.body
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: first - 1])), sum(map(len, lines[: node.end_lineno]))
