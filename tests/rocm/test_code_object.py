"""What the built machine code says of itself."""

import pytest

from benchmarks import gfx950 as benchmark
from zyfa_jax import _ffi

EXTENSION = _ffi.load()
KERNELS = (
    benchmark.kernels() if EXTENSION is not None and EXTENSION.rocm_archs() else {}
)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_resources(kernel):
    assert kernel.scratch_bytes == 0
    assert kernel.vgpr_spills == kernel.sgpr_spills == 0
    assert kernel.vgprs <= 256  # two waves on a SIMD
    assert kernel.lds_bytes <= 160 * 1024


def test_a_full_fp8_tile_is_short():
    mix = benchmark.tile_mix(KERNELS["zyfa_attention_fp8_128x128"])
    assert mix.kinds[benchmark.MATRIX] == 18
    assert mix.kinds["v_exp"] == 0
    assert mix.vector <= 200
    assert mix.total <= 330


@pytest.mark.parametrize(("dims", "instructions"), [("128x128", 355), ("192x128", 385)])
def test_a_full_int8_tile_is_as_short_as_one_of_fp8(dims, instructions):
    mix, fp8 = (
        benchmark.tile_mix(KERNELS[f"zyfa_attention_{kind}_{dims}"])
        for kind in ("int8", "fp8")
    )
    # Products of int8 are half as deep.
    products = 4 * int(dims[:3]) // 64
    assert mix.kinds[benchmark.MATRIX] == fp8.kinds[benchmark.MATRIX] + products
    assert mix.kinds["conversion"] == fp8.kinds["conversion"]
    assert mix.kinds["v_exp"] == 0
    assert mix.vector <= fp8.vector + 7  # the tile's descale, and where sums start
    assert mix.total <= instructions


@pytest.mark.parametrize("dims", ["128x128", "192x128"])
def test_a_full_bf16_tile_takes_one_exponential_for_each_logit(dims):
    mix = benchmark.tile_mix(KERNELS[f"zyfa_attention_bf16_{dims}"])
    assert mix.kinds["v_exp"] == 32
    assert mix.kinds[benchmark.MATRIX] == 2 * (int(dims[:3]) // 16) + 16


def test_aiters_mix_adds_up():
    mix = benchmark.aiter_mix()
    assert mix.kinds[benchmark.MATRIX] == 16
    assert mix.vector == 309
    assert mix.total == 417
