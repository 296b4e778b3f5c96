"""The table of verify launches by rows: what the bytes explain, and from which accept length drafts pay."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from glm53_mono.cli.bench_report import Barriers, Launched, Point, Report
from glm53_mono.cli.bench_times import Timing
from glm53_mono.cli.step_bytes import StepBytes
from glm53_mono.cli.verify_cost import RowsCost, drafts_ms, explained, pays
from glm53_mono.upstream.bench_runner import MONOKERNEL, SGLANG

GB = 10**9


def cost(tokens: int, ms: float, gigabytes: int, context: int = 1024, requests: int = 1) -> RowsCost:
    bytes_ = StepBytes(weights=gigabytes * GB, experts=0, embedding=0, latents=0, index_keys=0, state=0)
    experts = (8 * requests * tokens,) * 2
    return RowsCost(requests, tokens, context, Timing(ms, ms, ms), experts, bytes_)


ONE, TWO, FOUR = cost(1, 10.0, 30), cost(2, 12.0, 36), cost(4, 15.0, 42)


def test_bytes_explain_a_launch_or_do_not() -> None:
    """Two rows take 1.2 times the time and the bytes; four take 1.5 times the time for 1.4 times the bytes."""
    assert explained(TWO, ONE).unexplained == pytest.approx(1.0)
    found = explained(FOUR, ONE)
    assert (found.time_ratio, found.bytes_ratio) == (1.5, 1.4)
    assert found.unexplained == pytest.approx(1.5 / 1.4)
    slower = replace(FOUR, timing=Timing(30.0, 30.0, 30.0))
    assert explained(slower, ONE).unexplained == pytest.approx(3.0 / 1.4)


def test_drafts_pay_where_a_round_takes_as_long_as_its_tokens_decode_steps() -> None:
    """With 2 ms beside each launch four rows are 17 ms for a decode step's 12; 4 ms of drafts make the round 21."""
    found = pays(FOUR, ONE, 2.0, {3: 4.0})
    assert found.step_ms == 17.0
    assert found.verify_alone == pytest.approx(17 / 12)
    assert found.whole_round == pytest.approx(21 / 12)
    assert pays(FOUR, ONE, 2.0, {1: 4.0}).whole_round is None


def test_drafts_of_more_requests_are_not_those_of_one() -> None:
    """Two requests: eight rows are 22 ms for a decode step's 15 of both, and what drafts take was not measured."""
    found = pays(cost(4, 20.0, 52, requests=2), cost(1, 13.0, 36, requests=2), 2.0, {3: 4.0})
    assert found.verify_alone == pytest.approx(22 / 15)
    assert found.whole_round is None


def test_drafts_that_were_not_measured_lie_on_the_line() -> None:
    assert drafts_ms(3, {3: 4.0}) == 4.0
    assert drafts_ms(2, {3: 4.0}) is None and drafts_ms(2, {}) is None
    assert drafts_ms(5, {1: 1.5, 3: 3.5}) == pytest.approx(5.5)
    assert drafts_ms(2, {1: 1.5, 3: 3.5}) == pytest.approx(2.5)


def drafting_report() -> Report:
    """MTP3 of one request at two contexts, and of two at one; what a step takes beside its launch is 2, 3 and 4 ms."""

    def point(rows: int, context: int, launch_ms: float, step_ms: float) -> Point:
        launched = Launched(Timing(launch_ms, launch_ms, launch_ms), 106, Barriers(400, 0.5), (32, 32), FOUR.bytes)
        arms = {MONOKERNEL: Timing(step_ms, step_ms, step_ms), SGLANG: Timing(19.0, 19.0, 19.0)}
        return Point(rows, context, arms, launched)

    return Report(
        {"device": "some GPU"},
        copy_bytes_per_s=4e12,
        head_bytes=GB,
        points=[point(4, 1024, 15.0, 17.0), point(4, 8192, 44.0, 47.0), point(8, 1024, 20.0, 24.0)],
        tokens_per_request=4,
        drafts_ms={3: 4.0},
        by_rows=[
            *(ONE, TWO, FOUR, cost(1, 13.0, 36, requests=2), cost(4, 20.0, 52, requests=2)),
            *(cost(1, 11.0, 31, 8192), cost(2, 44.0, 62, 8192)),
        ],
    )


def test_launches_by_rows_in_the_json() -> None:
    """Each beside the launch of one row a request, and the step, of its own requests and context."""
    values = json.loads(json.dumps(drafting_report().as_dict()))
    assert values["tokens_per_request"] == 4 and values["drafts_ms"] == {"3": 4.0}
    by_rows = values["by_rows"]
    assert [(entry["requests"], entry["rows"]) for entry in by_rows] == [
        (1, 1), (1, 2), (1, 4), (2, 2), (2, 8), (1, 1), (1, 2),
    ]  # fmt: skip
    four = by_rows[2]
    assert four["step_ms"] == 17.0 and four["drafts"] == 3
    assert four["pays_from_accept_length_verify_alone"] == pytest.approx(17 / 12)
    assert four["pays_from_accept_length"] == pytest.approx(21 / 12)
    assert by_rows[1]["pays_from_accept_length"] is None
    assert by_rows[6]["time_over_bytes"] == pytest.approx(2.0)
    assert by_rows[6]["step_ms"] == 47.0
    assert by_rows[4]["time_over_bytes"] == pytest.approx((20 / 13) / (52 / 36))
    assert by_rows[4]["pays_from_accept_length_verify_alone"] == pytest.approx(24 / 17)


def lines(report: Report) -> list[str]:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.rows_table())
    kept = ([word for word in line.split() if word not in "│┃|%"] for line in console.export_text().splitlines())
    return [" ".join(words) for words in kept if words and words[0].isdigit()]


def test_the_table_by_rows() -> None:
    """42 GB in 15 ms are 70 % of 4 TB/s."""
    report = drafting_report()
    found = lines(report)
    assert found[0] == "1 1 - 1024 10.000 75.0 8.0 30.00 1.000 1.000 1.000 12.000 - -"
    assert found[1] == "1 2 1 1024 12.000 75.0 16.0 36.00 1.200 1.200 1.000 14.000 1.17 -"
    assert found[2] == "1 4 3 1024 15.000 70.0 32.0 42.00 1.500 1.400 1.071 17.000 1.42 1.75"
    assert found[4] == "2 8 3 1024 20.000 65.0 64.0 52.00 1.538 1.444 1.065 24.000 1.41 -"
    report.drafts_ms = {3: 40.0}
    assert lines(report)[2].endswith("never (4.75)")


def test_a_server_without_drafts_has_no_such_table() -> None:
    report = drafting_report()
    noted = report.notes
    report.by_rows = []
    assert report.rows_table() is None and report.as_dict()["by_rows"] == []
    assert len(report.notes) < len(noted)
    assert report.table().title.startswith("verify step of 4 rows a request")
    report.tokens_per_request = 1
    assert report.table().title.startswith("decode step")
