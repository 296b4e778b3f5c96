"""What every test run shares: the interpreter or a GPU, one thread, and a fresh seed that the header records."""

from __future__ import annotations

import os
import random
import zlib
from typing import Any

import pytest

GPU_TESTS_LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="Seed of the random inputs; a fresh one if not given.")


def pytest_configure(config: pytest.Config) -> None:
    # Set once in the controller; pytest-xdist hands the options on to its workers.
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(2**31)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not runs_on_gpu(config):
        # Triton reads it when a kernel is declared, so before any test module is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    elif not gpu_is_visible():
        raise pytest.UsageError("-m gpu needs a GPU, and torch sees none")


def pytest_report_header(config: pytest.Config) -> str:
    where = "on the GPU" if runs_on_gpu(config) else "in Triton's interpreter"
    return f"kernels run {where}; seed {config.option.seed} (repeat with --seed {config.option.seed})"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if runs_on_gpu(config):
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if item not in left_out]
    config.stash[GPU_TESTS_LEFT_OUT] = len(left_out)
    config.hook.pytest_deselected(items=left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["gpu_tests_left_out"] = session.config.stash.get(GPU_TESTS_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker of pytest-xdist collects all tests and tells the same number."""
    node.config.stash[GPU_TESTS_LEFT_OUT] = getattr(node, "workeroutput", {}).get("gpu_tests_left_out", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    left_out = config.stash.get(GPU_TESTS_LEFT_OUT, 0)
    if left_out:
        terminalreporter.write_line(
            f"{left_out} tests that need a GPU did not run: `make gpu-test` runs them where there is one"
        )


def runs_on_gpu(config: pytest.Config) -> bool:
    """GPU tests run when they are asked for, so that `make test` means the same on every machine."""
    return config.option.markexpr == "gpu"


def gpu_is_visible() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of the test's own, drawn from the run's; the same for the same test and `--seed`."""
    return (request.config.option.seed + zlib.crc32(request.node.nodeid.encode())) % 2**31
