"""`glm53-mono doctor` answers wherever it is asked: also where torch or SGLang is missing, broken or drifted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import glm53_mono
from glm53_mono.cli import doctor as doctor_module
from glm53_mono.cli import serving
from glm53_mono.cli.doctor import Finding, Stage, State
from glm53_mono.cli.main import COMMANDS, SubCommand, app
from glm53_mono.cli.versions import Software, Versions, is_tested, same_release
from glm53_mono.upstream.source import installed_root

REPOSITORY = Path(glm53_mono.__file__).parents[1]

HIDE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {hidden!r}


class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in HIDDEN else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *args, **kwargs):
        return [found for found in super().find_distributions(*args, **kwargs) if found.name not in HIDDEN]


sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
"""A `sitecustomize` under which packages are not installed: neither imports nor package records show them."""


def machine(folder: Path, hidden: Sequence[str] = (), modules: dict[str, str] | None = None) -> Path:
    """A folder that, first on the path, makes this machine another one.

    Args:
        hidden: packages that are not installed there.
        modules: source files that stand before the installed ones.
    """
    (folder / "sitecustomize.py").write_text(HIDE.format(hidden=set(hidden)))
    record = folder / "glm53_mono-0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: glm53-mono\nVersion: 0\n")
    (record / "entry_points.txt").write_text("[sglang.srt.plugins]\nglm53_mono = glm53_mono.plugin:register\n")
    for name, text in (modules or {}).items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def run_doctor(folder: Path, *arguments: str, **variables: str) -> tuple[int, dict]:
    """Exit status and report of a doctor in an empty directory on such a machine."""
    empty = folder / "empty"
    empty.mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}", **variables}
    program = "from glm53_mono.cli.main import app; app(prog_name='glm53-mono')"
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        cwd=empty,
        env=environment,
        timeout=300,
        check=False,
    )
    assert list(empty.iterdir()) == []
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    report["findings"] = {finding["name"]: finding for finding in report["findings"]}
    return done.returncode, report


def with_links(real: Path, copy: Path, changed: dict[str, str]) -> None:
    """A copy of a folder in which all but the changed files are links.

    Args:
        changed: path below the folder -> new text.
    """
    copy.mkdir(parents=True)
    heads = {path.split("/")[0] for path in changed}
    for child in real.iterdir():
        below = {path.partition("/")[2]: text for path, text in changed.items() if path.split("/")[0] == child.name}
        if child.name not in heads:
            (copy / child.name).symlink_to(child)
        elif child.is_dir():
            with_links(child, copy / child.name, below)
        else:
            (copy / child.name).write_text(below[""])


def test_from_an_empty_directory_with_nothing_missing(tmp_path: Path) -> None:
    status, report = run_doctor(machine(tmp_path), "--isa", "gfx950")
    failures = {name: finding for name, finding in report["findings"].items() if finding["state"] == "failure"}
    assert failures == {}
    assert report["works"] is True and status == 0
    assert report["server"] is None
    assert report["findings"]["contract"]["found"].endswith(str(installed_root()))
    assert "gfx950 (256 compute units)" in report["findings"]["spec"]["found"]


def test_without_torch_and_with_a_drifted_sglang(tmp_path: Path) -> None:
    spec = "kernels/plugin_kernels/amd/spec.py"
    text = (installed_root() / spec).read_text().replace("MONOKERNEL_API_VERSION = 1", "MONOKERNEL_API_VERSION = 2")
    with_links(installed_root(), tmp_path / "sglang", {spec: text})
    status, report = run_doctor(machine(tmp_path, hidden=["torch"]))
    findings = report["findings"]
    assert status == 1 and report["works"] is False
    assert findings["torch"]["found"] == "not installed"
    assert findings["device"]["found"] == "unknown: torch is missing"
    assert findings["contract"]["found"].startswith("1 of ")
    drift = findings["contract: spec.MONOKERNEL_API_VERSION"]
    assert drift["state"] == "failure"
    assert drift["found"] == "MONOKERNEL_API_VERSION = 2"
    assert drift["remark"].startswith("expected MONOKERNEL_API_VERSION = 1")


def test_without_sglang(tmp_path: Path) -> None:
    status, report = run_doctor(machine(tmp_path, hidden=["sglang"]), "--isa", "sm_90", "--", "--model-path", "x")
    findings = report["findings"]
    assert status == 1 and report["works"] is False
    assert findings["sglang"]["found"] == "not installed"
    assert findings["contract"]["remark"] == "package sglang is not installed"
    assert "No module named 'sglang'" in findings["spec"]["remark"]
    assert "No module named 'sglang'" in report["server"]["reasons"][0]
    assert findings["torch"]["state"] == "ok"


def test_with_a_torch_that_does_not_import(tmp_path: Path) -> None:
    broken = {"torch/__init__.py": "raise OSError('libamdhip64.so.7: cannot open shared object file')"}
    status, report = run_doctor(machine(tmp_path, hidden=["sglang"], modules=broken))
    assert status == 1
    assert "OSError: libamdhip64.so.7" in report["findings"]["torch"]["remark"]
    assert report["findings"]["device"]["found"] == "unknown: torch does not import"


def test_with_a_torch_that_kills_the_process(tmp_path: Path) -> None:
    broken = {"torch/__init__.py": "import os, sys\nprint('free(): invalid pointer', file=sys.stderr)\nos.abort()"}
    status, report = run_doctor(machine(tmp_path, hidden=["sglang"], modules=broken), SGLANG_PLUGINS="another")
    assert status == 1
    remark = report["findings"]["torch"]["remark"]
    assert "ended with status -6" in remark and "free(): invalid pointer" in remark
    assert report["findings"]["entry point"]["remark"].startswith("SGLANG_PLUGINS=another leaves glm53_mono out")


def stage(*gpus: tuple[str, int]) -> Stage:
    return Stage({"version": "2.11", "gpus": [{"isa": isa, "name": "GPU", "compute_units": n} for isa, n in gpus]})


SPEC_STAGE = Stage({"devices": {"gfx950": 256, "sm_90": 132}})


@pytest.mark.parametrize(
    ("torch", "spec", "state", "says"),
    [
        (stage(("sm_90", 132)), SPEC_STAGE, State.OK, "1 x sm_90 (GPU, 132 compute units)"),
        (stage(("gfx950", 256), ("gfx950", 256)), SPEC_STAGE, State.OK, "2 x gfx950 (GPU, 256 compute units)"),
        (stage(("gfx950", 128)), SPEC_STAGE, State.FAILURE, "128 compute units are visible, the launch grid needs 256"),
        (stage(("sm_90", 132), ("sm_80", 108)), SPEC_STAGE, State.FAILURE, "sm_80 is not one of gfx950, sm_90"),
        (stage(), SPEC_STAGE, State.FAILURE, "no GPU is visible"),
        (stage(("sm_90", 132)), Stage(None, "ImportError"), State.WARNING, "unknown whether supported"),
    ],
)
def test_devices(torch: Stage, spec: Stage, state: State, says: str) -> None:
    finding = doctor_module._device(None, torch, spec, torch_is_there=True)
    assert finding.state is state
    assert says in f"{finding.found} {finding.remark}"


TORCH = Software("torch", ("torch",), ("2.11", "2.14.1"))
SOMEWHERE = Path("/somewhere/torch/__init__.py")


@pytest.mark.parametrize(
    ("versions", "probed", "state", "says"),
    [
        (Versions("2.11.0+cu130", None, SOMEWHERE), "2.11.0", State.OK, "2.11.0+cu130"),
        (Versions("2.14.1", None, SOMEWHERE), "2.14.1+rocm7", State.OK, "2.14.1"),
        (Versions("2.14.2", None, SOMEWHERE), "2.14.2", State.WARNING, "not tested; tested: 2.11, 2.14.1"),
        (Versions("2.14.1", None, SOMEWHERE), "2.9.0", State.WARNING, "loads 2.9.0 from /somewhere/torch"),
        (Versions("2.14.1", None, None), None, State.FAILURE, "2.14.1 installed, but nothing to import"),
        (Versions(None, None, None), None, State.FAILURE, "not installed"),
    ],
)
def test_versions(versions: Versions, probed: str | None, state: State, says: str) -> None:
    found = doctor_module._version(TORCH, versions, Stage({"version": probed}) if probed else None)
    assert found.state is state
    assert says in f"{found.found} {found.remark}"


def test_a_version_is_tested_by_whole_numbers() -> None:
    assert is_tested(TORCH, "2.11.3+cu130") and is_tested(TORCH, "2.14.1")
    assert not is_tested(TORCH, "2.1.1") and not is_tested(TORCH, "2.14.10") and not is_tested(TORCH, "2.14")
    assert same_release("2.14.1+cpu", "2.14.1") and not same_release("2.14.1", "2.14.0")


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "examine", lambda isa: [Finding("spec", State.OK, "gfx950")])


@pytest.mark.parametrize("runs", [True, False])
def test_a_server_is_judged(monkeypatch: pytest.MonkeyPatch, healthy: None, runs: bool) -> None:
    asked = []
    verdict = {"runs": runs, "spec": "glm53_mono", "isa": "gfx950", "reasons": ["[too] many rows"] * (not runs)}
    verdict |= {
        "steps": {"mode": "decode", "batch_sizes": [1, 2], "tokens_per_request": 1},
        "not_evaluated": ["memory"],
        "weights": "FP8 blocks",
    }

    def judge(arguments: Sequence[str], isa: str | None) -> SimpleNamespace:
        asked.append((list(arguments), isa))
        return SimpleNamespace(as_dict=lambda: verdict)

    monkeypatch.setattr(serving, "judge", judge)
    done = CliRunner().invoke(app, ["doctor", "--isa", "gfx950", "--", "--model-path", "m", "--tp-size", "4"])
    assert asked == [(["--model-path", "m", "--tp-size", "4"], "gfx950")]
    assert done.exit_code == (0 if runs else 1)
    assert ("[too] many rows" in done.output) is not runs
    assert "decode of [1, 2] requests x 1 tokens" in done.output
    assert "The checkpoint's weights: FP8 blocks." in done.output


def test_arguments_that_sglang_refuses(monkeypatch: pytest.MonkeyPatch, healthy: None) -> None:

    def judge(arguments: Sequence[str], isa: str | None) -> None:
        raise serving.ServingError("SGLang does not parse these arguments: no --such-flag")

    monkeypatch.setattr(serving, "judge", judge)
    done = CliRunner().invoke(app, ["doctor", "--", "--such-flag"])
    assert done.exit_code == 2
    assert done.stderr == "glm53-mono doctor: SGLang does not parse these arguments: no --such-flag\n"
    assert done.stdout == ""


def test_a_server_that_nobody_can_judge(monkeypatch: pytest.MonkeyPatch, healthy: None) -> None:
    """Whatever a drifted SGLang raises becomes the reason."""

    def judge(arguments: Sequence[str], isa: str | None) -> None:
        raise AttributeError("'ServerArgs' object has no attribute 'resolve_once'")

    monkeypatch.setattr(serving, "judge", judge)
    done = CliRunner().invoke(app, ["doctor", "--json", "--", "--model-path", "m"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["server"]["reasons"] == [
        "SGLang cannot be asked: AttributeError: 'ServerArgs' object has no attribute 'resolve_once'"
    ]


def test_an_unknown_device_is_refused() -> None:
    done = CliRunner().invoke(app, ["doctor", "--isa", "gfx942"])
    assert done.exit_code == 2
    assert done.stderr == "glm53-mono doctor: ISA 'gfx942' is not one of gfx950, sm_90\n"


def test_a_broken_sub_command_breaks_no_other(monkeypatch: pytest.MonkeyPatch, healthy: None) -> None:
    monkeypatch.setitem(COMMANDS, "demo", SubCommand("glm53_mono.cli.no_such_module", "demo"))
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
    assert "demo" in CliRunner().invoke(app, ["--help"]).output
    broken = CliRunner().invoke(app, ["demo", "--layers", "2", "x"])
    assert broken.exit_code == 1
    assert broken.stderr.startswith("glm53-mono demo: glm53_mono.cli.no_such_module does not import")


def test_the_command_starts_without_importing_anything_heavy() -> None:
    program = "import sys\nfrom glm53_mono.cli.main import app\nimport glm53_mono.cli.doctor\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert not {"torch", "triton", "sglang", "transformers", "numpy"} & set(done.stdout.split())
