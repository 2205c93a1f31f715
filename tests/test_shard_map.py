"""shard_map with its checks of varying axes on, and pmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from zyfa_jax import attention, quantize

SPLITS = {
    "batch": (P("x"), P("x")),
    "heads, keys and values shared": (P(None, None, "x"), P()),
}


def make_mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def inputs(split):
    kv_heads = 1 if split.startswith("heads") else 2
    return tuple(
        jax.random.normal(jax.random.key(i), (8, 12, heads, 16), jnp.float32)
        for i, heads in enumerate((8, kv_heads, kv_heads))
    )


def loss(q, k, v):
    return jnp.sum(jnp.square(attention(q, k, v)))


def fp8_loss(q, k, v):
    out = attention(*(quantize(x) for x in (q, k, v)), out_dtype=jnp.float32)
    return jnp.sum(jnp.square(out))


def repeated(q, k, v):
    """Attention as the body of a scan whose carry is its own result."""

    def body(carry, _):
        return attention(carry, k, v), None

    return jax.lax.scan(body, q, None, length=3)[0]


def blockwise(q, k, v):
    return attention(q, k, v, implementation="reference")


def assert_near(got, want, tolerance=2e-4):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("call", [attention, repeated, blockwise])
@pytest.mark.parametrize("check_vma", [True, False])
def test_values(split, call, check_vma):
    q_spec, kv_spec = SPLITS[split]
    arrays = inputs(split)
    split_call = jax.shard_map(
        call,
        mesh=make_mesh(),
        in_specs=(q_spec, kv_spec, kv_spec),
        out_specs=q_spec,
        check_vma=check_vma,
    )
    want = call(*arrays)
    assert_near(split_call(*arrays), want, 1e-5)
    assert_near(jax.jit(split_call)(*arrays), want, 1e-5)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "function",
    [loss, fp8_loss, lambda *x: jnp.sum(repeated(*x))],
    ids=["", "fp8", "scan"],
)
def test_gradients_inside_and_outside(split, function):
    q_spec, kv_spec = SPLITS[split]
    specs = (q_spec, kv_spec, kv_spec)
    arrays = inputs(split)

    def total(q, k, v):
        return jax.lax.psum(function(q, k, v), "x")

    want = jax.jit(jax.grad(function, (0, 1, 2)))(*arrays)
    if function is fp8_loss and split.startswith("heads"):
        by_head = jax.vmap(fp8_loss, in_axes=(2, None, None))
        want = jax.jit(
            jax.grad(
                lambda q, k, v: jnp.sum(by_head(jnp.expand_dims(q, 3), k, v)), (0, 1, 2)
            )
        )(*arrays)
    split_by = {"mesh": make_mesh(), "in_specs": specs}
    inside = jax.shard_map(jax.grad(total, (0, 1, 2)), out_specs=specs, **split_by)
    assert_near(jax.jit(inside)(*arrays), want)
    outside = jax.grad(jax.shard_map(total, out_specs=P(), **split_by), (0, 1, 2))
    assert_near(jax.jit(outside)(*arrays), want)


def test_over_some_axes_of_a_mesh():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    arrays = inputs("batch")
    spec = jax.sharding.NamedSharding(mesh, P("x", None, "y"))
    sharded = [jax.device_put(arrays[0], spec), *arrays[1:]]
    call = jax.shard_map(
        attention, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    assert_near(jax.jit(call)(*sharded), attention(*arrays), 1e-6)


@pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")
def test_pmap():
    arrays = [x[:, None] for x in inputs("batch")]
    want = jax.vmap(attention)(*arrays)
    assert_near(jax.pmap(attention)(*arrays), want, 1e-6)
    gradient = jax.grad(loss, (0, 1, 2))
    assert_near(jax.pmap(gradient)(*arrays), jax.jit(jax.vmap(gradient))(*arrays))
