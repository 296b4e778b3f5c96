"""A real server that drafts (MTP), with the monokernel against the same server without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from glm53_mono.numerics import BOUNDS
from test.e2e import likely_drafts, mtp_scenario
from test.e2e.compare import compare_greedy, decoded, wrong_answers
from test.e2e.conftest import head_of
from test.e2e.mtp_scenario import AT_ONCE, Plan, Results, accept_length, verify_steps, watched_answers
from test.e2e.server import COUNTED, MONOKERNEL, Answer, drafting, running

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

LAYERS, EXPERTS = 8, 16

ARMS = {
    "every size captured": (*COUNTED,),
    "padded requests": (*COUNTED, "--cuda-graph-bs-decode", "2", "8"),
    "no graphs": (*COUNTED, "--disable-cuda-graph"),
}
"""Arguments of the MTP3 arms that run the kernel."""

NEAR_TIE = 0.5
"""Log-probability between the two likeliest tokens below which either arm may be right: where no token is likely they
are some 0.2 apart, and an expert that falls the other way at a near-tie of its scores moves a logit by a tenth. Likely
tokens lead by ten and more."""

BF16_BITS = 7
"""Stored bits of a significand: the head's library GEMM may depend on a step's rows by the last one."""

FEWEST_SAME = 8
"""Tokens that two greedy continuations must share for a comparison of their hidden states to mean something."""

DEVIATIONS = 4
"""Standard deviations of an accept length's mean, of which one run in some ten thousand is further away."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """The model of GLM53_MONO_MODEL, or a synthetic one whose drafts are often right."""
    named = os.environ.get("GLM53_MONO_MODEL")
    if named:
        return Path(named)
    made, seed = tmp_path_factory.mktemp("model") / "mtp", pytestconfig.option.seed
    command = [sys.executable, "-c", "from glm53_mono.cli.main import app; app()", "checkpoint", str(made), "--mtp"]
    sizes = ["--layers", str(LAYERS), "--experts", str(EXPERTS), "--device", "cuda", "--seed", str(seed)]
    subprocess.run([*command, *sizes], check=True)
    likely_drafts.make_likely(made, seed)
    return made


Arm = Callable[..., Results]


@pytest.fixture(scope="session")
def head(folder: Path) -> torch.Tensor:
    """[vocab, hidden] fp32 on the GPU."""
    return head_of(folder)


@pytest.fixture(scope="session")
def plan(pytestconfig: pytest.Config, head: torch.Tensor) -> Plan:
    """The requests that every arm answers."""
    return mtp_scenario.draw(pytestconfig.option.seed, head.shape[0])


@pytest.fixture(scope="session")
def arm(folder: Path, plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Arm:
    """Runs the plan on a server of its own."""
    logs = tmp_path_factory.mktemp("mtp-logs")

    def run(name: str, *arguments: str, at_once: int) -> Results:
        with running(folder, logs / f"{name.replace(' ', '-')}.log", *arguments) as server:
            return mtp_scenario.run(server, plan, at_once=at_once, counts="--enable-metrics" in arguments)

    return run


@pytest.fixture(scope="session")
def off3(arm: Arm) -> Results:
    """SGLang's own forward, MTP3."""
    return arm("mtp3-off", *drafting(3), at_once=AT_ONCE)


@pytest.fixture(scope="session", params=ARMS)
def on3(request: pytest.FixtureRequest, off3: Results, arm: Arm) -> Results:
    """The kernel, MTP3, an arm at a time."""
    return arm(f"mtp3-{request.param}", *drafting(3), *ARMS[request.param], at_once=AT_ONCE)


@pytest.fixture(scope="session")
def off5(arm: Arm) -> Results:
    """SGLang's own forward, MTP5."""
    return arm("mtp5-off", *drafting(5), at_once=1)


@pytest.fixture(scope="session")
def on5(off5: Results, arm: Arm) -> Results:
    """The kernel, MTP5."""
    return arm("mtp5-on", *drafting(5), *COUNTED, at_once=1)


@pytest.fixture(scope="session")
def undrafted(folder: Path, plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """`Plan.watched` by the kernel without drafts: decode steps."""
    with running(folder, tmp_path_factory.mktemp("mtp-logs") / "undrafted.log", *MONOKERNEL) as server:
        return watched_answers(server, plan)


def assert_served(on: Results, tokens: int) -> None:
    """The kernel ran the steps that fit, and every other one was counted under its reason."""
    assert "glm53_mono: active (rank 0" in on.log
    assert "glm53_mono: rank 0, program" not in on.log
    print(on.steps)
    fitting = verify_steps([*on.fitting, *on.watched])
    # a step of two requests counts for both, and each request has an overlapped step or two after its end
    assert on.fitting_steps["kernel", ""] >= fitting / AT_ONCE
    wide = {int(reason.split()[0]) for path, reason in on.steps if path == "sglang" and reason.endswith(" rows")}
    assert wide and all(rows > 8 and rows % tokens == 0 for rows in wide)
    assert not any(reason.endswith(" rows") for _, reason in on.fitting_steps)
    assert {("sglang", "extend"), ("sglang", "draft extend")} <= set(on.steps)


def assert_same_accept_length(on: Results, off: Results, tokens: int) -> None:
    """Within the noise of two runs whose steps accept between 1 and `tokens` tokens."""
    for name in ("fitting", "answers"):
        found, expected = getattr(on, name), getattr(off, name)
        one_step = (tokens - 1) / 2
        noise = DEVIATIONS * one_step * (1 / verify_steps(found) + 1 / verify_steps(expected)) ** 0.5
        said = f"{name}: accept length {accept_length(found):.3f}, SGLang {accept_length(expected):.3f} +- {noise:.3f}"
        print(said)
        assert abs(accept_length(found) - accept_length(expected)) <= noise, said
        # random drafts would make it 1, and all comparisons here empty
        assert accept_length(expected) > 1.3, said


def assert_same_continuations(found: list[Answer], expected: list[Answer]) -> None:
    """The same tokens up to a near-tie, with nearly the same log-probabilities at most of them."""
    for own, other in zip(found, expected, strict=True):
        continuation = compare_greedy(own, other)
        print(continuation)
        assert continuation.gap is None or continuation.gap <= NEAR_TIE
        assert continuation.logprob_median <= BOUNDS["step", "logits"].rel


def drift(results: Results) -> tuple[float, float]:
    """Mean distance of the long answer's log-probabilities from prefill's, in its first and its last quarter."""
    pairs = zip(results.long.logprobs, results.long_scores, strict=True)
    apart = torch.tensor([abs(generated - scored) for generated, scored in pairs])
    quarter = len(apart) // 4
    return apart[:quarter].mean().item(), apart[-quarter:].mean().item()


class TestMonokernelMtp:
    """Verify steps of up to 8 rows on the kernel, wider ones on SGLang's forward."""

    def test_mtp3_steps_are_served_and_counted(self, on3: Results) -> None:
        assert_served(on3, tokens=4)

    def test_mtp3_accepts_as_many_drafts(self, on3: Results, off3: Results) -> None:
        assert_same_accept_length(on3, off3, tokens=4)

    def test_mtp3_outputs_agree(self, on3: Results, off3: Results) -> None:
        assert_same_continuations(on3.fitting, off3.fitting)

    def test_mtp3_requests_may_change_sides(self, on3: Results, off3: Results) -> None:
        """Steps of one to six requests: of three on they are SGLang's."""
        assert_same_continuations([*on3.passing, on3.long], [*off3.passing, off3.long])

    def test_states_do_not_drift(self, on3: Results, off3: Results) -> None:
        """Over 2,000 tokens of mixed steps, against a prefill of the same tokens."""
        (first, last), (own_first, own_last) = drift(on3), drift(off3)
        said = f"first quarter {first:.2e}, last {last:.2e}; SGLang's own {own_first:.2e}, {own_last:.2e}"
        print(said)
        assert last <= max(2 * own_last, 2 * first), said

    def test_mtp5_is_mtp3_with_longer_chains(self, on5: Results, off5: Results) -> None:
        assert_served(on5, tokens=6)
        assert_same_accept_length(on5, off5, tokens=6)
        assert_same_continuations(on5.fitting, off5.fitting)
        assert_same_continuations([*on5.passing, on5.long], [*off5.passing, off5.long])

    def test_hidden_states_are_those_of_decode_steps(
        self, on3: Results, undrafted: list[Answer], head: torch.Tensor
    ) -> None:
        """Bit for bit, up to where the head's GEMM of another row count chooses another token at a near-tie."""
        near_ties = 0
        for found, expected in zip(on3.watched, undrafted, strict=True):
            same = compare_greedy(found, expected).same
            assert same > FEWEST_SAME
            own, other = decoded(found)[:same], decoded(expected)[:same]
            assert torch.equal(own, other)
            if same < len(expected.tokens):
                near_ties += 1
                loudest = (other[-1].to(head.device) @ head.T).max().log2().floor().item()
                assert expected.top_gaps[same] <= 2 ** (loudest - BF16_BITS), f"token {same}"
        print(f"{near_ties} of {len(undrafted)} continuations part at a tie of the head")

    def test_another_row_is_seen(self, on3: Results) -> None:
        """Negative control of the comparisons: rows that are one off, another token and other log-probabilities."""
        rows = decoded(on3.watched[0])
        assert not torch.equal(rows[1:], rows[:-1])
        answer = on3.fitting[0]
        for wrong in wrong_answers(answer, unlikelier=0.1):
            with pytest.raises(AssertionError):
                assert_same_continuations([wrong], [answer])
