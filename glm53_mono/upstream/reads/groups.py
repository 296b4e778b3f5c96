"""Short ways to write several reads of one owner."""

from __future__ import annotations

from glm53_mono.upstream.contract import Kind, Read


def classes(module: str, purpose: str, *names: str) -> tuple[Read, ...]:
    """Classes that `module` defines."""
    return tuple(Read(module, None, name, Kind.CLASS, purpose) for name in names)


def fields(module: str, owner: str, purpose: str, *names: str) -> tuple[Read, ...]:
    """Fields in the body of a class, or of a base of it."""
    return tuple(Read(module, owner, name, Kind.FIELD, purpose) for name in names)


def assigned(module: str, owner: str, purpose: str, *names: str) -> tuple[Read, ...]:
    """Attributes that an instance has after `__init__`."""
    return tuple(Read(module, owner, name, Kind.ASSIGNED, purpose) for name in names)


def built(module: str, owner: str, attribute: str, purpose: str, *classes: str) -> Read:
    """An attribute that `__init__` builds with one of these constructors, named as the module names them."""
    return Read(module, owner, attribute, Kind.ASSIGNED, purpose, value=classes)


def method(module: str, owner: str, attribute: str, signature: str, purpose: str) -> Read:
    """A method that we call with these parameters."""
    return Read(module, owner, attribute, Kind.METHOD, purpose, signature=signature)


def function(module: str, attribute: str, signature: str, purpose: str) -> Read:
    """A function that we call with these parameters."""
    return Read(module, None, attribute, Kind.FUNCTION, purpose, signature=signature)


def constant(module: str, attribute: str, value: object, purpose: str) -> Read:
    """A module constant that must keep its value."""
    return Read(module, None, attribute, Kind.CONSTANT, purpose, value=value)


def alias(module: str, attribute: str, target: str, purpose: str) -> Read:
    """A name that `module` imports, and the class or function it must stand for, as "module.name"."""
    return Read(module, None, attribute, Kind.ALIAS, purpose, value=target)


def marked(module: str, owner: str, attribute: str, source: str, purpose: str) -> Read:
    """An assignment inside a function of SGLang by which it marks what it has done to a layer."""
    return Read(module, owner, attribute, Kind.MARKED, purpose, value=source)


def call(module: str, owner: str, callee: str, source: str, purpose: str) -> Read:
    """A call inside a function of SGLang by which it drives what we implement."""
    return Read(module, owner, callee, Kind.CALL, purpose, value=source)
