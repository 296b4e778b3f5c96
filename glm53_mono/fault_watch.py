"""The host's side of a launch's record: a thread that prints a fault as it happens, and reports the counts.

It reads mapped host memory alone. After a fault no call to the device returns, so this thread must make none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from glm53_mono.kernels import sync
from glm53_mono.kernels.peers import PEER_QUARTERS
from glm53_mono.program.phase import Phase

logger = logging.getLogger(__name__)

POLL_S = 0.02
"""Seconds between two looks at the record. The process ends soon after a fault, so the line must come first."""

REPORT_S = 60.0
"""Seconds between two lines of counts, as long as they change."""

METRICS_S = 1.0
"""Seconds between two updates of the server's metrics."""


@dataclass(frozen=True)
class Fault:
    """A wait whose deadline passed.

    Attributes:
        program: of the launch's grid, the one that waited.
        phase: the phase it was about to start.
        expected: arrivals that it waited for, of all phases before; from a peer, the number of the reduce.
        seen: arrivals that had come; from a peer, the last reduce that it has left its rows for.
        peer: the rank whose flag did not come; None where a program of the own grid did not arrive.
    """

    program: int
    phase: int
    expected: int
    seen: int
    peer: int | None = None


class LaunchFault(RuntimeError):
    """A launch of this process has recorded a fault, so no other one may start; the message is the fault's line."""


class HostRecord:
    """Reads what launches write to mapped host memory.

    Args:
        record: int32 [sync.HOST_WORDS], pinned where a GPU writes it.
    """

    def __init__(self, record: torch.Tensor) -> None:
        self._tensor = record
        self._words = record.numpy()
        self._served = self._words[sync.SERVED.value : sync.SERVED.value + 2].view(np.int64)
        self._epochs = self._words[sync.FAULT_EPOCHS.value : sync.FAULT_EPOCHS.value + 4].view(np.int64)

    def fault(self) -> Fault | None:
        """The fault that a launch has recorded, if one has."""
        words = self._words
        if not words[sync.FAULT_FLAG.value]:
            return None
        of_peer = words[sync.FAULT_PEER.value] > 0
        counts = self._epochs if of_peer else words[[sync.FAULT_EXPECTED.value, sync.FAULT_SEEN.value]]
        return Fault(
            program=int(words[sync.FAULT_PROGRAM.value]),
            phase=int(words[sync.FAULT_PHASE.value]),
            expected=int(counts[0]),
            seen=int(counts[1]),
            peer=int(words[sync.FAULT_PEER.value]) - 1 if of_peer else None,
        )

    def served(self) -> int:
        """Launches that have completed, replays of captured graphs and SGLang's warm-up runs included."""
        return int(self._served[0])

    def clear(self) -> None:
        """Forgets everything."""
        self._tensor.zero_()


class Watch:
    """The thread. It ends with the process, or by `stop`.

    Args:
        record: what it looks at.
        phases: gives a fault's phase its name.
        rank: of this process among those that share the model.
        deadline_s: seconds that a wait may last.
        counts: the line of counts.
        update_metrics: brings the server's metrics up to date.
    """

    def __init__(
        self,
        record: HostRecord,
        phases: Sequence[Phase],
        rank: int,
        deadline_s: float,
        counts: Callable[[], str],
        update_metrics: Callable[[], None],
    ) -> None:
        self._record = record
        self._names = [(phase.kind.name, phase.layer) for phase in phases]
        self._rank = rank
        self._deadline_s = deadline_s
        self._counts = counts
        self._update_metrics = update_metrics
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="glm53_mono watch", daemon=True)

    def start(self) -> None:
        """Starts looking."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and waits for it."""
        self._stopped.set()
        self._thread.join()

    def sentence(self, fault: Fault) -> str:
        """What a fault means."""
        kind, layer = self._names[fault.phase]
        if fault.peer is None:
            waited, missing = self._deadline_s, fault.expected - fault.seen
            what = f"{fault.seen} of {fault.expected} arrivals, {missing} missing"
        else:
            waited = self._deadline_s * PEER_QUARTERS.value / 4
            what = (
                f"rank {fault.peer} has not left its rows of reduce {fault.expected}, the last that it left are those "
                f"of reduce {fault.seen}"
            )
        return (
            f"glm53_mono: rank {self._rank}, program {fault.program} waited {waited:g} s before phase "
            f"{fault.phase} ({kind} of layer {layer}): {what}; it now faults the GPU at address 0"
        )

    def _run(self) -> None:
        reported, due, update = self._counts(), time.monotonic() + REPORT_S, time.monotonic()
        metrics = True
        while not self._stopped.wait(POLL_S):
            fault = self._record.fault()
            if fault is not None:
                logger.critical("%s", self.sentence(fault))
                return
            if metrics and time.monotonic() >= update:
                update += METRICS_S
                try:
                    self._update_metrics()
                except Exception:  # a full disk, say: faults must be printed all the same
                    metrics = False
                    logger.exception("glm53_mono: rank %d: its steps are counted in the metrics no more", self._rank)
            if time.monotonic() >= due:
                due += REPORT_S
                counts = self._counts()
                if counts != reported:
                    reported = counts
                    logger.info("glm53_mono: rank %d: %s", self._rank, counts)
