"""The host's side of the probes: a thread that prints what is new, at most once a second."""

from __future__ import annotations

import logging
import threading

import numpy as np

from glm53_mono.probe.findings import Findings, Kind, read_findings, steps_probed

logger = logging.getLogger(__name__)

ACTIVE = "probes of each step's inputs"
"""What the line has that says that a server probes."""

LOG_S = 1.0
"""Seconds between two lines."""

MARK = "probe finding"
"""What every line of a finding has; `glm53-mono diagnose` looks for it in a server's log."""


class Report:
    """The thread. It reads host memory alone, and ends with the process or by `stop`.

    Args:
        findings: what it prints.
        rank: of this process among those that share the model.
    """

    def __init__(self, findings: Findings, rank: int) -> None:
        self._findings = findings
        self._rank = rank
        self._printed: dict[Kind, int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="glm53_mono probe", daemon=True)

    def start(self) -> None:
        """Starts looking."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, waits for it, and prints what it had not."""
        self._stopped.set()
        self._thread.join()
        self._print_new()

    def _run(self) -> None:
        while not self._stopped.wait(LOG_S):
            self._print_new()

    def _print_new(self) -> None:
        numbers = settled(self._findings.host_numbers)
        lines = []
        for finding in read_findings(numbers):
            before = self._printed.get(finding.kind, 0)
            if finding.count > before:
                self._printed[finding.kind] = finding.count
                lines.append(
                    f"{finding.kind.name.lower()} ({finding.count - before} new, {finding.count} in all), "
                    f"the last in step {finding.step}: {finding}"
                )
        if lines:
            logger.error(
                "glm53_mono: rank %d: %s in %d steps: %s",
                self._rank,
                MARK,
                steps_probed(numbers),
                "; ".join(lines),
            )


def settled(numbers: np.ndarray) -> np.ndarray:
    """A copy of numbers that the device may be writing: two looks in a row that agree."""
    seen = numbers.copy()
    while not np.array_equal(seen, now := numbers.copy(), equal_nan=True):
        seen = now
    return seen
