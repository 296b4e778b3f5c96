"""A PTX listing as instructions, source lines and basic blocks.

Read from `asm["ptx"]` of a kernel that Triton compiled for NVIDIA; inline assembly is part of it. What ptxas makes of
it is not read: the order of memory that PTX states binds it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from glm53_mono.isa.listing import Block, Listing, ListingError, Registers, SourceLine


@dataclass(frozen=True)
class PtxInstruction:
    """One instruction.

    Attributes:
        opcode: with its modifiers, e.g. `ld.global.gpu.acquire.b32`.
        operands: between commas.
        predicate: the register that decides whether it runs; empty if it always does.
        line: in the listing, from 1.
        source: None before the first location.
    """

    opcode: str
    operands: tuple[str, ...]
    predicate: str
    line: int
    source: SourceLine | None

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.opcode} {', '.join(self.operands)} at line {self.line}{where}".replace("  ", " ")

    @cached_property
    def parts(self) -> frozenset[str]:
        """The opcode's words."""
        return frozenset(self.opcode.split("."))

    @property
    def is_load(self) -> bool:
        """Whether it loads from memory that other programs see, into registers or shared memory."""
        if self.opcode.startswith("cp.async"):
            return self.bytes > 0
        return self.opcode.startswith(("ld.", "ldu.")) and not self.parts & _OWN_MEMORY

    @property
    def is_store(self) -> bool:
        """Whether it stores to memory that other programs see."""
        return self.opcode.startswith("st.") and not self.parts & _OWN_MEMORY

    @property
    def is_atomic(self) -> bool:
        """Whether it is an atomic on memory that other programs see."""
        return self.opcode.startswith(("atom.", "red.")) and not self.parts & _OWN_MEMORY

    @property
    def acquires(self) -> bool:
        """Whether what follows it comes after it."""
        return bool(self.parts & {"acquire", "acq_rel", "sc"}) or self.opcode.startswith("membar")

    @property
    def releases(self) -> bool:
        """Whether what precedes it comes before it."""
        return bool(self.parts & {"release", "acq_rel", "sc"}) or self.opcode.startswith("membar")

    @property
    def is_fence(self) -> bool:
        """Whether it orders memory and does nothing else."""
        return self.opcode.startswith(("fence.", "membar.")) and "proxy" not in self.parts

    @property
    def is_program_barrier(self) -> bool:
        """Whether all threads of the program meet at it: Triton's barrier 0, of no given number of threads."""
        return self.opcode.startswith(("bar.sync", "barrier.sync", "barrier.cta.sync")) and self.operands == ("0",)

    @property
    def bytes(self) -> int:
        """Bytes that a load brings to each thread; 0 of what is no load."""
        if self.opcode.startswith("cp.async"):
            copies = self.opcode.startswith(("cp.async.ca", "cp.async.cg"))
            return int(self.operands[2], 0) if copies else 0
        widths = [int(word[1:]) for word in self.opcode.split(".") if _TYPE.fullmatch(word)]
        counts = [int(word[1:]) for word in self.opcode.split(".") if _VECTOR.fullmatch(word)]
        return widths[-1] // 8 * (counts[0] if counts else 1) if widths else 0

    @cached_property
    def writes(self) -> Registers:
        """Registers that it writes."""
        if self.is_store or self.opcode.startswith(_WITHOUT_DESTINATION):
            return frozenset()
        return _registers(self.operands[0]) if self.operands else frozenset()

    @cached_property
    def reads(self) -> Registers:
        """Registers that it reads, its predicate among them."""
        first = 0 if not self.writes else 1
        named = frozenset().union(*(_registers(operand) for operand in self.operands[first:]))
        return named | _registers(self.predicate)

    @property
    def ends_block(self) -> bool:
        """Whether the next instruction starts another basic block."""
        return self.opcode.startswith(("bra", "brx", "ret", "exit", "trap"))


_OWN_MEMORY = frozenset({"shared", "shared::cta", "param", "local", "const"})
_WITHOUT_DESTINATION = (
    "st.", "red.", "bra", "brx", "ret", "exit", "trap", "bar.", "barrier.", "cp.async", "fence", "membar", "nanosleep",
    "stmatrix", "wgmma", "mbarrier", "prefetch",
)  # fmt: skip
_TYPE = re.compile(r"[busf](8|16|32|64|128)")
_VECTOR = re.compile(r"v[248]")
_REGISTER = re.compile(r"%[a-z]+\d+")

_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_LABEL = re.compile(r"(\$L__BB\w+):$")
_TABLE = re.compile(r"(\$L_brx\w+):\s*\.branchtargets(.*)")
_TARGET = re.compile(r"\$L__BB\w+")
_STATEMENT = re.compile(r"(?:@(!?%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)


def _registers(operand: str) -> Registers:
    return frozenset(_REGISTER.findall(operand))


def parse_ptx(text: str) -> Listing[PtxInstruction]:
    """Reads a listing.

    Raises:
        ListingError: no kernel, a second function, a call, or a branch to a place that is not in the text.
    """
    files = dict(_FILE.findall(text))
    blocks: list[Block[PtxInstruction]] = []
    labels: dict[str, int] = {}
    source: SourceLine | None = None
    tables: dict[str, list[str]] = {}
    table = ""
    functions = 0
    opens = False
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("//")[0].strip()
        if line.startswith((".visible .entry", ".entry", ".func", ".visible .func")):
            functions += 1
            if functions > 1:
                raise ListingError(f"line {number}: a second function, where the kernel inlines all")
            opens = True
        elif named := _TABLE.match(line):
            table = named[1]
            tables[table] = _TARGET.findall(named[2])
        elif table:
            tables[table] += _TARGET.findall(line)
        elif label := _LABEL.match(line):
            labels[label[1]] = len(blocks)
            blocks.append(Block(label[1]))
            opens = False
        elif located := _LOCATION.match(line):
            source = SourceLine(files[located[1]], int(located[2]))
        elif functions:
            for statement in line.split(";"):
                instruction = _instruction(statement.strip(" \t{}"), number, source)
                if instruction is None:
                    continue
                if opens:
                    blocks.append(Block(f"line {number}"))
                blocks[-1].instructions.append(instruction)
                opens = instruction.ends_block
        if line.endswith(";"):
            table = ""
    if not blocks:
        raise ListingError("no kernel in the listing")
    _connect(blocks, labels, tables)
    return Listing(text, blocks)


def _instruction(statement: str, line: int, source: SourceLine | None) -> PtxInstruction | None:
    found = _STATEMENT.fullmatch(statement)
    if found is None or not found[2][0].islower():
        return None
    operands = tuple(each.strip() for each in re.split(r",(?![^\[{]*[\]}])", found[3])) if found[3] else ()
    return PtxInstruction(found[2], operands, found[1] or "", line, source)


def _connect(blocks: list[Block[PtxInstruction]], labels: dict[str, int], tables: dict[str, list[str]]) -> None:
    for index, block in enumerate(blocks):
        following = [index + 1] if index + 1 < len(blocks) else []
        last = block.instructions[-1] if block.instructions else None
        if any(each.opcode.startswith("call") for each in block.instructions):
            raise ListingError(f"{block.name} calls a function, where the kernel inlines all")
        if last is None or not last.ends_block:
            block.successors = following
        elif last.opcode.startswith("br"):
            targets = tables.get(last.operands[1], []) if last.opcode.startswith("brx") else [last.operands[0]]
            unknown = [target for target in targets if target not in labels]
            if unknown or not targets:
                raise ListingError(f"{last} goes to {', '.join(unknown) or 'no table'}, which is not in the listing")
            block.successors = list(dict.fromkeys(labels[target] for target in targets))
            if last.predicate:
                block.successors += [each for each in following if each not in block.successors]
        else:
            block.successors = following if last.predicate else []
        for successor in block.successors:
            blocks[successor].predecessors.append(index)
