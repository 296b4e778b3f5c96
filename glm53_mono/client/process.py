"""Servers that are started for a while, with their output in a file."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

from glm53_mono.client.http import Client, ServerError

START_S = 900.0
"""Seconds until a server must answer; the first start on a machine compiles SGLang's kernels for minutes."""

HOST = "127.0.0.1"
LAST_LINES = 30
POLL_S = 0.2
END_S = 30.0
"""Seconds that a server has to end by itself."""


@dataclass(frozen=True)
class Started:
    """A server of this process.

    Attributes:
        client: sends it requests.
        log_file: what it prints.
        process: of the server; its workers are in its process group.
    """

    client: Client
    log_file: Path
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        """Everything it has printed."""
        return self.log_file.read_text(errors="replace")


@contextmanager
def running(
    command: Sequence[str],
    log_file: Path,
    *,
    environment: Mapping[str, str] | None = None,
    start_s: float = START_S,
) -> Iterator[Started]:
    """A server, until the end of the block.

    Args:
        command: starts it; host and a free port are added.
        log_file: takes its output; the server runs in its folder.
        environment: variables beside this process's.
        start_s: seconds until it must answer.

    Raises:
        ServerError: it ended, or did not answer in time; the message ends with its last lines.
    """
    port = _free_port()
    with log_file.open("w") as log:
        try:
            process = subprocess.Popen(
                [*command, "--host", HOST, "--port", str(port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(environment or {}),
                cwd=log_file.parent,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(f"{command[0]} cannot be run: {error}") from error
    try:
        started = Started(Client(f"http://{HOST}:{port}"), log_file, process)
        _wait_until_it_answers(started, start_s)
        yield started
    finally:
        _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _wait_until_it_answers(started: Started, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        if started.process.poll() is not None:
            raise ServerError(
                f"the server ended with status {started.process.returncode}:\n{last_lines(started.log_file)}"
            )
        try:
            if requests.get(f"{started.client.url}/health", timeout=5).ok:
                return
        except (requests.ConnectionError, requests.Timeout):
            pass  # it is not there yet
        time.sleep(POLL_S)
    raise ServerError(f"the server does not answer after {start_s:g} s:\n{last_lines(started.log_file)}")


def last_lines(log_file: Path) -> str:
    """The end of a log."""
    return "\n".join(log_file.read_text(errors="replace").splitlines()[-LAST_LINES:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers, which share a process group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
