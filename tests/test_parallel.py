"""Attention with tokens spread over devices is that of one device."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _oracle import BF16, F32, FP8, assert_near_oracle, make, rounding
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zyfa_jax
from zyfa_jax import _parallel_ring, parallel, quantize
from zyfa_jax._gradient import Operands
from zyfa_jax._spec import AttentionSpec

TOKENS = 64
ORDERS = ("contiguous", "zigzag")
METHODS = ("ring", "all_gather")
EVERY = [(order, method) for order in ORDERS for method in METHODS]
every = pytest.mark.parametrize(("order", "method"), EVERY, ids=lambda x: x)


def make_mesh(devices, axis_type=AxisType.Auto, name="t"):
    return jax.make_mesh(
        (devices,), (name,), axis_types=(axis_type,), devices=jax.devices()[:devices]
    )


def make_mesh_of_three(axis_type=AxisType.Auto):
    return jax.make_mesh((2, 2, 2), ("b", "t", "h"), axis_types=(axis_type,) * 3)


OVER_TOKENS = P(None, "t")
OVER_THREE = {"axis_name": "t", "batch_axes": "b", "head_axes": "h"}


def self_attention(dtype=F32, tokens=TOKENS, **shapes):
    return make(tokens=(tokens, tokens), dtype=dtype, **shapes)


def spread(*inputs, devices, order, mesh=None, axis_name="t", jit=True, **options):
    """(out, lse) in the tokens' own order, over devices."""
    if order == "zigzag":
        inputs = [parallel.zigzag(x, devices) for x in inputs]
    call = functools.partial(
        parallel.attention,
        mesh=mesh or make_mesh(devices),
        axis_name=axis_name,
        order=order,
        return_lse=True,
        **options,
    )
    out, lse = (jax.jit(call) if jit else call)(*inputs)
    if order == "zigzag":
        out = parallel.unzigzag(out, devices)
        lse = parallel.unzigzag(lse, devices, axis=2)
    return out, lse


def assert_same(got, want, tolerance=2e-6):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance)


@every
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_equals_one_device(devices, order, method, causal):
    inputs = self_attention()
    got = spread(*inputs, devices=devices, order=order, method=method, causal=causal)
    assert_same(got, zyfa_jax.attention(*inputs, causal=causal, return_lse=True))
    assert_near_oracle(got, inputs, causal=causal)


OPTIONS = {
    "window": {"window": 7},
    "window of two sides": {"causal": False, "window": (21, 3)},
    "window of one side": {"causal": False, "window": (None, 5)},
    "scale": {"scale": -0.3},
    "offset": {"q_offset": -9},
    "offsets and window": {"q_offset": np.array([3, -70], np.int32), "window": 30},
    "lengths": {"q_lengths": np.array([64, 3]), "kv_lengths": np.array([40, 50])},
    "no keys": {"kv_lengths": 0, "causal": False},
    "keys alone": {"kv_lengths": np.array([17, 33]), "causal": False},
    "far": {"q_offset": -(2**31), "kv_lengths": 60},
    "reference": {"implementation": "reference"},
}


@every
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, order, method):
    inputs, options = self_attention(), OPTIONS[name]
    got = spread(*inputs, devices=4, order=order, method=method, **options)
    assert_same(got, zyfa_jax.attention(*inputs, return_lse=True, **options))


@every
def test_more_keys_than_queries(order, method):
    inputs = make(tokens=(32, 64))
    got = spread(*inputs, devices=4, order=order, method=method)
    assert_same(got, zyfa_jax.attention(*inputs, return_lse=True))


@every
@pytest.mark.parametrize("tokens", [(0, 0), (8, 0), (0, 8), (8, 8)])
def test_no_tokens_and_one_of_a_chunk(tokens, order, method):
    inputs = make(tokens=tokens)
    got = spread(*inputs, devices=4, order=order, method=method)
    assert_same(got, zyfa_jax.attention(*inputs, return_lse=True))


@every
def test_bfloat16_is_rounded_once_more(order, method):
    inputs = self_attention(BF16, heads=(4, 1), dims=(24, 16))
    got = spread(*inputs, devices=8, order=order, method=method)
    assert got[0].dtype == BF16
    assert_near_oracle(got, inputs)
    one, _ = zyfa_jax.attention(*inputs, return_lse=True)
    scale = np.abs(one.astype(np.float32)).max()
    error = np.abs(got[0].astype(np.float32) - one.astype(np.float32))
    assert error.max() <= 2 * scale * rounding(BF16)


def quantized(inputs, **options):
    return [quantize(x, **options).detach() for x in inputs]


@every
@pytest.mark.parametrize("granularity", ["head", "tensor", "block"])
def test_quantized(granularity, order, method):
    inputs = self_attention(tokens=512)
    inputs = quantized(inputs, granularity=granularity)
    devices = 2
    got = spread(
        *inputs, devices=devices, order=order, method=method, out_dtype=jnp.float32
    )
    assert_near_oracle(got, inputs)
    want = zyfa_jax.attention(*inputs, out_dtype=jnp.float32, return_lse=True)
    assert np.linalg.norm(got[0] - want[0]) <= 0.03 * np.linalg.norm(want[0])


@every
def test_raw_fp8_of_any_descales(order, method):
    inputs = [np.asarray(x.values) for x in quantized(self_attention())]
    descales = {
        "q_descale": np.float32(0.01),
        "k_descale": np.array([0.01, 0.03], np.float32),
        "v_descale": np.array([[0.5], [0.25]], np.float32),
    }
    got = spread(*inputs, devices=4, order=order, method=method, **descales)
    assert got[0].dtype == BF16
    assert_near_oracle(got, inputs, **descales)


@every
def test_centred_and_rotated_keys(order, method):
    q, k, v = self_attention(tokens=128)
    inputs = (
        quantize(q, rotate=True),
        quantize(k + np.float32(2), rotate=True, center=True),
        quantize(v),
    )
    got = spread(*inputs, devices=4, order=order, method=method)
    want = zyfa_jax.attention(*inputs, return_lse=True)
    assert_same(got[1], want[1], 0.05)


@every
def test_unbatched(order, method):
    inputs = [x[0] for x in self_attention()]
    if order == "zigzag":
        inputs = [parallel.zigzag(x, 4, axis=0) for x in inputs]
    out, lse = parallel.attention(
        *inputs, mesh=make_mesh(4), axis_name="t", order=order, method=method,
        return_lse=True,
    )  # fmt: skip
    if order == "zigzag":
        out, lse = parallel.unzigzag(out, 4, axis=0), parallel.unzigzag(lse, 4)
        inputs = [parallel.unzigzag(x, 4, axis=0) for x in inputs]
    assert_same((out, lse), zyfa_jax.attention(*inputs, return_lse=True))


@every
def test_a_value_that_is_not_finite_reaches_who_sees_it(order, method):
    q, k, v = self_attention()
    v[0, 40, 0, 0] = np.inf
    k[1, 50] = np.nan
    got = spread(q, k, v, devices=4, order=order, method=method)
    want = zyfa_jax.attention(q, k, v, return_lse=True)
    assert np.isnan(want[0]).any()
    assert_same(got, want)


@every
def test_with_batch_and_heads(order, method):
    inputs = self_attention()
    got = spread(
        *inputs, devices=2, order=order, method=method, mesh=make_mesh_of_three(),
        batch_axes="b", head_axes="h", q_offset=np.array([0, -3], np.int32),
    )  # fmt: skip
    want = zyfa_jax.attention(
        *inputs, q_offset=np.array([0, -3], np.int32), return_lse=True
    )
    assert_same(got, want)


def test_over_two_axes_of_a_mesh():
    inputs = self_attention()
    got = spread(
        *inputs, devices=4, order="zigzag", mesh=make_mesh_of_three(),
        axis_name=("b", "h"), method="ring",
    )  # fmt: skip
    assert_same(got, zyfa_jax.attention(*inputs, return_lse=True))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_that_is_set(axis_type):
    inputs = [parallel.zigzag(x, 2) for x in self_attention()]
    call = functools.partial(parallel.attention, order="zigzag", **OVER_THREE)
    want = call(*inputs, mesh=make_mesh_of_three())
    spec = P("b", "t", "h")
    with jax.set_mesh(make_mesh_of_three(axis_type)):
        sharded = [jax.device_put(x, spec) for x in inputs]
        got = jax.jit(call)(*sharded)
        gradient = jax.jit(jax.grad(lambda *x: jnp.sum(call(*x)), (0, 1, 2)))(*sharded)
    assert_same(got, want)
    assert got.sharding.is_equivalent_to(sharded[0].sharding, 4)
    plain = jax.grad(lambda *x: jnp.sum(call(*x, mesh=make_mesh_of_three())), (0, 1, 2))
    assert_same(gradient, plain(*inputs))


def test_eager_and_vmap():
    inputs = self_attention()
    want = zyfa_jax.attention(*inputs, return_lse=True)
    options = {"devices": 4, "order": "contiguous", "method": "ring"}
    assert_same(spread(*inputs, jit=False, **options), want)

    def call(q, k, v):
        return parallel.attention(
            q, k, v, mesh=make_mesh(4), axis_name="t", return_lse=True
        )

    assert_same(jax.vmap(call)(*inputs), want)


# ---- Inside shard_map


def inside(call, devices, specs=OVER_TOKENS, out_specs=None, **options):
    return jax.jit(
        jax.shard_map(
            call,
            mesh=make_mesh(devices),
            in_specs=specs,
            out_specs=specs if out_specs is None else out_specs,
            **options,
        )
    )


@every
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(order, method, check_vma):
    inputs = self_attention()
    q, k, v = (parallel.zigzag(x, 4) if order == "zigzag" else x for x in inputs)

    def call(q, k, v):
        return parallel.attention(
            q, k, v, axis_name="t", order=order, method=method, q_offset=2, window=30,
            kv_lengths=60,
        )  # fmt: skip

    out = inside(call, 4, check_vma=check_vma)(q, k, v)
    out = parallel.unzigzag(out, 4) if order == "zigzag" else out
    want = zyfa_jax.attention(*inputs, q_offset=2, window=30, kv_lengths=60)
    assert_same(out, want)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_descales_of_each_device_travel(order, check_vma):
    q, k, v = self_attention()
    k[:, 32:] *= 8
    v[:, 16:] *= 20

    def call(q, k, v):
        q, k, v = (quantize(x).detach() for x in (q, k, v))
        return parallel.attention(
            q, k, v, axis_name="t", order=order, method="ring", out_dtype=jnp.float32
        )

    shuffled = [parallel.zigzag(x, 4) if order == "zigzag" else x for x in (q, k, v)]
    out = inside(call, 4, check_vma=check_vma)(*shuffled)
    out = parallel.unzigzag(out, 4) if order == "zigzag" else out
    want = zyfa_jax.attention(q, k, v)
    assert np.linalg.norm(out - want) <= 0.15 * np.linalg.norm(want)

    def gather(q, k, v):
        q, k, v = (quantize(x).detach() for x in (q, k, v))
        return parallel.attention(q, k, v, axis_name="t", method="all_gather")

    with pytest.raises(ValueError, match=r"same descales.*'ring' takes them"):
        inside(gather, 4, check_vma=check_vma)(q, k, v)


def test_a_mean_of_each_device_is_refused():
    def call(q, k, v):
        k = quantize(k, center=True)
        return parallel.attention(quantize(q), k, quantize(v), axis_name="t")

    with pytest.raises(ValueError, match="mean of its own"):
        inside(call, 4)(*self_attention())
    assert np.isnan(inside(call, 4, check_vma=False)(*self_attention())).all()


def test_one_mean_without_checks():
    q, k, v = self_attention()
    q, k, v = quantize(q), quantize(k, center=True), quantize(v)
    want = zyfa_jax.attention(q, k, v, return_lse=True, out_dtype=jnp.float32)

    def call(*inputs):
        return parallel.attention(
            *inputs, axis_name="t", return_lse=True, out_dtype=jnp.float32
        )

    def specs(x):
        return jax.tree.map(lambda leaf: OVER_TOKENS if leaf.ndim == 4 else P(), x)

    out = inside(
        call, 4, tuple(map(specs, (q, k, v))), (OVER_TOKENS, P(None, None, "t")),
        check_vma=False,
    )(q, k, v)  # fmt: skip
    difference = np.linalg.norm(out[0] - want[0])
    assert difference < 0.02 * np.linalg.norm(want[0])
    np.testing.assert_allclose(out[1], want[1], atol=0.05)


@pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")
def test_pmap():
    inputs = self_attention()
    want = zyfa_jax.attention(*inputs)
    shares = [np.stack(np.split(x, 4, axis=1)) for x in inputs]
    call = functools.partial(parallel.attention, axis_name="t")
    out = jax.pmap(call, axis_name="t", devices=jax.devices()[:4])(*shares)
    assert_same(np.concatenate(out, axis=1), want)


# ---- Gradients


def loss(call, *inputs):
    out, lse = call(*inputs)
    seen = jnp.where(lse == -jnp.inf, np.float32(0), jnp.cos(lse))
    return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(seen)


def gradients(call, inputs, argnums=(0, 1, 2)):
    return jax.jit(jax.grad(functools.partial(loss, call), argnums))(*inputs)


# Both methods have one backward pass.
GRADIENTS = [("plain", *x) for x in EVERY] + [
    (name, order, "ring") for name in ("window", "lengths", "full") for order in ORDERS
]


@pytest.mark.parametrize(("name", "order", "method"), GRADIENTS)
def test_gradients(name, order, method):
    options = {"plain": {}, "full": {"causal": False}, **OPTIONS}[name]
    inputs = self_attention()
    call = functools.partial(
        spread, devices=4, order=order, method=method, jit=False, **options
    )
    one = functools.partial(zyfa_jax.attention, return_lse=True, **options)
    assert_same(gradients(call, inputs), gradients(one, inputs), 1e-4)


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_of_quantized_inputs_and_scale(order):
    inputs = self_attention(tokens=512, heads=(2, 1), batch=(1,), dims=(16, 16))

    def over(call, q, k, v, scale):
        q, k, v = (quantize(x, granularity="block") for x in (q, k, v))
        return call(q, k, v, scale=scale, out_dtype=jnp.float32)

    spread_out = functools.partial(
        spread, devices=2, order=order, method="ring", jit=False
    )
    one = functools.partial(zyfa_jax.attention, return_lse=True)
    got, want = (
        gradients(functools.partial(over, call), (*inputs, np.float32(0.2)), range(4))
        for call in (spread_out, one)
    )
    for x, y in zip(got, want, strict=True):
        assert np.linalg.norm(x - y) <= 0.05 * np.linalg.norm(y)


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_of_descales(order):
    inputs = [x.values for x in quantized(self_attention())]
    descales = [np.full((2, n), 0.01, np.float32) for n in (4, 2, 2)]

    def over(call, *descales):
        names = ("q_descale", "k_descale", "v_descale")
        return call(
            *inputs, out_dtype=jnp.float32, **dict(zip(names, descales, strict=True))
        )

    spread_out = functools.partial(
        spread, devices=4, order=order, method="ring", jit=False
    )
    one = functools.partial(zyfa_jax.attention, return_lse=True)
    got, want = (
        gradients(functools.partial(over, call), descales) for call in (spread_out, one)
    )
    for x, y in zip(got, want, strict=True):
        assert np.linalg.norm(x - y) <= 0.1 * np.linalg.norm(y)


@pytest.mark.parametrize(("order", "method"), [EVERY[1], EVERY[2]])
def test_gradients_inside_shard_map(order, method):
    """Of a replicated operand too: the devices' shares are summed."""
    inputs = self_attention(batch=(1,))
    q, k, v = (parallel.zigzag(x, 4) if order == "zigzag" else x for x in inputs)
    call = functools.partial(
        parallel.attention, axis_name="t", order=order, method=method
    )

    def total(q, k, v, scale):
        return jax.lax.psum(jnp.sum(jnp.square(call(q, k, v, scale=scale))), "t")

    spec = P(None, "t")
    specs = (spec, spec, spec, P())
    argnums = (0, 1, 2, 3)
    arguments = (q, k, v, np.float32(0.3))
    got = inside(jax.grad(total, argnums), 4, specs)(*arguments)
    outside = jax.grad(inside(total, 4, specs, P()), argnums)(*arguments)

    def one(q, k, v, scale):
        return jnp.sum(jnp.square(zyfa_jax.attention(q, k, v, scale=scale)))

    want = jax.grad(one, argnums)(*inputs, np.float32(0.3))
    for gradient in (got, outside):
        arrays = gradient[:3]
        if order == "zigzag":
            arrays = [parallel.unzigzag(x, 4) for x in arrays]
        assert_same((*arrays, gradient[3]), want, 1e-3)


def test_checkpoint_keeps_the_results():
    """With the names saved, the backward pass runs no attention again."""
    inputs = self_attention()
    call = functools.partial(
        parallel.attention, mesh=make_mesh(2), axis_name="t", method="ring"
    )

    def total(policy, *inputs):
        return jnp.sum(jax.checkpoint(call, policy=policy)(*inputs))

    def forwards(policy):
        gradient = jax.grad(functools.partial(total, policy), (0, 1, 2))
        return str(jax.make_jaxpr(gradient)(*inputs)).count("zyfa_attention[")

    save = jax.checkpoint_policies.save_only_these_names(*zyfa_jax.CHECKPOINT_NAMES)
    once = forwards(jax.checkpoint_policies.everything_saveable)
    assert forwards(save) == once
    assert forwards(None) == 2 * once


def test_backward_keeps_a_devices_own_alone():
    """What is kept does not grow with the number of devices."""
    inputs = self_attention()

    def saved(devices):
        call = functools.partial(
            parallel.attention, mesh=make_mesh(devices), axis_name="t", method="ring"
        )
        _, pull = jax.vjp(call, *inputs)
        return sum(x.size for x in jax.tree.leaves(pull))

    assert saved(8) - saved(2) < 200  # but for some numbers of each device


# ---- What travels

COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "all-reduce",
               "reduce-scatter")  # fmt: skip


def collectives(call, *inputs):
    """(kind, dtype) of each collective in the compiled program: how many."""
    text = jax.jit(call).lower(*inputs).compile().as_text() or ""
    kinds = "|".join(COLLECTIVES)
    found = re.findall(rf"= \(?(\w+)\[.* ({kinds})(?:-start)?\(", text)
    return Counter((kind, dtype) for dtype, kind in found)


def placed(inputs, mesh):
    return [jax.device_put(x, NamedSharding(mesh, OVER_TOKENS)) for x in inputs]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("dtype", [F32, FP8])
def test_collectives(order, devices, dtype):
    mesh = make_mesh(devices)
    inputs = placed(self_attention(), mesh)
    if dtype == FP8:
        inputs = placed([x.astype(FP8) for x in inputs], mesh)
    descales = {f"{x}_descale": 1.0 for x in "qkv"} if dtype == FP8 else {}
    call = functools.partial(
        parallel.attention, mesh=mesh, axis_name="t", order=order, return_lse=True,
        **descales,
    )  # fmt: skip
    name = "u8" if dtype == FP8 else "f32"  # the bits
    ring = collectives(functools.partial(call, method="ring"), *inputs)
    assert ring == {("collective-permute", name): 2 * (devices - 1)}
    gathered = collectives(functools.partial(call, method="all_gather"), *inputs)
    assert gathered == {("all-gather", name): 2}


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_kernels_of_gpus_serve(platform, dtype):
    """Every step is one call of the platform's kernel."""
    inputs = [x.astype(dtype) for x in self_attention(dims=(128, 128))]
    descales = {f"{x}_descale": 1.0 for x in "qkv"} if dtype == FP8 else {}
    mesh = make_mesh(4)
    for method, calls in (("ring", 4), ("all_gather", 2)):
        call = functools.partial(
            parallel.attention, mesh=mesh, axis_name="t", order="zigzag",
            method=method, **descales,
        )  # fmt: skip
        lowered = jax.jit(call).trace(*placed(inputs, mesh))
        text = lowered.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("custom_call @zyfa_attention") == calls


def test_collectives_of_the_gradient():
    mesh = make_mesh(4)
    inputs = placed(self_attention(), mesh)
    call = functools.partial(
        parallel.attention, mesh=mesh, axis_name="t", order="zigzag"
    )

    def gradient(method):
        def total(*inputs):
            return jnp.sum(call(*inputs, method=method))

        return collectives(jax.grad(total, (0, 1, 2)), *inputs)

    # Keys and values go round twice, and their gradients once.
    assert gradient("ring") == {("collective-permute", "f32"): 3 * 2 * 3}
    assert gradient("all_gather") == {
        ("all-gather", "f32"): 2,
        ("collective-permute", "f32"): 2 * 2 * 3,
    }


def test_a_window_leaves_steps_out():
    mesh = make_mesh(8)
    inputs = placed(self_attention(), mesh)

    def count(order, window, **options):
        call = functools.partial(
            parallel.attention, mesh=mesh, axis_name="t", order=order, window=window,
            method="ring", **options,
        )  # fmt: skip
        return collectives(call, *inputs)[("collective-permute", "f32")]

    assert count("contiguous", 8) == 2 * 1  # the neighbour's keys
    assert count("contiguous", 9) == 2 * 2
    assert count("contiguous", 0) == 0
    # A chunk's neighbours lie on both sides.
    assert count("zigzag", 4) == 2 * 2
    assert count("contiguous", (8, 8), causal=False) == 2 * 2
    assert count("contiguous", 8, kv_lengths=60) == 2 * 7


def test_blocks_of_zigzag_are_half_of_all():
    """In every step after the first, each device has two of four pairs of chunks."""
    devices, tokens = 4, 16
    plan = _parallel_ring.Plan(
        AttentionSpec((None, 0), F32, q_offset=0),
        "t", devices, "zigzag", "ring", False, True,
    )  # fmt: skip
    x = operands_of(tokens)

    def lengths(shift):
        def call(_):
            [block] = _parallel_ring._blocks(plan, x, _parallel_ring._keys(x), shift)
            return jnp.stack(block.ints[1:])

        return inside(call, devices, P("t"), P(None, "t"))(jnp.zeros(devices))

    for shift in range(1, devices):
        queries, keys = np.asarray(lengths(shift)).reshape(2, devices, 2)
        pairs = (queries // 8) * (keys // 8)
        np.testing.assert_array_equal(pairs.sum(axis=1), 2)


def operands_of(tokens):
    q = jnp.zeros((1, tokens, 1, 8))
    one = jnp.ones((1, 1, 1))
    row = jnp.full((1,), tokens, jnp.int32)
    return Operands(
        q, q, q, one, one, one, jnp.float32(1), row * 0, row, row, None, None, None
    )


def test_the_method_follows_what_would_be_gathered(monkeypatch):
    inputs = self_attention()

    def method(devices):
        mesh = make_mesh(devices)
        call = functools.partial(parallel.attention, mesh=mesh, axis_name="t")
        [(kind, _)] = collectives(call, *placed(inputs, mesh))
        return kind

    assert method(4) == "all-gather"
    assert method(2) == "collective-permute"
    nbytes = inputs[1].nbytes + inputs[2].nbytes
    monkeypatch.setattr(parallel, "GATHERED_BYTES", nbytes)
    assert method(4) == "all-gather"
    monkeypatch.setattr(parallel, "GATHERED_BYTES", nbytes - 1)
    assert method(4) == "collective-permute"
