"""SGLANG_READS is complete, and checking it needs neither SGLang nor torch in memory."""

from __future__ import annotations

import ast
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import glm53_mono
from glm53_mono.upstream.contract import OneOf, each_read
from glm53_mono.upstream.reads import SGLANG_READS
from glm53_mono.upstream.server import Arguments
from tests.sources import defined

PACKAGE = Path(glm53_mono.__file__).parent
UPSTREAM = PACKAGE / "upstream"
READERS = ("model.py", "step.py", "pools.py", "hooks.py", "loaded.py", "bench_runner.py", "parts.py")
"""Modules that take objects of SGLang apart."""

TENSOR_NAMES = {
    "Tensor",
    "dtype",
    "shape",
    "stride",
    "flatten",
    "gather",
    "split",
    "squeeze",
    "tensor",
    "transpose",
    "view",
}
TENSOR_NAMES |= {"bfloat16", "bool", "float32", "float8_e4m3fn", "int32", "int64", "uint8"}
"""What the readers use of torch."""

TENSOR_NAMES |= {"all_gather_object"}
"""What the ranks tell one another through torch."""

TENSOR_NAMES |= {"arange", "contiguous", "device", "full", "max", "min", "nbytes", "sum", "to", "view"}
"""What the benchmark's batches use of torch."""

TENSOR_NAMES |= {"register_forward_hook", "remove"}
"""What looks into SGLang's modules uses of torch."""

PYTHON_NAMES = {"_replace"}
PYTHON_NAMES |= {"__name__", "__module__", "__qualname__", "__wrapped__", "contextmanager", "getclosurevars"}
PYTHON_NAMES |= {"fromkeys", "items", "nonlocals", "nullcontext", "resolve_name", "start", "stop"}


def sglang_imports(source: str) -> set[tuple[str, str]]:
    """(module, name) of every import from SGLang in a source text."""
    return {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang"
        for alias in node.names
    } | {
        (package, module)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import)
        for alias in node.names
        for package, _, module in [alias.name.rpartition(".")]
        if alias.name.split(".")[0] == "sglang"
    }


def dereferenced(source: str) -> set[str]:
    """Attribute names that a source text takes from objects, `hasattr` and `getattr` with a literal included."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            names |= {argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)}
    return names


def variables(source: str) -> set[str]:
    """Environment variables that `server.py` asks SGLang's registry for."""
    return {
        node.args[0].value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "_variable"
        and isinstance(node.args[0], ast.Constant)
    }


def registered_names() -> set[tuple[str, str]]:
    """(module, top-level name) that the reads own, modules of theirs as (package, module) included."""
    names = set()
    for read in each_read(SGLANG_READS):
        package, _, module = read.module.rpartition(".")
        names |= {(read.module, (read.owner or read.attribute).split(".")[0]), (package, module)}
    return names


def unregistered(source: str) -> set[str]:
    """Attributes of a reader that are neither ours, nor torch's, nor a read."""
    own_files = [PACKAGE / "geometry.py", PACKAGE / "weights" / "descriptor.py"]
    own_files += [UPSTREAM / name for name in (*READERS, "tensors.py", "launch.py", "server.py")]
    ours = {name for name in dereferenced(source) if name.startswith("_") and f"self.{name} = " in source}
    ours = ours.union(defined(source), *(defined(file.read_text()) for file in own_files))
    reads = {read.attribute for read in each_read(SGLANG_READS)} | {"name"}
    return dereferenced(source) - ours - reads - TENSOR_NAMES - PYTHON_NAMES


def test_every_import_is_a_read() -> None:
    registered = registered_names()
    for file in UPSTREAM.rglob("*.py"):
        missing = sglang_imports(file.read_text()) - registered
        assert not missing, f"{file.name} imports {sorted(missing)}, which SGLANG_READS does not list"


def test_every_dereference_is_a_read() -> None:
    for name in READERS:
        missing = unregistered((UPSTREAM / name).read_text())
        assert not missing, f"{name} reads {sorted(missing)}, which SGLANG_READS does not list"


def test_every_argument_and_variable_is_a_read() -> None:
    """What `server.py` takes by name from SGLang's arguments and from its registry of variables."""
    reads = {read.attribute for read in each_read(SGLANG_READS)}
    assert {field.name for field in dataclasses.fields(Arguments)} <= reads
    assert variables((UPSTREAM / "server.py").read_text()) <= reads
    assert variables('_variable("SGLANG_SEEDED")') == {"SGLANG_SEEDED"}


def test_an_unlisted_import_and_dereference_are_seen() -> None:
    """The two tests above can fail."""
    source = (UPSTREAM / "pools.py").read_text()
    seeded = (
        source + "\n\ndef _seeded(pool):\n    from sglang.srt.mem_cache.allocator import Seeded\n    pool.seeded_name"
    )
    assert sglang_imports(seeded) - registered_names() == {("sglang.srt.mem_cache.allocator", "Seeded")}
    assert unregistered(seeded) == {"seeded_name"}
    assert unregistered(source.replace('"state_layer_cache"', '"seeded_name"')) == {"seeded_name"}


def test_reads_are_distinct_and_say_what_for() -> None:
    reads = list(each_read(SGLANG_READS))
    keys = [(read.module, read.owner, read.attribute, read.kind, read.within, str(read.value)) for read in reads]
    assert len(set(keys)) == len(keys)
    assert all(read.purpose for read in reads)
    assert all(len(entry.options) > 1 for entry in SGLANG_READS if isinstance(entry, OneOf))


def test_checking_imports_nothing_heavy() -> None:
    program = (
        "import json, sys\n"
        "from glm53_mono.upstream.contract import check\n"
        "from glm53_mono.upstream.reads import SGLANG_READS\n"
        "from glm53_mono.upstream.source import SourceTree, installed_root\n"
        "drifts = check(SGLANG_READS, SourceTree(installed_root()))\n"
        "print(json.dumps([len(drifts), sorted({name.split('.')[0] for name in sys.modules})]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=PACKAGE.parent,
    )
    drifts, modules = json.loads(done.stdout)
    assert drifts == 0
    assert not {"torch", "triton", "transformers", "sglang", "numpy"} & set(modules)
