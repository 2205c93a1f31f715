"""What the tests of all quantisation kernels share: inputs, and jnp's result."""

import dataclasses
import itertools
from typing import Any

import jax
import ml_dtypes
import numpy as np
from _oracle import BF16

from zyfa_jax import Quantized, quantize, quantize_qkv

OPTIONS: list[dict[str, Any]] = [
    dict(zip(("granularity", "center", "rotate"), choice, strict=True))
    for choice in itertools.product(
        ("head", "tensor", "block"), (False, True), (False, True)
    )
]
EVERYTHING = OPTIONS[-1]


def normal(*shape: int, dtype: np.dtype = BF16, seed: int = 0) -> np.ndarray:
    """Heads and tokens of several sizes, off centre."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-4, 4, (*shape[:-1], 1)))
    return (x + rng.standard_normal(shape[-1])).astype(dtype)


def bits(x):
    x = np.asarray(x)
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


def array(x: Any) -> np.ndarray:
    assert x is not None
    return np.asarray(x)


def hadamard(dim):
    size = dim & -dim
    index = np.arange(size)
    signs = np.array([[(i & j).bit_count() for j in index] for i in index])
    return np.kron(np.eye(dim // size), (-1.0) ** signs / np.sqrt(size))


def per_token(z: Quantized) -> np.ndarray:
    """The descale of each token, (..., S, H, 1)."""
    descale = np.asarray(z.descale)
    if not z.block:
        return descale[..., None, :, None]
    of_token = descale[..., np.arange(z.shape[-3]) // z.block]
    return np.moveaxis(of_token, -1, -2)[..., None]


def on_cpu(x: np.ndarray, **options: Any) -> Quantized:
    """What jnp makes of x."""
    with jax.default_device(jax.devices("cpu")[0]):
        return quantize(x, **options)


def assert_same(z: Quantized, x: np.ndarray, **options: Any) -> None:
    """Asserts that z is what jnp makes of x, to the bit but for the rotation's."""
    expected = on_cpu(x, **options)
    assert (z.shape, z.dtype) == (expected.shape, expected.dtype)
    assert (z.block, z.rotated) == (expected.block, expected.rotated)
    y = np.asarray(x, np.float32)
    if z.center is not None:
        center = np.asarray(z.center)
        scale = np.nan_to_num(np.abs(center)).max(initial=0)
        np.testing.assert_allclose(
            center, array(expected.center), rtol=1e-6, atol=1e-6 * scale
        )
        if not z.rotated:
            # XLA may sum in another order in another program.
            y = y - center[..., None, :, :]
            options = {name: options[name] for name in options if name != "center"}
            expected = on_cpu(y, **options)
    if not z.rotated:
        np.testing.assert_array_equal(bits(z.descale), bits(expected.descale))
        # XLA divides by what many numbers share with an error in the last place.
        exact = np.clip(y / per_token(z), -448, 448).astype(z.dtype)
        np.testing.assert_array_equal(bits(z.values), bits(exact))
        differ = bits(z.values) != bits(expected.values)
        assert differ.mean() < 1e-4
        return
    np.testing.assert_allclose(z.descale, expected.descale, rtol=2e-6)
    # In float64, and what float32 leaves open of it.
    y = np.asarray(x, np.float64) @ hadamard(x.shape[-1])
    if z.center is not None:
        center = np.asarray(z.center, np.float64)
        center = np.where(np.isfinite(center), center, y.mean(axis=-3))
        y = y - center[..., None, :, :]
    y /= per_token(z)
    exponent = np.floor(np.log2(np.maximum(np.abs(y), 2.0**-6)))
    half_step = np.exp2(exponent - 4)
    error = np.abs(np.asarray(z.values, np.float64) - y)
    assert (error <= half_step + 448 * 2.0**-20).all()


def assert_same_beside_nan(z: Quantized, x: np.ndarray, **options: Any) -> None:
    """The same where there are NaN and infinities, which may be rotated."""
    y = x
    if z.center is not None and not z.rotated:
        # Another order of sums gives another mean.
        y = np.asarray(x, np.float32) - np.asarray(z.center)[..., None, :, :]
        options = options | {"center": False}
    expected = on_cpu(y, **options)
    np.testing.assert_allclose(z.descale, expected.descale, rtol=2e-6)
    got, wanted = (np.asarray(y.values, np.float32) for y in (z, expected))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    if options["rotate"]:
        where = np.isinf(x.astype(np.float32)).any(-1)
        np.testing.assert_array_equal(got[where], wanted[where])
        close = np.isclose(got, wanted, rtol=0.13, atol=2.0**-8, equal_nan=True)
        assert close.all()
    else:
        np.testing.assert_array_equal(got, wanted)


def unbalanced(
    *, tokens: int = 131, heads: tuple[int, int] = (4, 2), dim: int = 128,
    v_dim: int = 64, dtype: np.dtype = BF16,
) -> list[np.ndarray]:  # fmt: skip
    """q, k and v of (1, tokens, heads, dim); channels large in k are small in q."""
    loud = np.exp2(np.arange(dim) * 7 % 9 - 4.0)
    q, k, v = (
        normal(1, tokens, h, d, dtype=np.dtype(np.float32), seed=seed)
        for seed, h, d in zip(
            range(3), (heads[0], *heads[1:] * 2), (dim, dim, v_dim), strict=True
        )
    )
    return [x.astype(dtype) for x in (q * loud, k / loud, v)]


def extremes(*, dtype, **options):
    """`unbalanced` with the largest and the least normal numbers, and with zeros."""
    info = ml_dtypes.finfo(dtype)
    for extreme in (info.max, info.smallest_normal, 0):
        inputs = unbalanced(dtype=dtype, **options)
        for x in inputs:
            x[:, ::2] = extreme
            x[:, ::4, :, ::2] *= -1
        yield inputs


def assert_finite(z):
    for y in z:
        assert np.isfinite(np.asarray(y.values, np.float32)).all()
        assert np.isfinite(np.asarray(y.descale)).all()
        assert (np.asarray(y.descale) > 0).all()


def assert_same_together(
    z: Any, inputs: list[np.ndarray], precision: str = "int8", *, rtol: float = 4e-6
) -> None:
    """Asserts that z is what jnp makes of q, k and v.

    Sums in another order move a number to its neighbour where it lies between two.
    """
    with jax.default_device(jax.devices("cpu")[0]):
        expected = quantize_qkv(*inputs, precision=precision)  # type: ignore[arg-type]
    for got, wanted in zip(z, expected, strict=True):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        assert dataclasses.replace(got, **LEAVES) == dataclasses.replace(
            wanted, **LEAVES
        )
        np.testing.assert_allclose(got.descale, wanted.descale, rtol=rtol)
        a, b = (np.asarray(x.values, np.float64) for x in (got, wanted))
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        if got.rotated:
            near = np.abs(a - b) <= np.maximum(1, np.abs(b) / 8)
            assert (near | np.isnan(a)).all()
        differ = (a != b) & ~np.isnan(a)
        assert differ.sum() <= 1e-3 * differ.size
    center, wanted = np.asarray(z[1].center), array(expected[1].center)
    scale = np.nan_to_num(np.abs(wanted)).max(initial=0)
    np.testing.assert_allclose(center, wanted, rtol=1e-5, atol=1e-6 * scale)


LEAVES = dict.fromkeys(("values", "descale", "center", "source"))
