"""`quantize`: its options, its extremes, its gradient, and JAX's transformations."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax import export

from zyfa_jax import Quantized, export_safety_checks, quantize

OPTIONS: list[dict[str, Any]] = [
    dict(zip(("granularity", "center", "rotate"), choice, strict=True))
    for choice in itertools.product(
        ("head", "tensor", "block"), (False, True), (False, True)
    )
]


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def array(x: jax.Array | None) -> np.ndarray:
    assert x is not None
    return np.asarray(x)


def descale_per_token(z):
    """(..., S, H, 1) from z.descale, without z's own dequantize."""
    descale = np.asarray(z.descale)
    if z.block:
        token = np.arange(z.shape[-3]) // z.block
        return np.moveaxis(descale[..., token], -1, -2)[..., None]
    return np.broadcast_to(descale[..., None, :, None], (*z.shape[:-1], 1))


def hadamard(dim):
    """Sylvester's matrix of the largest power of two in dim, block-diagonal."""
    size = dim & -dim
    index = np.arange(size)
    bits = np.array([[(i & j).bit_count() for j in index] for i in index])
    return np.kron(np.eye(dim // size), (-1.0) ** bits / np.sqrt(size))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("batch", [(), (2,)], ids=["rank3", "rank4"])
def test_values_times_descale_is_the_source(options, batch):
    x = normal(*batch, 300, 3, 24) * np.array([1, 8, 0.01], np.float32)[:, None] + 2
    z = quantize(x, **options)
    block = 128 if options["granularity"] == "block" else 0
    assert z.block == block
    assert z.rotated == options["rotate"]
    assert z.values.dtype == jnp.float8_e4m3fn
    assert z.shape == x.shape
    assert z.descale.shape == (*batch, 3, *((3,) if block else ()))
    assert z.descale.dtype == np.float32

    expected = np.asarray(x, np.float64)
    if options["rotate"]:
        expected = expected @ hadamard(24)
    if options["center"]:
        mean = expected.mean(axis=-3)
        expected = expected - mean[..., None, :, :]
        np.testing.assert_allclose(array(z.center), mean, rtol=1e-4, atol=1e-5)
    else:
        assert z.center is None
    np.testing.assert_allclose(array(z.source), expected, rtol=1e-4, atol=1e-4)
    got = np.asarray(z.values, np.float64) * descale_per_token(z)
    np.testing.assert_allclose(np.asarray(z.dequantize()), got, rtol=1e-6)
    # e4m3 keeps four significant bits down to 2^-6, and 2^-10 below that.
    error = np.abs(got - np.asarray(z.source, np.float64))
    bound = np.maximum(np.abs(got) / 16, descale_per_token(z) * 2.0**-10)
    assert (error <= bound * 1.001 + 1e-9).all()


@pytest.mark.parametrize(
    ("options", "axes"),
    [
        ({"granularity": "tensor"}, (0, 1, 2, 3)),
        ({}, (1, 3)),
        ({"granularity": "block", "block": 256}, (1, 3)),
    ],
)
def test_the_largest_magnitude_becomes_448(options, axes):
    x = normal(2, 256, 3, 16)
    z = quantize(x, **options)
    largest = np.abs(np.asarray(z.values, np.float32)).max(axis=axes)
    np.testing.assert_array_equal(largest, np.full_like(largest, 448))


def test_each_granularity_fits_the_data_it_covers():
    x = normal(256, 2, 16)
    x[:, 1] *= 64
    x[128:] *= 64
    tensor, head, block = (
        np.asarray(quantize(x, granularity=g).descale)
        for g in ("tensor", "head", "block")
    )
    assert tensor[0] == tensor[1]
    assert head[1] > 30 * head[0]
    assert (block[:, 1] > 30 * block[:, 0]).all()


def test_block_covers_a_partial_last_block():
    x = normal(130, 1, 8)
    x[128:] = 0.25
    z = quantize(x, granularity="block")
    np.testing.assert_array_equal(np.asarray(z.values[128:], np.float32), 448)
    np.testing.assert_allclose(z.descale[0, 1], 0.25 / 448)


@pytest.mark.parametrize("dim", [8, 24, 128, 192])
def test_rotation_keeps_products(dim):
    q, k = normal(5, 1, dim), normal(7, 1, dim, seed=1)
    q_rotated = np.asarray(quantize(q, rotate=True).source)[:, 0]
    k_rotated = np.asarray(quantize(k, rotate=True).source)[:, 0]
    np.testing.assert_allclose(q_rotated @ k_rotated.T, q[:, 0] @ k[:, 0].T, atol=1e-4)


def test_centring_cuts_the_error_of_offset_channels():
    x = normal(256, 1, 16)
    x[..., 5] += 20

    def error(**options):
        z = quantize(x, **options)
        return np.linalg.norm(np.asarray(z.dequantize()) - np.asarray(z.source))

    assert error(center=True) < 0.5 * error()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("options", [{}, OPTIONS[3], OPTIONS[4], OPTIONS[-1]])
def test_extreme_finite_inputs_stay_finite(dtype, options):
    info = ml_dtypes.finfo(dtype)
    for extreme in (info.max, info.smallest_subnormal, info.smallest_normal, 0):
        x = np.full((4, 2, 8), extreme, dtype)
        x[::2, :, ::2] *= -1
        z = quantize(x, **options)
        assert np.isfinite(np.asarray(z.values, np.float32)).all()
        assert np.isfinite(np.asarray(z.descale)).all()
        assert (np.asarray(z.descale) > 0).all()


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=60, deadline=None)
@given(
    x=hnp.arrays(np.float32, (3, 2, 8), elements=finite),
    options=st.sampled_from([{}, OPTIONS[3], OPTIONS[-1]]),
)
def test_never_nan_from_finite(x, options):
    z = quantize(x, **options)
    assert np.isfinite(np.asarray(z.values, np.float32)).all()
    assert (np.asarray(z.descale) > 0).all()
    assert np.isfinite(np.asarray(z.descale)).all()


def test_zeros_have_descale_one():
    for options in ({}, OPTIONS[-1]):
        z = quantize(np.zeros((2, 130, 2, 8), np.float32), **options)
        np.testing.assert_array_equal(np.asarray(z.descale), 1)
        assert not np.asarray(z.values, np.float32).any()


def test_what_centring_leaves_nothing_of_has_descale_one():
    """Also where numbers are so large that they are made smaller first."""
    x = np.full((1, 1, 2, 8), 1e30, np.float32)
    z = quantize(x, center=True)
    np.testing.assert_array_equal(z.descale, np.ones((1, 2), np.float32))
    np.testing.assert_array_equal(z.center, x[:, 0])


@pytest.mark.parametrize("shape", [(0, 2, 8), (0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)])
@pytest.mark.parametrize("options", [{}, OPTIONS[4], OPTIONS[-1]])
def test_empty(shape, options):
    z = quantize(np.zeros(shape, np.float32), **options)
    assert z.shape == shape
    assert np.isfinite(np.asarray(z.descale)).all()


def test_nan_stays_alone_and_infinity_saturates():
    x = normal(6, 2, 8)
    x[3, 1, 2] = np.nan
    x[2, 0, 1] = -np.inf
    for options in ({}, OPTIONS[2], OPTIONS[4]):
        z = quantize(x, **options)
        values = np.asarray(z.values, np.float32)
        np.testing.assert_array_equal(np.isnan(values), np.isnan(x))
        assert values[2, 0, 1] == -448
        assert np.isfinite(np.asarray(z.descale)).all()


@pytest.mark.parametrize("options", [{}, OPTIONS[-1]])
def test_jit_and_vmap_give_the_same(options):
    x = normal(3, 150, 2, 16, dtype=ml_dtypes.bfloat16)
    one_by_one = [quantize(y, **options) for y in x]
    together = jax.vmap(lambda y: quantize(y, **options))(x)
    jitted = [jax.jit(lambda y: quantize(y, **options))(y) for y in x]
    for i in range(3):
        for leaf, mapped, compiled in zip(
            jax.tree.leaves(one_by_one[i]),
            jax.tree.leaves(jax.tree.map(lambda leaf, i=i: leaf[i], together)),
            jax.tree.leaves(jitted[i]),
            strict=True,
        ):
            a, b, c = (np.asarray(y, np.float32) for y in (leaf, mapped, compiled))
            np.testing.assert_allclose(b, a, rtol=0.13, atol=1e-2)
            np.testing.assert_allclose(c, a, rtol=0.13, atol=1e-2)


def test_the_gradient_passes_to_x():
    x = jnp.asarray(normal(5, 2, 16))
    weight = jnp.asarray(normal(5, 2, 16, seed=1))

    def loss(x, **options):
        return (jnp.asarray(quantize(x, **options).source) * weight).sum()

    np.testing.assert_array_equal(jax.grad(loss)(x), weight)
    for options, expected in (
        ({"center": True}, weight - weight.mean(axis=0)),
        ({"rotate": True}, weight @ jnp.asarray(hadamard(16), jnp.float32)),
    ):
        got = jax.grad(lambda x, options=options: loss(x, **options))(x)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_values_and_descale_are_constants_to_differentiation():
    def loss(x):
        z = quantize(x, center=True)
        return z.dequantize().sum()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.asarray(normal(5, 2, 8))), 0)


def test_detach_drops_the_source():
    z = quantize(normal(5, 2, 8))
    assert z.detach().source is None
    assert z.detach().values is z.values


def test_is_a_pytree_with_any_leaves():
    z = quantize(normal(2, 5, 2, 8), granularity="block", center=True, rotate=True)
    leaves, structure = jax.tree.flatten(z)
    assert len(leaves) == 4
    again = jax.tree.unflatten(structure, [object()] * 4)
    assert isinstance(again, Quantized)
    assert (again.block, again.rotated) == (128, True)
    shapes = jax.eval_shape(lambda x: quantize(x, granularity="block"), z.source)
    assert shapes.values.shape == (2, 5, 2, 8)
    axes = jax.vmap(lambda z: z.descale.sum(), in_axes=(jax.tree.map(lambda _: 0, z),))
    assert axes(z).shape == (2,)
    _, stacked = jax.lax.scan(lambda c, x: (c, quantize(x)), 0, z.source)
    assert stacked.values.shape == (2, 5, 2, 8)


@pytest.mark.parametrize("options", [{}, OPTIONS[-1]])
def test_exports_with_symbolic_shapes_for_another_platform(options):
    def leaves(x):
        return jax.tree.leaves(quantize(x, **options))

    batch, tokens = export.symbolic_shape("b, s")
    shape = jax.ShapeDtypeStruct((batch, tokens, 2, 8), jnp.float32)
    exported = export.export(
        jax.jit(leaves),
        platforms=["cpu", "rocm"],
        disabled_checks=export_safety_checks(),
    )(shape)
    x = normal(2, 200, 2, 8)
    for a, b in zip(exported.call(x), leaves(x), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0.13, atol=1e-2)


def test_x64_changes_no_dtype():
    with jax.enable_x64(True):
        for options in ({}, OPTIONS[-1]):
            z = jax.jit(lambda x, options=options: quantize(x, **options))(
                normal(5, 2, 8)
            )
            assert z.descale.dtype == np.float32
            assert z.source.dtype == np.float32


def test_shard_map_keeps_shards_apart():
    mesh = jax.make_mesh((2,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    x = normal(4, 130, 2, 8)
    spec = jax.sharding.PartitionSpec("b")
    for options in ({}, OPTIONS[-1]):
        call = functools.partial(quantize, **options)
        sharded = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec))
        for a, b in zip(
            jax.tree.leaves(sharded(x)), jax.tree.leaves(call(x)), strict=True
        ):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            np.testing.assert_allclose(a, b, rtol=0.13, atol=1e-2)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (normal(5, 8), {}, r"\(batch, tokens, heads, dim\).*got \(5, 8\)"),
        (normal(1, 1, 5, 2, 8), {}, r"got \(1, 1, 5, 2, 8\)"),
        (np.zeros((5, 2, 8), np.int8), {}, "bfloat16, float16 or float32, got int8"),
        (np.zeros((5, 2, 8)), {}, "got float64"),
        (np.zeros((5, 2, 8), ml_dtypes.float8_e4m3fn), {}, "got float8_e4m3fn"),
        (np.zeros((5, 2, 8), bool), {}, "got bool"),
        ([[[1.0]]], {}, "a JAX or NumPy array, got list"),
        (1.0, {}, "a JAX or NumPy array, got float"),
        (quantize(normal(5, 2, 8)), {}, "not yet quantized, got Quantized"),
        (normal(5, 2, 8), {"granularity": "row"}, "'head', 'tensor', 'block'.*'row'"),
        (normal(5, 2, 8), {"granularity": None}, "got None"),
        (normal(5, 2, 8), {"block": 100}, "multiple of 128 tokens, got 100"),
        (normal(5, 2, 8), {"block": 0}, "got 0"),
        (normal(5, 2, 8), {"block": -128}, "got -128"),
        (normal(5, 2, 8), {"block": 128.0}, "got 128.0"),
        (normal(5, 2, 8), {"block": True}, "got True"),
        (normal(5, 2, 8), {"center": "yes"}, "center=True or False, got 'yes'"),
        (normal(5, 2, 8), {"rotate": 1}, "rotate=True or False, got 1"),
    ],
)
def test_wrong_use_says_what_came_and_what_is_taken(x, options, message):
    if "block" in options:
        options = {"granularity": "block", **options}
    with pytest.raises(ValueError, match=message):
        quantize(x, **options)
