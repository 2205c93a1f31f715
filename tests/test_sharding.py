"""jit with sharded inputs.

Without a partitioning rule the compiler gathers every operand of a custom call onto
every device, silently: right results at a multiple of the time and memory. So these
tests read the compiled program.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from zyfa_jax import attention, quantize

COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "all-reduce")


def make_mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)


def inputs(heads, kv_heads, batch=4, tokens=32, dim=16):
    return tuple(
        jax.random.normal(jax.random.key(i), (batch, tokens, h, dim), jnp.float32)
        for i, h in enumerate((heads, kv_heads, kv_heads))
    )


def put(mesh, arrays, q_spec, kv_spec):
    specs = (q_spec, kv_spec, kv_spec)
    return [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, specs, strict=True)
    ]


def run(call, arrays):
    """Results of a jitted call, and the collectives in its program."""
    program = jax.jit(call).lower(*arrays).compile()
    text = program.as_text() or ""
    return program(*arrays), [x for x in COLLECTIVES if x in text]


def call(q, k, v):
    return attention(q, k, v, return_lse=True)


def loss(q, k, v):
    return jnp.sum(jnp.square(attention(q, k, v)))


LOCAL = {
    "batch": (P("y"), P("y"), 4, 4),
    "batch, grouped": (P("y"), P("y"), 4, 2),
    "heads": (P(None, None, "y"), P(None, None, "y"), 8, 8),
    "heads, grouped": (P(None, None, "y"), P(None, None, "y"), 8, 4),
    "both, grouped": (P("x", None, "y"), P("x", None, "y"), 8, 4),
    "heads over two axes": (P(None, None, ("x", "y")),) * 2 + (8, 8),
    "one key/value head for all": (P("x", None, "y"), P("x"), 8, 1),
    "fewer key/value heads than devices": (P("x", None, "y"), P("x"), 8, 2),
    "key/value heads over the outer axis": (
        P(None, None, ("x", "y")),
        P(None, None, "x"),
        8,
        2,
    ),
    "queries alone": (P(None, None, "y"), P(), 8, 4),
    "nothing": (P(), P(), 8, 2),
}


@pytest.mark.parametrize("case", LOCAL)
def test_batch_and_heads_stay_sharded(case):
    q_spec, kv_spec, heads, kv_heads = LOCAL[case]
    mesh = make_mesh()
    arrays = inputs(heads, kv_heads)
    (out, lse), collectives = run(call, put(mesh, arrays, q_spec, kv_spec))
    want, want_lse = call(*arrays)
    assert collectives == []
    b, _, h = (*q_spec, None, None, None)[:3]
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(b, None, h)), 4)
    assert lse.sharding.is_equivalent_to(NamedSharding(mesh, P(b, h)), 3)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want_lse)


@pytest.mark.parametrize("case", LOCAL)
def test_gradients(case):
    q_spec, kv_spec, heads, kv_heads = LOCAL[case]
    arrays = inputs(heads, kv_heads)
    gradient = jax.grad(loss, (0, 1, 2))
    got, collectives = run(gradient, put(make_mesh(), arrays, q_spec, kv_spec))
    if q_spec == kv_spec:
        assert collectives == []
    for x, want in zip(got, jax.jit(gradient)(*arrays), strict=True):
        np.testing.assert_allclose(x, want, atol=1e-4)


@pytest.mark.parametrize("granularity", ["head", "block"])
def test_quantized(granularity):
    def call(q, k, v):
        return attention(*(quantize(x, granularity=granularity) for x in (q, k, v)))

    arrays = inputs(8, 4)
    spec = P("x", None, "y")
    got, collectives = run(call, put(make_mesh(), arrays, spec, spec))
    assert collectives == []
    np.testing.assert_array_equal(got, jax.jit(call)(*arrays))


def test_lengths_and_offsets():
    def call(q, k, v, n):
        return attention(q, k, v, kv_lengths=n, q_offset=n - 4, window=9)

    arrays = inputs(8, 4)
    n = jnp.array([32, 5, 17, 0], jnp.int32)
    mesh = make_mesh()
    sharded = put(mesh, arrays, P("x"), P("x"))
    got, collectives = run(
        call, [*sharded, jax.device_put(n, NamedSharding(mesh, P("x")))]
    )
    assert collectives == []
    np.testing.assert_array_equal(got, call(*arrays, n))


@pytest.mark.parametrize(
    "specs",
    [
        (P(None, "y"), P(None, "y")),
        (P("x", "y"), P("x", "y")),
        (P(None, None, None, "y"), P(None, None, None, "y")),
    ],
    ids=str,
)
def test_other_axes_are_gathered(specs):
    arrays = inputs(8, 4)
    (out, _), collectives = run(call, put(make_mesh(), arrays, *specs))
    assert "all-gather" in collectives
    np.testing.assert_array_equal(out, attention(*arrays))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "batch"), [(6, 2, 4), (8, 2, 3), (6, 3, 3)]
)
def test_uneven_shares(heads, kv_heads, batch):
    arrays = inputs(heads, kv_heads, batch)
    mesh = make_mesh()
    sharding = NamedSharding(mesh, P("x", None, "y"))

    def call(q, k, v):
        q, k, v = (jax.lax.with_sharding_constraint(x, sharding) for x in (q, k, v))
        return attention(q, k, v)

    np.testing.assert_array_equal(run(call, arrays)[0], attention(*arrays))


@pytest.mark.parametrize("kv_spec", [P("x"), P("x", None, "y")], ids=str)
def test_explicit_mesh(kv_spec):
    arrays = inputs(8, 4)
    with jax.set_mesh(make_mesh(AxisType.Explicit)):
        sharded = [
            jax.device_put(x, spec)
            for x, spec in zip(
                arrays, (P("x", None, "y"), kv_spec, kv_spec), strict=True
            )
        ]
        (out, lse), collectives = run(call, sharded)
        gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(*sharded)
    assert collectives == []
    assert jax.typeof(out).sharding.spec == P("x", None, "y", None)
    assert jax.typeof(lse).sharding.spec == P("x", "y", None)
    np.testing.assert_array_equal(out, attention(*arrays))
    wants = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
    for got, want, x in zip(gradients, wants, sharded, strict=True):
        assert jax.typeof(got).sharding == jax.typeof(x).sharding
        np.testing.assert_allclose(got, want, atol=1e-4)


def test_gradient_on_an_explicit_mesh_that_is_not_set():
    arrays = inputs(8, 4)
    spec = P("x", None, "y")
    sharded = put(make_mesh(AxisType.Explicit), arrays, spec, spec)
    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(*sharded)
    wants = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
    for got, want, x in zip(gradients, wants, sharded, strict=True):
        assert jax.typeof(got) == jax.typeof(x)
        np.testing.assert_allclose(got, want, atol=1e-4)


def test_explicit_mesh_vmap():
    arrays = inputs(8, 4, batch=8)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        out = jax.jit(jax.vmap(attention))(*(jax.device_put(x, P("x")) for x in arrays))
    assert jax.typeof(out).sharding.spec[0] == "x"
    np.testing.assert_array_equal(out, attention(*arrays))
