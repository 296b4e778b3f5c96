"""An AMDGCN listing as instructions: mnemonics, operands, registers, source lines and basic blocks.

Read from the text that LLVM's AMDGPU backend prints (`asm["amdgcn"]` of a compiled Triton kernel). One function a
listing: everything is inlined into the kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import Generic, TypeVar

Registers = frozenset[str]
NO_REGISTERS: Registers = frozenset()


class ListingError(ValueError):
    """A listing that the checks cannot read; the message names the line."""


@dataclass(frozen=True)
class SourceLine:
    """Where an instruction comes from: the innermost inlined function's file and line; line 0 is nowhere."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{PurePath(self.file).name}:{self.line}"


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        mnemonic: e.g. `global_load_dwordx4`.
        operands: between commas, modifiers left out.
        modifiers: what follows the operands, e.g. `sc1`, `nt`, `offset:16`.
        line: in the listing, from 1.
        source: None before the first location.
    """

    mnemonic: str
    operands: tuple[str, ...]
    modifiers: frozenset[str]
    line: int
    source: SourceLine | None

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.mnemonic} {', '.join(self.operands)} at line {self.line}{where}".replace("  ", " ")

    @cached_property
    def reads(self) -> Registers:
        """Registers that it reads; the lane mask that every vector instruction reads is left out."""
        first = 0 if not self._destinations or self._keeps_destination else self._destinations
        named = frozenset().union(*(registers(operand) for operand in self.operands[first:]))
        return named | _implicit_reads(self.mnemonic)

    @cached_property
    def writes(self) -> Registers:
        """Registers that it writes."""
        named = frozenset().union(*(registers(operand) for operand in self.operands[: self._destinations]))
        return named | _implicit_writes(self.mnemonic)

    @property
    def is_load(self) -> bool:
        """Whether it loads from memory that other programs see, into registers or LDS."""
        return bool(re.match(r"(global|buffer|flat)_load_", self.mnemonic))

    @property
    def is_scalar_load(self) -> bool:
        """Whether it loads through the scalar cache."""
        return bool(re.match(r"s_(buffer_)?load_", self.mnemonic))

    @property
    def is_store(self) -> bool:
        """Whether it stores to memory that other programs see."""
        return bool(re.match(r"(global|buffer|flat)_store_", self.mnemonic))

    @property
    def is_atomic(self) -> bool:
        """Whether it is an atomic on memory that other programs see."""
        return bool(re.match(r"(global|buffer|flat)_atomic_", self.mnemonic))

    @property
    def returns(self) -> bool:
        """Whether an atomic brings back the old value."""
        return self.is_atomic and "sc0" in self.modifiers

    def waits_for(self, counter: str) -> bool:
        """Whether it is an `s_waitcnt` that brings a counter (`vmcnt`, `lgkmcnt`) to zero."""
        return self.mnemonic == "s_waitcnt" and f"{counter}(0)" in {*self.operands, *self.modifiers}

    @property
    def ends_block(self) -> bool:
        """Whether the next instruction starts another basic block."""
        return self.mnemonic.startswith(("s_branch", "s_cbranch", "s_setpc", "s_endpgm"))

    @property
    def _destinations(self) -> int:
        """Leading operands that are written."""
        name = self.mnemonic
        if self.is_store or name.startswith(_WITHOUT_DESTINATION) or "_lds_" in name or "lds" in self.modifiers:
            return 0
        if self.is_atomic:
            return int(self.returns)
        if name.startswith("ds_"):
            return int(name.startswith(("ds_read", "ds_bpermute", "ds_permute", "ds_swizzle")) or "_rtn" in name)
        return 2 if name.startswith(_TWO_DESTINATIONS) else 1

    @property
    def _keeps_destination(self) -> bool:
        """Whether the destination is a source as well."""
        return self.mnemonic.startswith(("v_fmac", "v_writelane", "v_permlane", "v_swap", "v_dot2c", "v_pk_fmac"))


_WITHOUT_DESTINATION = (
    "s_cmp", "s_bitcmp", "s_waitcnt", "s_nop", "s_barrier", "s_branch", "s_cbranch", "s_setpc", "s_endpgm", "s_sleep",
    "s_trap", "s_setreg", "s_setprio", "s_dcache", "s_icache", "s_sethalt", "buffer_wbl2", "buffer_inv",
    "scratch_store", "s_store", "v_nop",
)  # fmt: skip
_TWO_DESTINATIONS = (
    "v_add_co_", "v_addc_co_", "v_sub_co_", "v_subb_co_", "v_subrev_co_", "v_div_scale", "v_mad_u64_u32",
    "v_mad_i64_i32", "v_permlane16_swap", "v_permlane32_swap", "v_swap",
)  # fmt: skip
_KEEPS_SCC = ("s_mov", "s_cmov", "s_cselect", "s_load", "s_buffer_load", "s_mul_", "s_mulk", "s_getpc", "s_sext",
              "s_mem", "s_bfm", "s_brev", "s_ff1", "s_flbit", "s_getreg", "s_pack", "s_bitset")  # fmt: skip

_FLAGS = {"sc0", "sc1", "nt", "lds", "glc", "slc"}
"""Modifiers that may stand where an instruction without operands has its first one."""

VCC = frozenset({"vcc_lo", "vcc_hi"})
EXEC = frozenset({"exec_lo", "exec_hi"})
SCC = frozenset({"scc"})

_REGISTER = re.compile(r"(?<![\w.])(?:([vsa])(\d+)|([vsa])\[(\d+):(\d+)\]|(vcc|exec)(_lo|_hi)?|(m0|scc))(?!\w)")


def registers(operand: str) -> Registers:
    """The registers that an operand names: `v[2:3]` is v2 and v3, `vcc` both of its halves."""
    found: set[str] = set()
    for kind, number, range_kind, first, last, mask, half, other in _REGISTER.findall(operand):
        if kind:
            found.add(kind + number)
        elif range_kind:
            found |= {f"{range_kind}{i}" for i in range(int(first), int(last) + 1)}
        elif mask:
            found |= {mask + half} if half else {f"{mask}_lo", f"{mask}_hi"}
        else:
            found.add(other)
    return frozenset(found)


def _implicit_reads(mnemonic: str) -> Registers:
    if mnemonic.startswith(("s_cbranch_scc", "s_cselect", "s_addc", "s_subb", "s_cmov")):
        return SCC
    if mnemonic.startswith("s_cbranch_vcc"):
        return VCC
    if mnemonic.startswith("s_cbranch_exec") or "saveexec" in mnemonic:
        return EXEC
    return VCC if mnemonic.startswith("v_div_fmas") else NO_REGISTERS


def _implicit_writes(mnemonic: str) -> Registers:
    written = NO_REGISTERS
    if "saveexec" in mnemonic or mnemonic.startswith("v_cmpx"):
        written |= EXEC
    sets_scc = mnemonic.startswith(("s_cmp", "s_bitcmp")) or (
        mnemonic.startswith("s_") and not mnemonic.startswith((*_KEEPS_SCC, *_WITHOUT_DESTINATION))
    )
    return written | SCC if sets_scc else written


Kind = TypeVar("Kind")
"""An instruction of either vendor."""


@dataclass
class Block(Generic[Kind]):
    """Instructions without a branch between them; `name` is the label, or the line where there is none."""

    name: str
    instructions: list[Kind] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)
    predecessors: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Listing(Generic[Kind]):
    """A kernel: its blocks in the order of the text (the first one is the entry), and the text."""

    text: str
    blocks: list[Block[Kind]]

    @property
    def instructions(self) -> list[Kind]:
        """All of them, in the order of the text."""
        return [instruction for block in self.blocks for instruction in block.instructions]


_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_FUNCTION = re.compile(r"\.type\s+([\w$.]+),@function")
_LABEL = re.compile(r"([.\w$]+):$")
_LABEL_IN_EXPRESSION = re.compile(r"\((\.\w+)-")


def parse(text: str) -> Listing[Instruction]:
    """Reads a listing.

    Raises:
        ListingError: no function, a second one, a call, or a branch to a place that is not in the text.
    """
    blocks: list[Block] = []
    labels: dict[str, int] = {}
    files: dict[str, str] = {}
    source: SourceLine | None = None
    functions: set[str] = set()
    inside = opens = False
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition(";")[0].strip()
        if not line or line.startswith("//"):
            continue
        if label := _LABEL.match(line):
            name = label[1]
            if name.startswith(".Lfunc_end"):
                inside = False
            elif name in functions:
                if blocks:
                    raise ListingError(f"line {number}: a second function {name}, where the kernel inlines all")
                inside = opens = True
            elif name.startswith(".LBB"):
                labels[name] = len(blocks)
                blocks.append(Block(name))
                opens = False
        elif declared := _FUNCTION.match(line):
            functions.add(declared[1])
        elif located := _FILE.match(line):
            files[located[1]] = f"{located[2]}/{located[3]}" if located[3] else located[2]
        elif located := _LOCATION.match(line):
            source = SourceLine(files[located[1]], int(located[2]))
        elif inside and not line.startswith("."):
            if opens:
                blocks.append(Block(f"line {number}"))
            instruction = _instruction(line, number, source)
            blocks[-1].instructions.append(instruction)
            opens = instruction.ends_block
    if not blocks:
        raise ListingError("no function in the listing")
    _connect(blocks, labels)
    return Listing(text, blocks)


def _instruction(line: str, number: int, source: SourceLine | None) -> Instruction:
    mnemonic, _, rest = line.partition(" ") if " " in line else line.partition("\t")
    operands: list[str] = []
    modifiers: list[str] = []
    for part in re.split(r",(?![^\[(]*[\])])", rest.strip()) if rest.strip() else []:
        words = part.split()
        first = 0 if not words or words[0] in _FLAGS else 1
        operands += words[:first]
        modifiers += words[first:]
    return Instruction(mnemonic, tuple(operands), frozenset(modifiers), number, source)


def _connect(blocks: list[Block], labels: dict[str, int]) -> None:
    for index, block in enumerate(blocks):
        following = [index + 1] if index + 1 < len(blocks) else []
        last = block.instructions[-1] if block.instructions else None
        if any(each.mnemonic.startswith(("s_swappc", "s_call")) for each in block.instructions):
            raise ListingError(f"{block.name} calls a function, where the kernel inlines all")
        if last is None or not last.ends_block:
            block.successors = following
        elif last.mnemonic.startswith("s_endpgm"):
            block.successors = []
        else:
            target = _long_branch_target(block) if last.mnemonic.startswith("s_setpc") else last.operands[0]
            if target not in labels:
                raise ListingError(f"{last} goes to {target}, which is not in the listing")
            block.successors = [labels[target]]
            if last.mnemonic.startswith("s_cbranch"):
                block.successors += [each for each in following if each not in block.successors]
        for successor in block.successors:
            blocks[successor].predecessors.append(index)


def _long_branch_target(block: Block) -> str:
    """The label of a branch that is too far for an offset: the block adds it to the program counter beforehand."""
    for instruction in reversed(block.instructions):
        if found := _LABEL_IN_EXPRESSION.search(" ".join(instruction.operands)):
            return found[1]
    raise ListingError(f"{block.instructions[-1]} goes to an address that the block does not name")
