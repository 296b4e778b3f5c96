"""Releases: whatever any wave of a program stored must be visible before the program says so.

On gfx9 `s_barrier` waits for no store and `vmcnt` counts the stores of its own wave alone. So every wave drains its
counter, the workgroup meets, and then one wave writes the L2 cache back (`buffer_wbl2`), waits for that, and performs
the atomic (LLVM's AMDGPU usage, memory model of gfx942).
"""

from __future__ import annotations

from enum import Enum, auto

from glm53_mono.isa.flow import at_entries
from glm53_mono.isa.listing import Block, Instruction, Listing, registers


class Progress(Enum):
    """How far a store has come on some path."""

    ISSUED = auto()
    DRAINED = auto()
    """Its own wave has waited for it; the other waves may still be before theirs."""
    CROSSED = auto()
    """A workgroup barrier was passed before it was drained."""
    CROSSED_DRAINED = auto()
    """And then waited for, too late for the waves that had met already."""


Pending = frozenset[tuple[Instruction, Progress]]

_ON_DRAIN = {Progress.ISSUED: Progress.DRAINED, Progress.CROSSED: Progress.CROSSED_DRAINED}
_ON_BARRIER = {Progress.ISSUED: Progress.CROSSED, Progress.CROSSED: Progress.CROSSED}
"""What is drained when the waves meet is visible to all of them, and pending no longer."""


def release_hazards(listing: Listing) -> list[str]:
    """Releases that may overtake a store, and atomics that release and acquire nothing."""
    found: list[str] = []
    entering = _pending_at_entries(listing)
    for index, block in enumerate(listing.blocks):
        pending = entering.get(index, frozenset())
        for place, instruction in enumerate(block.instructions):
            if instruction.mnemonic == "buffer_wbl2":
                found += _overtaken(instruction, pending, block)
                found += _unfinished_writeback(block, place)
            elif instruction.is_atomic and not _is_ordered(block, place):
                found.append(f"relaxed atomic: {instruction} neither releases before it nor acquires after it")
            if not _is_fault(block, place):
                pending = _after(pending, instruction)
    return list(dict.fromkeys(found))


def _pending_at_entries(listing: Listing) -> dict[int, Pending]:
    """Stores that may be pending where a block starts: the union over all paths."""
    events = [
        [each for place, each in enumerate(block.instructions) if _is_event(each) and not _is_fault(block, place)]
        for block in listing.blocks
    ]
    return at_entries(listing, events, _after)


def _is_event(instruction: Instruction) -> bool:
    """Whether an instruction changes what is pending."""
    return instruction.is_store or instruction.mnemonic == "s_barrier" or instruction.waits_for("vmcnt")


def _is_fault(block: Block, place: int) -> bool:
    """Whether a store goes to address 0, with which a program ends the kernel on purpose."""
    store = block.instructions[place]
    if not store.is_store:
        return False
    address = registers(store.operands[0])
    writer = next((each for each in reversed(block.instructions[:place]) if each.writes & address), None)
    return writer is not None and writer.mnemonic.startswith("v_mov_b64") and writer.operands[1] == "0"


def _after(pending: Pending, instruction: Instruction) -> Pending:
    if instruction.is_store:
        return pending | {(instruction, Progress.ISSUED)}
    if instruction.waits_for("vmcnt"):
        return frozenset((store, _ON_DRAIN.get(progress, progress)) for store, progress in pending)
    if instruction.mnemonic == "s_barrier":
        return frozenset((store, _ON_BARRIER[progress]) for store, progress in pending if progress in _ON_BARRIER)
    return pending


def _overtaken(release: Instruction, pending: Pending, block: Block) -> list[str]:
    found = []
    for store, progress in sorted(pending, key=lambda each: each[0].line):
        if progress in (Progress.CROSSED, Progress.CROSSED_DRAINED):
            found.append(
                f"release without a drained store counter: {store} passes the workgroup barrier before {release} "
                "without s_waitcnt vmcnt(0)"
            )
        elif store not in block.instructions:
            # a store of the release's own block is of its own wave, which the release waits for
            found.append(f"store after the last workgroup barrier: {store} is not met by the waves before {release}")
    return found


def _unfinished_writeback(block: Block, place: int) -> list[str]:
    release = block.instructions[place]
    for later in block.instructions[place + 1 :]:
        if later.waits_for("vmcnt"):
            return []
        if later.is_store or later.is_atomic:
            break
    return [f"release without a drained store counter: no s_waitcnt vmcnt(0) between {release} and what it releases"]


def _is_ordered(block: Block, place: int) -> bool:
    """Whether an atomic has a write-back before it or an invalidation after it, with no other access between."""
    for sequence, wanted in (
        (reversed(block.instructions[:place]), "buffer_wbl2"),
        (block.instructions[place + 1 :], "buffer_inv"),
    ):
        for other in sequence:
            if other.mnemonic == wanted:
                return True
            if other.is_store or other.is_load or other.is_atomic:
                break
    return False
