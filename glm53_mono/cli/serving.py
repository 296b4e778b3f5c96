"""Would a server with these launch arguments run the monokernel, on which steps, and if not, why not?"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from glm53_mono.upstream import launch

AFTER_LOADING = "whether the loaded weights lie as a step reads them: SGLang asks that after it has loaded them"
WITHOUT_GPU = (
    "whether all compute units are visible to the server (partitioned GPUs are refused)",
    "what SGLang derives from the size of the GPU's memory: default graph sizes, chunked prefill, memory fractions",
)
WITHOUT_ROCM = (
    "whether AITER's pre-shuffled index keys can be used (Triton 3.5, SGLANG_USE_AITER=1): taken to be so; if not, the "
    "page size becomes 1 and the server is refused",
    "which layout AITER gives the weights: SGLang decides that on the ROCm machine",
)


class ServingError(ValueError):
    """The arguments cannot be judged; the message is one line that says why."""


@dataclass(frozen=True)
class Verdict:
    """What would become of a server.

    Attributes:
        isa: the device it was judged for.
        spec: name of the spec that SGLang found, None where it found none.
        steps: what the spec would run if nothing stood against it; None without a spec.
        reasons: everything that stands against it.
        not_evaluated: what only the real machine, or the loaded model, can tell.
    """

    isa: str
    spec: str | None
    steps: launch.Steps | None
    reasons: tuple[str, ...]
    not_evaluated: tuple[str, ...]
    weights: str
    """the checkpoint's format, as its config.json states it"""

    @property
    def runs(self) -> bool:
        """Whether the server would run the monokernel."""
        return not self.reasons

    def as_dict(self) -> dict[str, Any]:
        """The verdict as plain values, for JSON."""
        return {"runs": self.runs, **asdict(self)}


def weight_format(quantization: str | None) -> str:
    """SGLang's name of a quantisation in the words of the support matrix; a name of others stays as it is."""
    named = {None: "bf16", "unquant": "bf16", "fp8": "FP8 blocks", "quark": "Quark MXFP4 with FP8 blocks"}
    return named.get(quantization, str(quantization))


def judge(arguments: Sequence[str], isa: str | None = None) -> Verdict:
    """Judge a server by the arguments of `python -m sglang.launch_server`, without starting it.

    Args:
        arguments: the command line after the module name.
        isa: judge for this device instead of the machine's own; a key of `launch.PLATFORMS`.

    Raises:
        ServingError: no such device, none at all, or arguments with which SGLang itself would not start.
    """
    if isa is not None and isa not in launch.PLATFORMS:
        raise ServingError(f"ISA {isa!r} is not one of {', '.join(launch.PLATFORMS)}")
    own = launch.device_isa()
    judged = isa or own
    if judged is None:
        raise ServingError(f"this machine has no GPU: name the device with --isa ({' or '.join(launch.PLATFORMS)})")
    elsewhere = judged != own
    with contextlib.ExitStack() as stack:
        stack.enter_context(launch.environment_kept())
        if elsewhere:
            stack.enter_context(launch.platform_of(judged))
        launch.load_plugins()
        try:
            server = launch.resolve(arguments)
        except launch.LaunchError as error:
            raise ServingError(str(error)) from error
        spec, reasons = launch.disable_reasons(server, judged)
        steps = None if spec is None else launch.served_steps(server, spec.widths(judged))
    if not server.monokernel:
        reasons = ["the arguments do not ask for the monokernel: add --enable-amd-monokernel", *reasons]
    return Verdict(
        isa=judged,
        spec=None if spec is None else spec.name,
        steps=steps,
        reasons=tuple(reasons),
        not_evaluated=(
            AFTER_LOADING,
            *(WITHOUT_GPU if elsewhere else ()),
            *(WITHOUT_ROCM if elsewhere and judged.startswith("gfx") else ()),
        ),
        weights=weight_format(server.server.quantization),
    )
