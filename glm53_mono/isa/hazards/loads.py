"""Loads: wide where a stream of weights is promised, and never through a cache that no acquire invalidates."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

from glm53_mono.isa.flow import reverse_postorder
from glm53_mono.isa.listing import Block, Instruction, Listing

KERNELS = Path(__file__).parents[2] / "kernels"
"""The device code whose marks count."""

Lines = Collection[tuple[str, int]]
"""File names and lines of it."""

PROMISED_BYTES = 16
"""Width of a load of streamed weights."""

BEFORE_ARGUMENTS = {"dispatch_ptr": 2, "queue_ptr": 2}
"""Scalar registers that a kernel may ask for and finds before its arguments' address when it starts (LLVM's AMDGPU
usage, initial kernel execution state)."""

_WIDTHS = {"byte": 1, "ubyte": 1, "sbyte": 1, "short": 2, "ushort": 2, "sshort": 2, "dword": 4}


def streamed_lines(folder: Path = KERNELS) -> Lines:
    """The loads that kernels mark `evict_first`: weights, which a step reads once."""
    found = set()
    for file in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and any(
                each.arg == "eviction_policy" and getattr(each.value, "value", None) == "evict_first"
                for each in node.keywords
            ):
                found |= {(file.name, line) for line in range(node.lineno, node.end_lineno + 1)}
    return found


def load_bytes(mnemonic: str) -> int:
    """Bytes that a vector load brings to each lane."""
    suffix = mnemonic.rpartition("load_")[2].removeprefix("lds_")
    kind, _, count = suffix.partition("x") if suffix.startswith("dwordx") else (suffix, "", "1")
    width = _WIDTHS.get(kind.split("_")[0])
    if width is None:
        raise ValueError(f"{mnemonic} is a load of unknown width")
    return width * int(count)


def width_hazards(listing: Listing, streamed: Lines) -> list[str]:
    """Loads of streamed weights that are narrower than 16 bytes: one lost alignment hint costs half the bandwidth."""
    return narrow_loads(listing, streamed, lambda load: load_bytes(load.mnemonic))


def narrow_loads(listing: Listing[Any], streamed: Lines, width: Callable[[Any], int]) -> list[str]:
    """Loads from the streamed lines that bring less than was promised, or that there is none.

    Args:
        width: bytes of a load.
    """
    loads = [each for each in listing.instructions if each.is_load and place_of(each) in streamed]
    if not loads:
        return [f"no streamed weights: no load comes from {shown(streamed)}"]
    return [
        f"narrow weight load: {each} brings {width(each)} bytes where {PROMISED_BYTES} are promised"
        for each in loads
        if width(each) < PROMISED_BYTES
    ]


def place_of(instruction: Any) -> tuple[str, int] | None:
    """File and line that an instruction of a listing comes from, None if it does not say."""
    source = instruction.source
    return None if source is None else (Path(source.file).name, source.line)


def shown(lines: Lines) -> str:
    """The lines in one phrase."""
    return ", ".join(f"{file}:{line}" for file, line in sorted(lines)) or "a load marked evict_first, for there is none"


def cached_load_hazards(listing: Listing, streamed: Lines) -> list[str]:
    """Non-temporal loads of anything but streamed weights, and scalar loads of anything but the kernel's arguments.

    Other programs write what the kernel reads, and no acquire reaches the scalar cache.
    """
    found = [
        f"non-temporal load: {each} may be served from what a cache held before an acquire"
        for each in listing.instructions
        if each.is_load and "nt" in each.modifiers and place_of(each) not in streamed
    ]
    entering = _argument_places(listing)
    for index, block in enumerate(listing.blocks):
        places = entering.get(index, frozenset())
        for each in block.instructions:
            if each.is_scalar_load and not _is_argument(each, places):
                found.append(f"scalar load: {each} reads memory through a cache that no acquire invalidates")
            places = _places_after(places, each)
    return found


Places = frozenset[tuple[str, int]]
"""Registers, or lanes of a spill register as `v254.12`, each with the half of the arguments' address that it holds."""

_PAIR = re.compile(r"s\[(\d+):(\d+)\]")


def _at_entry(listing: Listing) -> Places:
    asked = dict(re.findall(r"\.amdhsa_user_sgpr_(\w+) (\d+)", listing.text))
    first = sum(count for name, count in BEFORE_ARGUMENTS.items() if asked.get(name) == "1")
    return frozenset({(f"s{first}", 0), (f"s{first + 1}", 1)})


def _is_argument(load: Instruction, places: Places) -> bool:
    address = _halves(load.operands[1])
    return len(address) == 2 and {(address[0], 0), (address[1], 1)} <= places


def _argument_places(listing: Listing) -> dict[int, Places]:
    """Where the arguments' address certainly is when a block starts."""
    order = reverse_postorder(listing.blocks)
    entering: dict[int, Places] = {0: _at_entry(listing)}
    leaving: dict[int, Places] = {}
    changed = True
    while changed:
        changed = False
        for index in order:
            block = listing.blocks[index]
            if index:
                known = [leaving[each] for each in block.predecessors if each in leaving]
                entering[index] = frozenset.intersection(*known)
            after = _places_after_block(entering[index], block)
            if leaving.get(index) != after:
                leaving[index], changed = after, True
    return entering


def _places_after_block(places: Places, block: Block) -> Places:
    for each in block.instructions:
        places = _places_after(places, each)
    return places


def _places_after(places: Places, instruction: Instruction) -> Places:
    name, operands = instruction.mnemonic, instruction.operands
    if not name.startswith(_COPIES) and not instruction.writes & _registers_of(places):
        return places
    held = dict(places)
    if name == "v_writelane_b32":
        lane = f"{operands[0]}.{operands[2]}"
        moved = {lane: held[operands[1]]} if operands[1] in held else {}
        lost = {lane}
    else:
        moved = _moved(name, operands, held)
        lost = {place for place in held if place.partition(".")[0] in instruction.writes}
    if not moved and not lost & held.keys():
        return places
    return frozenset(({place: half for place, half in held.items() if place not in lost} | moved).items())


_COPIES = ("s_mov_b", "v_readlane_b32", "v_writelane_b32")


@cache
def _registers_of(places: Places) -> frozenset[str]:
    return frozenset(place.partition(".")[0] for place, _ in places)


def _moved(name: str, operands: tuple[str, ...], held: dict[str, int]) -> dict[str, int]:
    """What a copy from register to register, or from a lane of a spill register, brings where."""
    if name.startswith("s_mov_b"):
        target, source = (_halves(each) for each in operands[:2])
        return {to: held[of] for to, of in zip(target, source, strict=False) if of in held}
    if name == "v_readlane_b32" and f"{operands[1]}.{operands[2]}" in held:
        return {operands[0]: held[f"{operands[1]}.{operands[2]}"]}
    return {}


def _halves(operand: str) -> list[str]:
    if operand == "vcc":
        return ["vcc_lo", "vcc_hi"]
    pair = _PAIR.fullmatch(operand)
    return [f"s{pair[1]}", f"s{pair[2]}"] if pair else [operand]
