"""The host's side of the check: a thread that logs violations and counts from pinned memory, and ends the process."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from glm53_mono.check.comparisons import Comparisons, Counts, Violation
from glm53_mono.check.plan import FORWARD, LAUNCH

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between two looks: a violation is logged within a second of its step."""

REPORT_S = 10.0
"""Seconds between two lines of counts, as long as they change."""

LINES_A_LOOK = 4
"""Violations that one look logs; the others are counted in its last line."""


def abort() -> None:
    """Ends this process at once, as a fault of the GPU does; SGLang's server ends with it."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.kill(os.getpid(), signal.SIGABRT)


class Watch:
    """The thread. It ends with the process, or by `stop`.

    Args:
        comparisons: whose tables it reads.
        rank: of this process among those that share the model.
        raises: the first violation ends the process.
        end: how.
    """

    def __init__(self, comparisons: Comparisons, rank: int, *, raises: bool, end: Callable[[], None] = abort) -> None:
        self._comparisons = comparisons
        self._rank = rank
        self._raises = raises
        self._end = end
        self._logged = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="glm53_mono check", daemon=True)

    def start(self) -> None:
        """Starts looking."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after a last look, and waits for it."""
        self._stopped.set()
        self._thread.join()

    def sentence(self, violation: Violation) -> str:
        """What a violation means."""
        c, measured = violation.comparison, violation.distance
        return (
            f"monokernel check: rank {self._rank}, step {violation.step}, "
            f"{'request' if c.per_request else 'row'} {violation.row} of the batch (request row "
            f"{violation.request_row}): layer {c.layer}, {c.part}, {c.value}: relative error {measured.rel:.3g} "
            f"(bound {c.bound.rel:.3g}), largest {measured.max_abs:.3g} of the RMS (bound {c.bound.max_abs:.3g}); at "
            f"place {violation.place} it is {violation.found:.6g}, "
            f"{'phase by phase' if c.part == LAUNCH else 'by SGLang'} {violation.expected:.6g}"
        )

    def summary(self) -> str:
        """The counts so far."""
        counts = self._comparisons.counts()
        nearest, measured = self._comparisons.nearest_to_its_bound()
        logits = [c for c in self._comparisons.comparisons if c.part == FORWARD]
        whole = [self._comparisons.worst(c.layer, c.part, c.value) for c in logits]
        return (
            f"monokernel check: rank {self._rank}: {counts.compared} of {counts.steps} steps compared, "
            f"{counts.violating} with a violation; near-ties that fell the other way: {counts.expert_ties} of experts, "
            f"{counts.pool_ties} of pools; {counts.left_out} requests left out; "
            f"nearest to its bound: layer {nearest.layer}, {nearest.part}, "
            f"{nearest.value}, relative error {measured.rel:.3g} of {nearest.bound.rel:.3g}, largest "
            f"{measured.max_abs:.3g} of {nearest.bound.max_abs:.3g}"
            + "".join(f"; logits of the two whole forwards: relative error up to {each.rel:.3g}" for each in whole)
        )

    def _run(self) -> None:
        try:
            self._watch()
        except Exception:
            logger.critical("monokernel check: rank %d watches no more", self._rank, exc_info=True)
            if self._raises:
                self._end()

    def _watch(self) -> None:
        due, reported = time.monotonic() + REPORT_S, Counts(0, 0, 0, 0, 0)
        while not self._stopped.wait(POLL_S):
            self._look()
            if time.monotonic() >= due:
                due += REPORT_S
                counts = self._comparisons.counts()
                if counts != reported:
                    reported = counts
                    logger.info("%s", self.summary())
        self._look()

    def _look(self) -> None:
        violating = self._comparisons.counts().violating
        if violating == self._logged:
            return
        found = self._comparisons.violations(self._logged, violating)
        for violation in found[:LINES_A_LOOK]:
            logger.error("%s", self.sentence(violation))
        others = violating - self._logged - len(found[:LINES_A_LOOK])
        if others:
            logger.error("monokernel check: rank %d: %d more steps with a violation", self._rank, others)
        self._logged = violating
        if self._raises:
            logger.critical("monokernel check: rank %d ends its process at the first violation", self._rank)
            self._stopped.set()
            self._end()
