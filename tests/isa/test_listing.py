"""A listing as instructions, blocks and loops, and the numbers that the compiler wrote beside it."""

from __future__ import annotations

import pytest

from glm53_mono.isa.flow import dominators, loops, waterfall_loops
from glm53_mono.isa.listing import Instruction, ListingError, parse, registers
from glm53_mono.isa.resources import ResourceError, of_listing
from tests.isa.listings import GOOD, changed


def instruction(line: str) -> Instruction:
    """One instruction as a kernel has it."""
    text = f"\t.type\tk,@function\nk:\n\t{line}\n\ts_endpgm\n.Lfunc_end0:\n"
    return parse(text).blocks[0].instructions[0]


@pytest.mark.parametrize(
    ("operand", "named"),
    [
        ("v12", "v12"), ("s[4:5]", "s4 s5"), ("a[0:1]", "a0 a1"), ("vcc", "vcc_lo vcc_hi"),
        ("exec_lo", "exec_lo"), ("-v1", "v1"), ("|v2|", "v2"), ("off", ""), ("0x10", ""), (".LBB0_12", ""),
        ("m0", "m0"), ("(.LBB0_5-.Lpost_getpc0)>>32", ""),
    ],
)  # fmt: skip
def test_registers_of_an_operand(operand: str, named: str) -> None:
    assert registers(operand) == set(named.split())


@pytest.mark.parametrize(
    ("line", "writes", "reads"),
    [
        ("global_load_dwordx2 v[2:3], v1, s[4:5] offset:8 sc1", "v2 v3", "v1 s4 s5"),
        ("global_store_dword v[4:5], v20, off", "", "v4 v5 v20"),
        ("global_load_lds_dwordx4 v[2:3], off", "", "v2 v3"),
        ("global_atomic_add v1, v2, v3, s[4:5] sc0", "v1", "v2 v3 s4 s5"),
        ("global_atomic_add v2, v3, s[4:5]", "", "v2 v3 s4 s5"),
        ("ds_write_b32 v1, v2", "", "v1 v2"),
        ("ds_read_b64 v[2:3], v1", "v2 v3", "v1"),
        ("v_add_co_u32_e32 v1, vcc, v2, v3", "v1 vcc_lo vcc_hi", "v2 v3"),
        ("v_fmac_f32_e32 v1, v2, v3", "v1", "v1 v2 v3"),
        ("v_writelane_b32 v254, s4, 12", "v254", "v254 s4"),
        ("s_and_saveexec_b64 s[2:3], vcc", "s2 s3 exec_lo exec_hi scc", "vcc_lo vcc_hi exec_lo exec_hi"),
        ("s_cmp_lt_i32 s2, 5", "scc", "s2"),
        ("s_cselect_b32 s1, s2, s3", "s1", "s2 s3 scc"),
        ("s_mov_b32 s1, s2", "s1", "s2"),
        ("v_mfma_f32_16x16x32_bf16 a[0:3], v[0:1], v[2:3], a[0:3]", "a0 a1 a2 a3", "v0 v1 v2 v3 a0 a1 a2 a3"),
    ],
)
def test_what_an_instruction_writes_and_reads(line: str, writes: str, reads: str) -> None:
    each = instruction(line)
    assert (each.writes, each.reads) == (set(writes.split()), set(reads.split()))


def test_operands_modifiers_and_places() -> None:
    listing = changed()
    poll = next(each for each in listing.instructions if "sc1" in each.modifiers and each.is_load)
    assert poll.operands == ("v6", "v141", "s[12:13]")
    assert str(poll).endswith("(sync.py:88)")
    assert GOOD.splitlines()[poll.line - 1].strip().startswith("global_load_dword v6")
    inv = next(each for each in listing.instructions if each.mnemonic == "buffer_inv")
    assert inv.operands == () and inv.modifiers == {"sc1"}
    wait = instruction("s_waitcnt vmcnt(3) lgkmcnt(0)")
    assert wait.waits_for("lgkmcnt") and not wait.waits_for("vmcnt")


def test_blocks_branches_and_loops() -> None:
    listing = changed()
    place = {block.name: index for index, block in enumerate(listing.blocks)}
    ends = [block.instructions[-1].mnemonic for block in listing.blocks]
    fault = ends.index("s_setpc_b64")
    assert listing.blocks[fault].successors == [place[".LBB0_5"]]
    headers = {listing.blocks[loop.header].name: loop for loop in loops(listing)}
    assert headers.keys() == {".LBB0_1", ".LBB0_5", ".LBB0_11"}
    spin = headers[".LBB0_5"]
    assert place[".LBB0_7"] in spin.body and fault in spin.body and place[".LBB0_1"] not in spin.body
    assert dominators(listing.blocks)[place[".LBB0_10"]] >= {0, place[".LBB0_5"], place[".LBB0_7"]}
    assert waterfall_loops(listing) == 1
    assert waterfall_loops(changed(("v_readfirstlane_b32 s28, v2", "s_mov_b32 s28, 0"))) == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("\ts_cbranch_scc1 .LBB0_1\n", "\ts_cbranch_scc1 .LBB0_77\n"), ".LBB0_77, which is not in the listing"),
        (("\ts_nop 7\n", "\ts_swappc_b64 s[30:31], s[4:5]\n"), "calls a function"),
        ((".LBB0_10:\n", "other:\n"), ".LBB0_10, which is not"),
    ],
)
def test_what_cannot_be_read_is_refused(change: tuple[str, str], says: str) -> None:
    with pytest.raises(ListingError, match=says):
        changed(change)


def test_a_long_branch_to_an_unknown_address_is_refused() -> None:
    with pytest.raises(ListingError, match="an address that the block does not name"):
        changed(("(.LBB0_5-.Lpost_getpc0)&4294967295", "8"), ("(.LBB0_5-.Lpost_getpc0)>>32", "0"))


def test_no_function_and_a_second_one_are_refused() -> None:
    with pytest.raises(ListingError, match="no function"):
        parse("\t.text\n")
    function = "\t.type\t{0},@function\n{0}:\n\ts_endpgm\n.Lfunc_end0:\n"
    with pytest.raises(ListingError, match="a second function b"):
        parse(function.format("a") + function.format("b"))


def test_resources_come_from_the_metadata() -> None:
    found = of_listing(changed(), shared=1024)
    assert (found.registers, found.accumulation_registers, found.scalar_registers) == (255, 0, 104)
    assert (found.register_spills, found.scalar_spills, found.scratch) == (0, 2, 0)
    assert (found.shared, found.code_bytes, found.waterfall_loops) == (1024, 640, 1)
    with pytest.raises(ResourceError, match="no vgpr_count"):
        of_listing(changed((".vgpr_count:", ".vgprs:")), shared=0)
