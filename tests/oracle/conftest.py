"""SGLang's single operations on the CPU, and how the tests of this folder compare."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.oracle.sglang_cpu import context


@pytest.fixture(autouse=True, scope="module")
def _fresh_draws(pytestconfig: pytest.Config) -> Iterator[None]:
    from tests.oracle.ops import Draw

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draw, "run_seed", pytestconfig.option.seed)
        yield


@pytest.fixture(scope="module")
def sglang_ops() -> Iterator[None]:
    """SGLang's operations can be called: its Triton kernels are interpreted, and rounded as on a GPU."""
    context.prepare_environment()
    import torch

    from glm53_mono.kernels import interpreter
    from tests.oracle.sglang_cpu import patches

    torch.set_num_threads(1)
    interpreter.repair()
    with patches.applied():
        yield
