"""Which part of the package may import which: the tables of parts have no cycle, and the code keeps to them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import glm53_mono

PACKAGE = Path(glm53_mono.__file__).parent

ALLOWED: dict[str, set[str]] = {
    "geometry": set(),
    "isas": set(),
    "numerics": set(),
    "metrics": set(),
    "checkpoint": {"geometry"},
    "weights": {"geometry"},
    "kernels": {"geometry", "weights"},
    "reference": {"geometry", "weights"},
    "upstream": {"geometry", "weights"},
    "plugin": {"geometry", "upstream"},
    "quark": {"geometry"},
    "refusals": {"geometry", "quark", "upstream"},
    "capabilities": {"refusals"},
    "counters": {"upstream"},
    "program": {"geometry", "isas", "kernels", "weights"},
    "exchange": {"program"},
    "fault_watch": {"kernels", "program"},
    "bindings": {"geometry", "kernels", "program", "upstream"},
    "observers": {"program", "upstream"},
    "probe": {"geometry", "observers", "upstream"},
    "client": {"metrics"},
    "quality": {"checkpoint"},
    "diagnose": {"check", "client", "probe", "quality"},
    "soak": {"client", "quality"},
    "isa": {
        *("bindings", "capabilities", "checkpoint", "geometry", "isas", "kernels", "program", "reference"),
        *("refusals", "upstream", "weights"),
    },
    "check": {"geometry", "kernels", "numerics", "program", "reference", "upstream", "weights"},
    "admission": {"bindings", "isa", "isas", "kernels", "program"},
    "capturing": {"admission", "bindings", "kernels", "program"},
    "runtime": {
        *("admission", "bindings", "capturing", "check", "counters", "exchange", "fault_watch", "geometry", "kernels"),
        *("metrics", "observers", "probe", "program", "upstream", "weights"),
    },
    "spec": {
        *("capabilities", "geometry", "isas", "numerics", "refusals", "runtime", "upstream", "weights"),
    },
}
"""What each part imports of the others, imports inside functions included. The command line may import all of them."""


def parts(source: str) -> Iterator[str]:
    """Parts of the package that a module imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "glm53_mono":
            names = [f"glm53_mono.{alias.name}" for alias in node.names if alias.name != "__version__"]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("glm53_mono."))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def violations(part: str, source: str) -> set[str]:
    """What a module of a part imports and may not."""
    return set(parts(source)) - ALLOWED[part] - {part}


def test_every_part_imports_what_it_may() -> None:
    wrong = {
        str(path.relative_to(PACKAGE)): found
        for path in sorted(PACKAGE.rglob("*.py"))
        if part_of(path) not in ("cli", "__init__") and (found := violations(part_of(path), path.read_text()))
    }
    assert not wrong


def test_the_table_has_no_cycle_and_no_part_that_is_gone() -> None:
    TopologicalSorter(ALLOWED).prepare()
    there = {part_of(path) for path in PACKAGE.rglob("*.py")} - {"cli", "__init__"}
    assert set(ALLOWED) == there


@pytest.mark.parametrize("part", ALLOWED)
def test_an_import_of_the_command_line_is_seen(part: str) -> None:
    assert violations(part, "def late():\n    from glm53_mono.cli import main\n") == {"cli"}


def test_an_edge_that_nothing_needs_is_seen() -> None:
    """The table promises no more than the code does, so that a new edge is a decision."""
    used = {part: set[str]() for part in ALLOWED}
    for path in PACKAGE.rglob("*.py"):
        if part_of(path) in used:
            used[part_of(path)] |= set(parts(path.read_text())) - {part_of(path)}
    assert used == ALLOWED
