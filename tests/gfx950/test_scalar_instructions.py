"""Scalar instructions against AMD's pseudocode, and control flow."""

from __future__ import annotations

import numpy as np
import pseudocode
import pytest
from assembly import build, lane_body, run_lanes

NAMES = """
s_mov_b32 s_mov_b64 s_not_b32 s_not_b64 s_abs_i32 s_and_b32 s_and_b64 s_or_b32
s_or_b64 s_xor_b32 s_xor_b64 s_andn2_b32 s_andn2_b64 s_orn2_b32 s_orn2_b64 s_nand_b32
s_nand_b64 s_nor_b32 s_nor_b64 s_xnor_b32 s_xnor_b64 s_lshl_b32 s_lshl_b64 s_lshr_b32
s_lshr_b64 s_ashr_i32 s_ashr_i64 s_bfm_b32 s_bfm_b64 s_mul_i32 s_bfe_u32 s_bfe_u64
s_mul_hi_u32 s_mul_hi_i32 s_sext_i32_i8 s_sext_i32_i16
"""


def _sources(name: str) -> list[str]:
    kinds = pseudocode.source_types(name)
    if name.startswith("s_bfm_b64") or "_b64" in name:
        return ["b64" if k.endswith("64") else "b32" for k in kinds]
    return kinds


def _scalar(first: int, kind: str) -> str:
    return f"s[{first}:{first + 1}]" if kind.endswith("64") else f"s{first}"


def _text(name: str) -> str:
    """The operation on lane 0's values, its result and SCC broadcast."""
    lines = [f"v_readfirstlane_b32 s{20 + i}, v{10 + i}" for i in range(4)]
    lines += ["s_mov_b32 s30, 0", "s_mov_b32 s31, 0", "s_cmp_eq_u32 s30, s31"]
    operands = [_scalar(20 + 2 * i, k) for i, k in enumerate(_sources(name))]
    result = _scalar(30, pseudocode.destination_type(name))
    lines += [f"{name} {', '.join([result, *operands])}", "s_cselect_b32 s32, 1, 0"]
    lines += [f"v_mov_b32 v{40 + i}, s{30 + i}" for i in range(3)]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def kernels():
    return build({name: lane_body(_text(name), 4, 3) for name in NAMES.split()})


@pytest.mark.parametrize("name", NAMES.split())
def test_pseudocode(kernels, name):
    rng = np.random.default_rng(1)
    for trial in range(24):
        words = rng.integers(0, 1 << 32, 4, dtype=np.uint64)
        if trial % 3 == 1:
            words = rng.choice([0, 1, 31, 0xFFFFFFFF, 0x80000000, 0x00050003], 4)
        a, b = (int(words[2 * i]) | int(words[2 * i + 1]) << 32 for i in (0, 1))
        kind = pseudocode.destination_type(name)
        rows = np.repeat(words.astype(np.uint32)[:, None], 64, 1)
        low, high, scc = (int(x) for x in run_lanes(kernels[name], rows, 3)[:, 0])
        got = low | (high << 32 if kind.endswith("64") else 0)
        expected = pseudocode.evaluate(name, a, b)
        assert got == expected, (name, hex(a), hex(b))
        if "SCC = D0" in pseudocode.TEXTS[name]:
            assert scc == (expected != 0)


def _one(lines: str, inputs: list[int], outputs: int) -> list[int]:
    start = [f"v_readfirstlane_b32 s{20 + i}, v{10 + i}" for i in range(len(inputs))]
    end = [f"v_mov_b32 v{40 + i}, s{30 + i}" for i in range(outputs)]
    text = "\n".join([*start, lines, *end])
    kernel = build({"k": lane_body(text, len(inputs), outputs)})["k"]
    rows = np.repeat(np.array(inputs, np.uint32)[:, None], 64, 1)
    return run_lanes(kernel, rows, outputs)[:, 0].tolist()


def test_carries_and_overflow():
    lines = """s_add_u32 s30, s20, s22
s_addc_u32 s31, s21, s23
s_cselect_b32 s32, 1, 0
s_sub_u32 s33, s20, s22
s_subb_u32 s34, s21, s23
s_cselect_b32 s35, 1, 0
s_add_i32 s36, s20, s22
s_cselect_b32 s37, 1, 0
s_sub_i32 s36, s20, s22
s_cselect_b32 s38, 1, 0
s_min_i32 s39, s20, s22
s_max_u32 s40, s20, s22"""
    a, b, wrap = 0x7FFFFFFF_F0000001, 0x80000000_20000002, 1 << 64
    words = [a & 0xFFFFFFFF, a >> 32, b & 0xFFFFFFFF, b >> 32]
    got = _one(lines, words, 11)
    assert got[0] | got[1] << 32 == (a + b) % wrap
    assert got[2] == (a + b >= wrap)
    assert got[3] | got[4] << 32 == (a - b) % wrap
    assert got[5] == (a < b)
    assert got[7:9] == [0, 0]  # a negative plus and minus a positive number
    assert got[9:] == [0xF0000001, 0xF0000001]


def test_bits():
    lines = """s_ff1_i32_b32 s30, s20
s_flbit_i32_b32 s31, s20
s_bcnt1_i32_b32 s32, s20
s_brev_b32 s33, s20
s_bitset1_b32 s21, 5
s_mov_b32 s34, s21
s_pack_ll_b32_b16 s35, s20, s22
s_bfe_i32 s36, s20, 0x80004
s_cmp_lt_i32 s20, s22
s_cselect_b32 s37, 7, 8
s_movk_i32 s38, 0x8000
s_lshl2_add_u32 s39, s20, s22"""
    got = _one(lines, [0x00F0, 0, 0xFFFF1234], 10)
    assert got[:5] == [4, 24, 4, 0x0F000000, 32]
    assert got[5:] == [0x123400F0, 0xF, 8, 0xFFFF8000, 0xFFFF15F4]


def test_loop_and_divergence():
    """Each lane counts to its own number, by EXEC; each wave loops as long as its
    longest lane."""
    text = """v_mov_b32 v40, 0
s_mov_b64 s[20:21], exec
s_mov_b32 s22, 0
again:
v_cmp_lt_u32 vcc, v40, v10
s_and_b64 exec, exec, vcc
s_cbranch_execz done
v_add_u32 v40, 1, v40
s_add_u32 s22, s22, 1
s_branch again
done:
s_mov_b64 exec, s[20:21]
v_mov_b32 v41, s22"""
    kernel = build({"k": lane_body(text, 1, 2)})["k"]
    counts = np.random.default_rng(2).integers(0, 20, 64).astype(np.uint32)
    got = run_lanes(kernel, counts[None], 2)
    assert np.array_equal(got[0], counts)
    assert np.all(got[1] == counts.max())


def test_saved_exec():
    text = """v_mov_b32 v40, 1
v_cmp_gt_u32 vcc, 32, v0
s_and_saveexec_b64 s[20:21], vcc
v_mov_b32 v40, 2
s_xor_b64 exec, exec, s[20:21]
v_mov_b32 v40, 3
s_mov_b64 exec, s[20:21]
v_readfirstlane_b32 s22, v40
v_mov_b32 v41, s22"""
    kernel = build({"k": lane_body(text, 1, 2)})["k"]
    got = run_lanes(kernel, np.zeros((1, 64)), 2)
    assert got[0].tolist() == [2] * 32 + [3] * 32
    assert np.all(got[1] == 2)
