"""Conversions against ml_dtypes, NumPy and the published formulas."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from assembly import build, lane_body, run_lanes

FP8 = {"fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2}
TEXTS = {
    "bf16": "v_cvt_pk_bf16_f32 v40, v10, v11",
    "f16": "v_cvt_pk_f16_f32 v40, v10, v11",
    "rtz": "v_cvt_pkrtz_f16_f32 v40, v10, v11",
    "unorm": "v_cvt_pknorm_u16_f32 v40, v10, v11",
    "snorm": "v_cvt_pknorm_i16_f32 v40, v10, v11",
    "u32": "v_cvt_u32_f32 v40, v10",
    "i32": "v_cvt_i32_f32 v40, v10",
    "f32u": "v_cvt_f32_u32 v40, v10",
    "f32i": "v_cvt_f32_i32 v40, v10",
    "ubyte": "v_cvt_f32_ubyte2 v40, v10",
    "u8": "v_cvt_pk_u8_f32 v40, v10, 2, v11",
    "halves": "v_cvt_f32_f16 v40, v10\nv_cvt_f32_f16_sdwa v41, v10 src0_sel:WORD_1",
    "rint": "v_rndne_f32 v40, v10\nv_floor_f32 v41, v10",
    "split": "v_frexp_mant_f32 v40, v10\nv_frexp_exp_i32_f32 v41, v10",
}
for _name in FP8:
    TEXTS[f"to_{_name}"] = (
        "v_mov_b32 v40, 0x12345678\nv_mov_b32 v41, 0x12345678\n"
        f"v_cvt_pk_{_name}_f32 v40, v10, v11\n"
        f"v_cvt_pk_{_name}_f32 v41, v10, v11 op_sel:[0,0,1]"
    )
    TEXTS[f"scaled_{_name}"] = (
        "v_mov_b32 v40, 0\nv_mov_b32 v41, 0\n"
        f"v_cvt_scalef32_pk_{_name}_f32 v40, v10, v11, v12\n"
        f"v_cvt_scalef32_pk_{_name}_f16 v41, v13, v12\n"
        f"v_cvt_scalef32_pk_{_name}_bf16 v41, v14, v12 op_sel:[0,0,1]"
    )
    TEXTS[f"from_{_name}"] = (
        f"v_cvt_pk_f32_{_name} v[40:41], v10\n"
        f"v_cvt_pk_f32_{_name}_sdwa v[42:43], v10 src0_sel:WORD_1\n"
        f"v_cvt_f32_{_name} v44, v10\n"
        f"v_cvt_f32_{_name}_sdwa v45, v10 src0_sel:BYTE_3"
    )
TEXTS["saturating"] = (
    "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\nv_mov_b32 v40, 0\n"
    "v_cvt_pk_fp8_f32 v40, v10, v11"
)


@pytest.fixture(scope="module")
def kernels():
    return build(
        {
            n: lane_body(f"v_mov_b32 v41, 0\n{t}", 5, 6 if "from" in n else 2)
            for n, t in TEXTS.items()
        }
    )


def _values(scale: float, seed: int = 0) -> np.ndarray:
    """(2, 64) floats of all sizes near a scale, with ties, zeros and specials."""
    rng = np.random.default_rng(seed)
    spread = rng.normal(size=(2, 64)) * 2.0 ** rng.integers(-14, 10, (2, 64))
    values = (spread * scale).astype(np.float32)
    values[0, :8] = [0, -0.0, np.inf, -np.inf, np.nan, scale, 1.0625 * scale, -scale]
    values[1, :4] = [1.1875 * scale, 2.0**-10 * scale, 3 * 2.0**-11 * scale, -0.0]
    return values


def _run(kernels, name: str, *rows: np.ndarray, outputs: int = 2) -> np.ndarray:
    words = [np.ascontiguousarray(r).view(np.uint32) for r in rows]
    words += [np.zeros(64, np.uint32)] * (5 - len(words))
    return run_lanes(kernels[name], np.stack(words), outputs)


def _same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal bits, any NaN for a NaN."""
    nan = np.isnan(want.astype(np.float32))
    assert np.array_equal(np.isnan(got.astype(np.float32)), nan)
    size = f"u{want.dtype.itemsize}"
    assert np.array_equal(got.view(size)[~nan], want.view(size)[~nan])


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)]
)
def test_to_half(kernels, name, dtype):
    for scale in (1.0, 1e-38 if name == "bf16" else 1e-6, 60000.0):
        x = _values(scale)
        got = _run(kernels, name, *x, outputs=2)[0][:, None].view(dtype)
        with np.errstate(over="ignore"):
            _same(got, x.T.astype(dtype))


def test_round_toward_zero(kernels):
    x = _values(1.0)
    got = _run(kernels, "rtz", *x)[0][:, None].view(np.float16).astype(np.float64)
    finite = np.isfinite(x.T)
    got, exact = np.abs(got[finite]), np.abs(x.T[finite])
    assert np.all(got <= exact)
    assert np.all(got + np.spacing(got.astype(np.float16)) > exact)


def test_normalised(kernels):
    x = _values(0.5)
    clamped = np.nan_to_num(np.clip(x.T.astype(np.float64), 0, 1))
    got = _run(kernels, "unorm", *x)[0][:, None].view(np.uint16)
    assert np.array_equal(got, np.rint(clamped * 65535).astype(np.uint16))
    clamped = np.nan_to_num(np.clip(x.T.astype(np.float64), -1, 1))
    got = _run(kernels, "snorm", *x)[0][:, None].view(np.int16)
    assert np.array_equal(got, np.rint(clamped * 32767).astype(np.int16))


def test_integers(kernels):
    x = _values(3e9)[0]
    exact = np.nan_to_num(np.trunc(x.astype(np.float64)), posinf=1e30, neginf=-1e30)
    got = _run(kernels, "u32", x)[0]
    assert np.array_equal(got, np.clip(exact, 0, 2**32 - 1).astype(np.uint32))
    got = _run(kernels, "i32", x)[0].view(np.int32)
    assert np.array_equal(got, np.clip(exact, -(2**31), 2**31 - 1).astype(np.int32))
    n = np.random.default_rng(1).integers(0, 1 << 32, 64, dtype=np.uint64)
    n = n.astype(np.uint32)
    assert np.array_equal(_run(kernels, "f32u", n)[0].view(np.float32), n.astype("f4"))
    signed = n.view(np.int32).astype("f4")
    assert np.array_equal(_run(kernels, "f32i", n)[0].view(np.float32), signed)
    byte = ((n >> 16) & 255).astype("f4")
    assert np.array_equal(_run(kernels, "ubyte", n)[0].view(np.float32), byte)


def test_byte_insertion(kernels):
    x = _values(100.0)[0]
    old = np.arange(64, dtype=np.uint32) * np.uint32(0x01010101)
    rounded = np.nan_to_num(np.clip(np.rint(x), 0, 255)).astype(np.uint32)
    got = _run(kernels, "u8", x, old)[0]
    assert np.array_equal(got, (old & 0xFF00FFFF) | (rounded << 16))


@pytest.mark.parametrize("name", FP8)
def test_to_fp8(kernels, name):
    dtype = FP8[name]
    for scale in (1.0, 448.0, 57344.0, 2.0**-6, 2.0**-9, 2.0**-16):
        x = _values(scale, seed=int(scale))
        got = _run(kernels, f"to_{name}", *x)
        with np.errstate(over="ignore", invalid="ignore"):
            want = x.T.astype(dtype)
        low = (got[0] & 0xFFFF).astype(np.uint16)[:, None].view(dtype)
        high = (got[1] >> 16).astype(np.uint16)[:, None].view(dtype)
        _same(low, want)
        _same(high, want)
        assert np.all(got[0] >> 16 == 0x1234)  # the other half stays
        assert np.all(got[1] & 0xFFFF == 0x5678)


def test_saturating_fp8(kernels):
    x = _values(448.0)
    got = _run(kernels, "saturating", *x, outputs=2)[0]
    codes = (got & 0xFFFF).astype(np.uint16)[:, None].view(ml_dtypes.float8_e4m3fn)
    _same(codes, np.clip(x.T, -448, 448).astype(ml_dtypes.float8_e4m3fn))


@pytest.mark.parametrize("name", FP8)
def test_scaled_fp8(kernels, name):
    """The scale is the exponent of a float: values are divided by it."""
    dtype = FP8[name]
    x = _values(4.0)
    x = np.where(np.isfinite(x), x, 1).astype(np.float32)
    scale = np.float32(2.0) ** np.random.default_rng(2).integers(-3, 4, 64)
    scale = scale.astype(np.float32) * np.float32(
        1.25
    )  # the mantissa counts for nothing
    half = x.T.astype(np.float16)
    brain = x.T.astype(ml_dtypes.bfloat16)
    words = [np.ascontiguousarray(v).view(np.uint32)[:, 0] for v in (half, brain)]
    got = _run(kernels, f"scaled_{name}", *x, scale, *words)
    divisor = (scale / np.float32(1.25))[:, None]
    for codes, values in (
        (got[0] & 0xFFFF, x.T),
        (got[1] & 0xFFFF, half.astype(np.float32)),
        (got[1] >> 16, brain.astype(np.float32)),
    ):
        with np.errstate(over="ignore"):
            want = (values / divisor).astype(dtype)
        _same(codes.astype(np.uint16)[:, None].view(dtype), want)


@pytest.mark.parametrize("name", FP8)
def test_from_fp8(kernels, name):
    codes = np.arange(256, dtype=np.uint8).reshape(64, 4)
    got = _run(kernels, f"from_{name}", codes.view(np.uint32)[:, 0], outputs=6)
    want = codes.view(FP8[name]).astype(np.float32).T
    got = got.view(np.float32)
    for row, column in enumerate((0, 1, 2, 3, 0, 3)):
        assert np.array_equal(got[row], want[column], equal_nan=True)


def test_rounding_and_splitting(kernels):
    x = _values(10.0)[0]
    got = _run(kernels, "rint", x).view(np.float32)
    assert np.array_equal(got[0], np.rint(x), equal_nan=True)
    assert np.array_equal(got[1], np.floor(x), equal_nan=True)
    x = x[np.isfinite(x)]
    x = np.resize(x, 64)
    got = _run(kernels, "split", x)
    mantissa, exponent = np.frexp(x)
    assert np.array_equal(got[0].view(np.float32), mantissa)
    assert np.array_equal(got[1].view(np.int32), exponent)


def test_halves(kernels):
    h = np.random.default_rng(4).normal(size=(64, 2)).astype(np.float16)
    got = _run(kernels, "halves", h.view(np.uint32)[:, 0]).view(np.float32)
    assert np.array_equal(got, h.T.astype(np.float32))
