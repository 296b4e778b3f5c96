"""Served steps and fallbacks among the server's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME = "glm53_mono_steps"
"""Of the counter; it is exposed as `glm53_mono_steps_total`."""

KERNEL, FALLBACK = "kernel", "sglang"
"""Values of the label `path`: who ran the steps."""


class StepCounter:
    """A counter with the labels `tp_rank`, `path` and `reason`, brought up to date from totals.

    prometheus_client writes its samples to the folder that SGLang names in PROMETHEUS_MULTIPROC_DIR before it starts
    its processes, and the server's /metrics adds them up (utils/common.py: set_prometheus_multiproc_dir).

    Args:
        rank: of this process among those that share the model.
        registry: where to register; prometheus_client's own by default.
    """

    def __init__(self, rank: int, registry: Any = None) -> None:
        # imported late: a server without metrics need not have it
        import prometheus_client

        self._counter = prometheus_client.Counter(
            NAME,
            "Steps that the monokernel served (path kernel; SGLang's warm-up runs count) or SGLang's forward ran (path "
            "sglang), by reason.",
            labelnames=("tp_rank", "path", "reason"),
            registry=registry or prometheus_client.REGISTRY,
        )
        self._rank = str(rank)
        self._seen: dict[tuple[str, str], int] = {}
        self.update(0, {})

    def update(self, served: int, fallbacks: Mapping[str, int]) -> None:
        """Adds what has come since the last update.

        Args:
            served: launches so far.
            fallbacks: steps that SGLang's forward ran so far, by reason.
        """
        totals = {(KERNEL, ""): served} | {(FALLBACK, reason): count for reason, count in fallbacks.items()}
        for (path, reason), total in totals.items():
            new = total - self._seen.get((path, reason), 0)
            self._counter.labels(tp_rank=self._rank, path=path, reason=reason).inc(new)
            self._seen[path, reason] = total
