"""Matrix instructions: layouts as published, products in float64.

Layouts: the matrix instruction calculator's formulas of AMD's CDNA3 and CDNA4 ISA
documents, written out lane by lane below.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from assembly import build, lane_body, run_lanes

FORMATS = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8": ml_dtypes.float8_e4m3fn,
    "bf8": ml_dtypes.float8_e5m2,
    "fp6": ml_dtypes.float6_e2m3fn,
    "bf6": ml_dtypes.float6_e3m2fn,
    "fp4": ml_dtypes.float4_e2m1fn,
    "i8": np.int8,
}
NARROW = [  # name, tile, K, format
    ("v_mfma_f32_32x32x16_bf16", 32, 16, "bf16"),
    ("v_mfma_f32_32x32x16_f16", 32, 16, "f16"),
    ("v_mfma_f32_16x16x32_bf16", 16, 32, "bf16"),
    ("v_mfma_f32_16x16x32_f16", 16, 32, "f16"),
    ("v_mfma_f32_32x32x8_f16", 32, 8, "f16"),
    ("v_mfma_f32_16x16x16_bf16", 16, 16, "bf16"),
    ("v_mfma_f32_32x32x16_fp8_fp8", 32, 16, "fp8"),
    ("v_mfma_f32_16x16x32_bf8_bf8", 16, 32, "bf8"),
    ("v_mfma_i32_32x32x32_i8", 32, 32, "i8"),
    ("v_mfma_i32_16x16x64_i8", 16, 64, "i8"),
]
WIDE = [  # tile, K, A, B
    (32, 64, "fp8", "fp8"),
    (32, 64, "bf8", "fp8"),
    (32, 64, "fp8", "fp4"),
    (32, 64, "fp4", "fp4"),
    (16, 128, "fp8", "fp8"),
    (16, 128, "fp4", "fp8"),
    (32, 64, "fp6", "bf6"),
    (16, 128, "bf6", "fp6"),
]
CODES = {"fp8": 0, "bf8": 1, "fp6": 2, "bf6": 3, "fp4": 4}


def k_of(lane: int, element: int, tile: int, k: int, format: str) -> int:
    """Which K an element of a lane's registers is."""
    groups = 64 // tile
    group, count = lane // tile, k // groups
    if format in ("fp8", "bf8") and count == 32:  # two halves of 16
        return (element // 16) * (k // 2) + 16 * group + element % 16
    return count * group + element


def registers(matrix: np.ndarray, format: str) -> np.ndarray:
    """(tile, K) values to (registers, 64)."""
    tile, k = matrix.shape
    count = k * tile // 64
    values = np.zeros((64, count), matrix.dtype)
    for lane in range(64):
        for element in range(count):
            place = k_of(lane, element, tile, k, format)
            values[lane, element] = matrix[lane % tile, place]
    if format == "fp4":
        codes = values.view(np.uint8)
        data = codes[:, 0::2] | codes[:, 1::2] << 4
    elif format in ("fp6", "bf6"):
        bits = np.unpackbits(
            values.view(np.uint8)[..., None], axis=-1, bitorder="little"
        )
        data = np.packbits(bits[..., :6].reshape(64, -1), axis=-1, bitorder="little")
    else:
        data = values.view(np.uint8)
    return np.ascontiguousarray(data).view(np.uint32).T


def place(register: int, lane: int, tile: int) -> tuple[int, int]:
    """Row and column of an accumulator's register in a lane."""
    if tile == 32:
        return 8 * (register // 4) + 4 * (lane // 32) + register % 4, lane % 32
    return 4 * (lane // 16) + register, lane % 16


def to_registers(matrix: np.ndarray) -> np.ndarray:
    tile = len(matrix)
    rows = np.zeros((tile * tile // 64, 64), matrix.dtype)
    for register in range(len(rows)):
        for lane in range(64):
            rows[register, lane] = matrix[place(register, lane, tile)]
    return rows


def matrix_of(rng: np.random.Generator, shape: tuple[int, int], format: str):
    if format == "i8":
        return rng.integers(-128, 128, shape).astype(np.int8)
    return rng.normal(size=shape).astype(np.float32).astype(FORMATS[format])


def _range(first: int, count: int) -> str:
    return f"v[{first}:{first + count - 1}]"


def _body(name: str, a: int, b: int, d: int, rest: str = "", scales: int = 0) -> str:
    text = f"{name} {_range(60, d)}, {_range(10, a)}, {_range(10 + a, b)}, "
    text += _range(10 + a + b, d)
    for i in range(scales):
        text += f", v{10 + a + b + d + i}"
    nops = "\ns_nop 15\ns_nop 15"
    return lane_body(text + rest + nops, a + b + d + scales, d, 60)


def _sizes(tile: int, k: int, a: str, b: str) -> tuple[int, int, int]:
    bits = {"f16": 16, "bf16": 16, "fp4": 4, "fp6": 6, "bf6": 6}
    count = k * tile // 64
    return count * bits.get(a, 8) // 32, count * bits.get(b, 8) // 32, tile * tile // 64


def _build():
    bodies = {}
    for name, tile, k, f in NARROW:
        bodies[name] = _body(name, *_sizes(tile, k, f, f))
    for tile, k, a, b in WIDE:
        shape = f"{tile}x{tile}x{k}_f8f6f4"
        formats = f" cbsz:{CODES[a]} blgp:{CODES[b]}"
        sizes = _sizes(tile, k, a, b)
        bodies[f"plain_{shape}_{a}_{b}"] = _body(f"v_mfma_f32_{shape}", *sizes, formats)
        bodies[f"scale_{shape}_{a}_{b}"] = _body(
            f"v_mfma_scale_f32_{shape}",
            *sizes,
            f" op_sel:[0,1,0] op_sel_hi:[1,0,0]{formats}",
            scales=2,
        )
    return build(bodies)


@pytest.fixture(scope="module")
def kernels():
    return _build()


def _inputs(rng, tile, k, a_format, b_format):
    a = matrix_of(rng, (tile, k), a_format)
    b = matrix_of(rng, (tile, k), b_format)  # B transposed: a row is a column of B
    if a_format == "i8":
        c = rng.integers(-(2**31), 2**31, (tile, tile)).astype(np.int32)
    else:
        c = rng.normal(size=(tile, tile)).astype(np.float32)
    return a, b, c


@pytest.mark.parametrize(("name", "tile", "k", "format"), NARROW)
def test_layout_and_product(kernels, name, tile, k, format):
    a, b, c = _inputs(np.random.default_rng(k), tile, k, format, format)
    words = [
        registers(a, format),
        registers(b, format),
        to_registers(c).view(np.uint32),
    ]
    got = run_lanes(kernels[name], np.concatenate(words), tile * tile // 64)
    if format == "i8":
        exact = a.astype(np.int64) @ b.astype(np.int64).T + c
        want = to_registers(exact.astype(np.int32)).view(np.uint32)
        assert np.array_equal(got, want)
        return
    exact = a.astype(np.float64) @ b.astype(np.float64).T + c
    want = to_registers(exact.astype(np.float32))
    assert np.array_equal(got.view(np.float32), want)


@pytest.mark.parametrize(("tile", "k", "a_format", "b_format"), WIDE)
@pytest.mark.parametrize("scaled", [False, True])
def test_f8f6f4(kernels, tile, k, a_format, b_format, scaled):
    """The scale of lane row + tile * block covers K 32 * block to 32 * block + 31."""
    rng = np.random.default_rng(k)
    a, b, c = _inputs(rng, tile, k, a_format, b_format)
    words = [
        registers(a, a_format),
        registers(b, b_format),
        to_registers(c).view(np.uint32),
    ]
    left, right = a.astype(np.float64), b.astype(np.float64)
    shape = f"{tile}x{tile}x{k}_f8f6f4_{a_format}_{b_format}"
    if scaled:
        codes = rng.integers(120, 134, (2, 64, 4)).astype(np.uint8)
        words += [codes[i].view(np.uint32).T for i in (0, 1)]
        # op_sel and op_sel_hi together: byte 2 for A, byte 1 for B.
        for matrix, scale in ((left, codes[0, :, 2]), (right, codes[1, :, 1])):
            for lane in range(64):
                block = slice(32 * (lane // tile), 32 * (lane // tile) + 32)
                matrix[lane % tile, block] *= 2.0 ** (int(scale[lane]) - 127)
    got = run_lanes(
        kernels[f"{'scale' if scaled else 'plain'}_{shape}"],
        np.concatenate(words),
        tile * tile // 64,
    )
    want = to_registers((left @ right.T + c).astype(np.float32))
    assert np.array_equal(got.view(np.float32), want)


def test_scale_of_nan(kernels):
    words = np.zeros((8 + 8 + 16 + 2, 64), np.uint32)
    words[-2] = 0x00FF0000
    got = run_lanes(kernels["scale_32x32x64_f8f6f4_fp8_fp8"], words, 16)
    assert np.all(np.isnan(got.view(np.float32)))
