"""`quantize` by the kernels on a Hopper GPU, against jnp on the CPU: `pytest -m cuda`.

To the bit; where rows are rotated, within what the order of float32 sums leaves open.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _oracle import BF16, F16, F32
from _quantized import (
    EVERYTHING,
    OPTIONS,
    assert_same,
    assert_same_beside_nan,
    bits,
    normal,
    on_cpu,
)

from zyfa_jax import _ffi, quantize
from zyfa_jax._quantize import quantize_by

pytestmark = pytest.mark.cuda

BY_BLOCK = {"granularity": "block"}


@pytest.fixture(scope="module", autouse=True)
def gpu():
    """The first GPU. Who asks by the marker for what is not here gets a failure."""
    try:
        device, *_ = jax.devices("cuda")
    except RuntimeError as error:
        pytest.fail(f"JAX sees no NVIDIA GPU: {error}")
    if not _ffi.has_kernel("cuda"):
        pytest.fail(_ffi.detail("cuda"))
    with jax.default_device(device):
        yield device


def run(x, **options):
    """The kernels' result on the host, the same when run again."""
    call = functools.partial(quantize_by, "cuda", **options)
    z, again = (jax.device_get(call(x).detach()) for _ in range(2))
    for a, b in zip(jax.tree.leaves(z), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))
    return z


def check(x, **options):
    z = run(x, **options)
    assert_same(z, x, **options)
    return z


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dim", [128, 192])
def test_every_option(dim, options):
    check(normal(2, 131, 2, dim), **options)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3], EVERYTHING], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_every_dtype(dtype, dim, options):
    check(normal(1, 131, 2, dim, dtype=dtype), **options)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("dim", [8, 16, 24, 32, 40, 64, 72, 96, 136, 160, 248, 256])
def test_every_head_dim(dim, rotate):
    check(normal(1, 130, 3, dim), center=True, rotate=rotate)


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 385])
@pytest.mark.parametrize("options", [{}, BY_BLOCK, {**BY_BLOCK, "block": 256}], ids=str)
def test_every_length(tokens, options):
    check(normal(tokens, 3, 64), **options)


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=str)
def test_several_rounds_of_blocks(options):
    check(normal(2, 5000, 12, 128), **options)


@pytest.mark.parametrize("options", OPTIONS[::3], ids=str)
def test_zeros(options):
    x = np.zeros((1, 131, 2, 128), BF16)
    x[:, 128:, 1] = 3
    check(x, **options)


def test_zeros_keep_their_sign():
    x = normal(1, 5, 1, 64)
    x[0, 2] = -0.0
    x[0, 3] = 0.0
    z = check(x)
    assert (bits(z.values)[0, 2] == 0x80).all()


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_extremes(dtype, options):
    """Of one sign each, so that rotated rows have the largest sums there are."""
    info = ml_dtypes.finfo(dtype)
    for extreme in (info.max, -info.max, info.smallest_normal):
        x = normal(1, 131, 2, 128, dtype=dtype)
        x[:, ::2] = extreme
        z = check(x, **options)
        assert np.isfinite(np.asarray(z.values, np.float32)).all()


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=str)
@pytest.mark.parametrize("scale", [2.0**-60, 2.0**-80, 2.0**-100, 2.0**63, 2.0**115])
def test_any_scale(scale, options):
    x = (normal(1, 131, 1, 64, dtype=F32) * np.float32(scale)).astype(BF16)
    check(x, **options)


def test_subnormals():
    """XLA's CPU code may flush them; the kernels do not."""
    tiny = ml_dtypes.finfo(BF16).smallest_subnormal
    z = run(np.full((1, 4, 1, 64), tiny, BF16))
    assert float(z.descale[0, 0]) == np.finfo(np.float32).smallest_normal
    got = np.asarray(z.values, np.float64) * float(z.descale[0, 0])
    np.testing.assert_array_equal(got, float(tiny))


@pytest.mark.parametrize("options", [*OPTIONS[:4], EVERYTHING], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_nan_and_infinity(dtype, options):
    x = normal(1, 260, 2, 64, dtype=dtype)
    x[0, 3, 1, 2] = np.nan
    x[0, 130, 0, 7] = -np.inf
    x[0, 131, 0, 0] = np.inf
    x[0, 259, 1] = np.inf
    assert_same_beside_nan(run(x, **options), x, **options)


def test_nan_of_every_kind():
    x = normal(1, 5, 1, 64)
    for i, code in enumerate((0x7FC0, 0xFFC0, 0x7F81, 0xFF81, 0x7FFF)):
        x.view(np.uint16)[0, i, 0, i] = code
    z = run(x)
    values = np.asarray(z.values, np.float32)
    np.testing.assert_array_equal(np.isnan(values), np.isnan(x.astype(np.float32)))
    np.testing.assert_array_equal(z.descale, on_cpu(x).descale)


@pytest.mark.parametrize("options", [OPTIONS[0], EVERYTHING], ids=str)
def test_vmap(options):
    x = normal(3, 2, 130, 1, 64)
    x[1] *= np.array(2.0**100, BF16)
    z = jax.device_get(jax.vmap(functools.partial(quantize_by, "cuda", **options))(x))
    for i in range(3):
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], z), x[i], **options)


@pytest.mark.parametrize("dim", [4, 12, 264])
def test_other_head_dims_take_jnp(dim):
    x = normal(1, 5, 1, dim)
    expected = on_cpu(x)
    z = jax.device_get(quantize_by("cuda", x))
    np.testing.assert_allclose(z.descale, expected.descale, rtol=1e-6)


def test_users_get_the_kernel():
    x = jnp.asarray(normal(1, 300, 2, 128))
    text = jax.jit(lambda x: quantize(x).detach()).lower(x).as_text()
    assert text.count("custom_call @zyfa_quantize") == 2


def test_past_32_bit_offsets():
    """2.5e9 elements; all zero but for the last token."""
    tokens, heads = 300_000, 64
    tail = normal(1, 1, heads, 128)
    x = jnp.zeros((1, tokens, heads, 128), BF16).at[:, -1:].set(tail)
    call: Any = jax.jit(lambda x: quantize_by("cuda", x).detach())
    z = call(x)
    expected = on_cpu(tail)
    np.testing.assert_array_equal(bits(z.descale), bits(expected.descale))
    exact = tail.astype(F32) / np.asarray(z.descale)[:, None, :, None]
    np.testing.assert_array_equal(bits(z.values[:, -1:]), bits(exact.astype(z.dtype)))
    assert not z.values[:, :-1].view(jnp.uint8).any()
