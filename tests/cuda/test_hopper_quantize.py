"""What the quantisation kernels for Hopper compute, against jnp on the CPU.

To the bit; where rows are rotated, within what the order of float32 sums leaves open.
Their source runs compiled for the host, launched through the whole path on a stand-in
for CUDA; by `pytest -m cuda` their machine code on a GPU.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _oracle import BF16, F16, F32
from _quantized import (
    EVERYTHING,
    OPTIONS,
    assert_finite,
    assert_same,
    assert_same_beside_nan,
    assert_same_together,
    bits,
    extremes,
    normal,
    on_cpu,
    unbalanced,
)

from zyfa_jax import Quantized, quantize, quantize_qkv
from zyfa_jax._quantize import quantize_by, quantize_qkv_by

on_gpu = pytest.mark.cuda
BY_BLOCK = {"granularity": "block"}

by_kernel = functools.partial(quantize_by, "cuda")


together = functools.partial(quantize_qkv_by, "cuda")


def detached(z):
    return z.detach() if isinstance(z, Quantized) else [x.detach() for x in z]


@pytest.fixture(params=["host", pytest.param("gpu", marks=on_gpu)])
def run(request):
    """Gives a call's result, on the host."""
    if request.param == "host":
        cuda, kernels = map(request.getfixturevalue, ("cuda", "host_kernels"))

        def on_host(call, *inputs):
            with cuda.running(kernels) as launches:
                z = jax.block_until_ready(detached(call(*inputs)))
            assert launches
            return jax.device_get(z)

        yield on_host
        return

    def twice(call, *inputs):
        z, again = (jax.device_get(detached(call(*inputs))) for _ in range(2))
        for a, b in zip(jax.tree.leaves(z), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))
        return z

    with jax.default_device(request.getfixturevalue("gpu")):
        yield twice


def check(run, x, **options):
    z = run(functools.partial(by_kernel, **options), x)
    assert_same(z, x, **options)
    return z


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option(run, options):
    check(run, normal(2, 131, 2, 128), **options)


@pytest.mark.parametrize("options", [BY_BLOCK, EVERYTHING], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_every_kernel(run, dtype, dim, options):
    check(run, normal(1, 131, 2, dim, dtype=dtype), **options)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("dim", [8, 24, 40, 72, 96, 136, 248])
def test_other_head_dims(run, dim, rotate):
    check(run, normal(1, 130, 3, dim), center=True, rotate=rotate, **BY_BLOCK)


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 385])
@pytest.mark.parametrize("options", [{}, BY_BLOCK, {**BY_BLOCK, "block": 256}], ids=str)
def test_every_length(run, tokens, options):
    check(run, normal(tokens, 3, 64), **options)


@on_gpu
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=str)
def test_several_rounds_of_blocks(gpu, options):
    x = normal(2, 5000, 12, 128)
    with jax.default_device(gpu):
        z = jax.device_get(by_kernel(x, **options).detach())
    assert_same(z, x, **options)


@pytest.mark.parametrize("options", OPTIONS[::3], ids=str)
def test_zeros(run, options):
    x = np.zeros((1, 131, 2, 128), BF16)
    x[:, 128:, 1] = 3
    check(run, x, **options)


def test_zeros_keep_their_sign(run):
    x = normal(1, 5, 1, 64)
    x[0, 2] = -0.0
    x[0, 3] = 0.0
    z = check(run, x)
    assert (bits(z.values)[0, 2] == 0x80).all()


@pytest.mark.parametrize("options", [OPTIONS[0], EVERYTHING], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_extremes(run, dtype, options):
    """Of one sign each, so that rotated rows have the largest sums there are."""
    info = ml_dtypes.finfo(dtype)
    for extreme in (info.max, -info.max, info.smallest_normal):
        x = normal(1, 131, 2, 128, dtype=dtype)
        x[:, ::2] = extreme
        z = check(run, x, **options)
        assert np.isfinite(np.asarray(z.values, np.float32)).all()


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=str)
@pytest.mark.parametrize("scale", [2.0**-60, 2.0**-100, 2.0**115])
def test_any_scale(run, scale, options):
    x = (normal(1, 131, 1, 64, dtype=F32) * np.float32(scale)).astype(BF16)
    check(run, x, **options)


def test_subnormals(run):
    """XLA's CPU code may flush them; the kernels do not."""
    tiny = ml_dtypes.finfo(BF16).smallest_subnormal
    z = run(by_kernel, np.full((1, 4, 1, 64), tiny, BF16))
    assert float(z.descale[0, 0]) == np.finfo(np.float32).smallest_normal
    got = np.asarray(z.values, np.float64) * float(z.descale[0, 0])
    np.testing.assert_array_equal(got, float(tiny))


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2], EVERYTHING], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_nan_and_infinity(run, dtype, options):
    x = normal(1, 260, 2, 64, dtype=dtype)
    x[0, 3, 1, 2] = np.nan
    x[0, 130, 0, 7] = -np.inf
    x[0, 131, 0, 0] = np.inf
    x[0, 259, 1] = np.inf
    z = run(functools.partial(by_kernel, **options), x)
    assert_same_beside_nan(z, x, **options)


def test_nan_of_every_kind(run):
    x = normal(1, 5, 1, 64)
    for i, code in enumerate((0x7FC0, 0xFFC0, 0x7F81, 0xFF81, 0x7FFF)):
        x.view(np.uint16)[0, i, 0, i] = code
    z = run(by_kernel, x)
    values = np.asarray(z.values, np.float32)
    np.testing.assert_array_equal(np.isnan(values), np.isnan(x.astype(np.float32)))
    np.testing.assert_array_equal(z.descale, on_cpu(x).descale)


@pytest.mark.parametrize("options", [OPTIONS[0], EVERYTHING], ids=str)
def test_vmap(run, options):
    x = normal(3, 2, 130, 1, 64)
    x[1] *= np.array(2.0**100, BF16)
    z = run(jax.vmap(functools.partial(by_kernel, **options)), x)
    for i in range(3):
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], z), x[i], **options)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_together(run, dtype, precision):
    inputs = unbalanced(dtype=dtype)
    z = run(functools.partial(together, precision=precision), *inputs)
    assert_same_together(z, inputs, precision)


@pytest.mark.parametrize("dim", [24, 64, 96, 192, 256])
def test_together_at_other_head_dims(run, dim):
    inputs = unbalanced(dim=dim, v_dim=dim // 2 // 8 * 8, heads=(3, 3))
    assert_same_together(run(together, *inputs), inputs)


@pytest.mark.parametrize("tokens", [1, 128, 300])
def test_together_at_other_lengths(run, tokens):
    inputs = unbalanced(tokens=tokens, dim=64)
    assert_same_together(run(together, *inputs), inputs)


@pytest.mark.parametrize("dim", [64, 128])
def test_nan_and_infinity_together(run, dim):
    inputs = unbalanced(tokens=260, dim=dim)
    for x in inputs:
        x[0, 3, 0, 2] = np.nan
        x[0, 130, 0, 7] = -np.inf
        x[0, 131, 1, [0, 9]] = np.inf
        x[0, 259, 1] = np.nan
    assert_same_together(run(together, *inputs), inputs)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_extremes_together(run, dtype):
    for inputs in extremes(dim=128, dtype=dtype, heads=(2, 2)):
        assert_finite(run(together, *inputs))


def test_a_mean_far_from_zero(run):
    """Squares about the mean are not lost under its own."""
    inputs = unbalanced(dtype=F32, tokens=500)
    inputs[1] += np.float32(300)
    # The mean's last bit is what differs.
    assert_same_together(run(together, *inputs), inputs, rtol=1e-4)


def test_together_mapped(run):
    inputs = [np.stack([x, x * 2]) for x in unbalanced(dim=64, heads=(2, 1))]
    z = run(jax.vmap(together), *inputs)
    for i in range(2):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], z)
        assert_same_together(own, [x[i] for x in inputs])


@on_gpu
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_several_rounds_of_blocks_together(gpu, precision):
    inputs = unbalanced(tokens=5000, heads=(16, 4))
    with jax.default_device(gpu):
        z = jax.device_get(detached(together(*inputs, precision=precision)))
    assert_same_together(z, inputs, precision)


@on_gpu
def test_users_get_the_kernels_together(gpu):
    inputs = [jax.device_put(x, gpu) for x in unbalanced()]
    text = jax.jit(lambda *x: detached(quantize_qkv(*x))).lower(*inputs).as_text()
    assert text.count("custom_call @zyfa_quantize") == 6


@on_gpu
def test_users_get_the_kernel(gpu):
    x = jax.device_put(normal(1, 300, 2, 128), gpu)
    text = jax.jit(lambda x: quantize(x).detach()).lower(x).as_text()
    assert text.count("custom_call @zyfa_quantize") == 2


@on_gpu
def test_past_32_bit_offsets(gpu):
    """2.5e9 elements; all zero but for the last token."""
    tokens, heads = 300_000, 64
    tail = normal(1, 1, heads, 128)
    with jax.default_device(gpu):
        x = jnp.zeros((1, tokens, heads, 128), BF16).at[:, -1:].set(tail)
        z = jax.jit(lambda x: by_kernel(x).detach())(x)
    expected = on_cpu(tail)
    np.testing.assert_array_equal(bits(z.descale), bits(expected.descale))
    exact = tail.astype(F32) / np.asarray(z.descale)[:, None, :, None]
    np.testing.assert_array_equal(bits(z.values[:, -1:]), bits(exact.astype(z.dtype)))
    assert not z.values[:, :-1].view(jnp.uint8).any()
