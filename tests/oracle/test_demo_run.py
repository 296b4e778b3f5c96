"""The demo from prompt to verdict: reference and kernels pass, kernels that commit the wrong draft do not."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from torch import Tensor

from glm53_mono.cli.demo import run_demo
from glm53_mono.cli.demo_plan import Plan
from glm53_mono.cli.kernel_runner import KernelRunner
from glm53_mono.cli.reference_runner import ReferenceRunner
from glm53_mono.reference.state import StepInputs

pytestmark = pytest.mark.slow

SEED_WITH_ACCEPTED_DRAFTS = 0


class ForgetfulRunner(KernelRunner):
    """Commits the first token of every request, whatever was accepted."""

    name = "forgetful"

    def commit(self, inputs: StepInputs, accepted: Tensor) -> None:
        super().commit(inputs, accepted * 0)


def test_the_demo_passes_reference_and_kernels_and_fails_a_bug() -> None:
    page = io.StringIO()
    plan = Plan(prompt_tokens=(21,), decode_steps=1, verify_rounds=3)
    runners = [ReferenceRunner, KernelRunner, ForgetfulRunner]
    passed = run_demo(plan, SEED_WITH_ACCEPTED_DRAFTS, Console(file=page, width=120), Console(quiet=True), runners)
    text = page.getvalue()
    assert not passed
    assert text.endswith("FAIL\n")
    assert "SGLang 0.5.23, its own forward on the CPU" in text
    right, wrong = text.split("reference against SGLang")[1].split("forgetful against SGLang")
    assert "EXCEEDED" not in right
    assert "EXCEEDED" in wrong
    assert "forgetful: conv windows" in wrong
    assert "reference: " not in wrong
    assert "kernels: " not in wrong
    assert "drafts: 0 of" not in text
