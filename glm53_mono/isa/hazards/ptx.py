"""The same hazards in PTX: what the order of memory that PTX states does not forbid, ptxas and the GPU may do.

Threads of a program meet at `bar.sync 0`, which orders what they did before it before what any of them does after it.
One thread then releases or acquires for all (PTX ISA, memory consistency model: causality order).
"""

from __future__ import annotations

from glm53_mono.isa.flow import Loop, at_entries, live_at_header, loops, walk
from glm53_mono.isa.hazards.loads import Lines, narrow_loads, place_of
from glm53_mono.isa.listing import Block, Listing
from glm53_mono.isa.ptx import PtxInstruction

PtxListing = Listing[PtxInstruction]
Stores = frozenset[PtxInstruction]


def ptx_hazards(listing: PtxListing, streamed: Lines) -> list[str]:
    """One line for each hazard that can make results wrong.

    Args:
        streamed: where weights are loaded, which nobody writes (`loads.streamed_lines`).
    """
    found = [*_atomics(listing), *_releases(listing), *_acquires(listing), *_polls(listing)]
    return [*dict.fromkeys(found), *_caches(listing, streamed)]


def ptx_width_hazards(listing: PtxListing, streamed: Lines) -> list[str]:
    """Loads of streamed weights that are narrower than 16 bytes: one lost alignment hint cost half the bandwidth."""
    return narrow_loads(listing, streamed, lambda load: load.bytes)


def _atomics(listing: PtxListing) -> list[str]:
    """Atomics that order nothing, or only for their own program."""
    found = []
    for block in listing.blocks:
        for place, each in enumerate(block.instructions):
            ordered = each.is_atomic or (each.is_load and each.acquires)
            if each.is_atomic and not (each.acquires or each.releases or _fenced(block, place)):
                found.append(f"relaxed atomic: {each} neither releases before it nor acquires after it")
            if ordered and not each.parts & {"gpu", "sys"}:
                found.append(f"narrow scope: {each} is ordered for its own program alone")
    return found


def _fenced(block: Block[PtxInstruction], place: int) -> bool:
    """Whether a fence stands beside an atomic, with no other access between."""
    for sequence in (reversed(block.instructions[:place]), block.instructions[place + 1 :]):
        for other in sequence:
            if other.is_fence:
                return True
            if other.is_load or other.is_store or other.is_atomic:
                break
    return False


def _releases(listing: PtxListing) -> list[str]:
    """Releases by one thread that the other threads' stores have not met."""
    found = []
    entering = _pending_at_entries(listing)
    for index, block in enumerate(listing.blocks):
        pending = entering.get(index, frozenset())
        for instruction in block.instructions:
            if instruction.is_atomic and instruction.releases:
                found += [
                    f"store after the last workgroup barrier: {store} is not met by the threads before {instruction}"
                    for store in sorted(pending, key=lambda each: each.line)
                    # of the release's own thread, in its own order
                    if store not in block.instructions
                ]
            pending = _after(pending, instruction)
    return found


def _pending_at_entries(listing: PtxListing) -> dict[int, Stores]:
    """Stores since the threads last met, where a block starts: the union over all paths."""
    return at_entries(listing, [block.instructions for block in listing.blocks], _after)


def _after(pending: Stores, instruction: PtxInstruction) -> Stores:
    if instruction.is_store:
        return pending | {instruction}
    return frozenset() if instruction.is_program_barrier else pending


def _acquires(listing: PtxListing) -> list[str]:
    """Loads that other threads may do before the one thread's acquire."""
    found: list[str] = []
    for index, block in enumerate(listing.blocks):
        for place, acquire in enumerate(block.instructions):
            if not acquire.acquires or not (acquire.is_load or acquire.is_atomic):
                continue

            def step(later: PtxInstruction, acquire: PtxInstruction = acquire) -> bool:
                if later.is_program_barrier or (later.is_load and later.acquires):
                    return True
                if later.is_load:
                    found.append(f"load before the threads have met: {later} follows {acquire} without a bar.sync")
                return later.is_load

            walk(listing, index, place, step)
    return found


def _polls(listing: PtxListing) -> list[str]:
    """Spins, known by their nap, that would not see an arrival or would never end; and loops that cannot."""
    found: list[str] = []
    all_loops = loops(listing)
    for index, block in enumerate(listing.blocks):
        for nap in (each for each in block.instructions if each.opcode.startswith("nanosleep")):
            around = [loop for loop in all_loops if index in loop.body]
            if around:
                found += _spin(listing, nap, min(around, key=lambda loop: len(loop.body)))
            else:
                found.append(f"spin without a load: {nap} is in no loop")
    return found + [
        f"endless loop: {listing.blocks[loop.header].name} repeats itself without reading memory, so its poll was "
        "dropped or hoisted"
        for loop in all_loops
        if _repeats_itself(listing, loop)
    ]


def _spin(listing: PtxListing, nap: PtxInstruction, loop: Loop) -> list[str]:
    inside = [each for index in sorted(loop.body) for each in listing.blocks[index].instructions]
    # an exchange is the fault's flag, and no poll
    reads = [each for each in inside if each.is_load or (each.is_atomic and not each.parts & {"red", "exch"})]
    if not reads:
        return [f"spin without a load: nothing in the loop of {nap} reads memory, its poll was dropped or hoisted"]
    found = []
    if not any(each.acquires for each in reads) and not any(each.is_fence for each in inside):
        kind = "poll served from a cache" if _is_weak(reads[0]) else "poll without an acquire"
        found.append(f"{kind}: {reads[0]} in the loop of {nap} acquires nothing")
    if not any("%globaltimer" in each.operands for each in inside):
        found.append(f"spin without a clock: no deadline can pass in the loop of {nap}")
    return found


def _is_weak(load: PtxInstruction) -> bool:
    return load.is_load and not load.parts & {"relaxed", "volatile", "acquire", "mmio"}


def _repeats_itself(listing: PtxListing, loop: Loop) -> bool:
    """Whether a round reads nothing from outside, nor a register that an earlier round wrote."""
    inside = [each for index in loop.body for each in listing.blocks[index].instructions]
    written = frozenset().union(*(each.writes for each in inside))
    if any(each.is_load or each.is_store or each.is_atomic or _is_outside(each) for each in inside):
        return False
    return not written & live_at_header(listing, loop)


def _is_outside(instruction: PtxInstruction) -> bool:
    """Whether something besides loads may bring a round something new."""
    return instruction.opcode.startswith(("ld.", "bar", "cp.", "nanosleep", "atom.", "mbarrier")) or any(
        operand.startswith(("%globaltimer", "%clock")) for operand in instruction.operands
    )


def _caches(listing: PtxListing, streamed: Lines) -> list[str]:
    """Loads through a path that no acquire reaches, of anything but streamed weights: other programs write the rest."""
    return [
        f"non-coherent load: {each} may be served from what a cache held before an acquire"
        for each in listing.instructions
        if (each.opcode.startswith("ldu.") or (each.is_load and "nc" in each.parts)) and place_of(each) not in streamed
    ]
