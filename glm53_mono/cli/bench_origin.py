"""Where a benchmark's numbers come from, and what it is at."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from glm53_mono import __version__
from glm53_mono.cli.versions import SOFTWARE, versions_of

if TYPE_CHECKING:
    from glm53_mono.cli.bench import Options


def provenance(arguments: Sequence[str], options: Options, weights: str) -> dict[str, Any]:
    """Where and with what the numbers came about; `weights` says where those came from."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    versions = {software.module: versions_of(software) for software in SOFTWARE if software.required}
    return {
        "device": properties.name,
        "compute_units": properties.multi_processor_count,
        "glm53_mono": __version__,
        "python": platform.python_version(),
        **{name: found.installed or found.importable for name, found in versions.items()},
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "server_arguments": list(arguments),
        "weights": weights,
        "seed": options.seed,
        "steps": options.steps,
    }


class Progress:
    """Says on stderr what begins, and when."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, what: str) -> None:
        """One line, behind the seconds since this was made."""
        print(f"glm53-mono bench: {time.monotonic() - self._started:6.1f} s: {what}", file=sys.stderr, flush=True)
