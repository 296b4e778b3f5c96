"""What the GPU tests make of servers' answers, steps and graphs, and the mistakes that they must find in each."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from glm53_mono.metrics import FALLBACK, KERNEL
from test.e2e.compare import FLIP, MOST_FLIPS, OWN_NOISE, compare, compare_all, compare_greedy, compare_rows, decoded
from test.e2e.forced_tokens import Forced
from test.e2e.graph_nodes import misplaced
from test.e2e.scenario import FEWEST_FORCED_STEPS
from test.e2e.server import Answer, grown
from test.e2e.test_glm53_flash_server import LOGIT_STEP, assert_close, assert_same_log_probabilities, assert_served

STEPS, HIDDEN, VOCAB = 64, 48, 80
NOISE = 4e-3
"""Relative distance of rounding differences, well within the bound of a few layers."""

FLIPPED = 3 * FLIP * NOISE
"""Relative distance of a row that took another expert."""


@pytest.fixture
def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(draw: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=draw)


def near(draw: torch.Generator, expected: torch.Tensor, distance: float | torch.Tensor) -> torch.Tensor:
    """Rows at that distance from the expected ones, relative to each row's length."""
    error = normal(draw, *expected.shape)
    return expected + error / error.norm(dim=1, keepdim=True) * expected.norm(dim=1, keepdim=True) * distance


def answer(states: torch.Tensor | None = None, tokens: int = STEPS + 1, **changes: object) -> Answer:
    """An answer with hidden states as a server sends them, the prompt's in a list of their own, and `tokens` tokens."""
    hidden = [] if states is None else [[[9.0] * HIDDEN] * 3, *states.tolist()]
    likely = [-0.1 * (1 + place % 5) for place in range(tokens)]
    plain = Answer(list(range(tokens)), 0, hidden, likely, [1.0 + place for place in range(tokens)], 0)
    return replace(plain, **changes)


def test_rounding_differences_are_close_and_do_not_grow(draw: torch.Generator) -> None:
    expected = normal(draw, STEPS, VOCAB)
    rows, own = (compare_rows(near(draw, expected, NOISE), expected) for _ in range(2))
    assert rows.overall == pytest.approx(NOISE, rel=1e-2)
    assert rows.median == pytest.approx(NOISE, rel=1e-2)
    assert (rows.flips, len(rows.distances)) == (0, STEPS)
    assert rows.growth == pytest.approx(1.0, abs=1e-2)
    assert_close(rows, own, "noise")


def test_the_same_rows_are_no_distance_apart(draw: torch.Generator) -> None:
    expected = normal(draw, STEPS, VOCAB)
    rows = compare_rows(expected.clone(), expected)
    assert (rows.overall, rows.median, rows.flips) == (0.0, 0.0, 0)


def test_distances_are_relative_to_each_row(draw: torch.Generator) -> None:
    expected = normal(draw, STEPS, VOCAB) * torch.logspace(-2, 2, STEPS)[:, None]
    rows = compare_rows(near(draw, expected, NOISE), expected)
    torch.testing.assert_close(rows.distances, torch.full((STEPS,), NOISE), rtol=1e-2, atol=0)


def test_a_drift_grows(draw: torch.Generator) -> None:
    """Four times as far at the end as in the beginning: each row by itself would still do."""
    expected = normal(draw, STEPS, VOCAB)
    rows = compare_rows(near(draw, expected, torch.linspace(1, 4, STEPS)[:, None] * NOISE), expected)
    assert rows.flips == 0
    assert rows.growth == pytest.approx((4 - 3 / 8) / (1 + 3 / 8), rel=5e-2)
    assert rows.growth > max(2.0, OWN_NOISE)


def test_a_few_near_ties_are_counted_apart(draw: torch.Generator) -> None:
    expected = normal(draw, STEPS, VOCAB)
    distances = torch.full((STEPS, 1), NOISE)
    distances[[5, 40]] = FLIPPED
    rows = compare_rows(near(draw, expected, distances), expected)
    assert rows.flips == 2
    assert rows.overall == pytest.approx(NOISE, rel=1e-2)
    assert MOST_FLIPS * STEPS >= 2
    assert_close(rows, compare_rows(expected, expected), "two near-ties")


def test_many_near_ties_are_too_many(draw: torch.Generator) -> None:
    expected = normal(draw, STEPS, VOCAB)
    distances = torch.full((STEPS, 1), NOISE)
    distances[: STEPS // 8] = FLIPPED
    rows = compare_rows(near(draw, expected, distances), expected)
    assert rows.flips == STEPS // 8
    with pytest.raises(AssertionError, match="8 near-ties in 64 rows"):
        assert_close(rows, compare_rows(expected, expected), "eight near-ties")


def test_a_mistake_in_every_row_is_no_near_tie(draw: torch.Generator) -> None:
    expected = normal(draw, STEPS, VOCAB)
    rows = compare_rows(near(draw, expected, FLIPPED), expected)
    assert rows.flips == 0
    with pytest.raises(AssertionError, match="relative RMSE"):
        assert_close(rows, compare_rows(expected, expected), "a mistake")


def test_more_noise_is_allowed_where_sglang_has_as_much(draw: torch.Generator) -> None:
    expected = normal(draw, STEPS, VOCAB)
    rows, own = (compare_rows(near(draw, expected, 20 * NOISE * share), expected) for share in (1.0, 0.9))
    assert_close(rows, own, "many layers")
    with pytest.raises(AssertionError, match="many layers"):
        assert_close(rows, compare_rows(near(draw, expected, 10 * NOISE), expected), "many layers")


def test_nan_is_not_close(draw: torch.Generator) -> None:
    expected = normal(draw, STEPS, VOCAB)
    spoilt = near(draw, expected, NOISE)
    spoilt[7, 7] = float("nan")
    with pytest.raises(AssertionError):
        assert_close(compare_rows(spoilt, expected), compare_rows(expected, expected), "NaN")


def test_logits_come_from_the_decode_steps_hidden_states(draw: torch.Generator) -> None:
    states, head = normal(draw, STEPS, HIDDEN), normal(draw, VOCAB, HIDDEN)
    found = answer(near(draw, states, NOISE))
    assert torch.equal(decoded(answer(states)), states)
    rows = compare(found, answer(states), head)
    assert len(rows.distances) == STEPS
    assert 0.3 * NOISE < rows.overall < 3 * NOISE


def test_the_last_row_of_a_retracted_requests_prefill_is_a_tokens(draw: torch.Generator) -> None:
    states = normal(draw, STEPS, HIDDEN)
    retracted = answer(states)
    retracted.hidden[8] = [[9.0] * HIDDEN, [8.0] * HIDDEN, retracted.hidden[8]]
    assert torch.equal(decoded(retracted), states)


def test_rows_after_another_token_are_left_out(draw: torch.Generator) -> None:
    """Both arms' states are compared as long as both were given the same tokens, over all requests together."""
    states, head = normal(draw, STEPS, HIDDEN), normal(draw, VOCAB, HIDDEN)
    expected = answer(states)
    changed = near(draw, states, NOISE)
    changed[20:] = 0.0
    found = answer(changed, tokens=STEPS + 1)
    found.tokens[20:] = [token + 100 for token in found.tokens[20:]]
    rows = compare(found, expected, head)
    assert len(rows.distances) == 20 and rows.overall < 3 * NOISE
    assert len(compare_all([found, expected], [expected, expected], head).distances) == 20 + STEPS
    other = replace(found, tokens=[token + 100 for token in expected.tokens])
    assert len(compare_all([other, expected], [expected, expected], head).distances) == STEPS
    with pytest.raises(ValueError, match="no two answers begin with the same token"):
        compare(other, expected, head)


def test_rows_that_are_one_off_are_far_away(draw: torch.Generator) -> None:
    states, head = normal(draw, STEPS, HIDDEN), normal(draw, VOCAB, HIDDEN)
    assert compare(answer(states[1:]), answer(states[:-1]), head).overall > 1.0


@pytest.mark.parametrize("rows", [STEPS - 1, 0])
def test_another_number_of_rows_is_refused(draw: torch.Generator, rows: int) -> None:
    states, head = normal(draw, STEPS, HIDDEN), normal(draw, VOCAB, HIDDEN)
    with pytest.raises(ValueError, match=r"are compared with \(64, 48\)"):
        compare(answer(states[:rows]), answer(states), head)


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden states"):
        compare(answer(), answer(), torch.ones(VOCAB, HIDDEN))


def test_equal_continuations() -> None:
    found = compare_greedy(answer(tokens=12), answer(tokens=12))
    assert (found.same, found.gap, found.logprob_error) == (12, None, 0.0)
    assert_same_log_probabilities([answer(tokens=12)], [answer(tokens=12)])


@pytest.mark.parametrize("place", [0, 5, 11])
def test_continuations_are_compared_until_they_part(place: int) -> None:
    expected = answer(tokens=12)
    tokens = [*expected.tokens[:place], *(token + 100 for token in expected.tokens[place:])]
    found = replace(expected, tokens=tokens, logprobs=[*expected.logprobs[:place], *[-9.0] * (12 - place)])
    parted = compare_greedy(found, expected)
    assert (parted.same, parted.gap, parted.logprob_error) == (place, expected.top_gaps[place], 0.0)
    assert_same_log_probabilities([found], [expected])


def test_shifted_log_probabilities_are_found() -> None:
    expected = answer(tokens=12)
    shifted = replace(expected, logprobs=[logprob - 2 * LOGIT_STEP for logprob in expected.logprobs])
    moved = replace(expected, logprobs=[*expected.logprobs[1:], expected.logprobs[0]])
    assert compare_greedy(shifted, expected).logprob_error == pytest.approx(2 * LOGIT_STEP)
    for wrong in (shifted, moved):
        with pytest.raises(AssertionError):
            assert_same_log_probabilities([wrong], [expected])


def test_a_continuation_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare_greedy(answer(tokens=11), answer(tokens=12))


def forced(params: dict[str, object], steps: int, known: int) -> int:
    """The token that is left to a request so many decode steps behind a prefill, which knew `known` tokens."""
    params["__req__"] = SimpleNamespace(decode_batch_idx=steps, output_ids=[0] * known)
    logits = torch.randn(2, VOCAB)
    Forced()(logits[1:], [params])
    assert logits[0].isfinite().all() and int(logits[1].isfinite().sum()) == 1
    return int(logits[1].argmax())


def test_tokens_are_forced_through_retraction() -> None:
    """A step's token that had not come back when its request was retracted is made once more."""
    params: dict[str, object] = {"forced_tokens": [7, 3, 9, 1, 5]}
    assert [forced(params, 0, 0)] * 2 == [7, forced(params, 0, 0)], "each part of a prompt makes a token"
    assert [forced(params, steps, known) for steps, known in ((1, 0), (2, 1))] == [3, 9]
    assert [forced(params, steps, known) for steps, known in ((0, 2), (1, 2), (2, 3), (3, 4))] == [9, 1, 5, 5]


SERVED = {(KERNEL, ""): FEWEST_FORCED_STEPS, (FALLBACK, "extend"): 30}
"""Steps of a server by path and reason, as few as there may be."""


def test_steps_that_the_kernel_served() -> None:
    assert_served(SERVED, FEWEST_FORCED_STEPS)


def test_steps_that_have_grown() -> None:
    before, after = {("a", ""): 2, ("b", ""): 3}, {("a", ""): 5, ("b", ""): 3, ("c", ""): 1}
    assert grown(after, before) == {("a", ""): 3, ("c", ""): 1}


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({}, id="nothing counted"),
        pytest.param({(FALLBACK, "extend"): 30}, id="no kernel"),
        pytest.param(SERVED | {(KERNEL, ""): FEWEST_FORCED_STEPS - 1}, id="a step too few"),
        pytest.param(SERVED | {(FALLBACK, "4 rows"): 1}, id="a width left out"),
        pytest.param(SERVED | {(FALLBACK, "input embeddings"): 1}, id="a request left out"),
        pytest.param({(KERNEL, ""): FEWEST_FORCED_STEPS}, id="fallbacks not counted"),
    ],
)
def test_steps_that_the_kernel_did_not_serve(wrong: dict[tuple[str, str], int]) -> None:
    with pytest.raises(AssertionError):
        assert_served(wrong, FEWEST_FORCED_STEPS)


OWN_GRAPH = ["memcpy", "lengths", "event", "embed", "mix", "memset", "norm", "gemm", "cast"]
"""Nodes of SGLang's own graph: three of metadata, a forward of four, two of the head."""


def test_a_graph_with_the_kernel_in_the_forwards_place() -> None:
    assert misplaced(["memcpy", "lengths", "event", "ours", "gemm", "cast"], OWN_GRAPH, "ours") == []


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (OWN_GRAPH, "0 nodes of ours"),
        (["lengths", "ours", "ours", "gemm", "cast"], "2 nodes of ours"),
        (["memcpy", "lengths", "event", "memset", "ours", "gemm", "cast"], "before it"),
        (["memcpy", "lengths", "event", "ours", "memcpy", "gemm", "cast"], "behind it"),
        (["memcpy", "lengths", "event", "ours"], "no LogitsProcessor"),
    ],
)
def test_a_graph_with_more_or_less_than_that(found: list[str], sentence: str) -> None:
    (line,) = misplaced(found, OWN_GRAPH, "ours")
    assert sentence in line


def test_a_graph_is_compared_with_one_that_has_a_forward() -> None:
    (line,) = misplaced(["lengths", "ours", "cast"], ["lengths", "cast"], "ours")
    assert "no forward in the 2 nodes" in line
    (line,) = misplaced(["lengths", "ours", "cast"], ["lengths", "ours", "norm", "cast"], "ours")
    assert "ours in SGLang's own graph" in line
