"""Vector arithmetic against AMD's pseudocode and against exact arithmetic."""

from __future__ import annotations

import math
import struct

import numpy as np
import pseudocode
import pytest
from assembly import build, lane_body, run, run_lanes

INTEGER = """
v_mul_i32_i24 v_mul_hi_i32_i24 v_mul_u32_u24 v_mul_hi_u32_u24 v_min_i32 v_max_i32
v_min_u32 v_max_u32 v_lshrrev_b32 v_ashrrev_i32 v_lshlrev_b32 v_and_b32 v_or_b32
v_xor_b32 v_xnor_b32 v_add_u16 v_sub_u16 v_mul_lo_u16 v_lshlrev_b16 v_lshrrev_b16
v_ashrrev_i16 v_max_u16 v_max_i16 v_min_u16 v_min_i16 v_add_u32 v_sub_u32 v_subrev_u32
v_mad_i32_i24 v_mad_u32_u24 v_bfe_u32 v_bfi_b32 v_alignbit_b32 v_alignbyte_b32
v_min3_i32 v_min3_u32 v_max3_i32 v_max3_u32 v_mad_u32_u16 v_mad_i32_i16 v_xad_u32
v_lshl_add_u32 v_add_lshl_u32 v_add3_u32 v_lshl_or_b32 v_and_or_b32 v_or3_b32
v_lshl_add_u64 v_mul_lo_u32 v_mul_hi_u32 v_mul_hi_i32 v_lshlrev_b64 v_lshrrev_b64
v_ashrrev_i64 v_bfm_b32 v_add_i32 v_sub_i32 v_add_i16 v_sub_i16 v_not_b32 v_mov_b32
v_mov_b64
"""
FLOAT = """
v_add_f32 v_sub_f32 v_subrev_f32 v_mul_f32 v_add_f16 v_sub_f16 v_subrev_f16 v_mul_f16
v_fma_f32 v_fma_f16 v_fma_f64 v_add_f64 v_mul_f64
"""
ACCUMULATING = ["v_fmac_f32", "v_fmac_f64"]
ALL = [*INTEGER.split(), *FLOAT.split(), *ACCUMULATING]


def _registers(first: int, kind: str) -> str:
    if kind.endswith("64"):
        return f"v[{first}:{first + 1}]"
    return f"v{first}"


def _text(name: str) -> str:
    kinds = pseudocode.source_types(name)
    sources = [_registers(10 + 2 * i, k) for i, k in enumerate(kinds)]
    result = _registers(40, pseudocode.destination_type(name))
    start = "v_mov_b32 v40, v16\nv_mov_b32 v41, v17\n"
    return start + f"{name} {', '.join([result, *sources])}"


@pytest.fixture(scope="module")
def kernels():
    return build({name: lane_body(_text(name), 8, 2) for name in ALL})


def _edges(kind: str, rng: np.random.Generator) -> np.ndarray:
    """64 values of a type, as bits: special ones, near misses, and random ones."""
    size = int(kind[1:])
    mask = (1 << size) - 1
    if kind.startswith("f"):
        code = {16: "<e", 32: "<f", 64: "<d"}[size]
        floats = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, 1.5, 3.0, 0.1, 65504.0)
        bits = [int.from_bytes(struct.pack(code, x), "little") for x in floats]
        bits += [
            1,
            2,
            (1 << (size - 1)) | 1,
            3 << (size // 4),
            bits[2] + 1,
            bits[2] - 1,
        ]
        near = rng.integers(bits[2] - 1000, bits[2] + 1000, 24, dtype=np.uint64)
        bits += near.tolist()
    else:
        bits = [
            0,
            1,
            2,
            31,
            32,
            63,
            mask,
            mask >> 1,
            (mask >> 1) + 1,
            0xFFFFFF,
            0x800000,
        ]
        bits += [1 << (i * size // 13) for i in range(13)]
    others = rng.integers(0, mask, 64 - len(bits), dtype=np.uint64, endpoint=True)
    values = np.array([b & mask for b in bits] + others.tolist(), np.uint64)
    return rng.permutation(values)


def _halves(values: np.ndarray) -> list[np.ndarray]:
    return [
        (values & np.uint64(0xFFFFFFFF)).astype(np.uint32),
        (values >> np.uint64(32)).astype(np.uint32),
    ]


@pytest.mark.parametrize("name", ALL)
def test_pseudocode(kernels, name):
    rng = np.random.default_rng(len(name))
    kinds = pseudocode.source_types(name)
    result_kind = pseudocode.destination_type(name)
    for _ in range(6):
        sources = [_edges(k, rng) for k in kinds]
        old = _edges(result_kind, rng)
        filled = [*sources, *([np.zeros(64, np.uint64)] * (3 - len(sources))), old]
        inputs = [half for values in filled for half in _halves(values)]
        low, high = run_lanes(kernels[name], np.stack(inputs), 2)
        got = low.astype(np.uint64)
        if result_kind.endswith("64"):
            got |= high.astype(np.uint64) << np.uint64(32)
        for lane in range(64):
            given = [int(s[lane]) for s in sources]
            expected = pseudocode.evaluate(name, *given, old=int(old[lane]))
            actual = int(got[lane])
            if result_kind == "f16" and name == "v_fma_f16":
                actual &= 0xFFFF  # it keeps the register's other half
            if result_kind.startswith("f"):
                expected_value = pseudocode.float_of(expected, result_kind)
                if math.isnan(expected_value):
                    assert math.isnan(pseudocode.float_of(actual, result_kind))
                    continue
            assert actual == expected, (name, lane, [hex(x) for x in given])


def test_fma_rounds_once():
    """A sum that float64 rounds to a tie of float32, and then wrongly to even."""
    text = "v_fma_f32 v40, v10, v11, v12\nv_fma_f32 v41, v10, v11, -v12"
    kernel = build({"k": lane_body(text, 3, 2)})["k"]
    a = np.float32(1 + 2.0**-12)
    rows = np.zeros((3, 64), np.float32)
    rows[0], rows[1] = a, a  # a * a = 1 + 2^-11 + 2^-24: a tie for float32
    rows[2, 0], rows[2, 1] = 2.0**-90, -(2.0**-90)
    got = run_lanes(kernel, rows.view(np.uint32), 2).view(np.float32)
    tie = np.float32(1 + 2.0**-11)
    above = np.nextafter(tie, np.float32(2))
    assert got[0, :3].tolist() == [above, tie, tie]
    assert got[1, :3].tolist() == [tie, above, tie]


def test_denormals_follow_the_kernel_descriptor():
    text = "v_add_f32 v40, v10, v11\nv_mul_f32 v41, 2.0, v10\nv_mov_b32 v42, v10"
    rows = np.zeros((2, 64), np.float32)
    rows[0] = 1e-39
    body = lane_body(text, 2, 3)
    for mode, expected in ((3, (1e-39, 2e-39)), (0, (0, 0)), (2, (0, 0))):
        kernel = build({"k": body}, denormals=mode)["k"]
        got = run_lanes(kernel, rows.view(np.uint32), 3).view(np.float32)[:, 0]
        assert np.array_equal(got, np.array([*expected, 1e-39], np.float32))


CASES = {
    "exp": ("v_exp_f32 v40, v10", lambda x: 2.0**x),
    "log": ("v_log_f32 v40, v10", lambda x: math.log2(abs(x))),
    "rcp": ("v_rcp_f32 v40, v10", lambda x: 1 / x),
    "rsq": ("v_rsq_f32 v40, |v10|", lambda x: 1 / math.sqrt(abs(x))),
    "sqrt": ("v_sqrt_f32 v40, |v10|", lambda x: math.sqrt(abs(x))),
    "sin": ("v_sin_f32 v40, v10", lambda x: math.sin(2 * math.pi * math.fmod(x, 1))),
}


@pytest.fixture(scope="module")
def functions():
    texts = {
        n: t.replace("v_log_f32 v40, v10", "v_log_f32 v40, |v10|")
        for n, (t, _) in CASES.items()
    }
    return build({name: lane_body(text, 1, 1) for name, text in texts.items()})


@pytest.mark.parametrize("name", CASES)
def test_functions(functions, name):
    """Within one unit in the last place of the exact value, as AMD promises."""
    x = np.random.default_rng(3).uniform(-60, 60, 64).astype(np.float32)
    got = run_lanes(functions[name], x.view(np.uint32)[None], 1).view(np.float32)[0]
    exact = np.array([CASES[name][1](float(v)) for v in x])
    assert np.all(np.abs(got - exact) <= np.spacing(np.abs(exact.astype(np.float32))))


MINMAX = {
    "max": "v_max_f32 v40, v10, v11",
    "min": "v_min_f32 v40, v10, v11",
    "max3": "v_max3_f32 v40, v10, v11, v11",
    "maximum3": "v_maximum3_f32 v40, v10, v11, v11",
    "minimum3": "v_minimum3_f32 v40, v10, v11, v11",
    "med3": "v_med3_f32 v40, v10, v11, v12",
}


def test_minimum_and_maximum():
    built = build({n: lane_body(t, 3, 1) for n, t in MINMAX.items()})
    special = [0.0, -0.0, 1.0, -2.0, math.inf, -math.inf, math.nan, 3.5]
    a, b = (
        np.array(x, np.float32)
        for x in zip(*[(p, q) for p in special for q in special], strict=True)
    )
    rows = np.stack([a, b, np.full(64, 0.5, np.float32)]).view(np.uint32)
    got = {n: run_lanes(k, rows, 1).view(np.float32)[0] for n, k in built.items()}
    for lane in range(64):
        x, y = float(a[lane]), float(b[lane])
        numbers = [v for v in (x, y) if not math.isnan(v)]
        key = lambda v: (v, math.copysign(1, v))  # noqa: E731
        largest = max(numbers, key=key) if numbers else math.nan
        smallest = min(numbers, key=key) if numbers else math.nan
        nan = len(numbers) < 2
        expected = {
            "max": largest,
            "min": smallest,
            "max3": largest,
            "maximum3": math.nan if nan else largest,
            "minimum3": math.nan if nan else smallest,
            "med3": min([*numbers, 0.5], key=key)
            if nan
            else sorted([x, y, 0.5], key=key)[1],
        }
        for name, value in expected.items():
            actual = float(got[name][lane])
            same = repr(actual) == repr(value) or actual == value != 0
            assert same, (name, x, y, actual, value)


def test_modifiers():
    """neg, abs, clamp, and an output of a comparison used by a choice."""
    text = """v_add_f32 v40, -|v10|, v11 clamp
v_cmp_lt_f32 s[8:9], v10, v11
v_cndmask_b32 v41, v10, v11, s[8:9]
v_cmp_class_f32 vcc, v10, 0x3
v_cndmask_b32 v42, 0, 1.0, vcc
v_mul_f32 v43, 0.5, v10
v_fma_f32 v44, v10, v11, -1.0"""
    kernel = build(
        {
            "k": lane_body(
                text.replace(
                    "v_cmp_class_f32 vcc, v10, 0x3",
                    "v_mov_b32 v12, 3\nv_cmp_class_f32 vcc, v10, v12",
                ),
                2,
                5,
            )
        }
    )["k"]
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=(2, 64)).astype(np.float32)
    a[7] = np.nan
    got = run_lanes(kernel, np.stack([a, b]).view(np.uint32), 5).view(np.float32)
    clamped = np.clip(b - np.abs(a), 0, 1)
    clamped[7] = 0
    assert np.array_equal(got[0], clamped)
    assert np.array_equal(got[1], np.where(a < b, b, a), equal_nan=True)
    assert np.array_equal(got[2], np.isnan(a).astype(np.float32))
    assert np.array_equal(got[3], a * np.float32(0.5), equal_nan=True)


def test_bit_operations():
    text = """v_bitop3_b32 v40, v10, v11, v12 bitop3:0xca
v_bitop3_b32 v41, v10, v11, v12 bitop3:0x96
v_perm_b32 v42, v10, v11, v13
v_bfe_i32 v43, v10, 5, 9
v_bfrev_b32 v44, v10
v_ffbh_u32 v45, v10
v_ffbl_b32 v46, v10
v_bcnt_u32_b32 v47, v10, 3"""
    kernel = build({"k": lane_body(text, 4, 8)})["k"]
    rng = np.random.default_rng(6)
    rows = rng.integers(0, 1 << 32, (4, 64), dtype=np.uint64).astype(np.uint32)
    rows[3] = rng.integers(0, 14, (64, 4), dtype=np.uint8).view(np.uint32)[:, 0]
    got = run_lanes(kernel, rows, 8)
    for lane in range(64):
        a, b, c, select = (int(x) for x in rows[:, lane])
        assert got[0, lane] == (a & b) | (~a & 0xFFFFFFFF & c)
        assert got[1, lane] == a ^ b ^ c
        data = (a << 32 | b).to_bytes(8, "little")
        picked = []
        for s in select.to_bytes(4, "little"):
            if s < 8:
                picked.append(data[s])
            elif s < 12:
                picked.append(0xFF if data[2 * (s - 8) + 1] & 0x80 else 0)
            else:
                picked.append(0 if s == 12 else 0xFF)
        assert got[2, lane] == int.from_bytes(bytes(picked), "little")
        field = (a >> 5) & 0x1FF
        assert got[3, lane] == (field - (0x200 if field & 0x100 else 0)) & 0xFFFFFFFF
        assert got[4, lane] == int(f"{a:032b}"[::-1], 2)
        assert got[5, lane] == 32 - a.bit_length()
        assert got[6, lane] == (a & -a).bit_length() - 1
        assert got[7, lane] == a.bit_count() + 3


def test_carries():
    text = """v_add_co_u32 v40, vcc, v10, v12
v_addc_co_u32 v41, vcc, v11, v13, vcc
v_sub_co_u32 v42, vcc, v10, v12
v_subb_co_u32 v43, vcc, v11, v13, vcc
v_mad_u64_u32 v[44:45], s[8:9], v10, v12, v[10:11]"""
    kernel = build({"k": lane_body(text, 4, 6)})["k"]
    rng = np.random.default_rng(7)
    rows = rng.integers(0, 1 << 32, (4, 64), dtype=np.uint64).astype(np.uint32)
    rows[1, :8], rows[3, :8] = 5, 5
    got = [[int(x) for x in row] for row in run_lanes(kernel, rows, 6)]
    for lane in range(64):
        a0, a1, b0, b1 = (int(x) for x in rows[:, lane])
        a, b, wrap = a1 << 32 | a0, b1 << 32 | b0, 1 << 64
        assert got[1][lane] << 32 | got[0][lane] == (a + b) % wrap
        assert got[3][lane] << 32 | got[2][lane] == (a - b) % wrap
        assert got[5][lane] << 32 | got[4][lane] == (a0 * b0 + a) % wrap


def test_packed():
    modifiers = "op_sel:[1,0,0] op_sel_hi:[0,1,1] neg_lo:[0,1,0]"
    text = f"""v_pk_fma_f32 v[40:41], v[10:11], v[12:13], v[14:15] {modifiers}
v_pk_mul_f32 v[42:43], v[10:11], v[12:13]
v_pk_add_f32 v[44:45], v[10:11], v[12:13] neg_hi:[0,1]
v_pk_mov_b32 v[46:47], v[10:11], v[12:13] op_sel:[1,0]"""
    kernel = build({"k": lane_body(text, 6, 8)})["k"]
    x = np.random.default_rng(8).normal(size=(6, 64)).astype(np.float32)
    got = run_lanes(kernel, x.view(np.uint32), 8).view(np.float32)
    low = [
        pseudocode.exact_fma(float(a), -float(b), float(c), "f32")
        for a, b, c in zip(x[1], x[2], x[4], strict=True)
    ]
    high = [
        pseudocode.exact_fma(float(a), float(b), float(c), "f32")
        for a, b, c in zip(x[0], x[3], x[5], strict=True)
    ]
    expected = [
        low,
        high,
        x[0] * x[2],
        x[1] * x[3],
        x[0] + x[2],
        x[1] - x[3],
        x[1],
        x[2],
    ]
    for row, want in zip(got, expected, strict=True):
        assert np.array_equal(row, np.array(want, np.float32))


def test_packed_halves():
    text = """v_pk_add_f16 v40, v10, v11
v_pk_mul_f16 v41, v10, v11 op_sel:[1,0] op_sel_hi:[0,1]
v_pk_max_f16 v42, v10, v11
v_pk_add_u16 v43, v12, v13
v_pk_max_i16 v44, v12, v13
v_dot4_i32_i8 v45, v12, v13, v14
v_fma_mix_f32 v46, v10, v11, 1.0 op_sel_hi:[1,1,0]"""
    kernel = build({"k": lane_body(text, 5, 7)})["k"]
    rng = np.random.default_rng(9)
    h = rng.normal(size=(2, 64, 2)).astype(np.float16)
    n = rng.integers(0, 1 << 16, (2, 64, 2)).astype(np.uint16)
    c = rng.integers(0, 1 << 31, 64, dtype=np.uint32)
    rows = [*(x.view(np.uint32)[..., 0] for x in (*h, *n)), c]
    got = run_lanes(kernel, np.stack(rows), 7)
    halves = [g[:, None].view(np.float16) for g in got[:3]]
    assert np.array_equal(halves[0], h[0] + h[1])
    assert np.array_equal(halves[1], h[0][:, ::-1] * h[1])
    assert np.array_equal(halves[2], np.maximum(*h))
    assert np.array_equal(got[3][:, None].view(np.uint16), n[0] + n[1])
    assert np.array_equal(got[4][:, None].view(np.int16), np.maximum(*n.view(np.int16)))
    products = n[0].view(np.int8).astype(int) * n[1].view(np.int8).astype(int)
    assert np.array_equal(got[5], (products.sum(1) + c).astype(np.uint32))
    mixed = h[0][:, 0].astype(np.float64) * h[1][:, 0] + 1
    assert np.array_equal(got[6].view(np.float32), mixed.astype(np.float32))


def test_accumulation_registers():
    text = """v_accvgpr_write_b32 a3, v10
v_accvgpr_write_b32 a4, 7
v_accvgpr_read_b32 v40, a3
v_accvgpr_read_b32 v41, a4
global_store_dword v2, a3, s[6:7] offset:512
s_nop 0"""
    kernel = build({"k": lane_body(text, 1, 2)}, agprs=8)["k"]
    rows = np.arange(64, dtype=np.uint32)[None]
    result = np.zeros((3, 64), np.uint32)
    run(kernel, rows, result)
    assert np.array_equal(result, [rows[0], np.full(64, 7), rows[0]])


def test_bytes_and_halves_with_scalars():
    text = """s_mov_b32 s20, 0x30201ff
v_and_b32_sdwa v40, s20, v10 dst_sel:DWORD src0_sel:WORD_1 src1_sel:DWORD
v_add_u32_sdwa v41, v10, s20 dst_sel:DWORD src0_sel:BYTE_2 src1_sel:BYTE_0
s_mov_b64 s[22:23], -1
v_cmp_lt_u16_sdwa s[22:23], v10, v11 src0_sel:BYTE_1 src1_sel:WORD_1
v_cndmask_b32_e64 v42, 0, 1, s[22:23]
s_mov_b64 vcc, -1
v_cmp_eq_u32_sdwa vcc, v10, v11 src0_sel:BYTE_0 src1_sel:BYTE_0
v_cndmask_b32_e64 v43, 0, 1, vcc
v_bitop3_b16 v44, v10, v11, v12 bitop3:0xca
v_bitop3_b16 v45, v10, v11, v12 bitop3:0x96 op_sel:[1,0,1,0]"""
    kernel = build({"k": lane_body(text, 3, 6)})["k"]
    rng = np.random.default_rng(8)
    rows = rng.integers(0, 1 << 32, (3, 64), dtype=np.uint64).astype(np.uint32)
    rows[1, ::2] = rows[1, ::2] & ~np.uint32(255) | rows[0, ::2] & 255
    a, b, c = rows
    got = run_lanes(kernel, rows, 6)
    assert np.array_equal(got[0], a & 0x302)
    assert np.array_equal(got[1], (a >> 16 & 255) + 255)
    assert np.array_equal(got[2], (a >> 8 & 255) < b >> 16)
    assert np.array_equal(got[3], a & 255 == b & 255)
    assert np.array_equal(got[4], (a & b | ~a & c) & 0xFFFF)
    assert np.array_equal(got[5], (a >> 16 ^ b ^ c >> 16) & 0xFFFF)
