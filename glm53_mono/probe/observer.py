"""The probes around a launch, and whether a server wants them."""

from __future__ import annotations

import logging
import math
import os

import torch
from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.observers import ObservedStep
from glm53_mono.probe.caches import probe_prefix, probe_written, scratch_bytes
from glm53_mono.probe.findings import NUMBER_BYTES, NUMBERS_SHAPE, Findings
from glm53_mono.probe.report import ACTIVE, Report
from glm53_mono.probe.snapshot import WINDOW, Requests, Tables
from glm53_mono.probe.tables import probe_tables

logger = logging.getLogger(__name__)

PROBE = "SGLANG_AMD_MONO_PROBE"
"""The variable that turns the probes on."""


def probe_is_wanted() -> bool:
    """Whether the variable asks for probes.

    Raises:
        ValueError: it has a value that means nothing.
    """
    value = os.environ.get(PROBE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{PROBE} is {value!r}: 1 turns the probes on, 0 or nothing leaves them off")
    return value == "1"


class InputProbe:
    """A `StepObserver` that probes each routed step.

    Args:
        geometry: sizes of this rank.
        rank: of this process among those that share the model.
        device: where steps run.
        longest: tokens that a request may have.
    """

    def __init__(self, geometry: Geometry, rank: int, device: torch.device, longest: int) -> None:
        logger.warning(
            "glm53_mono: rank %d: %s take %.1f KiB, and %.1f MiB while a step is probed; "
            "each step looks at %d tokens of a request's prefix",
            rank,
            ACTIVE,
            2 * math.prod(NUMBERS_SHAPE) * NUMBER_BYTES / 2**10,
            scratch_bytes(geometry, longest) / 2**20,
            WINDOW,
        )
        self._geometry = geometry
        self.findings = Findings(device)
        self._report = Report(self.findings, rank)
        self._report.start()

    def before(self, step: ObservedStep) -> None:
        """See `StepObserver`."""
        self.findings.next_step()
        requests = Requests.of(step)
        tables = Tables.of(step, requests, self.findings.step, self._geometry.page_tokens)
        probe_tables(self.findings, step, requests, tables, self._geometry)
        probe_prefix(self.findings, step, requests, tables, self._geometry)

    def after(self, step: ObservedStep, hidden: Tensor) -> None:
        """See `StepObserver`."""
        probe_written(self.findings, step, Requests.of(step), self._geometry, hidden)
        self.findings.publish()

    def close(self) -> None:
        """See `StepObserver`."""
        self._report.stop()
