"""The installed SGLang as syntax trees: which class owns what, without importing a line of it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any

PACKAGE = "sglang"


class SourceError(RuntimeError):
    """SGLang's source cannot be found or parsed; the message names the path."""


def installed_root() -> Path:
    """The folder of the `sglang` package that an import would take.

    Raises:
        SourceError: no such package, or one without a folder of Python files.
    """
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except ValueError:  # a module put into sys.modules without a spec
        spec = None
    if spec is None:
        raise SourceError(f"package {PACKAGE} is not installed")
    for location in spec.submodule_search_locations or ():
        if (Path(location) / "__init__.py").is_file():
            return Path(location)
    raise SourceError(f"package {PACKAGE} has no folder of Python files (found at {spec.origin})")


@dataclass(frozen=True)
class ClassSource:
    """A class statement and the module it stands in; `path` is its dotted name inside that module."""

    module: ModuleSource
    path: str
    node: ast.ClassDef

    def __str__(self) -> str:
        return f"{self.module.name}.{self.path}"

    def function(self, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The method of that name in the class's own body."""
        return _last(self._statements.get(name, ()), ast.FunctionDef | ast.AsyncFunctionDef)

    def attribute(self, name: str) -> ast.Assign | ast.AnnAssign | None:
        """The assignment or annotation of that name in the class's own body."""
        return _last(self._statements.get(name, ()), ast.Assign | ast.AnnAssign)

    def nested(self, name: str) -> ClassSource | None:
        """The class of that name in the class's own body."""
        node = _last(self._statements.get(name, ()), ast.ClassDef)
        return None if node is None else ClassSource(self.module, f"{self.path}.{name}", node)

    @cached_property
    def _statements(self) -> dict[str, list[ast.stmt]]:
        return _by_name(self.node.body)


@dataclass(eq=False)
class ModuleSource:
    """One parsed module and its top-level names."""

    name: str
    is_package: bool
    tree: ast.Module
    _classes: dict[str, ClassSource | None] = field(default_factory=dict, repr=False)

    @cached_property
    def statements(self) -> dict[str, list[ast.stmt]]:
        """Top-level name -> every statement that binds it, those under `if` and `try` included."""
        return _by_name(self.tree.body)

    def function(self, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The top-level function of that name."""
        return _last(self.statements.get(name, ()), ast.FunctionDef | ast.AsyncFunctionDef)

    def constant(self, name: str) -> ast.Assign | ast.AnnAssign | None:
        """The top-level assignment of that name."""
        return _last(self.statements.get(name, ()), ast.Assign | ast.AnnAssign)

    def own_class(self, path: str) -> ClassSource | None:
        """The class that the module defines itself, nested ones by their dotted path."""
        if path not in self._classes:
            outer, _, name = path.rpartition(".")
            if outer:
                owner = self.own_class(outer)
                self._classes[path] = None if owner is None else owner.nested(name)
            else:
                node = _last(self.statements.get(name, ()), ast.ClassDef)
                self._classes[path] = None if node is None else ClassSource(self, name, node)
        return self._classes[path]

    def imported(self, name: str) -> tuple[str, str | None] | None:
        """(module, attribute) that an import binds the name to; the attribute is None for a whole module."""
        for node in self.statements.get(name, ()):
            if isinstance(node, ast.ImportFrom):
                alias = next(alias for alias in node.names if (alias.asname or alias.name) == name)
                return self._absolute(node), alias.name
            if isinstance(node, ast.Import):
                alias = next(alias for alias in node.names if (alias.asname or alias.name.split(".")[0]) == name)
                return (alias.name if alias.asname else name), None
        return None

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


@dataclass
class SourceTree:
    """Parses modules of one SGLang on demand; `root` is the folder of its `sglang` package."""

    root: Path
    modules: dict[str, ModuleSource | None] = field(default_factory=dict)
    _assigned: dict[tuple[str, str], dict[str, list[ast.expr]]] = field(default_factory=dict, repr=False)

    def path(self, module: str) -> Path | None:
        """The file of a module, or None where this SGLang has none."""
        parts = module.split(".")
        if parts[0] != PACKAGE:
            return None
        base = self.root.joinpath(*parts[1:])
        for file in (base / "__init__.py", base.with_name(f"{base.name}.py")):
            if file.is_file():
                return file
        return None

    def module(self, name: str) -> ModuleSource | None:
        """The parsed module, or None where this SGLang has none.

        Raises:
            SourceError: its file is not Python.
        """
        if name not in self.modules:
            file = self.path(name)
            self.modules[name] = None if file is None else self._parse(name, file)
        return self.modules[name]

    def find_class(self, module: str, path: str) -> ClassSource | None:
        """The class that `module` defines itself, nested ones by their dotted path; imports do not count."""
        source = self.module(module)
        return None if source is None else source.own_class(path)

    def resolve_class(self, module: str, path: str, depth: int = 8) -> ClassSource | None:
        """The class behind a name of `module`, followed through imports inside the package."""
        source = self.module(module)
        if source is None or depth == 0:
            return None
        own = source.own_class(path)
        if own is not None:
            return own
        head, _, rest = path.partition(".")
        target = source.imported(head)
        if target is None:
            return None
        origin, attribute = target
        if attribute is None:
            return self.resolve_class(origin, rest, depth - 1) if rest else None
        return self.resolve_class(origin, f"{attribute}.{rest}" if rest else attribute, depth - 1)

    def definition(self, module: str, name: str, depth: int = 8) -> str | None:
        """ "module.name" of the class or function behind a name of `module`, followed through imports."""
        source = self.module(module)
        if source is None or depth == 0:
            return None
        if source.own_class(name) or source.function(name):
            return f"{module}.{name}"
        target = source.imported(name)
        return self.definition(*target, depth - 1) if target and target[1] else None

    def ancestry(self, owner: ClassSource) -> list[ClassSource]:
        """The class and its bases inside the package, depth first from left to right."""
        order: list[ClassSource] = []
        pending = [owner]
        while pending:
            current = pending.pop(0)
            if any(current.node is seen.node for seen in order):
                continue
            order.append(current)
            pending = [*self._bases(current), *pending]
        return order

    def method(
        self, owner: ClassSource, name: str
    ) -> tuple[ClassSource, ast.FunctionDef | ast.AsyncFunctionDef] | None:
        """The method as an instance of the class would find it, with the class that defines it."""
        return _first(self.ancestry(owner), name)

    def assigned(self, owner: ClassSource, within: str = "__init__") -> dict[str, list[ast.expr]]:
        """Attributes that a method gives to its instance -> the assigned expressions.

        Methods that it calls on `self` or on `super()` count as part of it.
        """
        key = (str(owner), within)
        if key not in self._assigned:
            self._assigned[key] = self._collect_assigned(owner, within)
        return self._assigned[key]

    def _collect_assigned(self, owner: ClassSource, within: str) -> dict[str, list[ast.expr]]:
        ancestry = self.ancestry(owner)
        found: dict[str, list[ast.expr]] = {}
        visited: set[int] = set()
        pending = [_first(ancestry, within)]
        while pending:
            target = pending.pop()
            if target is None or id(target[1]) in visited:
                continue
            definer, function = target
            visited.add(id(function))
            after = next(index for index, cls in enumerate(ancestry) if cls.node is definer.node) + 1
            for node in _own_nodes(function):
                for name, value in _self_targets(node):
                    found.setdefault(name, []).append(value)
                called = _called_on(node, "self")
                if called:
                    pending.append(_first(ancestry, called))
                called = _called_on_super(node)
                if called:
                    pending.append(_first(ancestry[after:], called))
        return found

    def _bases(self, owner: ClassSource) -> list[ClassSource]:
        bases = []
        for expression in owner.node.bases:
            name = _dotted(expression.value if isinstance(expression, ast.Subscript) else expression)
            if name is None:
                continue
            scope = owner.path.rpartition(".")[0]
            base = owner.module.own_class(f"{scope}.{name}") if scope else None
            base = base or self.resolve_class(owner.module.name, name)
            if base is not None:
                bases.append(base)
        return bases

    def _parse(self, name: str, file: Path) -> ModuleSource:
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
        except (OSError, ValueError, SyntaxError) as error:
            raise SourceError(f"{file} does not parse: {error}") from error
        return ModuleSource(name=name, is_package=file.name == "__init__.py", tree=tree)


def _by_name(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    names: dict[str, list[ast.stmt]] = {}
    for node in _flat(body):
        for name in _bound_names(node):
            names.setdefault(name, []).append(node)
    return names


def _last(nodes: Iterable[ast.stmt], kinds: type | UnionType) -> Any:
    """The last statement of a kind: the one that a reader of the name gets."""
    found = [node for node in nodes if isinstance(node, kinds)]
    return found[-1] if found else None


def _first(ancestry: list[ClassSource], name: str):
    for cls in ancestry:
        function = cls.function(name)
        if function is not None:
            return cls, function
    return None


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, those inside `if`, `try` and `with` included, those of nested scopes not."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for block in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from _flat(handler.body)


def _bound_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef) or _is_function(node):
        return [node.name]
    if isinstance(node, ast.Import):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _own_nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Every node of a function's body but those of functions and classes nested in it."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if _is_function(node) or isinstance(node, ast.ClassDef | ast.Lambda):
            continue
        yield node
        pending.extend(ast.iter_child_nodes(node))


def _self_targets(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets, value = [node.target], node.value
    else:
        return
    for target in targets:
        for item in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "self":
                yield item.attr, value


def _called_on(node: ast.AST, instance: str) -> str | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        holder = node.func.value
        if isinstance(holder, ast.Name) and holder.id == instance:
            return node.func.attr
    return None


def _called_on_super(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        holder = node.func.value
        if isinstance(holder, ast.Call) and isinstance(holder.func, ast.Name) and holder.func.id == "super":
            return node.func.attr
    return None


def _dotted(expression: ast.expr) -> str | None:
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Attribute):
        head = _dotted(expression.value)
        return None if head is None else f"{head}.{expression.attr}"
    return None
