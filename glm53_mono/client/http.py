"""Requests to an SGLang server by token ids, and what it says about itself."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import requests

from glm53_mono.metrics import NAME

REQUEST_S = 600.0
"""Seconds that a request may take."""

METRICS_LAG_S = 2.5
"""Seconds after which the metrics hold every step that has run."""


class ServerError(RuntimeError):
    """A server that does not start or answer as it should; the message says what it said."""


@dataclass(frozen=True)
class Generation:
    """One request.

    Attributes:
        prompt: token ids.
        tokens: to generate.
        hidden: the hidden states to return: True for all, "last" for the last one.
        logprobs: whether to return the log-probabilities of the chosen token and the two likeliest.
        ignore_eos: whether no end-of-sequence token ends it sooner.
    """

    prompt: Sequence[int]
    tokens: int
    hidden: bool | str = False
    logprobs: bool = False
    ignore_eos: bool = True

    def body(self) -> dict[str, Any]:
        """What SGLang's `/generate` takes; greedy."""
        sampling = {"temperature": 0, "max_new_tokens": self.tokens, "ignore_eos": self.ignore_eos}
        body: dict[str, Any] = {"input_ids": list(self.prompt), "sampling_params": sampling}
        if self.hidden:
            body["return_hidden_states"] = self.hidden
        if self.logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": 2}
        return body


@dataclass(frozen=True)
class Answer:
    """What a server returned.

    Attributes:
        tokens: generated ids.
        cached: prompt tokens that came from the prefix cache.
        hidden: hidden states as the server sent them.
        logprobs: of each generated token, as chosen; empty if not asked for.
        top_gaps: how far apart the two likeliest were at each token, in log-probability; empty likewise.
        verify_steps: steps that checked drafts for this answer; 0 where the server does not draft.
        finished: whether the model ended it, and not the number of tokens.
    """

    tokens: list[int]
    cached: int
    hidden: list[Any] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_gaps: list[float] = field(default_factory=list)
    verify_steps: int = 0
    finished: bool = False


@dataclass(frozen=True)
class Limits:
    """What fits a server.

    Attributes:
        request: tokens of one request, its answer included.
        together: tokens of all requests at once.
    """

    request: int
    together: int


@dataclass(frozen=True)
class Client:
    """A server that answers.

    Attributes:
        url: without a slash at its end.
        request_s: seconds that a request may take.
    """

    url: str
    request_s: float = REQUEST_S

    def generate(self, generation: Generation) -> Answer:
        """Send one request and wait for its answer.

        Raises:
            ServerError: it did not answer, or refused.
        """
        return answer_of(self.post("/generate", generation.body()))

    def generate_together(self, generations: Sequence[Generation]) -> list[Answer]:
        """Send requests at once; SGLang runs them in one batch as they come."""
        with ThreadPoolExecutor(len(generations)) as pool:
            return list(pool.map(self.generate, generations))

    def abort(self, generation: Generation, request_id: str) -> None:
        """Send a request, and end it while it decodes.

        Raises:
            ServerError: it went on to its end, or the server refused it.
        """
        body = generation.body() | {"rid": request_id, "stream": True}
        try:
            with requests.post(f"{self.url}/generate", json=body, timeout=self.request_s, stream=True) as response:
                pieces = response.iter_lines()
                for _ in range(2):
                    next(pieces, None)
                requests.post(
                    f"{self.url}/abort_request", json={"rid": request_id}, timeout=self.request_s
                ).raise_for_status()
                if len(list(pieces)) > generation.tokens:
                    raise ServerError(f"{request_id} went on to its end")
        except requests.RequestException as error:
            raise ServerError(f"{self.url}/abort_request: {error}") from error

    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """Log-probabilities of an answer's tokens, computed by prefill, which is SGLang's own forward in every server.

        SGLang takes no token from the prefix cache whose log-probability is asked for.
        """
        body = Generation([*prompt, *answer], 1).body() | {
            "return_logprob": True,
            "logprob_start_len": len(prompt) - 1,
        }
        entries = self.post("/generate", body)["meta_info"]["input_token_logprobs"]
        return [entry[0] for entry in entries[-len(answer) :]]

    def flush_cache(self) -> None:
        """Empty the prefix cache; the server must be idle.

        Raises:
            ServerError: it was not.
        """
        self._checked(self._send("POST", "/flush_cache"))

    def limits(self) -> Limits:
        """What fits the server (utils/common.py: build_server_info).

        Raises:
            ServerError: the server does not say.
        """
        said = self.get("/server_info")
        try:
            return Limits(int(said["max_req_input_len"]), int(said["max_total_num_tokens"]))
        except KeyError as error:
            raise ServerError(f"{self.url}/server_info does not name {error}") from error

    def steps(self) -> dict[tuple[str, str], int]:
        """Steps so far by path and reason, from the server's metrics (`--enable-metrics`), which lag by a second."""
        time.sleep(METRICS_LAG_S)
        text = self._checked(self._send("GET", "/metrics")).text
        found: dict[tuple[str, str], int] = {}
        for labels, count in re.findall(rf"^{NAME}_total\{{(.*)\}} (\S+)$", text, re.MULTILINE):
            label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            key = label["path"], label["reason"]
            found[key] = found.get(key, 0) + int(float(count))
        return found

    def get(self, path: str) -> Any:
        """The JSON behind a path.

        Raises:
            ServerError: another status than 200, or no answer.
        """
        return self._checked(self._send("GET", path)).json()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that answers a body.

        Raises:
            ServerError: another status than 200, or no answer.
        """
        return self._checked(self._send("POST", path, body)).json()

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> requests.Response:
        try:
            return requests.request(method, f"{self.url}{path}", json=body, timeout=self.request_s)
        except requests.RequestException as error:
            raise ServerError(f"{self.url}{path} does not answer: {error}") from error

    def _checked(self, response: requests.Response) -> requests.Response:
        if not response.ok:
            raise ServerError(f"{response.url}: status {response.status_code}: {response.text[:500]}")
        return response


def grown(after: Mapping[tuple[str, str], int], before: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    """The counts that have changed, by how much."""
    return {key: count - before.get(key, 0) for key, count in after.items() if count > before.get(key, 0)}


def answer_of(reply: Mapping[str, Any]) -> Answer:
    """What `/generate` returned."""
    meta = reply["meta_info"]
    tops = meta.get("output_top_logprobs") or []
    return Answer(
        tokens=reply["output_ids"],
        cached=meta["cached_tokens"],
        hidden=meta.get("hidden_states") or [],
        logprobs=[entry[0] for entry in meta.get("output_token_logprobs") or []],
        top_gaps=[first[0] - second[0] for first, second, *_ in tops],
        verify_steps=meta.get("spec_verify_ct", 0),
        finished=(meta.get("finish_reason") or {}).get("type") == "stop",
    )
