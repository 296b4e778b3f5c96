"""Detectors, divergence, rates and journals: each red on what it is for, and quiet on clean text."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest

from glm53_mono.quality.detectors import (
    FEWEST_REPEATS,
    SHORTEST_RUN,
    WINDOW,
    broken_characters,
    class_shift,
    control_tokens,
    repetition,
    suspicions,
)
from glm53_mono.quality.divergence import MOST_APART, NEAR_TIE, Outcome, difference, mean_distance
from glm53_mono.quality.journal import Journal, JournalError, read_header, read_records
from glm53_mono.quality.rates import Rate, fisher_exact
from tests.unit.fake_server import WORDS

CLEAN = """\
The build on atlas failed in the package stage, after 14 jobs had passed. I would look at the log of job 8813 first:

```python
def retry(count: int) -> None:
    for attempt in range(count):
        if run(attempt) == 0:
            return
```

| host | state |
| --- | --- |
| atlas | failed |
| borea | passed |

Then I would compare both hosts' compilers: 13.2.0 on atlas, 13.3.1 on borea; a naïve façade cannot tell them apart. """


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def words(seed: int, count: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1000, 150_000) for _ in range(count)]


def test_clean_text_is_quiet(seed: int) -> None:
    source = random.Random(seed)
    prose = " ".join(source.choice(WORDS) for _ in range(400))
    for text in (CLEAN, prose, CLEAN + prose, "", "42"):
        assert suspicions(words(seed, len(text)), text, CLEAN) == [], text[:40]
    assert suspicions(words(seed, 300), CLEAN + "<|user|>", CLEAN + prose) == []


@pytest.mark.parametrize("period", [1, 7, 60])
def test_a_passage_that_repeats_is_seen(seed: int, period: int) -> None:
    count = max(FEWEST_REPEATS, -(-SHORTEST_RUN // period))
    before, passage = words(seed, 40), words(seed + 1, period)
    found = repetition(before + passage * count + words(seed + 2, 30))
    assert found is not None and found.token == 40 and f"{period} tokens repeat {count} times" in found.detail
    assert repetition(before + passage * (FEWEST_REPEATS - 2) + words(seed + 2, 30)) is None
    assert "repetition" in [each.detector for each in suspicions(passage * count, "", "")]


@pytest.mark.parametrize(
    "text", ["ls<|observation|>[1]", "<|user|> hello", "a<|endoftext|> b<|endoftext|>", "[gMASK]a"]
)
def test_control_tokens_are_seen(text: str) -> None:
    found = control_tokens(text)
    assert found is not None and found.detector == "control tokens"
    assert found in suspicions([1], text, "")


@pytest.mark.parametrize("text", ["done<|endoftext|>", "done<|user|>\n", "<think>so</think>done", "a < b | c > d"])
def test_tokens_that_answers_have_are_no_leak(text: str) -> None:
    assert control_tokens(text) is None


def test_characters_that_are_none_are_seen() -> None:
    found = broken_characters(CLEAN + "\ufffd" * 12 + CLEAN)
    assert found is not None and found.detector == "broken characters"
    assert broken_characters(CLEAN + "\ufffd" + CLEAN) is None
    assert found.detector in [each.detector for each in suspicions([], CLEAN + "\x00\x01" * 99, CLEAN)]


@pytest.mark.parametrize("alphabet", ["数据模型输出", "абвгдеж", "0123456789", "#$%&;/{}"])
def test_other_classes_of_characters_are_seen(alphabet: str) -> None:
    odd = "".join(itertools.islice(itertools.cycle(alphabet), WINDOW))
    # within an answer, and against the session's earlier ones
    for found in (class_shift(CLEAN + odd, ""), class_shift(odd, CLEAN)):
        assert found is not None and found.detector == "character classes"
    assert class_shift(odd, "") is None and class_shift(odd, odd) is None


def test_where_answers_part() -> None:
    gaps = [2.0] * 4
    assert difference([1, 2, 3], [1, 2, 3], [], []).outcome is Outcome.SAME
    parted = difference([1, 2, 3, 4], [1, 2, 5, 6], gaps, gaps)
    assert (parted.outcome, parted.token, parted.gap) == (Outcome.DIVERGED, 2, 2.0)
    tied = difference([1, 2, 3, 4], [1, 2, 5, 6], gaps, [2.0, 2.0, NEAR_TIE, 0.0])
    assert (tied.outcome, tied.gap) == (Outcome.NEAR_TIE, NEAR_TIE)
    assert difference([1, 2], [1, 3], [], []).outcome is Outcome.DIVERGED
    assert difference([1, 2], [1, 2, 3], gaps, gaps).outcome is Outcome.DIVERGED


def test_log_probabilities_apart() -> None:
    assert mean_distance([-0.1, -0.2], [-0.1, -0.6]) == pytest.approx(0.2)
    assert mean_distance([], []) == 0.0
    assert mean_distance([math.nan], [-0.1]) == math.inf > MOST_APART
    with pytest.raises(ValueError):
        mean_distance([-0.1], [])


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((3, 20), (11, 20), 0.018701126042616586),
        ((0, 8), (5, 8), 0.025641025641025633),
        ((1, 9), (8, 9), 0.0033730974907445503),
        ((0, 50), (6, 50), 0.026661076308390465),
        ((2, 7), (8, 10), 0.05841217605923488),
    ],
)
def test_fishers_exact_test_is_scipys(first: tuple[int, int], second: tuple[int, int], expected: float) -> None:
    """Values of scipy.stats.fisher_exact, 1.17.1."""
    assert fisher_exact(Rate(*first), Rate(*second)) == pytest.approx(expected, rel=1e-12)
    assert fisher_exact(Rate(*second), Rate(*first)) == pytest.approx(expected, rel=1e-12)


def test_rates_that_are_alike_are_not_significant() -> None:
    assert fisher_exact(Rate(3, 20), Rate(3, 20)) == 1.0
    assert fisher_exact(Rate(0, 0), Rate(3, 20)) == 1.0
    assert fisher_exact(Rate(0, 5), Rate(0, 9)) == 1.0


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        ((0, 10), (0.0, 0.27753279986288926)),
        ((3, 20), (0.05236874589621662, 0.3604188647407569)),
        ((20, 20), (0.8388748419471808, 1.0)),
        ((1, 100), (0.001767432064140647, 0.054486196178705315)),
    ],
)
def test_the_interval_is_scipys(rate: tuple[int, int], expected: tuple[float, float]) -> None:
    """Values of scipy.stats.binomtest(...).proportion_ci(method="wilson"), 1.17.1."""
    assert Rate(*rate).interval() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_rate_says_how_sure_it_is() -> None:
    assert str(Rate(3, 20)) == "3 of 20 (15.0%, 95% interval 5.2% to 36.0%)"
    assert Rate(0, 0).interval() == (0.0, 1.0)
    with pytest.raises(ValueError, match="4 of 3 is no rate"):
        Rate(4, 3)


def test_a_journal_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    journal = Journal(file, {"plan": [1, 2]})
    journal.add({"text": "a\u2028b", "n": 1})
    with file.open("a") as cut:
        cut.write('{"text": "cut o')
    again = Journal(file, {"plan": (1, 2)})
    assert again.records == [{"text": "a\u2028b", "n": 1}]
    again.add({"n": 2})
    assert read_header(file) == {"plan": [1, 2]}
    assert [record["n"] for record in read_records(file)] == [1, 2]
    assert [json.loads(line) for line in file.read_text().strip().split("\n")][-1] == {"n": 2}


def test_a_journal_of_another_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    Journal(file, {"seed": 1})
    with pytest.raises(JournalError, match="was begun with seed 1, this run has 2: name another file, or remove it"):
        Journal(file, {"seed": 2})
    file.write_text("no json\n")
    with pytest.raises(JournalError, match="line 1 is no JSON"):
        Journal(file, {"seed": 1})
    file.write_text("[1]\n")
    with pytest.raises(JournalError, match="line 1 is list, not an object"):
        read_records(file)
    with pytest.raises(JournalError, match="is missing or empty"):
        read_records(tmp_path / "none.jsonl")
