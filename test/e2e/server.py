"""SGLang servers of the tests, and requests to them whose tokens may be forced."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glm53_mono.client import process
from glm53_mono.client.http import Answer, Client, ServerError, grown
from glm53_mono.client.http import Generation as PlainGeneration

__all__ = ["COUNTED", "MONOKERNEL", "Answer", "Generation", "Server", "ServerError", "grown", "running"]

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
"""The kernel in a server whose steps `Client.steps` counts."""

FORCED = json.dumps({"callable": b"cforced_tokens\nForced\n.".hex()})
"""`forced_tokens.Forced` as a server takes it: a pickled reference (sampling/custom_logit_processor.py: from_str)."""


@dataclass(frozen=True)
class Generation(PlainGeneration):
    """One request; no end-of-sequence token ends it.

    Attributes:
        forced: the tokens to generate, whatever the logits say.
    """

    forced: Sequence[int] | None = None

    def body(self) -> dict[str, Any]:
        """See `glm53_mono.client.http.Generation`."""
        body = super().body()
        if self.forced is not None:
            body["sampling_params"]["custom_params"] = {"forced_tokens": list(self.forced)}
            body["custom_logit_processor"] = FORCED
        return body


@dataclass(frozen=True)
class Server(Client):
    """A server of the tests.

    Attributes:
        log_file: what it prints.
    """

    log_file: Path = Path()

    @property
    def log(self) -> str:
        """Everything it has printed."""
        return self.log_file.read_text(errors="replace")

    def generate_in_turn(self, generations: Sequence[Generation], aborted: Sequence[Generation]) -> list[Answer]:
        """Send requests one shortly after another, so that each joins a running batch; some are aborted on the way.

        Returns:
            The answers of `generations`.
        """

        def later(place: int) -> Answer | None:
            time.sleep(place * SHORTLY_S)
            if place < len(generations):
                return self.generate(generations[place])
            return self.abort(aborted[place - len(generations)], f"aborted-{place}")

        count = len(generations) + len(aborted)
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(later, range(count)))
        return [answer for answer in answers[: len(generations)] if answer is not None]


def command_of(model: Path, *arguments: str) -> list[str]:
    """What starts a server of `model`.

    Args:
        arguments: beside `PLAIN`.
    """
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *PLAIN, *arguments]


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
        ServerError: it ended, or did not answer in `process.START_S`.
    """
    # not our folder itself: a server must find the plugin as it is installed
    path = os.pathsep.join([str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    variables = {"PYTHONPATH": path.rstrip(os.pathsep)} | dict(environment or {})
    with process.running(command_of(model, *arguments), log_file, environment=variables) as started:
        yield Server(started.client.url, log_file=log_file)
