"""SGLang servers of the tests, and requests to them by token ids."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import torch

START_S = 900.0
"""Seconds until a server must answer; the first start on a machine compiles SGLang's kernels for minutes."""

REQUEST_S = 600.0

METRICS_LAG_S = 2.5
"""Seconds after which the metrics hold every step that has run."""

SHORTLY_S = 0.1
"""Seconds between requests that follow one another: some tens of steps."""

PLAIN = (
    *("--trust-remote-code", "--skip-tokenizer-init", "--skip-server-warmup", "--tp", "1"),
    *("--kv-cache-dtype", "bfloat16", "--dsa-prefill-backend", "tilelang", "--dsa-decode-backend", "tilelang"),
    *("--max-running-requests", "8", "--cuda-graph-max-bs-decode", "8", "--mem-fraction-static", "0.85"),
    *("--mamba-radix-cache-strategy", "extra_buffer", "--context-length", "16384"),
    *("--max-total-tokens", "65536", "--max-mamba-cache-size", "96"),
    *("--chunked-prefill-size", "512", "--disable-prefill-cuda-graph"),
    *("--enable-return-hidden-states", "--enable-custom-logit-processor"),
    # AITER would shuffle the experts' weights
    *(("--moe-runner-backend", "triton") if torch.version.hip else ()),
)
"""Arguments that all arms share. Radix cache and overlapped scheduling are on, as users have them; prompts of more than
512 tokens are prefilled in chunks between decode steps. Graphs of prefill would take minutes to capture."""

MONOKERNEL = ("--monokernel-backend", "amd")

COUNTED = (*MONOKERNEL, "--enable-metrics")
"""The kernel in a server whose steps `Server.steps` counts."""

FORCED = json.dumps({"callable": b"cforced_tokens\nForced\n.".hex()})
"""`forced_tokens.Forced` as a server takes it: a pickled reference (sampling/custom_logit_processor.py: from_str)."""


class ServerError(RuntimeError):
    """A server that did not start; the message ends with its last lines."""


@dataclass(frozen=True)
class Generation:
    """One request.

    Attributes:
        prompt: token ids.
        tokens: to generate; no end-of-sequence token ends it sooner.
        forced: the tokens to generate, whatever the logits say.
        hidden: the hidden states to return: True for all, "last" for the last one.
        logprobs: whether to return the log-probabilities of the chosen token and the two likeliest.
    """

    prompt: Sequence[int]
    tokens: int
    forced: Sequence[int] | None = None
    hidden: bool | str = False
    logprobs: bool = False


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
    """

    tokens: list[int]
    cached: int
    hidden: list[Any]
    logprobs: list[float]
    top_gaps: list[float]
    verify_steps: int


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    url: str
    log_file: Path

    @property
    def log(self) -> str:
        """Everything it has printed."""
        return self.log_file.read_text(errors="replace")

    def generate(self, generation: Generation) -> Answer:
        """Send one request and wait for its answer."""
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": generation.tokens, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": list(generation.prompt), "sampling_params": sampling}
        if generation.forced is not None:
            sampling["custom_params"] = {"forced_tokens": list(generation.forced)}
            body["custom_logit_processor"] = FORCED
        if generation.hidden:
            body["return_hidden_states"] = generation.hidden
        if generation.logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": 2}
        response = requests.post(f"{self.url}/generate", json=body, timeout=REQUEST_S)
        if not response.ok:
            raise ServerError(f"{response.status_code}: {response.text[:500]}")
        return _answer(response.json())

    def generate_in_turn(self, generations: Sequence[Generation], aborted: Sequence[Generation]) -> list[Answer]:
        """Send requests one shortly after another, so that each joins a running batch; some are aborted on the way.

        Returns:
            The answers of `generations`.
        """

        def later(place: int) -> Answer | None:
            time.sleep(place * SHORTLY_S)
            if place < len(generations):
                return self.generate(generations[place])
            return self._abort(aborted[place - len(generations)], f"aborted-{place}")

        count = len(generations) + len(aborted)
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(later, range(count)))
        return [answer for answer in answers[: len(generations)] if answer is not None]

    def _abort(self, generation: Generation, request_id: str) -> None:
        """Send a request, and end it while it decodes."""
        sampling = {"temperature": 0, "max_new_tokens": generation.tokens, "ignore_eos": True}
        body = {"input_ids": list(generation.prompt), "sampling_params": sampling, "rid": request_id, "stream": True}
        with requests.post(f"{self.url}/generate", json=body, timeout=REQUEST_S, stream=True) as response:
            pieces = response.iter_lines()
            for _ in range(2):
                next(pieces)
            requests.post(f"{self.url}/abort_request", json={"rid": request_id}, timeout=REQUEST_S).raise_for_status()
            if len(list(pieces)) > generation.tokens:
                raise ServerError(f"{request_id} went on to its end")

    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """Log-probabilities of an answer's tokens, computed by prefill, which is SGLang's own forward in every arm."""
        body = {
            "input_ids": [*prompt, *answer],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": len(prompt) - 1,
        }
        response = requests.post(f"{self.url}/generate", json=body, timeout=REQUEST_S)
        if not response.ok:
            raise ServerError(f"{response.status_code}: {response.text[:500]}")
        entries = response.json()["meta_info"]["input_token_logprobs"]
        return [entry[0] for entry in entries[-len(answer) :]]

    def steps(self) -> dict[tuple[str, str], int]:
        """Steps so far by path and reason, from the server's metrics (`--enable-metrics`), which lag by a second."""
        time.sleep(METRICS_LAG_S)
        text = requests.get(f"{self.url}/metrics", timeout=REQUEST_S).text
        found: dict[tuple[str, str], int] = {}
        for labels, count in re.findall(r"^glm53_mono_steps_total\{(.*)\} (\S+)$", text, re.MULTILINE):
            label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            key = label["path"], label["reason"]
            found[key] = found.get(key, 0) + int(float(count))
        return found

    def generate_together(self, generations: Sequence[Generation]) -> list[Answer]:
        """Send requests at once; SGLang runs them in one batch as they come."""
        with ThreadPoolExecutor(len(generations)) as pool:
            return list(pool.map(self.generate, generations))


def drafting(steps: int) -> tuple[str, ...]:
    """Arguments of MTP with so many draft steps."""
    arguments = f"--speculative-algorithm EAGLE --speculative-num-steps {steps} --speculative-eagle-topk 1"
    return (*arguments.split(), "--speculative-num-draft-tokens", str(steps + 1))


@contextmanager
def running(
    model: Path, log_file: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server of `model`, until the end of the block.

    Args:
        arguments: beside `PLAIN`.
        environment: variables beside this process's.

    Raises:
        ServerError: it ended, or did not answer in `START_S`.
    """
    port = _free_port()
    # not our folder itself: a server must find the plugin as it is installed
    path = os.pathsep.join([str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
    with log_file.open("w") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", *PLAIN, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)} | dict(environment or {}),
            cwd=log_file.parent,
            start_new_session=True,
        )
    try:
        server = Server(f"http://127.0.0.1:{port}", log_file)
        _wait_until_it_answers(process, server)
        yield server
    finally:
        _stop(process)


def grown(after: dict[tuple[str, str], int], before: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    """The counts that have changed, by how much."""
    return {key: count - before.get(key, 0) for key, count in after.items() if count > before.get(key, 0)}


def _answer(reply: dict[str, Any]) -> Answer:
    meta = reply["meta_info"]
    tops = meta.get("output_top_logprobs") or []
    return Answer(
        tokens=reply["output_ids"],
        cached=meta["cached_tokens"],
        hidden=meta.get("hidden_states") or [],
        logprobs=[entry[0] for entry in meta.get("output_token_logprobs") or []],
        top_gaps=[first[0] - second[0] for first, second, *_ in tops],
        verify_steps=meta.get("spec_verify_ct", 0),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_it_answers(process: subprocess.Popen[bytes], server: Server) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"the server ended with status {process.returncode}:\n{_last_lines(server)}")
        try:
            if requests.get(f"{server.url}/health", timeout=5).ok:
                return
        except (requests.ConnectionError, requests.Timeout):
            pass
        time.sleep(1)
    raise ServerError(f"the server does not answer after {START_S:g} s:\n{_last_lines(server)}")


def _last_lines(server: Server) -> str:
    return "\n".join(server.log.splitlines()[-30:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers, which share a process group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
