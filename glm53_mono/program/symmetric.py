"""The buffer of a rank that its peers read and raise flags in: the places in it, and where all ranks' buffers are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm53_mono.geometry import MAX_ROWS, Geometry
from glm53_mono.kernels.peers import HALVES, RANKS_OF_LINE

WORD_BYTES = 8
"""Of a flag or a count, int64: at 91 reduces a step, 32 bits would end after some hours."""


@dataclass(frozen=True)
class Symmetric:
    """Offsets in bytes, the same in every rank's buffer. A program's words have a cache line of their own."""

    flags: int
    """int64 [programs, RANKS_OF_LINE], by the rank that raised it: the reduce whose rows that rank's program left."""
    finished: int
    """int64 [programs, RANKS_OF_LINE], the first word: reduces that this rank's program has finished."""
    claim: int
    """int64 [RANKS_OF_LINE], the first word: whether a program has written a fault."""
    partials: int
    """bf16 [HALVES, MAX_ROWS, hidden]: this rank's shares of a branch's output."""
    size: int
    """Bytes of all."""


def lay_out_symmetric(geometry: Geometry, programs: int) -> Symmetric:
    """Places everything.

    Args:
        programs: of the grid, the same on every rank.
    """
    lines = programs * RANKS_OF_LINE * WORD_BYTES
    partials = 2 * lines + RANKS_OF_LINE * WORD_BYTES
    rows = HALVES * MAX_ROWS * geometry.hidden * torch.bfloat16.itemsize
    return Symmetric(flags=0, finished=lines, claim=2 * lines, partials=partials, size=partials + rows)


@dataclass(frozen=True)
class Peers:
    """One rank's view of all symmetric buffers."""

    rank: int
    table: Tensor
    """[ranks] int64 on the rank's device: the buffers' addresses there, its own among them."""

    @classmethod
    def of_addresses(cls, rank: int, addresses: list[int], device: torch.device | str) -> Peers:
        """Copies the table to the device.

        Raises:
            ValueError: a rank that has no address, or an address that 16-byte loads cannot start at.
        """
        if not 0 <= rank < len(addresses):
            raise ValueError(f"rank {rank} is not among the {len(addresses)} ranks whose buffers are known")
        for peer, address in enumerate(addresses):
            if not address or address % 16:
                raise ValueError(f"the symmetric buffer of rank {peer} lies at {address:#x}, not at a multiple of 16")
        return cls(rank, torch.tensor(addresses, dtype=torch.int64, device=device))
