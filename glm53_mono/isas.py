"""The devices that the kernel is built for: what is known of each ISA's hardware and of how servers run on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Isa:
    """One device.

    Attributes:
        backend: the kernel's, `cuda` or `hip`.
        target: Triton's name of the architecture.
        lanes: threads of a warp (a wave).
        compute_units: that are active; the grid is one resident program on each.
        chiplets: dies that the compute units are on, as many on each. Programs are dealt to them in turn.
        index_tiled: whether a server keeps its index keys in 16 x 16 tiles: ROCm always (linear keys need pages of one
            token, which are refused), CUDA never (`upstream.running.index_keys_are_tiled`).
        oldest_triton: that compiles the kernel right.
    """

    backend: str
    target: str | int
    lanes: int
    compute_units: int
    chiplets: int
    index_tiled: bool
    oldest_triton: tuple[int, int]

    def chiplet_of(self, program: int) -> int:
        """The chiplet that a program of the grid is taken to run on; `kernels.sync.chiplet` is the device's twin."""
        return program % self.chiplets


ISAS: Mapping[str, Isa] = {
    "gfx950": Isa(
        backend="hip", target="gfx950", lanes=64, compute_units=256, chiplets=8, index_tiled=True,
        # 3.6 and 3.7 drop the wait between a release's write-back and its atomic
        oldest_triton=(3, 8),
    ),
    "sm_90": Isa(
        backend="cuda", target=90, lanes=32, compute_units=132, chiplets=1, index_tiled=False, oldest_triton=(3, 6)
    ),
}  # fmt: skip
"""By ISA. `gfx950` is an MI355X as one partition: 8 dies (XCD) of 32 active compute units; its dispatcher deals
workgroups to the dies in turn. Composable Kernel's remapping relies on that on MI300 (ROCm/composable_kernel, pull
request 3652) and nothing promises it, so `admission.log_placement` looks when a server starts.
"""
