"""One kernel for each thing that the emulator refuses."""

from __future__ import annotations

import numpy as np
import pytest
from assembly import build, run

from tools.gfx950 import (
    BarrierMismatch,
    EmulatorError,
    LdsRace,
    MemoryFault,
    MissingWait,
    UninitialisedRead,
    UnknownInstruction,
)

START = """s_load_dwordx4 s[4:7], s[0:1], 0x0
v_and_b32 v1, 63, v0
v_lshlrev_b32 v1, 2, v1
v_lshrrev_b32 v2, 6, v0
v_readfirstlane_b32 s12, v2
s_waitcnt lgkmcnt(0)
"""
STORE = "\nglobal_store_dword v1, v10, s[6:7]"
FIRST_WAVE = "s_cmp_lg_u32 s12, 0\ns_cbranch_scc1 {label}\n"


def _run(text: str, block: int = 64, **options):
    kernel = build({"k": START + text}, lds=1024, agprs=8)["k"]
    given, result = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    run(kernel, given, result, block=block, **options)
    return result


MISTAKES = {
    "opcode": (UnknownInstruction, "v_cubeid_f32 v10, v0, v0, v0", "v_cubeid_f32"),
    "index": (
        UnknownInstruction,
        "s_mov_b64 s[8:9], 0\ns_mov_b64 s[10:11], 0\n"
        "buffer_load_dword v10, v1, s[8:11], 0 idxen",
        "with an index",
    ),
    "rounding mode": (
        UnknownInstruction,
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 1",
        "rounding",
    ),
    "load beyond": (
        MemoryFault,
        "global_load_dword v10, v1, s[4:5] offset:4",
        "256 bytes into in of 256",
    ),
    "store beyond": (
        MemoryFault,
        "v_mov_b32 v10, 0\nglobal_store_dword v1, v10, s[6:7] offset:4",
        "lane 63",
    ),
    "null": (
        MemoryFault,
        "v_mov_b64 v[10:11], 0\nglobal_load_dword v12, v[10:11], off",
        "below every buffer",
    ),
    "read-only": (
        MemoryFault,
        "v_mov_b32 v10, 0\nglobal_store_dword v1, v10, s[4:5]",
        "read-only",
    ),
    "buffer beyond": (
        MemoryFault,
        "s_mov_b64 s[8:9], s[4:5]\ns_movk_i32 s10, 0x400\ns_mov_b32 s11, 0x20000\n"
        "buffer_load_dword v10, v1, s[8:11], 0 offen offset:128",
        "load of 4 bytes",
    ),
    "scalar load beyond": (
        MemoryFault,
        "s_load_dwordx4 s[8:11], s[4:5], 0xf4",
        "load of 4 bytes",
    ),
    "lds beyond": (
        MemoryFault,
        "v_mov_b32 v10, 0\nds_write_b32 v1, v10 offset:1020",
        "of 1024 allocated",
    ),
    "vector register": (UninitialisedRead, "v_add_u32 v10, v11, v0", "v11 is read"),
    "accumulator": (UninitialisedRead, "v_accvgpr_read_b32 v10, a3", "a3 is read"),
    "switched-off lanes": (
        UninitialisedRead,
        "v_cmp_gt_u32 vcc, 40, v0\ns_and_saveexec_b64 s[8:9], vcc\n"
        "v_mov_b32 v10, 1\ns_mov_b64 exec, s[8:9]\nv_mov_b32 v11, v10",
        "lane 40",
    ),
    "half of a register": (
        UninitialisedRead,
        "v_cvt_f32_u32 v11, v0\nv_cvt_pk_fp8_f32 v10, v11, v11\nv_mov_b32 v12, v10",
        "v10 is read",
    ),
    "matrix operand": (
        UninitialisedRead,
        "v_mfma_f32_32x32x8_f16 v[16:31], v[10:11], v[12:13], 0",
        "v10 is read",
    ),
    "scalar register": (UninitialisedRead, "s_add_u32 s20, s21, 1", "s21 is read"),
    "m0": (UninitialisedRead, "s_mov_b32 s20, m0", "s124 is read"),
    "scc": (UninitialisedRead, "s_cselect_b32 s20, 1, 0", "scc is read"),
    "lds": (UninitialisedRead, "ds_read_b32 v10, v1", "LDS address 0x0"),
    "vector load": (
        MissingWait,
        "global_load_dword v10, v1, s[4:5]\nv_add_u32 v11, v10, v10",
        "vmcnt",
    ),
    "later vector load": (
        MissingWait,
        "global_load_dword v10, v1, s[4:5]\nglobal_load_dword v11, v1, s[4:5]\n"
        "s_waitcnt vmcnt(1)\nv_mov_b32 v12, v10\nv_mov_b32 v13, v11",
        "v11 is read",
    ),
    "overwritten load": (
        MissingWait,
        "global_load_dword v10, v1, s[4:5]\nv_mov_b32 v10, 0",
        "v10 is overwritten",
    ),
    "load of another kind": (
        MissingWait,
        "ds_write_b32 v1, v0\nglobal_load_dword v10, v1, s[4:5]\nds_read_b32 v10, v1",
        "v10 is overwritten",
    ),
    "lds load": (
        MissingWait,
        "ds_write_b32 v1, v0\nds_read_b32 v10, v1\nv_mov_b32 v11, v10",
        "lgkmcnt",
    ),
    "scalar load": (
        MissingWait,
        "s_load_dword s8, s[4:5], 0x0\ns_load_dword s9, s[4:5], 0x4\n"
        "s_waitcnt lgkmcnt(1)\ns_mov_b32 s10, s8",
        "lgkmcnt(0)",
    ),
    "own load to lds": (
        MissingWait,
        "s_mov_b32 m0, 0\ns_nop 0\nglobal_load_lds_dword v1, s[4:5]\n"
        "ds_read_b32 v10, v1",
        "vmcnt",
    ),
    "endless loop": (EmulatorError, "again:\ns_branch again", "limit"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name):
    kind, text, message = MISTAKES[name]
    with pytest.raises(kind) as caught:
        _run(text, instruction_limit=1000)
    assert message in str(caught.value)
    if name != "endless loop":
        assert "workgroup (0, 0, 0), wave 0" in str(caught.value)
        instructions = [x.split()[0] for x in text.splitlines()]
        assert instructions[-1].split("_b32")[0] in str(caught.value)


def test_loads_into_one_register_are_in_order():
    text = """v_mov_b32 v11, 0
global_load_dword v10, v11, s[4:5]
global_load_dword v10, v1, s[4:5]
s_waitcnt vmcnt(0)"""
    assert np.array_equal(_run(text + STORE), np.arange(64))


def test_counted_waits_are_enough():
    text = """global_load_dword v10, v1, s[4:5]
global_load_dword v11, v1, s[4:5]
ds_write_b32 v1, v0
ds_read_b32 v12, v1
ds_read_b32 v13, v1 offset:0
s_waitcnt vmcnt(1) lgkmcnt(1)
v_add_u32 v10, v10, v12
s_waitcnt vmcnt(0) lgkmcnt(0)
v_add_u32 v10, v11, v10"""
    assert np.array_equal(_run(text + STORE), 3 * np.arange(64))


# Two waves. Wave 0 takes the first branch, wave 1 the second.

WRITE = "ds_write_b32 v1, v0\ns_waitcnt lgkmcnt(0)\n"
READ = "ds_read_b32 v10, v1\ns_waitcnt lgkmcnt(0)\n"
TO_LDS = "s_mov_b32 m0, 0\ns_nop 0\nglobal_load_lds_dword v1, s[4:5]\n"
BARRIER = "s_barrier\n"


def _two(first: str, second: str) -> str:
    return (
        FIRST_WAVE.format(label="second")
        + first
        + "s_branch over\nsecond:\n"
        + second
        + "over:\ns_barrier"
    )


def test_shared_lds_in_order():
    """Written, waited for, a barrier, then read by the other wave."""
    text = _two(WRITE + BARRIER, BARRIER + READ + STORE + "\n")
    assert np.array_equal(_run(text, block=128), np.arange(64))
    text = _two(
        TO_LDS + "s_waitcnt vmcnt(0)\n" + BARRIER, BARRIER + READ + STORE + "\n"
    )
    assert np.array_equal(_run(text, block=128), np.arange(64))


RACES = {
    "read without a barrier": (LdsRace, WRITE, READ),
    "read before the barrier": (LdsRace, WRITE + BARRIER, READ + BARRIER),
    "two writers": (LdsRace, WRITE, WRITE),
    "written while read": (LdsRace, WRITE + READ, WRITE),
    "write not waited for": (
        MissingWait,
        "ds_write_b32 v1, v0\n" + BARRIER,
        BARRIER + READ,
    ),
    "load to lds not waited for": (MissingWait, TO_LDS + BARRIER, BARRIER + READ),
    "load to lds without a barrier": (
        LdsRace,
        TO_LDS + "s_waitcnt vmcnt(0)\n",
        READ,
    ),
    "read not waited for": (
        LdsRace,
        WRITE + "ds_read_b32 v10, v1\n" + BARRIER,
        BARRIER + WRITE,
    ),
}


@pytest.mark.parametrize("name", RACES)
def test_race(name):
    kind, first, second = RACES[name]
    with pytest.raises(kind, match="LDS address 0x0"):
        _run(_two(first, second), block=128)


def test_two_waves_write_at_once():
    with pytest.raises(LdsRace, match="with no barrier between"):
        _run(WRITE, block=128)


def test_other_bytes_are_no_race():
    text = "v_lshlrev_b32 v3, 1, v0\nds_write_b8 v3, v0\ns_waitcnt lgkmcnt(0)\n"
    text = text.replace("v_lshlrev_b32 v3, 1, v0", "v_mov_b32 v3, v0")
    _run(text, block=128)
    race = text.replace("v_mov_b32 v3, v0", "v_lshrrev_b32 v3, 1, v0")
    _run(race, block=128)
    with pytest.raises(LdsRace):
        _run(text.replace("v_mov_b32 v3, v0", "v_lshrrev_b32 v3, 2, v1"), block=128)


def test_ended_wave():
    text = FIRST_WAVE.format(label="over") + "s_barrier\nover:\n"
    with pytest.raises(BarrierMismatch, match=r"\[1\] have ended and waves \[0\] wait"):
        _run(text, block=128)


def test_checks_can_be_off():
    text = MISTAKES["vector register"][1]
    _run(text, checks=False)
    with pytest.raises(MemoryFault):
        _run(MISTAKES["load beyond"][1], checks=False)


def test_scratch_is_refused():
    from dataclasses import replace

    kernel = build({"k": START})["k"]
    with pytest.raises(UnknownInstruction, match="scratch"):
        run(replace(kernel, scratch_bytes=16), np.zeros(1, "u4"), np.zeros(1, "u4"))
