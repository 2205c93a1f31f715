"""vmap: any operands, any axes, nested, named; the same as a loop over calls."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zyfa_jax import attention, quantize

SIZE = 3
BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 4, 2, 8, 16
SHAPES = ((BATCH, 9, HEADS, DIM), (BATCH, 13, KV_HEADS, DIM), (BATCH, 13, KV_HEADS, 16))


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def assert_like_loop(call, axes, args, tolerance=1e-5):
    call = jax.jit(call)
    got = jax.jit(jax.vmap(call, in_axes=axes))(*args)
    for i in range(SIZE):
        own = [
            x
            if axis is None
            else jax.tree.map(functools.partial(jnp.take, indices=i, axis=axis), x)
            for x, axis in zip(args, axes, strict=True)
        ]
        for part, want in zip(got, call(*own), strict=True):
            np.testing.assert_allclose(part[i], want, atol=tolerance, rtol=tolerance)


def call_with_all(q, k, v, scale, q_offset, q_lengths, kv_lengths):
    return attention(
        q,
        k,
        v,
        scale=scale,
        q_offset=q_offset,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        return_lse=True,
    )


# Each operand mapped at an axis of its own, at the ends and in the middle.
ALL_ARGS = (
    (0, normal(SIZE, *SHAPES[0], seed=1)),
    (2, normal(BATCH, 13, SIZE, KV_HEADS, DIM, seed=2)),
    (4, normal(BATCH, 13, KV_HEADS, VALUE_DIM, SIZE, seed=3)),
    (0, jnp.linspace(-0.5, 0.5, SIZE, dtype=jnp.float32)),
    (0, jnp.arange(SIZE, dtype=jnp.int32) + 2),
    (1, jnp.arange(SIZE * BATCH, dtype=jnp.int32).reshape(BATCH, SIZE) + 4),
    (0, jnp.arange(SIZE * BATCH, dtype=jnp.int32).reshape(SIZE, BATCH) + 8),
)


@pytest.mark.parametrize(
    "mapped",
    [m for m in itertools.product((False, True), repeat=7) if sum(m) in (1, 2, 6, 7)],
    ids=lambda m: "".join("qkvsoll"[i] if x else "-" for i, x in enumerate(m)),
)
def test_subsets_of_operands(mapped):
    axes = tuple(a if m else None for m, (a, _) in zip(mapped, ALL_ARGS, strict=True))
    args = [
        x if m else jnp.take(x, 1, axis=a)
        for m, (a, x) in zip(mapped, ALL_ARGS, strict=True)
    ]
    assert_like_loop(call_with_all, axes, args)


@pytest.mark.parametrize("mapped", [(0, None, None), (None, 0, None), (0, 0, 0)])
def test_quantized(mapped):
    def call(q, k, v):
        return attention(q, k, v, return_lse=True)

    args = [
        jax.vmap(functools.partial(quantize, granularity="block"))(
            normal(SIZE, *shape, seed=i)
        )
        for i, shape in enumerate(SHAPES)
    ]
    args = [
        x if axis == 0 else jax.tree.map(lambda y: y[1], x)
        for x, axis in zip(args, mapped, strict=True)
    ]
    assert_like_loop(call, mapped, args, tolerance=1e-2)


def test_descales():
    q, k, v = (normal(*shape, seed=i) for i, shape in enumerate(SHAPES))
    q, k, v = (x.astype(jnp.float8_e4m3fn) for x in (q, k, v))
    descales = jnp.linspace(0.5, 1.5, SIZE, dtype=jnp.float32)

    def call(q_descale, k_descale, v_descale):
        return attention(
            q,
            k,
            v,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            return_lse=True,
            out_dtype=jnp.float32,
        )

    for axes in itertools.product((0, None), repeat=3):
        if any(axis == 0 for axis in axes):
            args = [descales if a == 0 else descales[0] for a in axes]
            assert_like_loop(call, axes, args)


def test_nested():
    q = normal(2, SIZE, *SHAPES[0])
    k, v = (normal(SIZE, *shape) for shape in SHAPES[1:])
    kernel = jax.vmap(jax.vmap(attention), in_axes=(0, None, None))
    inner_shared = jax.vmap(
        jax.vmap(attention, in_axes=(0, None, None)), in_axes=(1, 0, 0), out_axes=1
    )
    for call in (kernel, inner_shared):
        got = call(q, k, v)
        for i, j in itertools.product(range(2), range(SIZE)):
            np.testing.assert_array_equal(got[i, j], attention(q[i, j], k[j], v[j]))


def test_shared_keys_are_not_copied():
    q = normal(SIZE, *SHAPES[0])
    k, v = (normal(*shape) for shape in SHAPES[1:])
    jaxpr = jax.make_jaxpr(jax.vmap(attention, in_axes=(0, None, None)))(q, k, v)
    calls = [e for e in jaxpr.jaxpr.eqns if "zyfa_attention" in str(e)]
    (call,) = (e for e in _flat(calls) if e.primitive.name == "zyfa_attention")
    assert call.invars[0].aval.shape[0] == SIZE * BATCH
    assert call.invars[1].aval.shape == SHAPES[1]
    assert call.invars[2].aval.shape == SHAPES[2]


def _flat(eqns):
    for eqn in eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _flat(inner.eqns)


def test_gradient():
    q, k, v = (normal(SIZE, *shape, seed=i) for i, shape in enumerate(SHAPES))

    def gradients(q, k, v):
        return jax.grad(lambda *x: jnp.sum(jnp.square(attention(*x))), (0, 1, 2))(
            q, k, v
        )

    assert_like_loop(gradients, (0, 0, 0), (q, k, v))
    assert_like_loop(gradients, (0, None, None), (q, k[0], v[0]))


def test_empty_axis():
    q, k, v = (jnp.zeros((0, *shape), jnp.float32) for shape in SHAPES)
    assert jax.vmap(attention)(q, k, v).shape == (0, *SHAPES[0][:3], VALUE_DIM)


@pytest.mark.parametrize("shares_kv", [False, True])
def test_spmd_axis_name(shares_kv):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    q, k, v = (normal(8, 1, *shape[1:], seed=i) for i, shape in enumerate(SHAPES))
    if shares_kv:
        k, v = k[0], v[0]
    axes = (0, None, None) if shares_kv else (0, 0, 0)
    want = jax.vmap(attention, axes)(q, k, v)
    with jax.set_mesh(mesh):
        call = jax.jit(jax.vmap(attention, axes, spmd_axis_name="x"))
        got = call(q, k, v)
        program = call.lower(q, k, v).compile().as_text()
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("x")), 5)
    assert program is not None
    assert "all-gather" not in program
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_spmd_axis_name_around_shard_map():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    split = jax.shard_map(
        attention, mesh=mesh, in_specs=PartitionSpec("y"), out_specs=PartitionSpec("y")
    )
    q, k, v = (normal(2, 4, *shape[1:], seed=i) for i, shape in enumerate(SHAPES))
    got = jax.jit(jax.vmap(split, spmd_axis_name="x"))(q, k, v)
    np.testing.assert_allclose(got, jax.vmap(attention)(q, k, v), atol=1e-6)
