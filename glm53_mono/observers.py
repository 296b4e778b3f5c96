"""What may look on while routed steps run: the runtime calls each observer before and after a step's launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from glm53_mono.program.pools import Pools
from glm53_mono.upstream.step import Backends, StepBindings


@dataclass(frozen=True)
class ObservedStep:
    """A routed step as its launch sees it.

    Attributes:
        inputs: SGLang's tensors of the step.
        pools: the caches that the launch reads and writes.
        backends: the attention backends of the forward in progress.
        forward_batch: SGLang's own `ForwardBatch`.
    """

    inputs: StepBindings
    pools: Pools
    backends: Backends
    forward_batch: Any


class StepObserver(Protocol):
    """Looks at steps. Under graph capture what it enqueues becomes part of the graph, so it must wait for nothing."""

    def before(self, step: ObservedStep) -> None:
        """Called ahead of the launch."""

    def after(self, step: ObservedStep, hidden: Tensor) -> None:
        """Called behind the launch, whose hidden states are [rows, hidden] bf16."""

    def close(self) -> None:
        """Ends what the observer started."""
