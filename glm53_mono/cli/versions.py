"""Versions of the software around the plugin: what is installed, what an import would take, what was tested."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Software:
    """A package that the plugin runs with.

    Attributes:
        module: its import name.
        distributions: the names under which package managers know it.
        tested: version prefixes on which this release was tested.
        required: whether the plugin cannot run without it.
    """

    module: str
    distributions: tuple[str, ...]
    tested: tuple[str, ...]
    required: bool = True


SOFTWARE = (
    Software("torch", ("torch",), ("2.11", "2.14.1")),
    Software("triton", ("triton", "pytorch-triton-rocm", "pytorch-triton"), ("3.6", "3.8")),
    Software("transformers", ("transformers",), ("5.19",)),
    Software("sglang", ("sglang",), ("0.5.23",)),
    Software("aiter", ("amd-aiter", "aiter"), (), required=False),
)
"""What `doctor` looks at; AITER exists on ROCm only, and none was at hand to test with."""


@dataclass(frozen=True)
class Versions:
    """Versions of one package.

    Attributes:
        installed: by the package manager's records; None where it has none.
        importable: by the source that an import would take; None where that says none, or there is no such source.
        origin: the folder or file that an import would take; None where there is none.
    """

    installed: str | None
    importable: str | None
    origin: Path | None


def versions_of(software: Software) -> Versions:
    """Look the versions up, without importing the package."""
    origin = _origin(software.module)
    return Versions(_installed(software.distributions), _declared(origin), origin)


def is_tested(software: Software, version: str) -> bool:
    """Whether a version is one of those tested, build tags and deeper digits aside."""
    parts = _public(version).split(".")
    return any(parts[: len(tested)] == tested for tested in (prefix.split(".") for prefix in software.tested))


def same_release(one: str, other: str) -> bool:
    """Whether two versions name the same release, whatever their build tags."""
    return _public(one) == _public(other)


def _public(version: str) -> str:
    return version.partition("+")[0]


def _installed(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _origin(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:  # no such package, or a mere folder of that name
        return None
    return Path(spec.origin)


def _declared(origin: Path | None) -> str | None:
    """`__version__` in the source of a package, as a literal."""
    if origin is None:
        return None
    for name in ("_version.py", "version.py", origin.name):
        file = origin.parent / name
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):
            continue
        for node in tree.body:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
                continue
            named = any(isinstance(target, ast.Name) and target.id == "__version__" for target in node.targets)
            if named and isinstance(node.value.value, str):
                return node.value.value
    return None
