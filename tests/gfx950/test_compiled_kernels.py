"""HIP as clang compiles it, against NumPy: what compilers do with ordinary code."""

from __future__ import annotations

import runpy
import struct
import sys

import ml_dtypes
import numpy as np
import pytest
from assembly import compile_hip, run

from tools.gfx950 import CodeObject, Memory, launch

SOURCE = """
typedef _Float16 half;
typedef __bf16 bhalf;
typedef unsigned u32; typedef unsigned long long u64;
typedef unsigned char u8; typedef short i16;
#define T __builtin_amdgcn_workitem_id_x()
#define THREADS(most) __attribute__((amdgpu_flat_work_group_size(1, most)))
#define KERNEL extern "C" __global__ THREADS(512)

KERNEL void divisions(const float* x, float* y) {
  float a = x[T], b = x[T + 64];
  y[T] = a / b;
  y[T + 64] = __builtin_sqrtf(__builtin_fabsf(a));
  y[T + 128] = __builtin_fmodf(a, b);
}

KERNEL void integers(const u32* x, u32* y) {
  u32 a = x[T], b = x[T + 64] | 1;
  y[T] = a / b; y[T + 64] = a % b;
  y[T + 128] = (int)a / (int)b; y[T + 192] = (int)a % (int)b;
  u64 p = (u64)a * b + ((u64)b << 20);
  y[T + 256] = p; y[T + 320] = p >> 32; y[T + 384] = p >> (b & 63);
  y[T + 448] = __builtin_clz(b) + __builtin_popcount(a) * 100;
  long long s = ((long long)(int)a * (int)b) >> 7;
  y[T + 512] = s; y[T + 576] = s < 12345678901ll ? 1 : 2;
  y[T + 640] = __builtin_bswap32(a) ^ __builtin_bitreverse32(b);
}

KERNEL void halves(const float* x, float* y) {
  half h = (half)x[T]; bhalf b = (bhalf)x[T];
  y[T] = (float)(h * h + h); y[T + 64] = (float)b;
  y[T + 128] = (float)(half)(float)(h > (half)0.5f ? h : -h);
}

KERNEL void narrow(const u8* x, u8* y) {
  const i16* w = (const i16*)x;
  y[T] = x[T] * 3 + 1;
  ((i16*)(y + 64))[T] = w[T] / 5;
  ((u32*)(y + 192))[T] = x[4 * T] | x[4 * T + 1] << 8 | x[4 * T + 2] << 16;
}

KERNEL void branches(const u32* x, u32* y) {
  u32 a = x[T], n = 0;
  while (a != 1 && n < 200) { a = a & 1 ? 3 * a + 1 : a / 2; n++; }
  switch (x[T] % 5) {
    case 0: n += 1000; break;
    case 1: n *= 2; break;
    case 3: n ^= 0x5555; break;
    default: n = -n;
  }
  y[T] = n;
}

KERNEL void reduction(const float* x, float* y) {
  __shared__ float part[512];
  int t = T;
  part[t] = x[t];
  __syncthreads_();
  for (int d = 256; d; d >>= 1) {
    if (t < d) part[t] += part[t + d];
    __syncthreads_();
  }
  y[t] = part[0];
}

KERNEL void wave_sum(const float* x, float* y) {
  float s = x[T];
  for (int d = 1; d < 64; d <<= 1) {
    int other = __builtin_amdgcn_ds_bpermute(4 * (T ^ d), __builtin_bit_cast(int, s));
    s += __builtin_bit_cast(float, other);
  }
  y[T] = s;
  y[T + 64] = __builtin_amdgcn_ballot_w64(x[T] > 0) >> T & 1;
}

KERNEL void local_array(const u32* x, u32* y) {
  u32 v[8];
  for (int i = 0; i < 8; i++) v[i] = x[T + 64 * i];
  for (int i = 0; i < 8; i++)
    for (int j = 0; j + 1 < 8 - i; j++)
      if (v[j] > v[j + 1]) { u32 t = v[j]; v[j] = v[j + 1]; v[j + 1] = t; }
  for (int i = 0; i < 8; i++) y[T + 64 * i] = v[i];
}

typedef float f2 __attribute__((ext_vector_type(2)));
typedef half h2 __attribute__((ext_vector_type(2)));
typedef unsigned short w2 __attribute__((ext_vector_type(2)));
KERNEL void pairs(const f2* x, f2* y) {
  f2 a = x[T];
  y[T] = a * 0.5f + 1.0f;
  y[T + 64] = a * (f2){2.0f, -3.5f};
  h2 b = __builtin_convertvector(a, h2);
  b = b * (half)0.5f + (half)1.0f;
  y[T + 128] = __builtin_convertvector(b, f2);
  w2 c = __builtin_bit_cast(w2, b);
  c = (c * (unsigned short)3 + (unsigned short)7) << (unsigned short)2;
  y[T + 192] = __builtin_convertvector(c, f2);
}

KERNEL void elementary(const float* x, float* y) {
  y[T] = __builtin_exp2f(x[T]);
  y[T + 64] = __builtin_log2f(__builtin_fabsf(x[T]));
  y[T + 128] = __builtin_floorf(x[T]) + __builtin_roundf(x[T] * 3);
  y[T + 192] = __builtin_ldexpf(x[T], (int)x[T]);
  y[T + 256] = (float)(int)(x[T] * 100) + (float)(u32)(__builtin_fabsf(x[T]) * 9);
  y[T + 320] = __builtin_fminf(__builtin_fmaxf(x[T], -1.0f), 2.0f);
}

KERNEL void grid(const u32* x, u32* y) {
  u32 g = __builtin_amdgcn_workgroup_id_y() * 2 + __builtin_amdgcn_workgroup_id_x();
  u32 t = __builtin_amdgcn_workitem_id_y() * 8 + T;
  y[g * 64 + t] = g * 1000 + t;
}
""".replace(
    "__syncthreads_();",
    '__builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); '
    "__builtin_amdgcn_s_barrier(); "
    '__builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");',
)


@pytest.fixture(scope="module")
def kernels():
    return CodeObject(compile_hip(SOURCE)).kernels


def _run(kernels, name: str, given: np.ndarray, rows: int, block: int = 64):
    result = np.zeros(rows * block, given.dtype)
    run(kernels[name], given, result, block=block)
    return result.reshape(rows, block)


def _floats(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=count) * 4).astype(np.float32)


def _words(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << 32, count, np.uint64).astype(np.uint32)


@pytest.mark.parametrize("scale", [1.0, 1e-38, 1e37])
def test_divisions(kernels, scale):
    """Correctly rounded, through v_div_scale, v_div_fmas and v_div_fixup."""
    x = _floats(128)
    x[:64] *= np.float32(scale)
    a, b = x[:64], x[64:]
    got = _run(kernels, "divisions", x, 3)
    assert np.array_equal(got[0], a / b)
    assert np.array_equal(got[1], np.sqrt(np.abs(a)))
    if scale == 1.0:
        assert np.array_equal(got[2], np.fmod(a, b))


def test_integers(kernels):
    x = _words(128)
    x[64:96] >>= 20
    a, b = x[:64], x[64:] | np.uint32(1)
    got = _run(kernels, "integers", x, 11)
    signed_a, signed_b = a.view(np.int32).astype(int), b.view(np.int32).astype(int)
    quotient = np.trunc(signed_a / signed_b).astype(int)
    assert np.array_equal(got[0], a // b)
    assert np.array_equal(got[1], a % b)
    assert np.array_equal(got[2].view(np.int32), quotient)
    assert np.array_equal(got[3].view(np.int32), signed_a - quotient * signed_b)
    product = a.astype(np.uint64) * b + (b.astype(np.uint64) << np.uint64(20))
    shifted = product >> (b & 63).astype(np.uint64)
    assert np.array_equal(got[4], product.astype(np.uint32))
    assert np.array_equal(got[5], (product >> np.uint64(32)).astype(np.uint32))
    assert np.array_equal(got[6], shifted.astype(np.uint32))
    wide = (signed_a * signed_b) >> 7
    for lane in range(64):
        p, q = int(a[lane]), int(b[lane])
        assert got[7, lane] == 32 - q.bit_length() + 100 * p.bit_count()
        swapped = int.from_bytes(p.to_bytes(4, "little"), "big")
        assert got[10, lane] == swapped ^ int(f"{q:032b}"[::-1], 2)
    assert np.array_equal(got[8].view(np.int32), wide.astype(np.int32))
    assert np.array_equal(got[9], np.where(wide < 12345678901, 1, 2))


def test_halves(kernels):
    x = _floats(64)
    got = _run(kernels, "halves", x, 3)
    h = x.astype(np.float16)
    fused = (h.astype(np.float64) ** 2 + h).astype(np.float16)
    assert np.array_equal(got[0], fused.astype(np.float32)) or np.array_equal(
        got[0], (h * h + h).astype(np.float32)
    )
    assert np.array_equal(got[1], x.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert np.array_equal(got[2], np.where(h > 0.5, h, -h).astype(np.float32))


def test_narrow(kernels):
    x = np.random.default_rng(1).integers(0, 256, 256).astype(np.uint8)
    got = _run(kernels, "narrow", x, 7).reshape(-1)
    assert np.array_equal(got[:64], (x[:64] * 3 + 1).astype(np.uint8))
    words = x.view(np.int16)[:64].astype(int)
    assert np.array_equal(got[64:192].view(np.int16), np.trunc(words / 5).astype(int))
    assert np.array_equal(got[192:].view(np.uint32), x.view(np.uint32) & 0xFFFFFF)


def test_branches(kernels):
    x = _words(64) >> np.uint32(16)
    x[0] = 0
    got = _run(kernels, "branches", x, 1)[0]
    for lane in range(64):
        a, n = int(x[lane]), 0
        while a != 1 and n < 200:
            a, n = (3 * a + 1 if a & 1 else a // 2), n + 1
        n = {0: n + 1000, 1: n * 2, 3: n ^ 0x5555}.get(int(x[lane]) % 5, -n)
        assert got[lane] == n & 0xFFFFFFFF


def test_reduction(kernels):
    x = np.arange(512, dtype=np.float32)
    assert np.all(_run(kernels, "reduction", x, 1, block=512) == x.sum())


def test_wave_sum(kernels):
    x = np.random.default_rng(2).integers(-50, 50, 64).astype(np.float32)
    got = _run(kernels, "wave_sum", x, 2)
    assert np.all(got[0] == x.sum())
    assert np.array_equal(got[1], x > 0)


def test_sorting(kernels):
    x = _words(512)
    assert np.array_equal(
        _run(kernels, "local_array", x, 8), np.sort(x.reshape(8, 64), 0)
    )


def test_elementary(kernels):
    x = _floats(64)
    got = _run(kernels, "elementary", x, 6)
    exact = x.astype(np.float64)
    assert np.allclose(got[0], 2**exact, rtol=2e-7)
    assert np.allclose(got[1], np.log2(np.abs(exact)), rtol=2e-7, atol=1e-7)
    tripled = x * np.float32(3)
    rounded = np.copysign(np.floor(np.abs(tripled) + 0.5), tripled)
    assert np.array_equal(got[2], np.floor(x) + rounded)
    assert np.array_equal(got[3], np.ldexp(x, x.astype(np.int32)))
    parts = np.trunc(x * np.float32(100)) + np.trunc(np.abs(x) * np.float32(9))
    assert np.array_equal(got[4], parts.astype(np.float32))
    assert np.array_equal(got[5], np.clip(x, -1, 2))


def test_packed_constants(kernels):
    x = _floats(128).reshape(64, 2)
    got = _run(kernels, "pairs", x.reshape(-1), 8).reshape(4, 64, 2)
    fused = (x.astype(np.float64) * 0.5 + 1).astype(np.float32)
    assert np.array_equal(got[0], fused)
    assert np.array_equal(got[1], x * np.array([2, -3.5], np.float32))
    h = (x.astype(np.float16).astype(np.float64) * 0.5 + 1).astype(np.float16)
    assert np.array_equal(got[2], h.astype(np.float32))
    c = (h.view(np.uint16) * np.uint16(3) + np.uint16(7)) << np.uint16(2)
    assert np.array_equal(got[3], c.astype(np.float32))


def test_two_dimensions(kernels):
    result = np.zeros(4 * 64, np.uint32)
    memory = Memory()
    memory.add(0x1000, result.view(np.uint8), True, "y")
    launch(
        kernels["grid"],
        grid=(2, 2, 1),
        block=(8, 8, 1),
        kernarg=struct.pack("<QQ", 0, 0x1000),
        memory=memory,
    )
    assert np.array_equal(result, np.arange(256) // 64 * 1000 + np.arange(256) % 64)


def test_command_line(tmp_path, monkeypatch, capsys):
    path = tmp_path / "k.co"
    path.write_bytes(compile_hip(SOURCE))
    options = ["--kernel", "reduction", "--disassemble", "--mix"]
    monkeypatch.setattr(sys, "argv", ["gfx950", str(path), *options])
    runpy.run_module("tools.gfx950", run_name="__main__")
    shown = capsys.readouterr().out
    assert "2048 bytes of LDS, 0 of scratch" in shown
    assert "s_barrier" in shown
    assert "not emulated" not in shown
    assert "divisions" not in shown
