"""The package as a newcomer finds it: readable files, metadata that resolves, a README that tells the truth."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import glm53_mono

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "glm53_mono"
README = (ROOT / "README.md").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

LONGEST_FILE = 500
"""Lines; a longer file holds more than one idea."""


def python_files() -> list[Path]:
    """Every Python file that we wrote."""
    folders = [PACKAGE, ROOT / "tests", ROOT / "test", ROOT / ".ci"]
    return [ROOT / "conftest.py", *(path for folder in folders for path in sorted(folder.rglob("*.py")))]


# Files


def too_long(files: Iterable[Path]) -> list[Path]:
    return [path for path in files if len(path.read_text().splitlines()) > LONGEST_FILE]


def test_no_file_is_too_long() -> None:
    assert too_long(python_files()) == []


def test_a_long_file_is_noticed(tmp_path: Path) -> None:
    for lines in (LONGEST_FILE, LONGEST_FILE + 1):
        (tmp_path / f"{lines}.py").write_text("x = 1\n" * lines)
    assert too_long(tmp_path.iterdir()) == [tmp_path / f"{LONGEST_FILE + 1}.py"]


def folders_without_init(package: Path) -> set[Path]:
    return {path.parent for path in package.rglob("*.py") if not (path.parent / "__init__.py").exists()}


def test_every_folder_is_a_package() -> None:
    assert folders_without_init(PACKAGE) == set()


def test_a_folder_that_is_no_package_is_noticed(tmp_path: Path) -> None:
    for folder in ("whole", "broken"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module.py").touch()
    (tmp_path / "whole" / "__init__.py").touch()
    assert folders_without_init(tmp_path) == {tmp_path / "broken"}


def compile_all(folder: Path, cache: Path) -> int:
    command = [sys.executable, "-W", "error", "-m", "compileall", "-q", str(folder)]
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(cache)}
    return subprocess.run(command, capture_output=True, env=environment, check=False).returncode


def test_everything_compiles(tmp_path: Path) -> None:
    assert compile_all(PACKAGE, tmp_path) == 0


def test_what_does_not_compile_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    assert compile_all(tmp_path, tmp_path / "cache") != 0


# Metadata


def unresolved(targets: Iterable[str]) -> list[str]:
    """Those of `module:attribute` that name nothing callable."""

    def resolves(target: str) -> bool:
        module, _, attribute = target.partition(":")
        try:
            return callable(getattr(importlib.import_module(module), attribute, None))
        except ImportError:
            return False

    return [target for target in targets if not resolves(target)]


def test_entry_points_resolve() -> None:
    project = PYPROJECT["project"]
    assert project["entry-points"] == {"sglang.srt.plugins": {"glm53_mono": "glm53_mono.plugin:register"}}
    assert project["scripts"] == {"glm53-mono": "glm53_mono.cli.main:app"}
    assert unresolved([*project["entry-points"]["sglang.srt.plugins"].values(), *project["scripts"].values()]) == []


def test_entry_points_that_do_not_resolve_are_noticed() -> None:
    broken = ["glm53_mono.plugin:registre", "glm53_mono.plugins:register", "glm53_mono:__version__"]
    assert unresolved(broken) == broken


def test_importing_the_entry_point_imports_nothing_heavy() -> None:
    script = "import sys, glm53_mono.plugin; print(*sorted({'torch', 'triton', 'sglang', 'numpy'} & set(sys.modules)))"
    command = [sys.executable, "-c", script]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == []


def test_version_is_the_packages() -> None:
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "glm53_mono.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", glm53_mono.__version__)


def test_serving_software_is_no_dependency() -> None:
    # A resolver would replace the builds that the serving image carries.
    names = {Requirement(line).name for line in PYPROJECT["project"]["dependencies"]}
    assert names.isdisjoint({"sglang", "torch", "triton", "transformers"})


def requirement_names(text: str) -> set[str]:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {Requirement(line).name for line in lines if line}


def unpinned(files: Iterable[str], constraints: str) -> set[str]:
    """Requirements without an exact version, of their own or among the constraints."""
    lines = (line.partition("#")[0].strip() for text in (*files, constraints) for line in text.splitlines())
    requirements = [Requirement(line) for line in lines if line]
    pinned = {r.name for r in requirements if [s.operator for s in r.specifier] == ["=="]}
    return {r.name for r in requirements} - pinned


def test_everything_installed_is_pinned() -> None:
    files = {path.name: path.read_text() for path in (ROOT / "requirements").glob("*.txt")}
    constraints = files.pop("constraints.txt")
    assert files.keys() == {"sglang-stack.txt", "sglang.txt", "dev.txt", "aiter.txt"}
    assert unpinned(files.values(), constraints) == set()
    ours = {Requirement(line).name for line in PYPROJECT["project"]["dependencies"]}
    assert ours <= requirement_names(files["dev.txt"])


def test_unpinned_requirements_are_noticed() -> None:
    assert unpinned(["a\nb\nc==1 # exact\n"], "a==2\nb>=1\n# d\n") == {"b"}


# The README


def section(text: str, title: str) -> str:
    """The lines under a heading of level 2."""
    _, found, rest = text.partition(f"\n## {title}\n")
    assert found, f"README has no section {title!r}"
    return rest.partition("\n## ")[0]


def listed_variables(text: str) -> set[str]:
    """Names in the first column of the table of environment variables."""
    return set(re.findall(r"^\| `([A-Z][A-Z0-9_]*)` ", section(text, "Environment variables"), re.MULTILINE))


class EnvironmentReads(ast.NodeVisitor):
    """Collects what a module asks `os.environ` or `os.getenv` for; a name that is no constant counts as itself."""

    def __init__(self, tree: ast.Module) -> None:
        assigned = (node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign))
        self.constants = {
            target.id: node.value.value
            for node in assigned
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant)
        }
        self.names: set[str] = set()
        self.visit(tree)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if self._is_environ(node.value):
            self._add(node.slice)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if any(self._is_environ(right) for right in node.comparators):
            self._add(node.left)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func
        if isinstance(called, ast.Attribute) and node.args:
            asks = called.attr in {"get", "setdefault", "pop"} and self._is_environ(called.value)
            if asks or called.attr == "getenv":
                self._add(node.args[0])
        elif isinstance(called, ast.Name) and called.id == "getenv":
            self._add(node.args[0])
        self.generic_visit(node)

    def _is_environ(self, node: ast.AST) -> bool:
        return getattr(node, "attr", getattr(node, "id", None)) == "environ"

    def _add(self, node: ast.AST) -> None:
        if isinstance(node, ast.Name):
            self.names.add(self.constants.get(node.id, node.id))
        else:
            self.names.add(node.value if isinstance(node, ast.Constant) else ast.unparse(node))


def read_variables(files: Iterable[Path]) -> set[str]:
    return {name for path in files for name in EnvironmentReads(ast.parse(path.read_text())).names}


def test_readme_lists_the_environment_variables() -> None:
    assert listed_variables(README) == read_variables(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize(
    "line",
    [
        'os.environ["SEEN"]',
        'os.environ.get("SEEN", "0")',
        'os.environ.setdefault("SEEN", "0")',
        'environ.pop("SEEN", None)',
        'os.getenv("SEEN")',
        'getenv("SEEN")',
        '"SEEN" in os.environ',
        "os.environ.get(NAME)",
        "os.environ[TYPED]",
    ],
)
def test_a_read_of_the_environment_is_noticed(tmp_path: Path, line: str) -> None:
    (tmp_path / "module.py").write_text(f'NAME = "SEEN"\nTYPED: str = "SEEN"\nvalue = {line}\n')
    assert read_variables(tmp_path.iterdir()) == {"SEEN"}


def test_an_unlisted_and_an_unread_variable_differ() -> None:
    listed = listed_variables(
        "\n## Environment variables\n\n| name | use |\n|---|---|\n| `SEEN` | x |\n\n## Next\n| `NO` |"
    )
    assert listed == {"SEEN"}


def missing_links(text: str, root: Path) -> list[str]:
    """Relative links of a Markdown text that lead nowhere."""
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    return [target for target in targets if "://" not in target and not (root / target).exists()]


def test_readme_links_lead_somewhere(tmp_path: Path) -> None:
    assert missing_links(README, ROOT) == []
    assert missing_links("[a](gone.py) [b](https://example.org) [c](README.md#tests)", ROOT) == ["gone.py"]


def parts_without_link(text: str, package: Path) -> set[str]:
    """Files and folders of a package that no link of a Markdown text leads to."""
    parts = {path.name for path in package.iterdir()} - {"__init__.py", "__pycache__"}
    return parts - set(re.findall(rf"\]\({package.name}/([^/)#]+)", text))


def test_readme_tells_the_role_of_every_part() -> None:
    assert parts_without_link(section(README, "Where to start reading"), PACKAGE) == set()


def test_a_part_that_is_only_mentioned_is_noticed(tmp_path: Path) -> None:
    package = tmp_path / "some_package"
    for part in ("isa", "cli"):
        (package / part).mkdir(parents=True)
    text = "[some_package/cli/](some_package/cli/main.py) names an isa, and [isa](other_package/isa/), some_package/isa"
    assert parts_without_link(text, package) == {"isa"}


def commands(text: str) -> Iterator[str]:
    """Targets of make that a text names."""
    yield from re.findall(r"\bmake ([a-z-]+)", text)


def test_make_targets_that_the_readme_and_ci_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(commands(README)) | set(commands((ROOT / ".ci" / "run").read_text()))
    assert {"test", "demo", "gpu-test", "lint"} <= named
    assert named <= targets
    assert not set(commands("run make nothing")) <= targets
