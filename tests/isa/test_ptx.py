"""PTX as instructions and blocks; each of its hazards is seen in a listing that has it, and in no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm53_mono.isa.flow import loops
from glm53_mono.isa.hazards.ptx import ptx_hazards, ptx_width_hazards
from glm53_mono.isa.listing import Listing, ListingError
from glm53_mono.isa.ptx import PtxInstruction, parse_ptx
from tests.isa.listings import STREAMED

GOOD = (Path(__file__).parent / "good.ptx").read_text()

MEETING = "\t.loc\t3 67 9                          // sync.py:67:9\n\tbar.sync \t0;\n"
ARRIVAL = "@%p1 atom.global.gpu.release.add.u32 %r11"
POLL = "@%p1 ld.global.gpu.acquire.b32 %r14, [ %rd5 + 0 ];"
SHARED = "\tbar.sync \t0;\n\tld.shared.b32 \t%r16, [global_smem];\n"
CLOCK = "\tmov.u64 \t%rd7, %globaltimer;\n"
LAST_MEETING = "\t.loc\t3 94 9                          // sync.py:94:9\n\tbar.sync \t0;\n"
READ = "ld.global.b32 { %r19 }, [ %rd4 + 0 ];"
COPY = "cp.async.cg.shared.global [ %r4 + 0 ], [ %rd2 + 0 ], 0x10, %r5;"
LOAD = "ld.global.v4.b32 { %r6, %r7, %r8, %r9 }, [ %rd3 + 0 ];"
STORE = "st.global.v4.b32 [ %rd4 + 0 ], { %r6, %r7, %r8, %r9 };"


def changed(*changes: tuple[str, str]) -> Listing[PtxInstruction]:
    """The good listing with texts replaced, each of which must be in it once."""
    text = GOOD
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in the listing"
        text = text.replace(old, new)
    return parse_ptx(text)


def test_nothing_is_wrong_with_the_good_listing() -> None:
    assert ptx_hazards(changed(), STREAMED) == []
    assert ptx_width_hazards(changed(), STREAMED) == []


@pytest.mark.parametrize(
    ("says", "count", "changes"),
    [
        ("store after the last workgroup barrier: st.global.v4", 1, [(MEETING, "")]),
        # A named barrier of half the threads is no meeting of all.
        ("store after the last workgroup barrier: st.global.v4", 1,
         [(MEETING, MEETING.replace("bar.sync \t0", "bar.sync \t1, 128"))]),
        ("store after the last workgroup barrier", 1,
         [(MEETING, f"{MEETING}\t{STORE}\n\t@%p2 bra $L__BB0_9;\n$L__BB0_9:\n")]),
        ("relaxed atomic", 1, [(ARRIVAL, ARRIVAL.replace("release", "relaxed"))]),
        ("narrow scope", 1, [(ARRIVAL, ARRIVAL.replace(".gpu", ".cta"))]),
        ("narrow scope", 1, [(POLL, POLL.replace(".gpu", ".cta"))]),
        ("spin without a load", 1, [(POLL, "")]),
        # A hoisted poll: read once, before the loop.
        ("spin without a load", 1, [(POLL, ""), ("\tmov.u64 \t%rd6, %globaltimer;\n", POLL + "\n")]),
        ("spin without a load", 1, [("\t@%p4 bra \t$L__BB0_5;\n", ""), ("\tbra.uni \t$L__BB0_5;\n", "\tret;\n")]),
        ("poll served from a cache", 1, [(POLL, POLL.replace(".gpu.acquire", ""))]),
        ("poll served from a cache", 1, [(POLL, POLL.replace(".gpu.acquire", ".nc"))]),
        ("poll without an acquire", 1, [(POLL, POLL.replace("acquire", "relaxed"))]),
        ("poll without an acquire", 1, [(POLL, POLL.replace(".gpu.acquire", ".volatile"))]),
        ("spin without a clock", 1, [(CLOCK, "")]),
        ("endless loop: $L__BB0_9", 1,
         [(READ, "$L__BB0_9:\n\tsetp.lt.s32 %p5, %r20, %r21;\n\t@%p5 bra $L__BB0_9;\n\t" + READ)]),
        ("load before the threads have met", 1,
         [(SHARED, SHARED.replace("\tbar.sync \t0;\n", "")), (LAST_MEETING, "")]),
        ("non-coherent load", 1, [(READ, READ.replace("ld.global", "ld.global.nc"))]),
        ("non-coherent load", 1, [(READ, READ.replace("ld.global", "ldu.global"))]),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_hazard_is_seen(says: str, count: int, changes: list[tuple[str, str]]) -> None:
    found = [each for each in ptx_hazards(changed(*changes), STREAMED) if each.startswith(says)]
    assert len(found) == count, ptx_hazards(changed(*changes), STREAMED)


@pytest.mark.parametrize(
    "changes",
    [
        # An arrival that polls by an atomic, as older versions leave it.
        [(POLL, "@%p1 atom.global.gpu.acquire.add.u32 %r14, [ %rd5 + 0 ], 0;")],
        # A relaxed poll behind which a fence stands.
        [(POLL, POLL.replace("acquire", "relaxed") + "\n\tfence.acq_rel.gpu;")],
        [(ARRIVAL, "fence.acq_rel.gpu;\n\t@%p1 atom.global.gpu.relaxed.add.u32 %r11")],
        # The releasing thread's own store, after the threads have met.
        [(MEETING, f"{MEETING}\t@%p1 st.global.b32 [ %rd8 + 0 ], {{ %r16 }};\n")],
        # A loop that counts needs no memory to end.
        [(READ, f"$L__BB0_9:\n\tadd.s32 %r20, %r20, -1;\n\tsetp.ne.s32 %p5, %r20, 0;\n\t@%p5 bra $L__BB0_9;\n{READ}")],
        # Weights that are read once may pass the caches by: nobody writes them.
        [(LOAD, LOAD.replace("ld.global", "ld.global.nc"))],
        [("@%p1 st.shared::cta.b32", "atom.relaxed.sys.shared.add.u32 %r22, [%r15], 1;\n\t@%p1 st.shared::cta.b32")],
    ],
    ids=["atomic poll", "fenced poll", "fenced release", "own store", "counting loop", "weights", "shared memory"],
)  # fmt: skip
def test_what_is_no_hazard_is_not_seen(changes: list[tuple[str, str]]) -> None:
    assert ptx_hazards(changed(*changes), STREAMED) == []


def test_narrow_weight_loads_are_seen() -> None:
    (found,) = ptx_width_hazards(changed((LOAD, "ld.global.b16 { %rs1 }, [ %rd3 + 0 ];")), STREAMED)
    assert found.startswith("narrow weight load: ld.global.b16") and "2 bytes where 16" in found
    (found,) = ptx_width_hazards(changed((COPY, COPY.replace("0x10", "0x4").replace(".cg", ".ca"))), STREAMED)
    assert "4 bytes where 16" in found
    assert ptx_width_hazards(changed(), {("gemv.py", 99)}) == ["no streamed weights: no load comes from gemv.py:99"]


def test_blocks_branches_and_places() -> None:
    listing = changed()
    place = {block.name: index for index, block in enumerate(listing.blocks)}
    table = next(block for block in listing.blocks if block.instructions[-1].opcode == "brx.idx")
    assert table.successors == [place["$L__BB0_3"], place["$L__BB0_4"]]
    assert {listing.blocks[loop.header].name for loop in loops(listing)} == {"$L__BB0_1", "$L__BB0_5"}
    poll = next(each for each in listing.instructions if "acquire" in each.parts)
    assert str(poll).endswith("(sync.py:88)") and GOOD.splitlines()[poll.line - 1].strip() == POLL
    assert (poll.predicate, poll.writes, poll.reads) == ("%p1", {"%r14"}, {"%rd5", "%p1"})
    load = next(each for each in listing.instructions if each.opcode == "ld.global.v4.b32")
    assert (load.bytes, load.writes) == (16, {"%r6", "%r7", "%r8", "%r9"})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("\t@%p2 bra \t$L__BB0_1;\n", "\t@%p2 bra \t$L__BB0_77;\n"), r"\$L__BB0_77, which is not in the listing"),
        (("\t\t$L__BB0_3,\n", "\t\t$L__BB0_77,\n"), r"\$L__BB0_77, which is not in the listing"),
        (("brx.idx \t%r10, $L_brx_0", "brx.idx \t%r10, $L_brx_9"), "no table, which is not in the listing"),
        (("\tret;\n", "\tcall.uni other;\n\tret;\n"), "calls a function"),
        (("$L__func_end0:\n}\n", "}\n.func other()\n{\n\tret;\n}\n"), "a second function"),
    ],
)
def test_what_cannot_be_read_is_refused(change: tuple[str, str], says: str) -> None:
    with pytest.raises(ListingError, match=says):
        changed(change)


def test_a_listing_without_a_kernel_is_refused() -> None:
    with pytest.raises(ListingError, match="no kernel"):
        parse_ptx(".version 8.8\n")
