"""Only `glm53_mono.upstream` touches SGLang: nothing else in the package imports it or takes its objects apart."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import glm53_mono
from glm53_mono.upstream.contract import Kind, each_read
from glm53_mono.upstream.reads import SGLANG_READS
from glm53_mono.upstream.reads.monokernel import SPEC
from tests.sources import defined

PACKAGE = Path(glm53_mono.__file__).parent
UPSTREAM = PACKAGE / "upstream"

IMPORTERS = {"import_module", "__import__", "find_spec", "resolve_name", "run_module", "LazyImport"}
"""Functions that import what a string names."""

DISTINCTIVE = 12
"""Names at least this long, with an underscore, are taken to be SGLang's own; shorter ones could be anybody's."""


def sglang_imports(source: str) -> list[str]:
    """Every way in which a source text imports SGLang, or names a module of it to an importer."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if _is_sglang(alias.name)]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_sglang(node.module or ""):
            found.append(node.module)
        elif isinstance(node, ast.Call) and _called(node) in IMPORTERS and node.args:
            found += [name for name in _strings(node.args[0]) if _is_sglang(name)]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules":
            found += [name for name in _strings(node.slice) if _is_sglang(name)]
    return found


def sglang_attributes(source: str, names: set[str]) -> set[str]:
    """Those of `names` that a source text takes from an object."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in names:
            found.add(node.attr)
        elif isinstance(node, ast.Call) and _called(node) in ("getattr", "hasattr", "setattr"):
            found |= {name for argument in node.args[1:2] for name in _strings(argument)} & names
    return found


@functools.cache
def distinctive_names() -> set[str]:
    """Names of SGLang's objects that nobody else would choose, those of its plugin contract and of ours left out."""
    contract = {read.attribute for read in each_read(SGLANG_READS) if read.module == SPEC}
    ours = {name for file in PACKAGE.rglob("*.py") for name in defined(file.read_text())}
    return {
        read.attribute
        for read in each_read(SGLANG_READS)
        if read.kind in (Kind.FIELD, Kind.ASSIGNED, Kind.REGISTERED, Kind.METHOD, Kind.PROPERTY)
        and "_" in read.attribute.strip("_")
        and len(read.attribute) >= DISTINCTIVE
    } - (contract | ours)


def others() -> list[Path]:
    """Every module of the package outside `upstream`."""
    return [file for file in sorted(PACKAGE.rglob("*.py")) if UPSTREAM not in file.parents]


@pytest.mark.parametrize("file", others(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_other_module_touches_sglang(file: Path) -> None:
    source = file.read_text()
    assert sglang_imports(source) == []
    assert sglang_attributes(source, distinctive_names()) == set()


@pytest.mark.parametrize(
    "seeded",
    [
        "import sglang",
        "import sglang.srt.environ as environ",
        "from sglang.srt.environ import envs",
        "def late():\n    from sglang import srt",
        "import importlib\nimportlib.import_module('sglang.srt.environ')",
        "import importlib\nname = 'environ'\nimportlib.import_module(f'sglang.srt.{name}')",
        "__import__('sglang')",
        "import pkgutil\npkgutil.resolve_name('sglang.srt.environ.envs')",
        "import sys\nsys.modules['sglang.srt.environ']",
    ],
)
def test_an_import_is_seen(seeded: str) -> None:
    assert sglang_imports(seeded)


@pytest.mark.parametrize(
    "innocent",
    ["import sglang_like", "from glm53_mono.upstream import SGLANG_READS", "name = 'sglang'", "from .sglang import x"],
)
def test_another_import_is_not_seen(innocent: str) -> None:
    assert not sglang_imports(innocent)


@pytest.mark.parametrize(
    "seeded",
    ["metadata.mamba_cache_indices", "getattr(pool, 'index_k_with_scale_buffer', None)", "x.q_a_layernorm.weight"],
)
def test_a_dereference_is_seen(seeded: str) -> None:
    assert sglang_attributes(seeded, distinctive_names())


def _is_sglang(name: str) -> bool:
    return name.split(".")[0] == "sglang"


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def _strings(expression: ast.expr) -> list[str]:
    """Literal strings in an expression, the first part of an f-string included."""
    return [
        node.value for node in ast.walk(expression) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
