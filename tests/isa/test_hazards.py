"""Each hazard is seen in a listing that has it, and in no other."""

from __future__ import annotations

import pytest

from glm53_mono.isa.hazards import protocol_hazards, width_hazards
from glm53_mono.isa.hazards.loads import load_bytes, streamed_lines
from glm53_mono.isa.hazards.matrix import wait_states
from tests.isa.listings import STREAMED, changed

STORE = "\tglobal_store_dword v[4:5], v20, off offset:64\n"
KEPT = "s_mov_b64 vcc, s[0:1]\n\t"
DRAIN = "\t;;#ASMSTART\n\ts_waitcnt vmcnt(0)\ns_mov_b32 s0, 0\n\t;;#ASMEND\n\ts_barrier\n"
MEETING = "\ts_barrier\n\tv_cmp_eq_u32_e32 vcc, 0, v0\n"
ARRIVAL = "\tbuffer_wbl2 sc1\n\ts_waitcnt vmcnt(0)\n\tglobal_atomic_add v141, v1, s[12:13]\n"
POLL = "\tglobal_load_dword v6, v141, s[12:13] sc1\n\ts_waitcnt vmcnt(0)\n\tbuffer_inv sc1\n"
READ = "\tglobal_load_dword v9, v[4:5], off\n"


def test_nothing_is_wrong_with_the_good_listing() -> None:
    assert protocol_hazards(changed(), STREAMED) == []
    assert width_hazards(changed(), STREAMED) == []


@pytest.mark.parametrize(
    ("says", "count", "changes"),
    [
        # LLVM of Triton 3.6 and 3.7 on gfx950: the write-back is not waited for.
        ("release without a drained store counter: no s_waitcnt", 1,
         [(ARRIVAL, ARRIVAL.replace("\ts_waitcnt vmcnt(0)\n", ""))]),
        # Two stores, each of which two releases do not wait for.
        ("release without a drained store counter: global_store", 4, [(DRAIN, "\ts_barrier\n")]),
        # A count that leaves a store outstanding is no wait for it.
        ("release without a drained store counter: global_store", 4,
         [(DRAIN, DRAIN.replace("vmcnt(0)", "vmcnt(1)"))]),
        # Triton 3.6 to 3.8 put no workgroup barrier before a release of their own accord.
        ("store after the last workgroup barrier", 2, [(MEETING, MEETING.replace("\ts_barrier\n", ""))]),
        ("store after the last workgroup barrier", 1, [(STORE, ""), (MEETING, MEETING + STORE)]),
        ("relaxed atomic", 1, [(ARRIVAL, ARRIVAL.replace("\tbuffer_wbl2 sc1\n\ts_waitcnt vmcnt(0)\n", ""))]),
        ("buffer_inv without sc1", 1, [(POLL, POLL.replace("inv sc1", "inv"))]),
        ("spin without a load", 1, [(POLL, "")]),
        ("spin without a load", 1, [(POLL, ""), ("\ts_add_u32 s16, s16, s18\n", POLL)]),
        ("spin without a load", 1, [("\ts_cbranch_scc1 .LBB0_5\n", "\ts_cbranch_scc1 .LBB0_10\n"),
                                    ("\ts_setpc_b64 s[98:99]\n", "\ts_endpgm\n")]),
        ("poll served from a cache", 1, [(POLL, POLL.replace("] sc1", "]"))]),
        ("poll served from a cache", 1, [(POLL, POLL + "\tglobal_load_dword v6, v141, s[12:13] sc0\n")]),
        ("poll served from a cache", 1, [(POLL, "\ts_load_dword s6, s[12:13], 0x0\n")]),
        ("poll without an acquire", 1, [(POLL, POLL.replace("\tbuffer_inv sc1\n", ""))]),
        ("poll without an acquire", 1, [(POLL, POLL.replace("\ts_waitcnt vmcnt(0)\n", ""))]),
        # What a spin on a volatile load becomes in Triton 3.6 to 3.8: a branch on a mask that nothing changes.
        ("endless loop: .LBB0_13", 1,
         [(READ, ".LBB0_13:\n\ts_and_b64 vcc, exec, s[22:23]\n\ts_cbranch_vccnz .LBB0_13\n" + READ)]),
        ("clock read without its wait", 1, [("s[16:17]\ns_waitcnt lgkmcnt(0)\n", "s[16:17]\n\ts_waitcnt vmcnt(0)\n")]),
        ("non-temporal load", 1, [(READ, READ.replace("off", "off nt"))]),
        ("scalar load", 1, [(READ, "\ts_load_dword s9, s[12:13], 0x0\n")]),
        ("scalar load", 1, [("s_load_dword s2, s[0:1]", "s_mov_b32 s1, s9\n\ts_load_dword s2, s[0:1]")]),
        ("scalar load", 1, [("s_load_dword s2, s[0:1]", f"{KEPT}v_cmp_eq_u32_e32 vcc, 0, v0\n\t"
                             "s_mov_b64 s[40:41], vcc\n\ts_load_dword s2, s[40:41]")]),
        ("matrix result read too early", 1, [("\ts_nop 7\n", "\ts_nop 3\n")]),
        # A scaled product takes longer, and a store reads its result too.
        ("matrix result read too early", 1, [("\ts_nop 11\n", "\ts_nop 10\n")]),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_hazard_is_seen(says: str, count: int, changes: list[tuple[str, str]]) -> None:
    found = [each for each in protocol_hazards(changed(*changes), STREAMED) if each.startswith(says)]
    assert len(found) == count, protocol_hazards(changed(*changes), STREAMED)


@pytest.mark.parametrize(
    "changes",
    [
        # An arrival that polls by an atomic, as other compilers leave it.
        [(POLL, POLL.replace("load_dword v6, v141, s[12:13] sc1", "atomic_add v6, v141, v1, s[12:13] sc0"))],
        # The releasing wave's own store, after the waves have met.
        [(ARRIVAL, STORE.replace("64", "80") + ARRIVAL)],
        # A loop that counts needs no memory to end.
        [(READ, ".LBB0_13:\n\ts_add_i32 s40, s40, -1\n\ts_cmp_lg_u32 s40, 0\n\ts_cbranch_scc1 .LBB0_13\n" + READ)],
        # A product that adds to the last one's result.
        [("\ts_nop 7\n", "\tv_mfma_f32_16x16x32_bf16 v[16:19], v[8:11], v[12:15], v[16:19]\n\ts_nop 7\n")],
        # The loop's end and the nop are just enough.
        [("\ts_nop 7\n", "\ts_nop 4\n")],
        # Weights that are read once may pass the caches by: nobody writes them.
        [("global_load_dwordx4 v[8:11], v[2:3], off", "global_load_dwordx4 v[8:11], v[2:3], off nt")],
        # The kernel's arguments, after a copy.
        [("s_load_dword s2, s[0:1]", "s_mov_b64 s[40:41], s[0:1]\n\ts_load_dword s2, s[40:41]")],
        # The same by way of vcc.
        [("s_load_dword s2, s[0:1]", f"{KEPT}s_mov_b64 s[40:41], vcc\n\ts_load_dword s2, s[40:41]")],
        # And from there.
        [("s_load_dword s2, s[0:1]", f"{KEPT}s_load_dword s2, vcc")],
    ],
    ids=[
        "atomic poll",
        "own store",
        "counting loop",
        "product after product",
        "enough states",
        "streamed weights",
        "copied arguments",
        "arguments by way of vcc",
        "arguments in vcc",
    ],
)
def test_what_is_no_hazard_is_not_seen(changes: list[tuple[str, str]]) -> None:
    assert protocol_hazards(changed(*changes), STREAMED) == []


def test_narrow_weight_loads_are_seen() -> None:
    wide = "global_load_dwordx4 v[8:11], v[2:3], off"
    (found,) = width_hazards(changed((wide, "global_load_ushort v8, v[2:3], off")), STREAMED)
    assert found.startswith("narrow weight load: global_load_ushort v8") and "2 bytes where 16" in found
    (found,) = width_hazards(changed(("global_load_lds_dwordx4", "global_load_lds_dword")), STREAMED)
    assert "4 bytes where 16" in found
    assert width_hazards(changed(), {("gemv.py", 99)}) == ["no streamed weights: no load comes from gemv.py:99"]
    assert len(width_hazards(changed(), set())) == 1


def test_widths_of_loads() -> None:
    names = ("global_load_ushort", "buffer_load_dword", "global_load_dwordx3", "global_load_short_d16_hi",
             "buffer_load_ubyte", "global_load_lds_dwordx4")  # fmt: skip
    assert [load_bytes(name) for name in names] == [2, 4, 12, 2, 1, 16]
    with pytest.raises(ValueError, match="global_load_word is a load of unknown width"):
        load_bytes("global_load_word")


def test_wait_states_of_products() -> None:
    products = ("16x16x32_bf16", "32x32x16_bf16", "scale_f32_16x16x128_f8f6f4", "scale_f32_32x32x64_f8f6f4")
    names = [f"v_mfma_{each}" if each.startswith("scale") else f"v_mfma_f32_{each}" for each in products]
    assert [wait_states(name) for name in names] == [8, 12, 12, 20]
    with pytest.raises(ValueError, match="of unknown length"):
        wait_states("v_mfma_f64_16x16x4_f64")


def test_the_kernels_mark_their_streamed_weights() -> None:
    lines = streamed_lines()
    assert {file for file, _ in lines} == {"gemv.py", "fp8.py", "mxfp4.py"}
