"""Global and buffer accesses, loads straight to LDS, and what a wave starts with."""

from __future__ import annotations

import numpy as np
import pytest
from assembly import build, run

POINTERS = """s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
s_waitcnt lgkmcnt(0)
"""
# s[8:11]: a buffer over the input, of which the length is given.
BUFFER = (
    POINTERS
    + """s_mov_b64 s[8:9], s[4:5]
s_mov_b32 s10, {records}
s_mov_b32 s11, 0x20000
"""
)


def _run(text: str, given: np.ndarray, size: int, lds: int = 0, **options):
    result = np.zeros(size, np.uint32)
    run(build({"k": text}, lds=lds)["k"], given, result, **options)
    return result


def _random(count: int) -> np.ndarray:
    return (
        np.random.default_rng(count).integers(0, 1 << 32, count, np.uint64).astype("u4")
    )


def test_widths_and_addresses():
    text = (
        POINTERS
        + """v_lshlrev_b32 v2, 4, v0
global_load_dwordx4 v[10:13], v2, s[4:5] offset:16
v_lshl_add_u64 v[4:5], v[0:1], 0, s[4:5]
v_mov_b32 v6, s4
v_mov_b32 v7, s5
global_load_dwordx3 v[14:16], v[6:7], off offset:4
global_load_ubyte v17, v1, s[4:5] offset:3
global_load_sshort v18, v1, s[4:5] offset:2
s_waitcnt vmcnt(0)
global_store_dwordx4 v2, v[10:13], s[6:7]
global_store_dwordx3 v2, v[14:16], s[6:7] offset:1024
v_add_u32 v2, 0x800, v1
global_store_dword v2, v17, s[6:7]
global_store_short v2, v18, s[6:7] offset:256
global_store_byte v2, v17, s[6:7] offset:258
"""
    )
    text = text.replace("v_lshl_add_u64 v[4:5], v[0:1], 0, s[4:5]\n", "")
    given = _random(64 * 4 + 4)
    got = _run(text, given, 1024)
    assert np.array_equal(got[:256], given[4:])
    assert np.array_equal(
        got[256:512].reshape(64, 4)[:, :3], np.tile(given[1:4], (64, 1))
    )
    assert np.array_equal(got[512:576], given[:64] >> 24)
    stored = (given[:64] >> 16) | (given[:64] >> 24) << 16
    assert np.array_equal(got[576:640], stored)


@pytest.mark.parametrize("records", [0, 200, 203, 256])
def test_buffer_range(records):
    """Loads past the record count are zero, stores past it are dropped; the scalar
    offset counts as part of the offset."""
    text = (
        BUFFER.format(records=records)
        + """s_movk_i32 s12, 40
buffer_load_dword v10, v1, s[8:11], 0 offen
buffer_load_dword v11, v1, s[8:11], s12 offen offset:4
s_waitcnt vmcnt(0)
s_mov_b64 s[8:9], s[6:7]
buffer_store_dword v10, v1, s[8:11], 0 offen
global_store_dword v1, v11, s[6:7] offset:256
"""
    )
    given = _random(64)
    got = _run(text, given, 128)
    bytes_of = 4 * np.arange(64) + 4
    inside = bytes_of <= records
    assert np.array_equal(got[:64], np.where(inside, given, 0))
    shifted = np.where(bytes_of + 44 <= records, np.roll(given, -11), 0)
    assert np.array_equal(got[64:], shifted)


def test_buffer_range_is_checked_by_dword():
    text = (
        BUFFER.format(records=4 * 63 + 2)
        + """v_lshlrev_b32 v2, 4, v0
buffer_load_dwordx4 v[10:13], v2, s[8:11], 0 offen
s_waitcnt vmcnt(0)
global_store_dwordx4 v2, v[10:13], s[6:7]
"""
    )
    given = _random(64)
    got = _run(text, given, 256)
    assert np.array_equal(got[:63], given[:63])
    assert not got[63:].any()


@pytest.mark.parametrize("dwords", [1, 3, 4])
def test_load_to_lds(dwords):
    """M0 gives the place, the instruction's offset moves memory and LDS alike, lanes
    lie side by side, and what is out of range is zero."""
    suffix = "" if dwords == 1 else f"x{dwords}"
    size = 4 * dwords
    text = (
        BUFFER.format(records=64 * size + 16 - size)
        + f"""v_mul_u32_u24 v2, {size}, v0
s_mov_b32 m0, 256
s_nop 0
buffer_load_dword{suffix} v2, s[8:11], 0 offen offset:16 lds
s_waitcnt vmcnt(0)
"""
        + "".join(
            f"""ds_read_b32 v{10 + i}, v2 offset:{272 + 4 * i}
s_waitcnt lgkmcnt(0)
global_store_dword v2, v{10 + i}, s[6:7] offset:{4 * i}
"""
            for i in range(dwords)
        )
    )
    given = _random(64 * dwords + 4)
    got = _run(text, given, 64 * dwords, lds=2048)
    want = given[4:].copy()
    want[63 * dwords :] = 0
    assert np.array_equal(got, want)


def test_global_load_to_lds():
    text = (
        POINTERS
        + """s_mov_b32 m0, 0
global_load_lds_dwordx4 v2, s[4:5]
s_waitcnt vmcnt(0)
v_lshlrev_b32 v2, 4, v0
ds_read_b128 v[10:13], v2
s_waitcnt lgkmcnt(0)
global_store_dwordx4 v2, v[10:13], s[6:7]
"""
    )
    text = text.replace(
        "s_mov_b32 m0, 0\n", "s_mov_b32 m0, 0\nv_lshlrev_b32 v2, 4, v0\n"
    )
    given = _random(256)
    assert np.array_equal(_run(text, given, 256, lds=1024), given)


def test_scalar_loads():
    text = (
        BUFFER.format(records=20)
        + """s_load_dwordx2 s[12:13], s[4:5], 0x4
s_movk_i32 s16, 8
s_load_dword s14, s[4:5], s16 offset:0x4
s_buffer_load_dwordx2 s[18:19], s[8:11], 0x10
s_waitcnt lgkmcnt(0)
"""
        + "".join(
            f"v_mov_b32 v10, s{r}\n"
            f"global_store_dword v1, v10, s[6:7] offset:{256 * i}\n"
            for i, r in enumerate((12, 13, 14, 18, 19))
        )
    )
    given = _random(8)
    got = _run(text, given, 5 * 64).reshape(5, 64)
    assert got[:, 0].tolist() == [given[1], given[2], given[3], given[4], 0]


def test_identities():
    """Workgroup numbers in the first free SGPR, thread numbers in v0, and a last wave
    of which only some lanes exist."""
    text = (
        POINTERS
        + """s_mul_i32 s8, s2, 400
s_add_u32 s6, s6, s8
s_addc_u32 s7, s7, 0
v_mov_b32 v2, s2
v_lshl_or_b32 v2, v2, 16, v0
global_store_dword v1, v2, s[6:7]
"""
    )
    result = np.zeros(300, np.uint32)
    report = run(build({"k": text})["k"], np.zeros(1, "u4"), result, block=100, grid=3)
    group, thread = np.divmod(np.arange(300), 100)
    assert np.array_equal(result, group << 16 | thread)
    assert report.waves == 6
    assert report.opcodes["global_store_dword"] == 6


def test_waves_run_in_batches():
    text = (
        POINTERS
        + """s_lshl_b32 s8, s2, 8
s_add_u32 s6, s6, s8
s_addc_u32 s7, s7, 0
v_mov_b32 v2, s2
global_store_dword v1, v2, s[6:7]
"""
    )
    result = np.zeros(640, np.uint32)
    kernel = build({"k": text})["k"]
    run(kernel, np.zeros(1, "u4"), result, grid=10, waves_at_once=3)
    assert np.array_equal(result, np.arange(640) // 64)
