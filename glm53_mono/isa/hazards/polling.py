"""Waits: a spin must read memory in every round, past every cache, and drop what its caches held before.

A spin is known by its nap (`s_sleep`): the smallest loop around it. On gfx942 and gfx950 a load reaches past the
caches of its compute unit with `sc1` (scope device or system), and `buffer_inv` without `sc1` invalidates nothing.
"""

from __future__ import annotations

from glm53_mono.isa.flow import Loop, live_at_header, loops
from glm53_mono.isa.listing import Block, Instruction, Listing


def polling_hazards(listing: Listing) -> list[str]:
    """Spins that would not see an arrival, and invalidations that invalidate nothing."""
    found = [
        f"buffer_inv without sc1: {each} invalidates nothing"
        for each in listing.instructions
        if each.mnemonic == "buffer_inv" and "sc1" not in each.modifiers
    ]
    all_loops = loops(listing)
    for index, block in enumerate(listing.blocks):
        for nap in (each for each in block.instructions if each.mnemonic == "s_sleep"):
            found += _spin(listing, nap, [loop for loop in all_loops if index in loop.body])
    found += [
        f"endless loop: {listing.blocks[loop.header].name} at line {_first_line(listing.blocks[loop.header])} repeats "
        "itself without reading memory, so its poll was dropped or hoisted"
        for loop in all_loops
        if _repeats_itself(listing, loop)
    ]
    return found


def _spin(listing: Listing, nap: Instruction, around: list[Loop]) -> list[str]:
    if not around:
        return [f"spin without a load: {nap} is in no loop"]
    loop = min(around, key=lambda each: len(each.body))
    blocks = [listing.blocks[index] for index in sorted(loop.body)]
    reads = [(block, each) for block in blocks for each in block.instructions if _reads_memory(each)]
    if not reads:
        return [f"spin without a load: nothing in the loop of {nap} reads memory, its poll was dropped or hoisted"]
    coherent = [(block, each) for block, each in reads if "sc1" in each.modifiers or each.returns]
    if not coherent:
        return [f"poll served from a cache: {reads[0][1]} in the loop of {nap} has no sc1"]
    found = [
        f"poll served from a cache: {each} in the loop of {nap} has no sc1"
        for _, each in reads
        if each.is_load and "sc1" not in each.modifiers
    ]
    if not any(_acquires(block, each) for block, each in coherent):
        found.append(f"poll without an acquire: no s_waitcnt vmcnt(0) and buffer_inv follow {coherent[0][1]}")
    return found


def _reads_memory(instruction: Instruction) -> bool:
    return instruction.is_load or instruction.is_scalar_load or instruction.returns


def _acquires(block: Block, poll: Instruction) -> bool:
    waited = False
    for later in block.instructions[block.instructions.index(poll) + 1 :]:
        waited = waited or later.waits_for("vmcnt")
        if later.mnemonic == "buffer_inv":
            return waited
    return False


def _first_line(block: Block) -> int:
    return block.instructions[0].line if block.instructions else 0


_OUTSIDE = ("s_mem", "s_barrier", "s_sleep", "ds_", "s_getreg", "scratch_")
"""What may bring something new into a round besides loads."""


def _repeats_itself(listing: Listing, loop: Loop) -> bool:
    """Whether a round neither reads anything from outside nor a register that an earlier round wrote."""
    written: set[str] = set()
    for index in loop.body:
        for each in listing.blocks[index].instructions:
            if _reads_memory(each) or each.is_store or each.mnemonic.startswith(_OUTSIDE):
                return False
            written |= each.writes
    return not live_at_header(listing, loop) & written
