"""The clock: `s_memrealtime` answers like a scalar load, so what it writes counts only after `lgkmcnt(0)`."""

from __future__ import annotations

from glm53_mono.isa.flow import walk
from glm53_mono.isa.listing import Instruction, Listing


def clock_hazards(listing: Listing) -> list[str]:
    """Reads of a clock's value that may come before the value."""
    found: list[str] = []
    for index, block in enumerate(listing.blocks):
        for place, clock in enumerate(block.instructions):
            if not clock.mnemonic.startswith(("s_memrealtime", "s_memtime")):
                continue

            def step(later: Instruction, clock: Instruction = clock) -> bool:
                if later.waits_for("lgkmcnt"):
                    return True
                if later.reads & clock.writes:
                    found.append(f"clock read without its wait: {later} comes before s_waitcnt lgkmcnt(0) of {clock}")
                    return True
                return False

            walk(listing, index, place, step)
    return found
