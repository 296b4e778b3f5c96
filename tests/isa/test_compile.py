"""`glm53-mono isa` on a kernel that a gfx950 server launches: compiled here, without such a device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from glm53_mono.cli import isa as module
from glm53_mono.cli.isa import ExamineError, examine
from glm53_mono.cli.main import app
from glm53_mono.isa.hazards import width_hazards
from glm53_mono.isa.hazards.loads import streamed_lines
from glm53_mono.isa.hazards.polling import polling_hazards
from glm53_mono.isa.listing import parse
from glm53_mono.isa.report import Report
from glm53_mono.isa.variants import KernelVariant, variants
from glm53_mono.isas import ISAS
from tests.isa.test_budget import FITS

VARIANT = variants("gfx950")[-1]
"""One of them, with all that is built; the command compiles the others."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("listings")


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    """A minute where Triton's cache does not have it yet."""
    return examine(VARIANT, folder)


@pytest.mark.slow
def test_nothing_is_wrong_with_the_compiled_kernel(report: Report, folder: Path) -> None:
    assert report.wrong == []
    assert report.variant == VARIANT
    assert report.programs_per_unit >= 1
    assert report.resources.shared > 0 and report.resources.code_bytes > 50_000
    listing = (folder / f"{VARIANT.name}.amdgcn").read_text()
    assert 'amdgcn-amd-amdhsa--gfx950"' in listing
    assert Report.from_dict(json.loads(json.dumps(report.as_dict()))) == report


@pytest.mark.slow
def test_a_hazard_in_the_compiled_kernel_would_be_seen(report: Report, folder: Path) -> None:
    """Every spin of the real listing loses its poll, and the weights their width."""
    text = (folder / f"{VARIANT.name}.amdgcn").read_text()
    lines = [line for line in text.splitlines() if not ("_load_dword " in line and line.endswith("sc1"))]
    broken = parse("\n".join(lines).replace("global_load_dwordx4", "global_load_ushort"))
    # What is left in the loops is the address of the host's record, a scalar load for the fault.
    assert all(hazard.startswith("poll served from a cache: s_load") for hazard in polling_hazards(broken))
    assert polling_hazards(broken)
    assert len(width_hazards(broken, streamed_lines())) > 20


def compiled(variant: KernelVariant, **changes: object) -> Report:
    """A report that needs no compiler."""
    return Report(variant, replace(FITS, **changes), 4, 61.5, False, "3.8.0", ())


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["isa", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_every_variant_is_compiled_and_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "examine", lambda variant, listings: compiled(variant))
    status, out, err = run("--isa", "gfx950", "--json", str(tmp_path / "isa.json"))
    assert status == 0
    written = json.loads((tmp_path / "isa.json").read_text())
    assert [each["name"] for each in written] == [variant.name for variant in variants("gfx950")]
    assert all(variant.name in out and f"compiling {variant.name}" in err for variant in variants("gfx950"))
    assert "163,840" in out and "compiled, not run" in out


def test_each_budget_that_is_exceeded_and_each_failure_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = [variant for isa in ISAS for variant in variants(isa)]

    def answer(variant: KernelVariant, listings: Path | None) -> Report:
        if variant == first:
            return compiled(variant, register_spills=7, scratch=28)
        raise ExamineError("it does not compile (status 1): ptxas fatal")

    monkeypatch.setattr(module, "examine", answer)
    status, _, err = run()
    assert status == 1
    lines = [line for line in err.splitlines() if "compiling" not in line]
    assert f"glm53-mono isa: {first.name}: register spills: 7 of at most 0" in lines
    assert f"glm53-mono isa: {first.name}: scratch: 28 of at most 0" in lines
    assert sum("ptxas fatal" in line for line in lines) == len(others)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--isa", "gfx942"], "--isa 'gfx942' is not one of gfx950, sm_90"),
        (["--only", "tp9"], "--only 'tp9' is in the name of no variant"),
        (["--jobs", "0"], "--jobs 0 is less than 1"),
        (["--json", "/no/such/folder/x"], "--json /no/such/folder/x: its folder does not exist, or it is one"),
        (["--listings", "/no/such/folder"], "--listings /no/such/folder is not a folder"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], says: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out, err) == (2, "", f"glm53-mono isa: {says}\n")


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (
            "import sys; sys.exit('Triton 3.6.0 is too old')",
            r"it does not compile \(status 1\): Triton 3.6.0 is too old",
        ),
        ("import os; os.abort()", r"it does not compile \(status -6\): no message"),
        ("import time; time.sleep(60)", "compiling it took longer than 0.5 s"),
    ],
)
def test_a_process_that_fails_says_why(
    program: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.py").write_text(program)
    monkeypatch.setattr(module, "worker_file", lambda: tmp_path / "worker.py")
    monkeypatch.setattr(module, "LONGEST_S", 0.5 if "sleep" in program else 60)
    with pytest.raises(ExamineError, match=says):
        examine(VARIANT)


def test_narrow_weights_are_not_brought_to_lds_directly() -> None:
    from glm53_mono.isa import compile as compiling

    def setting(isa: str, weights: str) -> bool | None:
        with compiling.published_launch(KernelVariant(isa, False, 1, weights, True)).compiler():
            return compiling.triton.knobs.amd.use_async_copy

    as_it_was = compiling.triton.knobs.amd.use_async_copy
    found = [setting(*each) for each in (("gfx950", "fp8"), ("gfx950", "mxfp4"), ("gfx950", "bf16"), ("sm_90", "fp8"))]
    assert found == [False, False, as_it_was, as_it_was]
    assert compiling.triton.knobs.amd.use_async_copy == as_it_was


def test_formats_without_weights_and_old_compilers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from glm53_mono.isa import compile as compiling

    with pytest.raises(compiling.CompileError, match="there are no int3 weights to compile gfx950-decode-tp1-int3"):
        compiling.published_launch(KernelVariant("gfx950", False, 1, "int3", False))
    monkeypatch.setattr(compiling.triton, "__version__", "3.7.1")
    with pytest.raises(compiling.CompileError, match=r"Triton 3\.7\.1 is too old for gfx950: at least 3\.8 is needed"):
        compiling.compile_variant(VARIANT)
