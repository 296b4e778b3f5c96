"""What this package reads of SGLang, as data, and the check that a given SGLang still offers it.

A read names its owner: a name that merely still occurs in the file satisfies nothing. The check parses the source files
and imports none of them, so it runs without a GPU, without torch, and on an SGLang that no longer imports.
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from glm53_mono.upstream.source import ClassSource, SourceTree

ANY = object()
"""Stands for a value, or a default, that nothing depends on."""


class Kind(enum.Enum):
    """What a read finds at its owner."""

    MODULE = "module"
    CLASS = "class"
    ALIAS = "name imported from another module"
    FUNCTION = "function"
    METHOD = "method"
    PROPERTY = "property"
    FIELD = "field of the class body"
    CONSTANT = "constant"
    ASSIGNED = "attribute assigned on self"
    REGISTERED = "parameter registered by create_weights"
    CALL = "call"
    MARKED = "attribute set on what a function is handed"


@dataclass(frozen=True)
class Read:
    """One thing that this package reads of SGLang.

    Attributes:
        module: the module that defines the owner, or the name itself where `owner` is None.
        owner: dotted class name inside the module; for `Kind.CALL` and `Kind.MARKED` the function (or `Class.method`)
            that contains it.
        attribute: the name read; for `Kind.CALL` the source of the callee.
        kind: what the name must be.
        purpose: what it is read for.
        signature: parameters as Python source, `self` left out; a default is written where we depend on it. Positional
            ones must come first and in this order. None: not called by us.
        within: for `Kind.ASSIGNED` the method that assigns, or calls what assigns.
        closed: no parameter beyond `signature` may exist, since we implement the function; otherwise others may, if
            they have defaults.
        value: of a constant or field (a literal); of an alias ("module.Class"); of an assigned attribute the names of
            the classes that may be constructed for it; of a call or a mark its whole source.
    """

    module: str
    owner: str | None
    attribute: str
    kind: Kind
    purpose: str
    signature: str | None = None
    closed: bool = False
    value: object = ANY
    within: str = "__init__"

    @property
    def name(self) -> str:
        """Owner and attribute, the short name in messages."""
        return f"{self.owner or self.module.rpartition('.')[2]}.{self.attribute}"


@dataclass(frozen=True)
class OneOf:
    """Alternatives of one read: exactly one option must hold, each option in full."""

    name: str
    options: tuple[tuple[Read, ...], ...]


@dataclass(frozen=True)
class Drift:
    """A read that does not hold."""

    read: str
    place: str
    purpose: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.read} ({self.place}; read for {self.purpose}): expected {self.expected}, found {self.found}"


def each_read(reads: Iterable[Read | OneOf]) -> Iterator[Read]:
    """Every single read, those of all alternatives included."""
    for entry in reads:
        if isinstance(entry, OneOf):
            for option in entry.options:
                yield from option
        else:
            yield entry


def check(reads: Iterable[Read | OneOf], tree: SourceTree) -> list[Drift]:
    """The reads that do not hold in a SGLang source tree, in the order of `reads`.

    Raises:
        SourceError: a file of the tree is not Python.
    """
    drifts: list[Drift] = []
    for entry in reads:
        if isinstance(entry, OneOf):
            drifts += _check_alternatives(entry, tree)
        else:
            drifts += _check_one(entry, tree)
    return drifts


def _check_alternatives(entry: OneOf, tree: SourceTree) -> list[Drift]:
    failures = [[drift for read in option for drift in _check_one(read, tree)] for option in entry.options]
    holding = [option for option, failed in zip(entry.options, failures, strict=True) if not failed]
    if len(holding) == 1:
        return []
    labels = [" + ".join(read.name for read in option) for option in entry.options]
    if holding:
        found = "both: " + "; ".join(" + ".join(read.name for read in option) for option in holding)
    else:
        found = "neither: " + "; ".join(str(failed[0]) for failed in failures)
    first = entry.options[0][0]
    return [Drift(entry.name, first.module, first.purpose, "exactly one of " + " | ".join(labels), found)]


def _check_one(read: Read, tree: SourceTree) -> list[Drift]:
    expected, found = _CHECKS[read.kind](read, tree)
    if expected == found:
        return []
    place = f"{read.kind.value} of {read.module}" + (f".{read.owner}" if read.owner else "")
    return [Drift(read.name, place, read.purpose, expected, found)]


HOLDS = ("", "")
"""What a check answers when a read holds: nothing expected that was not found."""


def _missing_owner(read: Read, tree: SourceTree) -> tuple[str, str]:
    if tree.module(read.module) is None:
        return f"module {read.module}", "no such module"
    found = tree.resolve_class(read.module, read.owner or read.attribute)
    return f"class {read.owner or read.attribute} in {read.module}", "no such class" if found is None else f"{found}"


def _check_module(read: Read, tree: SourceTree) -> tuple[str, str]:
    name = f"{read.module}.{read.attribute}"
    return HOLDS if tree.module(name) else (f"module {name}", "no such module")


def _check_class(read: Read, tree: SourceTree) -> tuple[str, str]:
    return HOLDS if tree.find_class(read.module, read.attribute) else _missing_owner(read, tree)


def _check_alias(read: Read, tree: SourceTree) -> tuple[str, str]:
    found = tree.definition(read.module, read.attribute)
    return f"{read.attribute} to be {read.value}", f"{read.attribute} to be {found or 'undefined'}"


def _check_function(read: Read, tree: SourceTree) -> tuple[str, str]:
    module = tree.module(read.module)
    function = None if module is None else module.function(read.attribute)
    if module is None:
        return _missing_owner(read, tree)
    if function is None:
        return f"function {read.attribute} in {read.module}", _where_else(read, tree)
    return _compare_signature(read, function, bound=False)


def _check_method(read: Read, tree: SourceTree) -> tuple[str, str]:
    owner = tree.find_class(read.module, read.owner)
    if owner is None:
        return _missing_owner(read, tree)
    target = tree.method(owner, read.attribute)
    if target is None or _is_property(target[1]):
        found = "a property" if target else _where_else(read, tree)
        return f"method {read.attribute} of class {read.owner}", found
    return _compare_signature(read, target[1], bound=not _has_decorator(target[1], "staticmethod"))


def _check_property(read: Read, tree: SourceTree) -> tuple[str, str]:
    owner = tree.find_class(read.module, read.owner)
    if owner is None:
        return _missing_owner(read, tree)
    target = tree.method(owner, read.attribute)
    if target is None or not _is_property(target[1]):
        found = "a method" if target else _where_else(read, tree)
        return f"property {read.attribute} of class {read.owner}", found
    return HOLDS


def _check_field(read: Read, tree: SourceTree) -> tuple[str, str]:
    owner = tree.find_class(read.module, read.owner)
    if owner is None:
        return _missing_owner(read, tree)
    for cls in tree.ancestry(owner):
        node = cls.attribute(read.attribute)
        if node is not None:
            return _compare_value(read, node.value)
    return f"field {read.attribute} in the body of class {read.owner}", _where_else(read, tree)


def _check_constant(read: Read, tree: SourceTree) -> tuple[str, str]:
    module = tree.module(read.module)
    if module is None:
        return _missing_owner(read, tree)
    node = module.constant(read.attribute)
    if node is None:
        return f"constant {read.attribute} in {read.module}", _where_else(read, tree)
    return _compare_value(read, node.value)


def _check_assigned(read: Read, tree: SourceTree) -> tuple[str, str]:
    owner = tree.find_class(read.module, read.owner)
    if owner is None:
        return _missing_owner(read, tree)
    values = tree.assigned(owner, read.within).get(read.attribute)
    if values is None:
        return f"self.{read.attribute} assigned in {read.owner}.{read.within}", _where_else(read, tree)
    if read.value is ANY:
        return HOLDS
    built = sorted({ast.unparse(value.func) for value in values if isinstance(value, ast.Call)})
    expected = f"self.{read.attribute} built by {' or '.join(sorted(read.value))}"
    return expected, f"self.{read.attribute} built by {' or '.join(built) or 'no call'}"


def _check_registered(read: Read, tree: SourceTree) -> tuple[str, str]:
    owner = tree.find_class(read.module, read.owner)
    if owner is None:
        return _missing_owner(read, tree)
    target = tree.method(owner, "create_weights")
    body = target[1] if target else ast.Module([], [])
    called = {node.func.attr for node in ast.walk(body) if isinstance(node, ast.Call) and hasattr(node.func, "attr")}
    helpers = [found[1] for name in sorted(called) if (found := tree.method(owner, name)) is not None]
    names = [
        node.args[0].value
        for node in (node for part in (body, *helpers) for node in ast.walk(part))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "register_parameter"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ]
    if read.attribute in names:
        return HOLDS
    expected = f"{read.owner}.create_weights to register parameter {read.attribute}"
    return expected, f"parameters {sorted(set(names))}"


def _function_of(read: Read, tree: SourceTree) -> ast.AST | None:
    """The function, or `Class.method`, that a read names as its owner."""
    owner, _, name = (read.owner or "").rpartition(".")
    if owner:
        cls = tree.find_class(read.module, owner)
        return None if cls is None else cls.function(name)
    module = tree.module(read.module)
    return None if module is None else module.function(name)


def _check_marked(read: Read, tree: SourceTree) -> tuple[str, str]:
    if tree.module(read.module) is None:
        return _missing_owner(read, tree)
    function = _function_of(read, tree)
    if function is None:
        return f"function {read.owner} in {read.module}", "no such function"
    marks = [
        ast.unparse(node)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Attribute) and target.attr == read.attribute for target in node.targets)
    ]
    expected = ast.unparse(ast.parse(read.value))
    if expected in marks:
        return HOLDS
    return f"{read.owner} to set {expected}", " and ".join(marks) or f"{read.attribute} set nowhere in it"


def _check_call(read: Read, tree: SourceTree) -> tuple[str, str]:
    if tree.module(read.module) is None:
        return _missing_owner(read, tree)
    function = _function_of(read, tree)
    if function is None:
        return f"function {read.owner} in {read.module}", "no such function"
    calls = [
        ast.unparse(node)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == read.attribute
    ]
    expected = ast.unparse(ast.parse(read.value, mode="eval"))
    if expected in calls:
        return HOLDS
    return f"{read.owner} to call {expected}", " and ".join(calls) or f"no call of {read.attribute} in it"


_CHECKS = {
    Kind.MODULE: _check_module,
    Kind.CLASS: _check_class,
    Kind.ALIAS: _check_alias,
    Kind.FUNCTION: _check_function,
    Kind.METHOD: _check_method,
    Kind.PROPERTY: _check_property,
    Kind.FIELD: _check_field,
    Kind.CONSTANT: _check_constant,
    Kind.ASSIGNED: _check_assigned,
    Kind.REGISTERED: _check_registered,
    Kind.CALL: _check_call,
    Kind.MARKED: _check_marked,
}


def _where_else(read: Read, tree: SourceTree) -> str:
    """Where in the read's own module the name stands instead: the first thing to look at after a drift."""
    module = tree.module(read.module)
    if module is not None:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            cls = ClassSource(module=module, path=node.name, node=node)
            if node.name == (read.owner or "").rpartition(".")[2]:
                if cls.function(read.attribute) or cls.attribute(read.attribute):
                    return f"{read.attribute} of another kind in class {node.name}"
            elif cls.function(read.attribute) or cls.attribute(read.attribute):
                return f"none there, but {read.attribute} in class {node.name} of the same file"
    return "none there"


def _compare_value(read: Read, node: ast.expr | None) -> tuple[str, str]:
    if read.value is ANY:
        return HOLDS
    return f"{read.attribute} = {read.value!r}", f"{read.attribute} = {_literal(node)}"


def _literal(node: ast.expr | None) -> str:
    """Source of a value in one spelling, so that equal literals compare equal."""
    if node is None:
        return "no value"
    try:
        return repr(ast.literal_eval(node))
    except ValueError:
        return ast.unparse(node)


@dataclass(frozen=True)
class _Parameter:
    name: str
    positional: bool
    default: str | None


def _parameters(arguments: ast.arguments) -> list[_Parameter]:
    positional = [*arguments.posonlyargs, *arguments.args]
    padding: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    listed = [
        _Parameter(argument.arg, True, None if default is None else _literal(default))
        for argument, default in zip(positional, [*padding, *arguments.defaults], strict=True)
    ]
    return listed + [
        _Parameter(argument.arg, False, None if default is None else _literal(default))
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]


def _compare_signature(read: Read, function: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool) -> tuple[str, str]:
    if read.signature is None:
        return HOLDS
    signature = ast.parse(f"def _({read.signature}): ...").body[0].args
    found = _parameters(function.args)[1 if bound else 0 :]
    takes_any = function.args.kwarg is not None or signature.kwarg is None
    if takes_any and _signature_serves(_parameters(signature), found, closed=read.closed):
        return HOLDS
    others = "no others" if read.closed else "any others with defaults"
    return f"{read.attribute}({read.signature}) and {others}", f"{read.attribute}({_without_annotations(found)})"


def _signature_serves(wanted: list[_Parameter], found: list[_Parameter], *, closed: bool) -> bool:
    by_name = {parameter.name: parameter for parameter in found}
    order = [parameter.name for parameter in found if parameter.positional]
    for index, parameter in enumerate(wanted):
        actual = by_name.get(parameter.name)
        if actual is None or (parameter.positional and order[index : index + 1] != [parameter.name]):
            return False
        if parameter.default is not None and parameter.default != actual.default:
            return False
    names = {parameter.name for parameter in wanted}
    extra = [parameter for parameter in found if parameter.name not in names]
    return not extra if closed else all(parameter.default is not None for parameter in extra)


def _without_annotations(parameters: list[_Parameter]) -> str:
    shown = []
    for parameter in parameters:
        if not parameter.positional and "*" not in shown:
            shown.append("*")
        shown.append(parameter.name if parameter.default is None else f"{parameter.name}={parameter.default}")
    return ", ".join(shown)


def _has_decorator(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    return any(ast.unparse(decorator).rpartition(".")[2] == name for decorator in function.decorator_list)


def _is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return _has_decorator(function, "property") or _has_decorator(function, "cached_property")
