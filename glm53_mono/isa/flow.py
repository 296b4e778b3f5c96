"""The flow of control of a listing: loops, and walks along every path from an instruction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from glm53_mono.isa.listing import Block, Listing


@dataclass(frozen=True)
class Loop:
    """A natural loop: the blocks from which its header is reached again without leaving it.

    Attributes:
        header: index of the block that every round starts at.
        latches: blocks that branch back to it.
        body: indices of all blocks, the header's included.
    """

    header: int
    latches: frozenset[int]
    body: frozenset[int]


def loops(listing: Listing) -> list[Loop]:
    """Every natural loop, one a header."""
    above = dominators(listing.blocks)
    latches: dict[int, set[int]] = {}
    for index, block in enumerate(listing.blocks):
        for successor in block.successors:
            if index in above and successor in above[index]:
                latches.setdefault(successor, set()).add(index)
    return [Loop(header, frozenset(ends), _body(listing.blocks, header, ends)) for header, ends in latches.items()]


def waterfall_loops(listing: Listing) -> int:
    """Loops that serve the lanes' distinct addresses one after another, as buffer operations on them need."""
    found = 0
    for loop in loops(listing):
        names = [each.mnemonic for index in loop.body for each in listing.blocks[index].instructions]
        ends = {listing.blocks[index].instructions[-1].mnemonic for index in loop.latches}
        narrows = any("saveexec" in name for name in names) and "v_readfirstlane_b32" in names
        found += "s_cbranch_execnz" in ends and narrows
    return found


def dominators(blocks: list[Block]) -> dict[int, frozenset[int]]:
    """Of each block that is reached at all: the blocks that every path from the entry to it goes through."""
    order = reverse_postorder(blocks)
    place = {block: position for position, block in enumerate(order)}
    parent = {order[0]: order[0]}

    def nearest_common(left: int, right: int) -> int:
        while left != right:
            while place[left] > place[right]:
                left = parent[left]
            while place[right] > place[left]:
                right = parent[right]
        return left

    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            known = [each for each in blocks[block].predecessors if each in parent]
            new = known[0]
            for other in known[1:]:
                new = nearest_common(new, other)
            if parent.get(block) != new:
                parent[block] = new
                changed = True
    found: dict[int, frozenset[int]] = {order[0]: frozenset({order[0]})}
    for block in order[1:]:
        found[block] = found[parent[block]] | {block}
    return found


def reverse_postorder(blocks: list[Block]) -> list[int]:
    """Blocks that are reached at all, each before its successors but for those of loops."""
    done: list[int] = []
    seen = {0}
    stack: list[tuple[int, Iterator[int]]] = [(0, iter(blocks[0].successors))]
    while stack:
        block, rest = stack[-1]
        following = next((each for each in rest if each not in seen), None)
        if following is None:
            done.append(block)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(blocks[following].successors)))
    return done[::-1]


def _body(blocks: list[Block], header: int, latches: set[int]) -> frozenset[int]:
    body, waiting = {header}, list(latches)
    while waiting:
        block = waiting.pop()
        if block not in body:
            body.add(block)
            waiting += blocks[block].predecessors
    return frozenset(body)


def walk(listing: Listing, block: int, place: int, step: Callable[[Any], bool]) -> None:
    """Visits what may follow an instruction, on every path, each instruction once.

    Args:
        block, place: of the instruction; the walk starts behind it.
        step: called with each instruction; a true answer ends that path.
    """
    seen: set[int] = set()
    waiting = [(block, place + 1)]
    while waiting:
        index, first = waiting.pop()
        if any(step(each) for each in listing.blocks[index].instructions[first:]):
            continue
        for successor in listing.blocks[index].successors:
            if successor not in seen:
                seen.add(successor)
                waiting.append((successor, 0))


def at_entries(
    listing: Listing[Any], events: Sequence[Sequence[Any]], after: Callable[[frozenset[Any], Any], frozenset[Any]]
) -> dict[int, frozenset[Any]]:
    """What is pending where each block that is reached starts: the union over all paths to it.

    Args:
        events: of each block, the instructions that change what is pending, in order.
        after: what is pending behind an instruction, given what was before it.
    """
    entering: dict[int, frozenset[Any]] = {0: frozenset()}
    waiting = [0]
    while waiting:
        index = waiting.pop()
        pending = entering[index]
        for instruction in events[index]:
            pending = after(pending, instruction)
        for successor in listing.blocks[index].successors:
            known = entering.get(successor)
            if known is None or not pending <= known:
                entering[successor] = pending | (known or frozenset())
                waiting.append(successor)
    return entering


def live_at_header(listing: Listing, loop: Loop) -> set[str]:
    """Registers that a round reads before it writes them."""
    live: dict[int, set[str]] = {index: set() for index in loop.body}
    changed = True
    while changed:
        changed = False
        for index in sorted(loop.body, reverse=True):
            block = listing.blocks[index]
            now = set().union(*(live[each] for each in block.successors if each in loop.body and each != loop.header))
            for each in reversed(block.instructions):
                now = (now - each.writes) | each.reads
            if now != live[index]:
                live[index], changed = now, True
    return live[loop.header]
