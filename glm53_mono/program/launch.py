"""A program ready to run on one device: records, workspace and the compiled kernel's constants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.isas import ISAS
from glm53_mono.kernels.monokernel import StepSizes, StepTensors, monokernel
from glm53_mono.kernels.sync import HOST_WORDS
from glm53_mono.program.phase import Phase
from glm53_mono.program.step import write_records
from glm53_mono.program.tiling import Tiling
from glm53_mono.program.workspace import Workspace, lay_out
from glm53_mono.weights.formats import Formats

BACKENDS = {**{name: isa.backend for name, isa in ISAS.items()}, "interp": "interp"}
"""The kernel's backend by ISA; `interp` is Triton's interpreter on the CPU, a phase a launch."""


@contextmanager
def _without_direct_lds() -> Iterator[None]:
    with triton.knobs.amd.scope():
        triton.knobs.amd.use_async_copy = False
        yield


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel is specialised for besides its sizes."""

    verify: bool
    index_tiled: bool
    shared_fused: bool
    backend: str
    """interp, cuda or hip"""
    timed: bool = False
    """whether the launch writes when each of its phases starts, for the bench"""


@dataclass
class Launch:
    """Runs a step's phases on one device.

    Attributes:
        buffer: the workspace, uint8; its barrier words must be zero before the first launch.
        host_record: int32 [HOST_WORDS] in host memory that the device writes: a fault, and the launches served.
        symmetric: uint8 [workspace.symmetric.size], zero before the first launch, which the other ranks read and write;
            None where the rank has the whole model.
        cooperative: whether the runtime is told that the grid waits for itself; see `capturing`.
    """

    geometry: Geometry
    tiling: Tiling
    variant: Variant
    workspace: Workspace
    records: Tensor
    buffer: Tensor
    host_record: Tensor
    phases: list[Phase]
    deadline_s: float
    formats: Formats
    symmetric: Tensor | None = None
    cooperative: bool = True

    @classmethod
    def prepare(
        cls,
        geometry: Geometry,
        tiling: Tiling,
        variant: Variant,
        phases: list[Phase],
        *,
        max_tokens: int,
        deadline_s: float,
        formats: Formats,
        device: torch.device | str,
    ) -> Launch:
        """Allocates the workspace and writes the records; the only place that takes device memory.

        Args:
            max_tokens: longest context of a request.
            deadline_s: seconds that a wait of a launch may last.
            formats: of the weights.
        """
        fitted = tiling.fitted(geometry)
        workspace = lay_out(geometry, fitted, len(phases), max_tokens)
        buffer = torch.zeros(workspace.size, dtype=torch.uint8, device=device)
        on_gpu = torch.device(device).type != "cpu"
        shared = geometry.tp_size > 1
        return cls(
            geometry=geometry,
            tiling=fitted,
            variant=variant,
            workspace=workspace,
            records=write_records(phases, device),
            buffer=buffer,
            host_record=torch.zeros(HOST_WORDS, dtype=torch.int32, pin_memory=on_gpu),
            phases=phases,
            deadline_s=deadline_s,
            symmetric=torch.zeros(workspace.symmetric.size, dtype=torch.uint8, device=device) if shared else None,
            formats=formats,
        )

    def bind(self, phases: list[Phase]) -> None:
        """Fills the records anew, for caches that did not exist when the launch was prepared; copies to the device.

        Args:
            phases: the same phases, with other addresses.
        """
        if [(phase.kind, phase.layer) for phase in phases] != [(phase.kind, phase.layer) for phase in self.phases]:
            raise ValueError(f"{len(phases)} phases are bound to a launch of {len(self.phases)}, or in another order")
        self.records.copy_(write_records(phases, self.records.device))
        self.phases = phases

    def run(
        self, tensors: StepTensors, sizes: StepSizes, hidden: Tensor, first: int = 0, last: int | None = None
    ) -> None:
        """One launch over the phases [first, last); all of them by default."""
        positional, constants = self.arguments(tensors, sizes, hidden, first, last)
        with self.compiler():
            monokernel[(self.tiling.programs,)](*positional, **constants)

    def compiler(self) -> AbstractContextManager[None]:
        """Triton's settings for whatever may compile the kernel.

        Triton 3.8 brings FP8 and MXFP4 tiles straight to LDS on gfx950, four bytes a lane; through registers it is 16.
        """
        return _without_direct_lds() if self.variant.backend == "hip" and self.formats != Formats() else nullcontext()

    def arguments(
        self, tensors: StepTensors, sizes: StepSizes, hidden: Tensor, first: int = 0, last: int | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a launch hands to the kernel: its run-time arguments in order; its constants and compiler options."""
        positional = (
            self.records,
            self.buffer,
            *tensors,
            hidden,
            self.host_record,
            *sizes,
            first,
            len(self.phases) if last is None else last,
            int(self.deadline_s * 1e9),
        )
        constants = {
            "VERIFY": self.variant.verify,
            "TILED": self.variant.index_tiled,
            "FUSED": self.variant.shared_fused,
            "TIMED": self.variant.timed,
            "W": self.workspace,
            "G": self.geometry,
            "T": self.tiling,
            "F": self.formats,
            "BACKEND": self.variant.backend,
        }
        return positional, constants | self._options()

    def _options(self) -> dict[str, int | bool]:
        options: dict[str, int | bool] = {"num_warps": self.tiling.warps}
        if self.variant.backend != "interp":
            options["launch_cooperative_grid"] = self.cooperative
        if self.tiling.max_registers:
            # ptxas takes 128 registers for 256 threads unless it is told that one program a multiprocessor is enough
            options["maxnreg"] = self.tiling.max_registers
        return options

    def run_by_phase(self, tensors: StepTensors, sizes: StepSizes, hidden: Tensor) -> None:
        """A launch for each phase: the same work with the grid's end as its barrier. The interpreter knows no other."""
        for phase in range(len(self.phases)):
            self.run(tensors, sizes, hidden, phase, phase + 1)

    def view(self, name: str) -> Tensor:
        """A region of the workspace as a tensor."""
        return self.workspace.view(self.buffer, name)

    def poison(self) -> None:
        """Fills the workspace with NaN but for the barrier words, as tests do before a step."""
        words = self.view("words").clone()
        self.buffer.view(torch.int32).fill_(0x7FC07FC0)
        self.view("words").copy_(words)
