"""Watching the runners: steps that the monokernel does not serve never reach this package otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
"""The call through which every step passes; a graph replay runs no other Python of the model."""


@dataclass(frozen=True)
class SeenStep:
    """A step that a runner just ran.

    Attributes:
        mode: SGLang's name of the forward mode, e.g. "DECODE", "TARGET_VERIFY", "EXTEND".
        requests: of the batch; in a replayed decode or verify step those of the graph, its padding included.
        tokens_per_request: rows of a request, rounded up where requests differ.
        is_draft: whether the runner is the draft model's.
    """

    mode: str
    requests: int
    tokens_per_request: int
    is_draft: bool

    @property
    def rows(self) -> int:
        """Tokens of the step."""
        return self.requests * self.tokens_per_request


def watch_steps(observer: Callable[[SeenStep], None]) -> bool:
    """Call `observer` after every forward of every runner of this process from now on.

    Returns:
        Whether it will be called: SGLang hooks a function once, so not where another plugin has hooked this one.
    """
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after_forward(result: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        observer(_seen(result, runner, forward_batch))

    unhooked = ModelRunner.forward
    HookRegistry.register(TARGET, after_forward, HookType.AFTER)
    HookRegistry.apply_hooks()
    return ModelRunner.forward is not unhooked


def _seen(result: Any, runner: Any, forward_batch: Any) -> SeenStep:
    mode = forward_batch.forward_mode
    requests, rows = int(forward_batch.batch_size), int(forward_batch.input_ids.shape[0])
    tokens = -(-rows // max(requests, 1))
    if result.can_run_graph and (mode.is_decode() or mode.is_target_verify()):
        requests = int(runner.decode_cuda_graph_runner.bs)
    return SeenStep(mode.name, requests, tokens, bool(runner.is_draft_worker))
