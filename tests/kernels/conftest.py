"""The interpreter as the kernel tests want it, and kernels compiled before GPU tests want them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def interpreter_ready(pytestconfig: pytest.Config) -> Iterator[None]:
    if pytestconfig.option.markexpr == "gpu":
        yield
        return
    import numpy as np
    import torch

    from glm53_mono.kernels.interpreter import repair

    torch.set_num_threads(1)
    repair()
    with np.errstate(over="ignore", invalid="ignore"):
        yield


@pytest.fixture(scope="session")
def compiled() -> None:
    """Every variant that the GPU tests launch lies in Triton's cache: compiled side by side, a process each."""
    from tests.kernels import full_width

    for process in [full_width.start(name) for name in ("short", "verify", "other layouts")]:
        status, _, error = full_width.finished(process)
        assert status == 0, error
