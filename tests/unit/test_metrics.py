"""Counts in the server's metrics, as one process writes them and another one exposes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry

from glm53_mono.metrics import StepCounter

WRITER = """
from glm53_mono.metrics import StepCounter
counter = StepCounter({rank})
counter.update(3, {{"extend": 1}})
counter.update(10, {{"extend": 1, "12 rows": 2}})
"""
"""A scheduler process of SGLang, as far as its metrics go."""


def exposed(registry: CollectorRegistry) -> dict[tuple[str, str, str], float]:
    """Samples of /metrics by rank, path and reason."""
    return {
        (sample.labels["tp_rank"], sample.labels["path"], sample.labels["reason"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "glm53_mono_steps_total"
    }


def test_totals_become_increments() -> None:
    registry = CollectorRegistry()
    counter = StepCounter(0, registry)
    assert exposed(registry) == {("0", "kernel", ""): 0}
    for served, fallbacks in ((4, {}), (9, {"extend": 2}), (9, {"extend": 2, "draft": 5})):
        counter.update(served, fallbacks)
    assert exposed(registry) == {("0", "kernel", ""): 9, ("0", "sglang", "extend"): 2, ("0", "sglang", "draft"): 5}
    assert b"glm53_mono_steps_total{" in prometheus_client.generate_latest(registry)


def test_a_count_never_falls() -> None:
    counter = StepCounter(0, CollectorRegistry())
    counter.update(4, {})
    with pytest.raises(ValueError, match="non-negative"):
        counter.update(3, {})


def test_another_process_exposes_them(tmp_path: Path) -> None:
    """The server's front collects what the schedulers' processes leave in a folder."""
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for rank in (0, 1):
        subprocess.run([sys.executable, "-c", WRITER.format(rank=rank)], env=environment, check=True)
    front = (
        "import prometheus_client, sys\n"
        "from prometheus_client import multiprocess\n"
        "registry = prometheus_client.CollectorRegistry()\n"
        "multiprocess.MultiProcessCollector(registry)\n"
        "sys.stdout.buffer.write(prometheus_client.generate_latest(registry))\n"
    )
    shown = subprocess.run([sys.executable, "-c", front], env=environment, check=True, capture_output=True, text=True)
    for rank in (0, 1):
        for path, reason, count in (("kernel", "", 10), ("sglang", "extend", 1), ("sglang", "12 rows", 2)):
            assert (
                f'glm53_mono_steps_total{{path="{path}",reason="{reason}",tp_rank="{rank}"}} {count}.0' in shown.stdout
            )
