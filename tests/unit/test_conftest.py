"""How the suite runs: GPU tests never pass for others without a GPU, and a seed repeats a run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[2] / "conftest.py"

SUITE = """
import os
import pytest

@pytest.mark.gpu
def test_on_the_gpu():
    assert os.environ.get("TRITON_INTERPRET") != "1"

def test_in_the_interpreter():
    assert os.environ["TRITON_INTERPRET"] == "1"

def test_seed(seed):
    print(f"drawn {seed}")
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "test_suite.py").write_text(SUITE)
    return tmp_path


def run(suite: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    command = [sys.executable, "-m", "pytest", "-s", *arguments]
    return subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, check=False, timeout=120)


def assert_gpu_test_is_left_out(done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0, done.stdout
    assert "1 tests that need a GPU did not run" in done.stdout
    assert "2 passed" in done.stdout


def test_workers_leave_gpu_tests_out_too(suite: Path) -> None:
    assert_gpu_test_is_left_out(run(suite, "-n", "2"))


@pytest.mark.parametrize("visible", [True, False])
def test_gpu_tests_run_alone_and_only_on_a_gpu(suite: Path, visible: bool) -> None:
    # A stand-in: what matters is its answer, and the real one takes seconds to import.
    (suite / "torch.py").write_text(f"class cuda:\n    is_available = lambda: {visible}\n")
    done = run(suite, "-m", "gpu")
    if visible:
        assert done.returncode == 0, done.stdout
        assert "1 passed, 2 deselected" in done.stdout
    else:
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert "-m gpu needs a GPU, and torch sees none" in done.stderr
        assert "passed" not in done.stdout


def test_a_run_is_fresh_and_its_seed_repeats_it(suite: Path) -> None:
    def found(pattern: str, done: subprocess.CompletedProcess) -> str:
        assert_gpu_test_is_left_out(done)
        return re.search(pattern, done.stdout)[1]

    first, fresh = run(suite), run(suite)
    again = run(suite, "--seed", found(r"repeat with --seed (\d+)", first))
    drawn = [found(r"drawn (\d+)", done) for done in (first, again, fresh)]
    assert drawn[0] == drawn[1] != drawn[2]
