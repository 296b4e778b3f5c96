"""Watching the runners: steps that the monokernel does not serve never reach this package otherwise."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
"""The call through which every step passes, but for drafts that are replayed; a graph replay runs no other Python of
the model."""

DRAFT_REPLAYS = (
    "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner.execute",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.execute",
)
"""The calls that replay a draft model's graph: all draft tokens of a round, and the draft model's step over the tokens
that a verify step has accepted (eagle_worker_v2.py: draft, _draft_extend_for_decode)."""


@dataclass(frozen=True)
class SeenStep:
    """A step that a runner just ran.

    Attributes:
        mode: SGLang's name of the forward mode, e.g. "DECODE", "TARGET_VERIFY", "EXTEND".
        requests: of the batch; in a replayed decode or verify step those of the graph, its padding included.
        tokens_per_request: rows of a request, rounded up where requests differ; 1 for a replayed draft.
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


def watch_steps(observer: Callable[[SeenStep], None], *, drafts: bool) -> list[str]:
    """Call `observer` after every forward of every runner of this process from now on.

    Args:
        drafts: whether the server drafts, so that replays of the draft model's graphs are to be seen too.

    Returns:
        What is not watched: SGLang hooks a function once, so none that another plugin has hooked.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after_forward(result: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        observer(_seen(result, runner, forward_batch))

    def after_replay(result: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        # the graph has its own inputs: a draft batch comes without token ids
        observer(SeenStep(forward_batch.forward_mode.name, int(forward_batch.batch_size), 1, is_draft=True))

    wanted = {FORWARD: after_forward} | (dict.fromkeys(DRAFT_REPLAYS, after_replay) if drafts else {})
    unhooked = {target: pkgutil.resolve_name(target) for target in wanted}
    for target, hook in wanted.items():
        HookRegistry.register(target, hook, HookType.AFTER)
    HookRegistry.apply_hooks()
    return [target for target, function in unhooked.items() if pkgutil.resolve_name(target) is function]


def _seen(result: Any, runner: Any, forward_batch: Any) -> SeenStep:
    mode, is_draft = forward_batch.forward_mode, bool(runner.is_draft_worker)
    requests, rows = int(forward_batch.batch_size), int(forward_batch.input_ids.shape[0])
    tokens = -(-rows // max(requests, 1))
    if result.can_run_graph and not is_draft and (mode.is_decode() or mode.is_target_verify()):
        requests = int(runner.decode_cuda_graph_runner.bs)
    return SeenStep(mode.name, requests, tokens, is_draft)
