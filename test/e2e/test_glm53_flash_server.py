"""A real server with the monokernel against the same server without it, in every arm of `conftest.ARMS`."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from glm53_mono.metrics import FALLBACK, KERNEL
from glm53_mono.numerics import BOUNDS
from test.e2e.compare import (
    MOST_FLIPS,
    OWN_NOISE,
    Rows,
    compare,
    compare_all,
    compare_greedy,
    compare_rows,
    decoded,
    wrong_answers,
)
from test.e2e.conftest import Model, Unusual
from test.e2e.scenario import FEWEST_FORCED_STEPS, FORCED_STEPS, TRACK_INTERVAL, Plan, Results
from test.e2e.server import MONOKERNEL, Answer, Generation, Server, running

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

LOGIT_STEP = 2.0**-5
"""Between two neighbours of bf16, as which logits of 4 to 8 are stored."""

GSM8K_FILE = "gsm8k_test.jsonl"
"""A real model's folder may hold this file: one JSON object a line, with `question` and `answer`."""

GSM8K_QUESTIONS = 200


def assert_served(steps: Mapping[tuple[str, str], int], fewest: int) -> None:
    """The kernel ran the decode steps, and SGLang's forward ran prefills and nothing else.

    Args:
        steps: by path and reason, as `Server.steps` counts them.
        fewest: decode steps that there were at least.
    """
    print(steps)
    assert steps.get((KERNEL, ""), 0) >= fewest, steps
    # no width of 1 to 8 rows and no request may be left to SGLang; prefills show that such steps are counted
    assert {reason for path, reason in steps if path == FALLBACK} == {"extend"}, steps


def own_noise(off: Results, head: torch.Tensor) -> Rows:
    """How far SGLang's forward in a crowd is from itself, of the request that is furthest."""
    each = [compare(crowded, alone, head) for crowded, alone in zip(off.crowded, off.alone, strict=True)]
    return max(each, key=lambda rows: rows.overall)


def assert_close(rows: Rows, own: Rows, name: str) -> None:
    """Within the bound of a few layers, or within SGLang's own noise where many layers make that larger."""
    bound = max(BOUNDS["step", "logits"].rel, OWN_NOISE * own.overall)
    said = (
        f"{name}: relative RMSE {rows.overall:.2e}, median {rows.median:.2e} "
        f"(SGLang against itself {own.overall:.2e}, {own.median:.2e}), "
        f"{rows.flips} near-ties in {len(rows.distances)} rows ({own.flips}), growth {rows.growth:.2f}"
    )
    print(said)
    assert rows.overall <= bound, said
    assert rows.flip_share <= max(MOST_FLIPS, 2 * own.flip_share), said


def assert_same_log_probabilities(found: list[Answer], expected: list[Answer]) -> None:
    """Of the tokens that both arms chose after the same ones: most are a step of their type apart or less."""
    pairs = [compare_greedy(*pair) for pair in zip(found, expected, strict=True)]
    print(*pairs, sep="\n")
    assert statistics.median(pair.logprob_median for pair in pairs) <= LOGIT_STEP


class TestMonokernelDecode:
    """Decode steps of 1 to 8 rows."""

    def test_the_kernel_served_the_steps(self, on: Results, off: Results) -> None:
        assert "glm53_mono: active (rank 0" in on.log
        assert "glm53_mono" not in off.log.replace("glm53_mono.plugin", "")
        assert "glm53_mono: rank 0, program" not in on.log
        assert_served(on.steps, FEWEST_FORCED_STEPS)

    def test_tokens_were_forced(self, on: Results, off: Results, plan: Plan) -> None:
        for arm in (on, off):
            for answers in (arm.together, arm.alone, off.crowded):
                assert [answer.tokens for answer in answers] == [list(each.forced) for each in plan.forced]
            assert [answer.tokens for answer in arm.passing] == [list(each.forced) for each in plan.passing]

    @pytest.mark.parametrize("batch", ["together", "alone"])
    def test_logits_agree(self, on: Results, off: Results, model: Model, batch: str) -> None:
        for request, expected in enumerate(getattr(off, batch)):
            rows = compare(getattr(on, batch)[request], expected, model.head)
            own = own_noise(off, model.head)
            assert_close(rows, own, f"request {request} {batch}")
            assert rows.growth <= max(2.0, OWN_NOISE * own.growth)

    def test_other_rows_do_not_agree(self, on: Results, off: Results, model: Model) -> None:
        """Negative control: the comparison sees a row that is one step off."""
        own, other = (decoded(arm.together[2]).to(model.head.device) @ model.head.T for arm in (on, off))
        assert compare_rows(own[1:], other[:-1]).overall > 10 * BOUNDS["step", "logits"].rel

    def test_greedy_outputs_agree(self, on: Results, off: Results, model: Model) -> None:
        """Up to the token where a near-tie sends two continuations apart."""
        assert_close(compare_all(on.greedy, off.greedy, model.head), own_noise(off, model.head), "greedy")
        assert_same_log_probabilities(on.greedy, off.greedy)

    def test_requests_may_come_and_go(self, on: Results, off: Results, model: Model) -> None:
        """They join a running batch, leave it, and are aborted in it."""
        assert_close(compare_all(on.passing, off.passing, model.head), own_noise(off, model.head), "passing")

    def test_requests_survive_retraction(self, unusual: Unusual, off: Results, plan: Plan, model: Model) -> None:
        assert "#retracted_reqs" in unusual.log
        # the requests that pass may share every step, and prefill makes the first token after each retraction: one in
        # dozens, so half is a bound with room
        tokens = max(generation.tokens for generation in plan.passing) + FORCED_STEPS
        assert_served(unusual.steps, tokens // 2)
        assert [answer.tokens for answer in unusual.passing] == [list(each.forced) for each in plan.passing]
        assert_close(compare_all(unusual.passing, off.passing, model.head), own_noise(off, model.head), "retracted")

    def test_other_log_probabilities_do_not_agree(self, off: Results) -> None:
        """Negative control: the same tokens half as likely."""
        for answer in off.greedy:
            _, unlikelier = wrong_answers(answer, unlikelier=0.7)
            with pytest.raises(AssertionError):
                assert_same_log_probabilities([unlikelier], [answer])

    def test_sessions_go_on_from_states_that_decode_steps_have_kept(
        self, on: Results, off: Results, plan: Plan, model: Model
    ) -> None:
        first_prompt, first_answer = plan.turns[0]
        for turn, (found, expected) in enumerate(zip(on.turns, off.turns, strict=True)):
            assert found.cached == expected.cached
            if turn == 1:
                # more than the first prompt is cached only if its answer's steps saved their states
                assert found.cached >= (len(first_prompt) + len(first_answer)) // TRACK_INTERVAL * TRACK_INTERVAL
            rows = compare(found, expected, model.head)
            assert_close(rows, own_noise(off, model.head), f"turn {turn}, {found.cached} tokens cached")

    def test_gsm8k_is_as_right_as_without(self, model: Model, logs: Path) -> None:
        questions = model.folder / GSM8K_FILE
        if not model.real:
            pytest.skip("random weights answer no question: set GLM53_MONO_MODEL to a real model")
        if not questions.exists():
            pytest.skip(f"{questions} is not there")
        right = {}
        for arm, arguments in (("off", ()), ("on", MONOKERNEL)):
            with running(model.folder, logs / f"gsm8k-{arm}.log", *arguments) as server:
                right[arm] = gsm8k(server, questions, model)
        print(f"GSM8K of {GSM8K_QUESTIONS}: {right}")
        # two standard deviations of the difference of two such scores
        assert right["on"] >= right["off"] - 2 * (2 * 0.25 * GSM8K_QUESTIONS) ** 0.5


class TestMonokernelHiddenStates:
    """Hidden states that a request asks for, in the modes full and last."""

    def test_one_row_a_step(self, on: Results, off: Results, plan: Plan, model: Model) -> None:
        for request, generation in enumerate(plan.forced):
            states = decoded(on.together[request])
            assert states.shape == decoded(off.together[request]).shape
            assert states.shape == (generation.tokens - 1, model.head.shape[1])

    def test_they_are_as_close_as_the_logits(self, on: Results, off: Results) -> None:
        for request, expected in enumerate(off.together):
            rows = compare_rows(decoded(on.together[request]), decoded(expected))
            own = compare_rows(decoded(off.crowded[request]), decoded(off.alone[request]))
            assert rows.overall <= max(BOUNDS["step", "hidden"].rel, OWN_NOISE * own.overall)

    def test_the_last_one_is_the_last_of_all(self, unusual: Unusual, off: Results) -> None:
        last = decoded(unusual.last)[-1:]
        rows = compare_rows(last, decoded(off.alone[0])[-1:])
        own = compare_rows(decoded(off.crowded[0]), decoded(off.alone[0]))
        assert rows.overall <= max(BOUNDS["step", "hidden"].rel, OWN_NOISE * own.overall)


def gsm8k(server: Server, questions: Path, model: Model) -> int:
    """Right answers of a five-shot run, eight questions at a time."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.folder, trust_remote_code=True)
    lines = [json.loads(line) for line in questions.read_text().splitlines()]
    shots = "".join(f"Question: {line['question']}\nAnswer: {line['answer']}\n\n" for line in lines[:5])
    asked = lines[5 : 5 + GSM8K_QUESTIONS]
    right = 0
    for first in range(0, len(asked), 8):
        batch = asked[first : first + 8]
        prompts = [tokenizer(f"{shots}Question: {line['question']}\nAnswer:")["input_ids"] for line in batch]
        answers = server.generate_together([Generation(prompt, 256) for prompt in prompts])
        for line, answer in zip(batch, answers, strict=True):
            said = tokenizer.decode(answer.tokens).split("Question:")[0]
            right += _last_number(said) == _last_number(line["answer"])
    return right


def _last_number(text: str) -> float | None:
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(numbers[-1].replace(",", "")) if numbers else None
