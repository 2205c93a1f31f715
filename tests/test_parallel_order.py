"""The order of tokens over devices, and what attention over devices refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _oracle import FP8, make
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from zyfa_jax import parallel, quantize


def make_mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((2, 2, 2), ("b", "t", "h"), axis_types=(axis_type,) * 3)


def test_each_part_is_early_and_late():
    got = parallel.zigzag(np.arange(12), 3, axis=0)
    np.testing.assert_array_equal(got, [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7])
    np.testing.assert_array_equal(got, parallel.positions(12, 3))
    np.testing.assert_array_equal(parallel.positions(5, 5, "contiguous"), range(5))
    assert parallel.positions(12, 3).dtype == np.int32


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("module", [np, jnp])
@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 16, 3, 4), None), ((16,), 0), ((2, 3, 16), -1)]
)
def test_unzigzag_is_the_inverse(shape, axis, module, devices):
    x = module.arange(int(np.prod(shape))).reshape(shape)
    there = parallel.zigzag(x, devices, axis=axis)
    assert type(there) is type(x)
    assert (there != x).any() == (devices > 1)
    np.testing.assert_array_equal(parallel.unzigzag(there, devices, axis=axis), x)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_with_the_axis_sharded(axis_type, jit):
    spread = jax.NamedSharding(make_mesh(axis_type), P(None, "t"))
    x = jax.device_put(jnp.arange(32).reshape(2, 16), spread)
    there = jit(functools.partial(parallel.zigzag, devices=2))(x)
    np.testing.assert_array_equal(there, parallel.zigzag(np.asarray(x), 2))
    back = jit(functools.partial(parallel.unzigzag, devices=2))(there)
    np.testing.assert_array_equal(back, x)
    assert jax.typeof(back) == jax.typeof(x)


@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_quantized(granularity, batch):
    x = make(tokens=(512, 512), batch=batch)[0]
    x8 = quantize(x, granularity=granularity)
    there = parallel.zigzag(x8, 2)
    axis = len(batch)
    np.testing.assert_allclose(
        there.dequantize(), parallel.zigzag(np.asarray(x8.dequantize()), 2, axis=axis)
    )
    np.testing.assert_array_equal(there.source, parallel.zigzag(x, 2, axis=axis))
    for got, want in zip(
        jax.tree.leaves(parallel.unzigzag(there, 2)), jax.tree.leaves(x8), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_local_positions(order):
    mesh = make_mesh()

    def call(x):
        tokens = x.shape[0]
        return parallel.local_positions(tokens, ("h", "t"), order)

    spec = P(("h", "t"))
    got = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.zeros(16))
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, parallel.positions(16, 4, order))


Q8 = [quantize(x, granularity="block") for x in make(tokens=(256, 256))]
FP8_ARRAYS = [x.astype(FP8) for x in make(tokens=(16, 16))]
REFUSED = {
    "order": ({"order": "striped"}, "'contiguous' or 'zigzag', not 'striped'"),
    "method": ({"method": "all_to_all"}, "'ring' or 'all_gather', not 'all_to_all'"),
    "axis": ({"axis_name": "s"}, r"'s' is no axis: got a mesh .*'b', 't', 'h'"),
    "no axis": ({"axis_name": ()}, r"axis_name as mesh axes, not \(\)"),
    "axis of no name": ({"axis_name": 3}, "axis_name as the name .* not 3"),
    "mesh": ({"mesh": ("t", 2)}, r"mesh as a jax.sharding.Mesh, not \('t', 2\)"),
    "one axis twice": (
        {"head_axes": "t"},
        r"one of batch, tokens and heads, got .*'t'",
    ),
    "tokens": (
        {"tokens": (18, 18), "order": "zigzag"},
        "zigzag tokens that 4 chunks, 2 for each of 2 devices, .* q has 18",
    ),
    "keys": ({"tokens": (16, 15)}, "contiguous tokens .* k has 15"),
    "batch": ({"batch": (3,), "batch_axes": "b"}, r"batch rows that the 2 .* not 3"),
    "query heads": ({"heads": (3, 1), "head_axes": "h"}, "query heads that .* not 3"),
    "heads": ({"heads": (4, 1), "head_axes": "h"}, "key/value heads that .* not 1"),
    "blocks": (
        {"arrays": Q8, "order": "zigzag"},
        "blocks no chunk cuts, but q has a descale for 128 tokens, and chunks of 64",
    ),
    "return_lse": ({"return_lse": 1}, "return_lse=True or False, not 1"),
    "window": ({"window": "all"}, "window=None, a number of tokens"),
    "lengths": ({"kv_lengths": 17}, "kv_lengths from 0 to 16 tokens"),
    "no descale": ({"arrays": FP8_ARRAYS}, "q_descale is None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    options, message = REFUSED[name]
    options = {"tokens": (16, 16), "axis_name": "t", "mesh": make_mesh(), **options}
    shapes = {x: options.pop(x) for x in ("tokens", "heads", "batch") if x in options}
    arrays = options.pop("arrays", None) or make(**shapes)
    with pytest.raises(ValueError, match=message):
        parallel.attention(*arrays, **options)


def test_refused_without_a_mesh():
    with pytest.raises(ValueError, match="'t' is no axis: got a mesh of None"):
        parallel.attention(*make(), axis_name="t")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_axes": "h"}, "inside shard_map takes no batch_axes or head_axes"),
        ({"mesh": make_mesh()}, "inside shard_map takes no mesh"),
    ],
)
def test_refused_inside_shard_map(options, message):
    def call(*arrays):
        return parallel.attention(*arrays, axis_name="t", **options)

    split = jax.shard_map(
        call, mesh=make_mesh(), in_specs=P(None, "t"), out_specs=P(None, "t")
    )
    with pytest.raises(ValueError, match=message):
        split(*make(tokens=(16, 16)))


def test_unknown_keywords_are_named():
    with pytest.raises(TypeError, match="unexpected keyword argument 'bias'"):
        parallel.attention(*make(), axis_name="t", mesh=make_mesh(), bias=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parallel.zigzag(np.ones((2, 12)), 4), r"axis 1 of \(2, 12\) has 12"),
        (lambda: parallel.zigzag([1, 2], 1, axis=0), "NumPy array or .*, not list"),
        (lambda: parallel.zigzag(np.ones(8), 2, axis="t"), "an integer, not 't'"),
        (lambda: parallel.zigzag(np.ones(8), 2), r"not 1 of shape \(8,\)"),
        (
            lambda: parallel.zigzag(np.ones((64, 8, 4)), 2),
            r"0 for \(tokens, heads, dim\), 1 for .*, got none for \(64, 8, 4\)",
        ),
        (lambda: parallel.zigzag(np.ones((2, 8)), 0), "above 0, not 0"),
        (lambda: parallel.zigzag(np.ones((2, 8)), 2.0), "above 0, not 2.0"),
        (lambda: parallel.zigzag(Q8[0], 2), "descale for 128 tokens, and chunks of 64"),
        (lambda: parallel.zigzag(Q8[0], 1, axis=1), "no axis for a Quantized, got 1"),
        (lambda: parallel.positions(12, 4), "tokens has 12"),
        (lambda: parallel.positions(12, 4, "ring"), "not 'ring'"),
    ],
)
def test_orders_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
