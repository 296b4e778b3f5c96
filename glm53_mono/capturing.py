"""Whether this runtime captures the kernel's launch, found out by capturing one that runs no phase.

The rule: a launch is cooperative, so the runtime itself refuses a grid that cannot be resident as a whole. Where a
runtime of AMD's does not capture such a launch, or captures nothing, servers launch the same grid flat and say so: what
the runtime would have checked is checked at the build (`admission`), and a wait has its deadline. Where neither is
captured, and on CUDA, the build is refused.

HIP's own sources capture `hipModuleLaunchCooperativeKernel`, which Triton's launcher calls, as a kernel node that keeps
its being cooperative (ROCm/clr: hip_module.cpp, hip_graph_internal.cpp). Calls that succeed under capture and are in no
graph have been seen there all the same (until HIP 7: ROCm/hip, pull request 3821), so the count of launches decides and
not whether a call has failed.
"""

from __future__ import annotations

import logging

import torch

from glm53_mono.admission import AdmissionError
from glm53_mono.bindings import Unused, empty_step
from glm53_mono.kernels.monokernel import StepSizes, StepTensors
from glm53_mono.kernels.sync import LAUNCHES
from glm53_mono.program.launch import Launch

logger = logging.getLogger(__name__)


def settle(launch: Launch) -> None:
    """Decides how a launch starts its grid; leaves the launch flat where a cooperative one is not captured.

    Raises:
        AdmissionError: this runtime captures no launch of ours.
    """
    problem = trial(launch)
    if problem is None:
        return
    if launch.variant.backend != "hip":
        raise AdmissionError(f"this CUDA runtime does not capture a cooperative launch: {problem}")
    launch.cooperative = False
    launch.run(*_nothing(launch))
    second = trial(launch)
    if second is not None:
        raise AdmissionError(
            f"this ROCm runtime captures neither a cooperative launch ({problem}) nor a flat one ({second})"
        )
    logger.warning(
        "glm53_mono: this ROCm runtime does not capture a cooperative launch (%s), so launches are flat: what it would "
        "check of the grid was checked when the server was built",
        problem,
    )


def trial(launch: Launch) -> str | None:
    """Captures and replays one launch that runs no phase; what went wrong, or None. The launch has run before."""
    nothing = _nothing(launch)
    before = launches(launch)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream(launch.buffer.device)
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            launch.run(*nothing)
        captured = launches(launch)
        graph.replay()
        replayed = launches(launch)
    except RuntimeError as error:
        # where the end of a capture fails, what made it invalid came before
        return str(error.__context__ or error).strip().partition("\n")[0]
    finally:
        # torch leaves the capture's stream current where its end fails
        torch.cuda.set_stream(stream)
    if captured != before:
        return "it ran while it was captured"
    return None if replayed == before + 1 else f"a replay ran it {replayed - before} times"


def launches(launch: Launch) -> int:
    """Launches that have completed, once all work is done."""
    torch.cuda.synchronize(launch.buffer.device)
    return int(launch.view("words")[LAUNCHES.value : LAUNCHES.value + 2].view(torch.int64))


def _nothing(launch: Launch) -> tuple[StepTensors, StepSizes, torch.Tensor, int, int]:
    """Arguments of a launch that runs no phase."""
    tensors, sizes = empty_step(Unused.on(launch.buffer.device))
    hidden = torch.empty((1, launch.geometry.hidden), dtype=torch.bfloat16, device=launch.buffer.device)
    return tensors, sizes, hidden, 0, 0
