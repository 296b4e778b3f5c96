"""How a launch starts its grid where the runtime captures it, and where it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm53_mono import capturing
from glm53_mono.admission import AdmissionError
from glm53_mono.capturing import settle, trial
from glm53_mono.kernels.sync import LAUNCHES, barrier_words


class Launches:
    """Stands in for a `Launch`, and for the runtime that captures it or not."""

    def __init__(self, backend: str, captures: Callable[[bool], str]) -> None:
        self.variant = SimpleNamespace(backend=backend)
        self.geometry = SimpleNamespace(hidden=8)
        self.buffer = torch.zeros(1)
        self.cooperative = True
        self.words = torch.zeros(barrier_words(1), dtype=torch.int32)
        self.capturing = False
        self.stream = "its own"
        self.recorded = 0
        self._captures = captures

    def view(self, name: str) -> torch.Tensor:
        assert name == "words"
        return self.words

    def run(self, *arguments: Any) -> None:
        assert arguments[-2:] == (0, 0), "a phase was run"
        how = self._captures(self.cooperative) if self.capturing else "runs"
        if how == "fails":
            raise RuntimeError("Triton Error [HIP]: Code: 900, operation not permitted\nmore")
        if how == "runs":
            self.count(1)
        self.recorded = int(how == "is captured")

    def count(self, launches: int) -> None:
        self.words[LAUNCHES.value : LAUNCHES.value + 2].view(torch.int64).add_(launches)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Launches]:
    """A launch on a runtime of that backend; `captures` tells what becomes of a launch under capture."""

    def made(backend: str, captures: Callable[[bool], str]) -> Launches:
        launch = Launches(backend, captures)

        @contextmanager
        def graph(_: Any, **__: str) -> Iterator[None]:
            launch.capturing, launch.stream = True, "the capture's"
            try:
                yield
            except RuntimeError as error:
                # as torch.cuda.graph does, which then does not put the stream back
                launch.capturing = False
                raise RuntimeError("operation failed due to a previous error during capture") from error
            launch.capturing, launch.stream = False, "its own"

        graphs = SimpleNamespace(
            CUDAGraph=lambda: SimpleNamespace(replay=lambda: launch.count(launch.recorded)),
            graph=graph,
            synchronize=lambda _: None,
            current_stream=lambda _: launch.stream,
            set_stream=lambda stream: setattr(launch, "stream", stream),
        )
        monkeypatch.setattr(capturing.torch, "cuda", graphs)
        return launch

    return made


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_a_captured_launch_is_cooperative(backend: str, runtime: Callable[..., Launches]) -> None:
    launch = runtime(backend, lambda _: "is captured")
    settle(launch)
    assert launch.cooperative


@pytest.mark.parametrize(
    ("becomes", "says"),
    [
        ("fails", "Triton Error [HIP]: Code: 900, operation not permitted"),
        ("runs", "it ran while it was captured"),
        ("is lost", "a replay ran it 0 times"),
    ],
)
def test_without_capture_hip_launches_flat_and_cuda_is_refused(
    becomes: str, says: str, runtime: Callable[..., Launches], caplog: pytest.LogCaptureFixture
) -> None:
    assert trial(runtime("hip", lambda _: becomes)) == says
    launch = runtime("hip", lambda cooperative: becomes if cooperative else "is captured")
    settle(launch)
    assert not launch.cooperative
    assert launch.stream == "its own", "torch leaves the capture's stream where the capture fails"
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING and f"({says}), so launches are flat" in caplog.text
    with pytest.raises(AdmissionError, match="this CUDA runtime does not capture a cooperative launch: ") as refused:
        settle(runtime("cuda", lambda cooperative: becomes if cooperative else "is captured"))
    assert str(refused.value).endswith(says)


def test_a_runtime_that_captures_neither_is_refused(runtime: Callable[..., Launches]) -> None:
    with pytest.raises(AdmissionError, match=r"neither a cooperative launch \(Triton .*\) nor a flat one \(it ran"):
        settle(runtime("hip", lambda cooperative: "fails" if cooperative else "runs"))
