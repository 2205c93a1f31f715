"""LDS reads and writes, transposing reads, and moves between lanes."""

from __future__ import annotations

import numpy as np
import pytest
from assembly import build, lane_body, run_lanes

LDS = 8192


def _kernel(text: str, inputs: int, outputs: int):
    return build({"k": lane_body(text, inputs, outputs)}, lds=LDS)["k"]


def _random(rows: int) -> np.ndarray:
    words = np.random.default_rng(rows).integers(0, 1 << 32, (rows, 64), np.uint64)
    return words.astype(np.uint32)


@pytest.mark.parametrize("dwords", [1, 2, 3, 4])
def test_widths(dwords):
    """Lanes write side by side and read their right neighbour's words."""
    last = f":{9 + dwords}]" if dwords > 1 else ""
    source = f"v[10{last}" if dwords > 1 else "v10"
    target = f"v[40:{39 + dwords}]" if dwords > 1 else "v40"
    text = f"""v_mul_u32_u24 v30, {4 * dwords}, v0
ds_write_b{32 * dwords} v30, {source} offset:64
v_add_u32 v31, 1, v0
v_and_b32 v31, 63, v31
v_mul_u32_u24 v31, {4 * dwords}, v31
s_waitcnt lgkmcnt(0)
ds_read_b{32 * dwords} {target}, v31 offset:64
s_waitcnt lgkmcnt(0)"""
    rows = _random(dwords)
    got = run_lanes(_kernel(text, dwords, dwords), rows, dwords)
    assert np.array_equal(got, np.roll(rows, -1, axis=1))


def test_pairs_and_narrow_accesses():
    text = """v_lshlrev_b32 v30, 3, v0
ds_write2_b32 v30, v10, v11 offset0:4 offset1:5
ds_write2st64_b32 v30, v12, v13 offset0:8 offset1:10
s_waitcnt lgkmcnt(0)
ds_read2_b32 v[40:41], v30 offset0:5 offset1:4
ds_read_b32 v42, v30 offset:2048
ds_read_u8 v43, v30 offset:2561
ds_read_i16 v44, v30 offset:2562
s_waitcnt lgkmcnt(0)
ds_write_b8 v30, v10 offset:18
ds_write_b16_d16_hi v30, v11 offset:20
s_waitcnt lgkmcnt(0)
ds_read2_b32 v[46:47], v30 offset0:4 offset1:5
s_waitcnt lgkmcnt(0)
v_mov_b32 v45, v46
v_mov_b32 v46, v47"""
    rows = _random(4)
    got = run_lanes(_kernel(text, 4, 7), rows, 7)
    a, b, c, d = rows
    for row, want in zip(got, (b, a, c, (d >> 8) & 255), strict=False):
        assert np.array_equal(row, want)
    assert np.array_equal(got[4].view(np.int32), d.view(np.int16)[1::2])
    assert np.array_equal(got[5], (a & 0xFF00FFFF) | (a & 255) << 16)
    assert np.array_equal(got[6], (b & 0xFFFF0000) | b >> 16)


@pytest.mark.parametrize("bits", [8, 16])
def test_transposing_read(bits):
    """By the formulas of rocjitsu, AMD's emulator: byte n of lane l comes from lane
    ((l & ~15) | ((l >> 3) & 1)) + 2 * n, byte l & 7, and halfword n from lane
    ((l & ~15) | ((l >> 2) & 3)) + 4 * n, halfword l & 3."""
    text = f"""v_lshlrev_b32 v30, 3, v0
ds_write_b64 v30, v[10:11]
s_waitcnt lgkmcnt(0)
ds_read_b64_tr_b{bits} v[40:41], v30
s_waitcnt lgkmcnt(0)"""
    rows = _random(2)
    got = run_lanes(_kernel(text, 2, 2), rows, 2)
    before, after = (
        np.ascontiguousarray(x.T).view(f"u{bits // 8}") for x in (rows, got)
    )
    shift, step = (3, 2) if bits == 8 else (2, 4)
    for lane in range(64):
        first = (lane & ~15) | (lane >> shift & (step - 1))
        for n in range(64 // bits):
            want = before[first + step * n, lane & (64 // bits - 1)]
            assert after[lane, n] == want


def test_addresses_of_transposing_read():
    """Each lane's own address counts: rows may lie apart."""
    text = """v_lshlrev_b32 v30, 5, v0
ds_write_b64 v30, v[10:11]
s_waitcnt lgkmcnt(0)
ds_read_b64_tr_b8 v[40:41], v30
s_waitcnt lgkmcnt(0)"""
    rows = _random(2)
    got = run_lanes(_kernel(text, 2, 2), rows, 2)
    data = np.ascontiguousarray(rows.T).view(np.uint8).reshape(4, 8, 16)
    columns = np.ascontiguousarray(got.T).view(np.uint8).reshape(4, 16, 8)
    assert np.array_equal(columns, data.transpose(0, 2, 1))


def test_atomics():
    text = """v_mov_b32 v30, 0
v_mov_b32 v31, 0
ds_write_b32 v30, v31
v_mov_b32 v31, 1
s_waitcnt lgkmcnt(0)
ds_add_rtn_u32 v40, v30, v31
ds_max_u32 v30, v10
s_waitcnt lgkmcnt(0)
ds_read_b32 v41, v30
s_waitcnt lgkmcnt(0)"""
    rows = _random(1)
    got = run_lanes(_kernel(text, 1, 2), rows, 2)
    assert got[0].tolist() == list(range(64))
    assert np.all(got[1] == max(64, rows.max()))


LANES = np.arange(64)


def test_permutes():
    text = """v_sub_u32 v30, 63, v0
v_lshlrev_b32 v30, 2, v30
ds_bpermute_b32 v40, v30, v10
ds_permute_b32 v41, v30, v10
ds_swizzle_b32 v42, v10 offset:0x041f
ds_swizzle_b32 v43, v10 offset:0x801b
s_waitcnt lgkmcnt(0)
v_readlane_b32 s20, v10, 17
v_mov_b32 v44, s20
v_writelane_b32 v44, 5, 33
v_mbcnt_lo_u32_b32 v45, -1, 0
v_mbcnt_hi_u32_b32 v45, -1, v45
v_mov_b32 v46, v10
v_mov_b32 v47, v11
s_nop 1
v_permlane32_swap_b32 v46, v47
v_mov_b32 v48, v10
v_mov_b32 v49, v11
s_nop 1
v_permlane16_swap_b32 v48, v49"""
    rows = _random(2)
    a, b = rows
    got = run_lanes(_kernel(text, 2, 10), rows, 10)
    assert np.array_equal(got[0], a[::-1])
    assert np.array_equal(got[1], a[::-1])
    assert np.array_equal(got[2], a[LANES ^ 1])
    assert np.array_equal(got[3], a[LANES ^ 3])
    assert np.array_equal(got[4], np.where(LANES == 33, 5, a[17]))
    assert np.array_equal(got[5], LANES)
    # By AMD's pseudocode: source lanes 0..31 trade with destination lanes 32..63.
    assert np.array_equal(got[6], np.concatenate([a[:32], b[:32]]))
    assert np.array_equal(got[7], np.concatenate([a[32:], b[32:]]))
    x, y = a.reshape(4, 16), b.reshape(4, 16)
    assert np.array_equal(got[8].reshape(4, 16), [x[0], y[0], x[2], y[2]])
    assert np.array_equal(got[9].reshape(4, 16), [x[1], y[1], x[3], y[3]])


DPP = {
    "quad_perm:[1,0,3,2]": LANES ^ 1,
    "row_ror:3": (LANES & 48) | ((LANES - 3) & 15),
    "row_mirror": (LANES & 48) | (15 - (LANES & 15)),
    "row_half_mirror": (LANES & 56) | (7 - (LANES & 7)),
    "row_newbcast:5": (LANES & 48) | 5,
}


def test_dpp():
    texts = [
        f"v_mov_b32_dpp v{40 + i}, v10 {control} row_mask:0xf bank_mask:0xf"
        for i, control in enumerate(DPP)
    ]
    texts += [
        "v_mov_b32 v45, v11\nv_mov_b32 v46, v11\nv_mov_b32 v47, v11\nv_mov_b32 v48, 0",
        "v_mov_b32_dpp v45, v10 row_shr:2 row_mask:0xf bank_mask:0xf",
        "v_mov_b32_dpp v46, v10 row_shl:2 row_mask:0xf bank_mask:0xf bound_ctrl:0",
        "v_mov_b32_dpp v47, v10 row_bcast:15 row_mask:0xa bank_mask:0xf",
        "v_add_u32_dpp v48, v10, v11 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:0",
    ]
    rows = _random(2)
    a, b = rows
    got = run_lanes(_kernel("\n".join(texts), 2, 9), rows, 9)
    for row, source in zip(got, DPP.values(), strict=False):
        assert np.array_equal(row, a[source])
    place = LANES & 15
    assert np.array_equal(got[5], np.where(place >= 2, np.roll(a, 2), b))
    assert np.array_equal(got[6], np.where(place < 14, np.roll(a, -2), 0))
    assert np.array_equal(got[7], np.where(LANES & 16, a[(LANES & 48) - 1], b))
    assert np.array_equal(got[8], b + np.where(place >= 1, np.roll(a, 1), 0))
