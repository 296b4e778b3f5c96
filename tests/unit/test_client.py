"""Requests to servers, and servers that are started: what they say, and what is said when they do not."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from glm53_mono.client import http
from glm53_mono.client.http import Answer, Client, Generation, Limits, ServerError, answer_of
from glm53_mono.client.process import running
from glm53_mono.client.threads import in_threads
from glm53_mono.metrics import KERNEL
from tests.unit import fake_server
from tests.unit.fake_server import GAP, LOGPROB, serving


def test_a_request_is_greedy_and_asks_for_what_is_wanted() -> None:
    assert Generation([1, 2], 5).body() == {
        "input_ids": [1, 2],
        "sampling_params": {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True},
    }
    body = Generation([1], 5, hidden="last", logprobs=True, ignore_eos=False).body()
    assert body["return_hidden_states"] == "last" and body["top_logprobs_num"] == 2
    assert not body["sampling_params"]["ignore_eos"]


def test_answers_are_read() -> None:
    with serving() as (url, state):
        client = Client(url)
        first, again = (client.generate(Generation([65, 66, 67], 4, logprobs=True)) for _ in range(2))
        assert first.tokens == again.tokens and len(first.tokens) == 4
        assert (first.cached, again.cached, first.finished) == (0, 3, False)
        assert first.logprobs == [LOGPROB] * 4 and first.top_gaps == pytest.approx([GAP] * 4)
        assert client.score([65, 66, 67], first.tokens) == [LOGPROB] * 4
        assert state.bodies[-1]["logprob_start_len"] == 2
        assert [len(each.tokens) for each in client.generate_together([Generation([65], n) for n in (2, 3)])] == [2, 3]
        assert client.limits() == Limits(request=6000, together=24_000)
        client.flush_cache()
        assert state.flushes == 1
    bare = answer_of({"output_ids": [3], "meta_info": {"cached_tokens": 0, "finish_reason": {"type": "stop"}}})
    assert bare == Answer([3], 0, finished=True)


def test_a_request_is_aborted() -> None:
    with serving() as (url, state):
        Client(url).abort(Generation([65], 200), "one")
        assert state.aborted == {"one"}


def test_steps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "METRICS_LAG_S", 0.0)
    with serving() as (url, _):
        assert Client(url).steps() == {(KERNEL, ""): 7}


def test_what_a_server_does_not_do_is_said() -> None:
    with serving(breaks_after=0) as (url, _):
        client = Client(url)
        with pytest.raises(ServerError, match=r"/generate: status 500: .*out of memory"):
            client.generate(Generation([65], 4))
        with pytest.raises(ServerError, match="status 404"):
            client.get("/nothing")
    with pytest.raises(ServerError, match="does not answer"):
        client.limits()


def test_a_server_is_started_and_ended(tmp_path: Path) -> None:
    with running([sys.executable, fake_server.__file__], tmp_path / "log") as started:
        assert started.client.limits().request == 6000
    assert started.process.returncode is not None
    with pytest.raises(ServerError):
        started.client.limits()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('no memory'); raise SystemExit(3)", "the server ended with status 3:\nno memory"),
        ("import time; print('loading', flush=True); time.sleep(60)", r"does not answer after 0.5 s:\n(loading)?"),
    ],
)
def test_a_server_that_does_not_start_is_a_sentence_and_its_last_lines(
    tmp_path: Path, script: str, message: str
) -> None:
    start_s = 0.5 if "sleep" in script else 60.0
    with (
        pytest.raises(ServerError, match=message),
        running([sys.executable, "-c", script], tmp_path / "log", start_s=start_s),
    ):
        raise AssertionError("it has started")


def test_the_first_exception_ends_the_work() -> None:
    done, lock = [], threading.Lock()

    def work(item: int) -> None:
        with lock:
            done.append(item)
        if item == 2:
            raise ServerError("two")

    with pytest.raises(ServerError, match="two"):
        in_threads(work, range(1000), 1)
    assert done == [0, 1, 2]
    in_threads(work, [5, 6], 2)
    assert {5, 6} <= set(done)
