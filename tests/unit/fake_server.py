"""A server that answers as SGLang's HTTP front does, right or with a seeded corruption; also a program of its own.

A token is a character's code point. It imports nothing but the standard library, so that it starts at once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = (
    *("the", "build", "on", "atlas", "failed", "in", "stage", "package", "after", "a", "queue", "of", "jobs", "passed"),
    *("while", "hydra", "waits", "look", "first", "at", "its", "log", "then", "borea", "where", "unit", "tests"),
    *("timed", "out", "twice", "and", "compile", "was", "skipped"),
)

CORRUPTIONS = ("repetition", "control", "classes", "broken", "drift", "other")
CAUSES = ("always", "graphs", "monokernel", "cache", "batch", "never")

LOGPROB, GAP = -0.1, 2.0
DRIFT = 1.0
"""Between an answer's log-probabilities as decoded and as scored, where the corruption is that."""


@dataclass
class Behaviour:
    """What a fake server does.

    Attributes:
        corruption: what its wrong answers look like; see `CORRUPTIONS`.
        cause: when an answer is wrong; see `CAUSES`.
        seed: of what it says.
        context: tokens of a request at most.
        tied: whether its two likeliest tokens are always near.
        has_tokenizer: else it answers like --skip-tokenizer-init.
        breaks_after: requests after which it answers with errors; None for never.
        arguments: its command line.
    """

    corruption: str = "repetition"
    cause: str = "never"
    seed: int = 0
    context: int = 6000
    tied: bool = False
    has_tokenizer: bool = True
    breaks_after: int | None = None
    arguments: Sequence[str] = ()


@dataclass
class State:
    """What it remembers.

    Attributes:
        bodies: of /generate, in the order in which they came.
        cached: prompts in its prefix cache.
        aborted: ids of requests.
    """

    behaviour: Behaviour
    bodies: list[dict[str, Any]] = field(default_factory=list)
    cached: set[tuple[int, ...]] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)
    flushes: int = 0
    running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wrong(self, prompt: tuple[int, ...], together: int) -> bool:
        """Whether the answer to a prompt is to be corrupted."""
        arguments = self.behaviour.arguments
        return {
            "never": False,
            "always": True,
            "graphs": "--disable-cuda-graph" not in arguments,
            "monokernel": "--enable-amd-monokernel" in arguments,
            "cache": prompt in self.cached and "--disable-radix-cache" not in arguments,
            "batch": together > 1,
        }[self.behaviour.cause]

    def answer(self, prompt: tuple[int, ...], tokens: int, wrong: bool) -> str:
        """Words that follow from the prompt, and what a corruption makes of them."""
        corruption = self.behaviour.corruption
        other = wrong and corruption == "other"
        source = random.Random(f"{self.behaviour.seed} {sum(prompt)} {len(prompt)} {other}")
        text = ""
        while len(text) < tokens:
            text += source.choice(WORDS) + source.choice((" ", " ", ", ", ". "))
        text = text[:tokens]
        if wrong:
            spoilt = {
                "repetition": text[:60] + "and again " * tokens,
                "control": text[: tokens // 2] + "<|observation|>" + text,
                "classes": text[: tokens // 3] + "".join(chr(0x4E00 + source.randrange(5000)) for _ in range(tokens)),
                "broken": text[: tokens // 3] + "\ufffd" * tokens,
            }
            text = spoilt.get(corruption, text)[:tokens]
        return text


class Handler(BaseHTTPRequestHandler):
    """SGLang's paths."""

    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._handle({})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self._handle(json.loads(self.rfile.read(length) or b"{}"))

    def _handle(self, body: dict[str, Any]) -> None:
        behaviour, state = self.state.behaviour, self.state
        if self.path == "/health":
            self._reply({})
        elif self.path == "/server_info":
            self._reply({"max_req_input_len": behaviour.context, "max_total_num_tokens": 4 * behaviour.context})
        elif self.path == "/tokenize" and behaviour.has_tokenizer:
            self._reply({"tokens": [ord(character) for character in body["prompt"]]})
        elif self.path == "/detokenize" and behaviour.has_tokenizer:
            self._reply({"text": "".join(map(chr, body["tokens"]))})
        elif self.path == "/flush_cache":
            state.flushes += 1
            state.cached.clear()
            self._reply({})
        elif self.path == "/abort_request":
            state.aborted.add(body["rid"])
            self._reply({})
        elif self.path == "/metrics":
            self._reply('glm53_mono_steps_total{path="kernel",reason="",tp_rank="0"} 7.0\n')
        elif self.path == "/generate":
            self._generate(body)
        else:
            self._reply({"error": "not there"}, 404)

    def _generate(self, body: dict[str, Any]) -> None:
        state, behaviour = self.state, self.state.behaviour
        prompt, tokens = tuple(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        with state.lock:
            state.bodies.append(body)
            state.running += 1
            state.most_running = max(state.most_running, state.running)
            broken = behaviour.breaks_after is not None and len(state.bodies) > behaviour.breaks_after
        try:
            time.sleep(0.01)
            if broken:
                self._reply({"error": "out of memory"}, 500)
            elif "logprob_start_len" in body:
                scores = [[LOGPROB, token, None] for token in prompt[body["logprob_start_len"] :]]
                self._reply({"output_ids": [0], "meta_info": {"cached_tokens": 0, "input_token_logprobs": scores}})
            elif body.get("stream"):
                self._stream(body["rid"], tokens)
            else:
                self._reply(self._whole(prompt, tokens))
        finally:
            with state.lock:
                state.running -= 1

    def _whole(self, prompt: tuple[int, ...], tokens: int) -> dict[str, Any]:
        state, behaviour = self.state, self.state.behaviour
        wrong = state.wrong(prompt, state.running)
        cached = max((len(known) for known in state.cached if prompt[: len(known)] == known), default=0)
        state.cached.add(prompt)
        ids = [ord(character) for character in state.answer(prompt, tokens, wrong)]
        decoded = LOGPROB - (DRIFT if wrong and behaviour.corruption == "drift" else 0.0)
        gap = 0.1 if behaviour.tied else GAP
        return {
            "output_ids": ids,
            "meta_info": {
                "cached_tokens": cached,
                "output_token_logprobs": [[decoded, token, None] for token in ids],
                "output_top_logprobs": [[[decoded, token, None], [decoded - gap, 0, None]] for token in ids],
                "finish_reason": {"type": "length"},
            },
        }

    def _stream(self, name: str, tokens: int) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for _ in range(tokens):
            self.wfile.write(b"data: {}\n\n")
            self.wfile.flush()
            if name in self.state.aborted:
                break
            time.sleep(0.005)
        self.close_connection = True

    def _reply(self, body: dict[str, Any] | str, status: int = 200) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _server(behaviour: Behaviour, host: str, port: int) -> tuple[ThreadingHTTPServer, State]:
    state = State(behaviour)
    handler = type("FakeHandler", (Handler,), {"state": state})
    server = ThreadingHTTPServer((host, port), handler)
    server.daemon_threads = True
    return server, state


@contextmanager
def serving(**behaviour: Any) -> Iterator[tuple[str, State]]:
    """A fake server in this process: its URL, and what it remembers."""
    server, state = _server(Behaviour(**behaviour), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> None:
    """As a program: it takes SGLang's options without a word, and refuses two ranks as a machine with one GPU does."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--corruption", choices=CORRUPTIONS, default="repetition")
    parser.add_argument("--cause", choices=CAUSES, default="never")
    parser.add_argument("--finds", default="")
    parser.add_argument("--watches", action="store_true")
    options, _ = parser.parse_known_args()
    if options.tp > 1:
        print("starting", flush=True)
        sys.exit("torch.AcceleratorError: CUDA error: invalid device ordinal")
    if options.watches:
        if os.environ.get("SGLANG_AMD_MONO_PROBE"):
            print("glm53_mono: rank 0: probes of each step's inputs take 3.5 KiB", flush=True)
        if os.environ.get("SGLANG_AMD_MONO_CHECK"):
            print("monokernel check: takes 3.5 MiB of device memory", flush=True)
            print("monokernel check: rank 0: 3 of 3 steps compared, 0 with a violation", flush=True)
    if os.environ.get(options.finds):
        print(f"{options.finds}: probe finding in 3 steps; monokernel check: rank 0, step 3, row 1", flush=True)
    server, _ = _server(
        Behaviour(corruption=options.corruption, cause=options.cause, arguments=sys.argv), options.host, options.port
    )
    server.serve_forever()


if __name__ == "__main__":
    main()
