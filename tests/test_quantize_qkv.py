"""q, k and v rounded together: what it gives, and attention over it everywhere."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _oracle import BF16, F16, F32, FP8, assert_near_oracle, make, normal
from _quantized import array
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from zyfa_jax import (
    Quantized,
    attention,
    export_safety_checks,
    parallel,
    quantize,
    quantize_qkv,
    reference,
)
from zyfa_jax import _quantize_numerics as numerics
from zyfa_jax._attention import canonical
from zyfa_jax._gradient import attention as attend

INT8 = np.dtype(np.int8)
PRECISIONS = ("int8", "fp8")


def unbalanced(seed=0, **sizes: Any):
    """q and k with a few large channels each, not the same ones, and k off centre."""
    q, k, v = make(**{"tokens": (200, 300), "dims": (64, 32), "seed": seed, **sizes})
    dim = q.shape[-1]
    q[..., dim // 4] *= 16
    k[..., dim // 2 :: 7] *= 16
    k += 8 * normal(dim, seed=seed + 1)
    return q, k, v


def call(q, k, v, precision="int8", rotated=False, **options):
    rounded = quantize_qkv(q, k, v, precision=precision, rotated=rotated)
    return attention(*rounded, **options)


def error(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def assert_close(got, want, tolerance=0.1):
    """XLA may round otherwise in another program, and move an 8-bit number."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("batch", [(2,), ()])
def test_int8(batch, dtype):
    q, k, v = unbalanced(batch=batch, dtype=F32)
    q8, k8, v8 = quantize_qkv(*(x.astype(dtype) for x in (q, k, v)))
    assert (q8.dtype, k8.dtype, v8.dtype) == (INT8, INT8, FP8)
    assert (q8.shape, k8.shape, v8.shape) == (q.shape, k.shape, v.shape)
    assert (q8.block, k8.block, v8.channels) == (1, 128, True)
    assert q8.descale.shape == (*batch, 4, 200)
    assert k8.descale.shape == (*batch, 2, 3)
    assert v8.descale.shape == (*batch, 2, 32)
    for x in (q8, k8):
        assert x.balanced
        assert x.rotated
        largest = np.abs(np.asarray(x.values, np.int32)).max()
        assert largest == 127
    assert q8.center is None
    assert k8.center is not None


def test_fp8():
    q8, k8, v8 = quantize_qkv(*unbalanced(), precision="fp8")
    for x, heads in ((q8, 4), (k8, 2), (v8, 2)):
        assert x.dtype == FP8
        assert x.descale.shape == (2, heads)
        assert (x.block, x.channels) == (0, False)
    assert [x.rotated for x in (q8, k8, v8)] == [True, True, False]
    assert [x.balanced for x in (q8, k8, v8)] == [True, True, False]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_sources_have_the_logits_of_q_and_k_less_their_mean(precision):
    q, k, v = unbalanced(heads=(4, 2))
    q8, k8, v8 = quantize_qkv(q, k, v, precision=precision)
    group = np.repeat(np.arange(2), 2)
    got = np.einsum("bthd,bshd->bhts", q8.source, array(k8.source)[:, :, group])
    k = k - k.mean(axis=1, keepdims=True)
    want = np.einsum("bthd,bshd->bhts", q, k[:, :, group])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3 * np.abs(want).max())
    np.testing.assert_array_equal(v8.source, v)


def test_balanced_channels_are_of_one_size():
    q, k, v = make(tokens=(500, 500), heads=(1, 1), dims=(32, 8))
    loud = np.exp2(np.arange(32) % 8)
    q, k = (x.astype(F32) for x in (q * loud, k * loud[::-1]))
    q8, k8, _ = quantize_qkv(q, k, v)
    # The rotation undone, channels of q and of k are as large, to half a power of two.
    hadamard = array(quantize(np.eye(32, dtype=F32)[:, None], rotate=True).source)[:, 0]
    of_q, of_k = (
        np.sqrt(np.mean((np.asarray(x.source) @ hadamard.T) ** 2, axis=(0, 1, 2)))
        for x in (q8, k8)
    )
    assert np.abs(np.log2(of_q / of_k)).max() < 1.1


@pytest.mark.parametrize("batch", [(2,), ()])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_comes_rotated_is_only_centred_and_rounded(precision, batch):
    q, k, v = make(batch=batch, tokens=(200, 300), dims=(32, 8))
    k += 3
    turned = (numerics.rotated(jnp.asarray(x)) for x in (q, k))
    got = quantize_qkv(*turned, v, precision=precision, rotated=True)
    want = quantize_qkv(q, k, v, precision=precision)
    for a, b in zip(got, want, strict=True):
        # These inputs' channels are alike, so that balancing them does nothing.
        assert (a.rotated, a.block, a.channels) == (b.rotated, b.block, b.channels)
        assert not a.balanced
        assert_close(a.dequantize(), b.dequantize(), 0.03 + 0.1 * (precision == "fp8"))
        assert_close(a.source, b.source, 1e-4)
    assert_close(got[1].center, want[1].center, 1e-4)
    out = attention(*got, out_dtype=F32)
    assert error(out, np.asarray(attention(*want, out_dtype=F32))) < 0.02
    with pytest.raises(ValueError, match="of one call of quantize_qkv, got balanced="):
        attention(got[0], want[1], v=got[2])


def test_gradients_of_what_comes_rotated():
    inputs = [jnp.asarray(x) for x in make(tokens=(20, 33))]

    def loss(attend, *inputs):
        return jnp.sum(jnp.sin(attend(*inputs)))

    rounded = functools.partial(call, rotated=True, out_dtype=F32)
    got, want = (
        jax.grad(functools.partial(loss, attend), (0, 1, 2))(*inputs)
        for attend in (rounded, attention)
    )
    for a, b in zip(got, want, strict=True):
        assert error(a, np.asarray(b)) < 0.1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_errs_less_than_fp8_alone(precision):
    q, k, v = unbalanced(tokens=(512, 512), batch=())
    want, _ = reference.attention(q, k, v)
    alone = attention(*(quantize(x) for x in (q, k, v)), out_dtype=F32)
    out = call(q, k, v, precision, out_dtype=F32)
    share = 0.3 if precision == "int8" else 0.5
    assert error(out, want) < share * error(alone, want)


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_attention_over_int8_is_near_the_oracle(implementation):
    q8, k8, v8 = quantize_qkv(*make(tokens=(260, 300), dims=(32, 16)))
    x = q8, dataclasses.replace(k8, center=None), v8
    got = attention(*x, out_dtype=F32, return_lse=True, implementation=implementation)
    assert_near_oracle(got, x)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_attention_over_int8_is_its_definition(implementation, sign):
    q8, k8, v8 = quantize_qkv(*make(tokens=(260, 300), dims=(32, 16), batch=(1,)))
    x = q8, dataclasses.replace(k8, center=None), v8
    spec, operands = canonical(
        *x, scale=sign * 0.4, out_dtype=F32, implementation=implementation
    )
    spec = dataclasses.replace(spec, quadratic=True)
    out, lse = jax.jit(attend, static_argnums=0)(spec, operands)
    descales = {f"{n}_descale": array(y.descale) for n, y in zip("qkv", x, strict=True)}
    want, want_lse = reference.fp8_attention(
        *(np.asarray(y.values) for y in x), probabilities="quadratic", **descales,
        q_block=1, kv_block=128, v_channels=True, scale=sign * 0.4,
    )  # fmt: skip
    assert error(out, want) < 1e-3
    np.testing.assert_allclose(lse, want_lse, atol=1e-3)


OPTIONS = {
    "causal": {},
    "whole": {"causal": False},
    "window": {"window": (20, 5), "causal": False},
    "offset": {"q_offset": 7},
    "lengths": {"q_lengths": [30, 200], "kv_lengths": [140, 300]},
    "negative scale": {"scale": -0.2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option(options):
    inputs = unbalanced()
    options = {n: np.asarray(x) if "len" in n else x for n, x in options.items()}
    want, want_lse = reference.attention(*inputs, **options)
    out, lse = call(*inputs, out_dtype=F32, return_lse=True, **options)
    # Logits of a few hundred, from 8 bits.
    assert error(out, want) < 0.2
    seen = np.isfinite(want_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~seen)
    np.testing.assert_allclose(np.asarray(lse)[seen], want_lse[seen], rtol=0.02, atol=1)


def test_plain_arrays_with_descales():
    q8, k8 = (
        np.clip(np.rint(x * 40), -127, 127).astype(INT8)
        for x in make(tokens=(40, 200))[:2]
    )
    v8 = make(tokens=(40, 200), dtype=FP8)[2]
    options = {
        "q_descale": np.float32(0.03),
        "k_descale": np.array([0.02, 0.03], F32),
        "v_descale": np.array([[0.5, 2.0]], F32),
    }
    for implementation in (None, "reference"):
        got = attention(
            q8, k8, v8, return_lse=True, implementation=implementation, **options
        )
        assert got[0].dtype == BF16
        assert_near_oracle(got, (q8, k8, v8), **options)


def test_one_descale_of_v_beside_blocks_of_k():
    _, k8, v8 = x = quantize_qkv(*unbalanced())
    with pytest.raises(ValueError, match="k and v with one descale block, got 128 and"):
        attention(x[0], k8, quantize(unbalanced()[2]))
    fp8 = [quantize(y, granularity="block") for y in unbalanced()]
    out = attention(fp8[0], fp8[1], v8, out_dtype=F32)
    want = attention(*fp8, out_dtype=F32)
    assert error(out, np.asarray(want)) < 0.05


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_reaches_what_sees_it(where):
    inputs = dict(zip("qkv", make(tokens=(150, 150), batch=()), strict=True))
    clean = call(**inputs, out_dtype=F32)
    inputs[where][140, 1, 3] = np.nan
    out = np.asarray(call(**inputs, out_dtype=F32))
    nan = np.zeros(out.shape, bool)
    if where == "q":
        nan[140, 1] = True
    elif where == "k":
        nan[140:, 2:] = True
    else:
        nan[140:, 2:, 3] = True
    np.testing.assert_array_equal(np.isnan(out), nan)
    np.testing.assert_allclose(out[~nan], clean[~nan], atol=0.05)


def test_what_lies_past_the_lengths_does_not_matter():
    inputs = make(tokens=(150, 150))
    lengths = {"q_lengths": [100, 150], "kv_lengths": [90, 140]}
    lengths = {name: np.asarray(x) for name, x in lengths.items()}
    for x in inputs[1:]:
        x[0, 90:] = np.nan
        x[1, 140:] = np.nan
    out = call(*inputs, **lengths)
    assert np.isfinite(np.asarray(out, F32)).all()


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_extreme_finite_inputs_stay_finite(precision, dtype):
    info = jnp.finfo(dtype)
    for extreme in (info.max, info.smallest_normal, 0):
        x = np.full((4, 2, 8), extreme, dtype)
        x[::2, :, ::2] *= -1
        for y in quantize_qkv(x, x, x, precision=precision):
            assert np.isfinite(np.asarray(y.values, F32)).all()
            assert np.isfinite(np.asarray(y.descale)).all()
            assert (np.asarray(y.descale) > 0).all()


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_empty(empty):
    sizes: Any = {
        "batch": {"batch": (0,)},
        "queries": {"tokens": (0, 5)},
        "keys": {"tokens": (5, 0)},
    }
    q, k, v = make(dims=(8, 8), **sizes[empty])
    out = call(q, k, v)
    assert out.shape == (*q.shape[:3], 8)
    assert not np.asarray(out, F32).any()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (None, 0, 0)])
def test_vmap_gives_the_same(mapped, precision):
    args = [
        np.stack([x] * 3) + (axis == 0) * normal(3, *x.shape, seed=9)
        for x, axis in zip(make(dims=(16, 16)), mapped, strict=True)
    ]
    args = [x if axis == 0 else x[0] for x, axis in zip(args, mapped, strict=True)]
    rounded = functools.partial(call, precision=precision, out_dtype=F32)
    got = jax.jit(jax.vmap(rounded, in_axes=mapped))(*args)
    for i in range(3):
        own = [x if a is None else x[i] for x, a in zip(args, mapped, strict=True)]
        assert_close(got[i], rounded(*own))


def test_vmap_over_what_is_quantized():
    inputs = [np.stack([x, x + 1]) for x in make()]
    x = jax.vmap(quantize_qkv)(*inputs)
    got = jax.vmap(functools.partial(attention, out_dtype=F32))(*x)
    own = jax.tree.map(lambda y: y[1], x)
    assert_close(got[1], attention(*own, out_dtype=F32), 1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_are_those_of_the_unquantized_call(precision):
    inputs = [jnp.asarray(x) for x in make(tokens=(20, 33))]

    def loss(attend, *inputs):
        out, lse = attend(*inputs)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    rounded = functools.partial(
        call, precision=precision, out_dtype=F32, return_lse=True
    )
    plain = functools.partial(attention, return_lse=True)
    got, want = (
        jax.grad(functools.partial(loss, attend), (0, 1, 2))(*inputs)
        for attend in (rounded, plain)
    )
    for a, b in zip(got, want, strict=True):
        assert a.dtype == F32
        assert error(a, np.asarray(b)) < 0.1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_of_the_log_sum_exp_know_the_mean_of_k(precision):
    q, k, v = make(tokens=(20, 33))
    k += 3

    def loss(attend, q):
        return jnp.sum(attend(q, k, v, return_lse=True)[1])

    got, want = (
        jax.grad(functools.partial(loss, attend))(jnp.asarray(q))
        for attend in (functools.partial(call, precision=precision), attention)
    )
    assert error(got, np.asarray(want)) < 0.02


def test_gradients_of_descales():
    x = quantize_qkv(*make(tokens=(20, 140)))
    weights = normal(2, 20, 4, 24, seed=5)

    def loss(factors):
        scaled = [
            dataclasses.replace(y, descale=y.descale * f)
            for y, f in zip(x, factors, strict=True)
        ]
        out = attention(*scaled, out_dtype=F32, implementation="reference")
        return jnp.sum(out * weights)

    factors = [jnp.ones_like(y.descale) for y in x]
    gradient = jax.grad(loss)(factors)

    def plain(factors):
        q, k, v = (
            dataclasses.replace(y, descale=y.descale * f).dequantize()
            for y, f in zip(x, factors, strict=True)
        )
        return jnp.sum(attention(q, k, v) * weights)

    for a, b in zip(gradient, jax.grad(plain)(factors), strict=True):
        assert error(a, np.asarray(b)) < 0.1


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("precision", "rotated"), [("int8", False), ("fp8", False), ("int8", True)]
)
def test_sharded_inputs(precision, rotated, kind):
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(kind, kind))
    inputs = make(tokens=(20, 20))
    rounded = functools.partial(
        call, precision=precision, rotated=rotated, out_dtype=F32
    )
    want = rounded(*inputs)
    sharding = NamedSharding(mesh, P("b", None, "h"))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, sharding) for x in inputs]
        got = jax.jit(rounded)(*placed)
    assert got.sharding.spec[:3:2] == ("b", "h")
    assert_close(got, want)


def test_shard_map():
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    inputs = make(tokens=(20, 20))
    spec = P("b", None, "h")

    def loss(*inputs):
        return jnp.sum(jnp.sin(call(*inputs, out_dtype=F32)))

    def share(*inputs):
        return jax.lax.psum(loss(*inputs), ("b", "h"))

    mapped = jax.shard_map(share, mesh=mesh, in_specs=spec, out_specs=P())
    got = jax.jit(jax.value_and_grad(mapped, (0, 1, 2)))(*inputs)
    want = jax.value_and_grad(loss, (0, 1, 2))(*inputs)
    assert_close(got, want)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_parallel(method, order):
    mesh = jax.make_mesh((2,), ("t",), axis_types=(AxisType.Auto,))
    inputs = make(tokens=(512, 512), heads=(2, 1), dims=(16, 8), batch=(1,))
    x = quantize_qkv(*inputs)
    want = attention(*x, out_dtype=F32, return_lse=True)
    if order == "zigzag":
        x = [parallel.zigzag(y, 2) for y in x]

    def over_mesh(*x):
        return parallel.attention(
            *x, mesh=mesh, axis_name="t", order=order, method=method, out_dtype=F32,
            return_lse=True,
        )  # fmt: skip

    out, lse = jax.jit(over_mesh)(*x)
    if order == "zigzag":
        out = parallel.unzigzag(out, 2)
        lse = parallel.unzigzag(lse, 2, axis=2)
    assert_close((out, lse), want, 0.05)


def test_parallel_gradients():
    mesh = jax.make_mesh((2,), ("t",), axis_types=(AxisType.Auto,))
    inputs = make(tokens=(256, 256), heads=(2, 1), dims=(16, 8), batch=(1,))

    def loss(attend, *inputs):
        return jnp.sum(jnp.sin(attend(*quantize_qkv(*inputs), out_dtype=F32)))

    over_mesh = functools.partial(parallel.attention, mesh=mesh, axis_name="t")
    got, want = (
        jax.jit(jax.grad(functools.partial(loss, attend), (0, 1, 2)))(*inputs)
        for attend in (over_mesh, attention)
    )
    for a, b in zip(got, want, strict=True):
        assert error(a, np.asarray(b)) < 0.02


@pytest.mark.parametrize("precision", PRECISIONS)
def test_export(precision):
    rounded = jax.jit(functools.partial(call, precision=precision, out_dtype=F32))
    batch, tokens = export.symbolic_shape("b, s")
    inputs = make(tokens=(200, 200), heads=(2, 1), dims=(16, 8))
    shapes = [
        jax.ShapeDtypeStruct((batch, tokens, *x.shape[2:]), x.dtype) for x in inputs
    ]
    exported = export.export(
        rounded, platforms=["cpu", "rocm"], disabled_checks=export_safety_checks()
    )(*shapes)
    exported = export.deserialize(exported.serialize())
    assert_close(exported.call(*inputs), rounded(*inputs))


def test_eval_shape_scan_and_checkpoint():
    q, k, v = make(dims=(16, 16))
    shapes = jax.eval_shape(quantize_qkv, q, k, v)
    assert [x.values.dtype for x in shapes] == [INT8, INT8, FP8]

    def body(carry, _):
        return call(carry, k, v, out_dtype=F32), None

    assert jax.lax.scan(body, jnp.asarray(q), length=2)[0].shape == q.shape

    def loss(q):
        return jnp.sum(jax.checkpoint(call)(q, k, v).astype(F32))

    assert np.isfinite(jax.grad(loss)(jnp.asarray(q))).all()


def test_x64_changes_no_dtype():
    with jax.enable_x64(True):
        x = quantize_qkv(*make())
        assert all(y.descale.dtype == F32 for y in x)
        assert attention(*x).dtype == BF16


BAD: dict[str, tuple[Any, str]] = {
    "precision": ({"precision": "int4"}, "precision 'int8' or 'fp8', not 'int4'"),
    "rotated": ({"rotated": 1}, "quantize_qkv takes rotated=True or False, got 1"),
    "dtypes": ({"k": normal(2, 33, 2, 16, dtype=BF16)}, "q, k and v of one dtype"),
    "heads": ({"q": normal(2, 20, 3, 16)}, "not 3 query and 2 key/value heads"),
    "kind": ({"v": [1.0]}, "quantize_qkv takes a JAX or NumPy array, got list"),
    "again": ({"q": quantize(normal(5, 2, 8))}, "not yet quantized, got Quantized"),
    "rank": ({"q": normal(5, 8)}, r"quantize_qkv takes .* got \(5, 8\)"),
}


@pytest.mark.parametrize(("given", "message"), BAD.values(), ids=BAD)
def test_wrong_use_says_what_came_and_what_is_taken(given, message):
    inputs: Any = {**dict(zip("qkv", make(), strict=True)), **given}
    with pytest.raises(ValueError, match=message):
        quantize_qkv(**inputs)


def replaced(x: Quantized, **fields: Any) -> Quantized:
    return dataclasses.replace(x, **fields)


Q8, K8, V8 = quantize_qkv(*make())
MIXED: dict[str, tuple[tuple[Any, Any, Any], str]] = {
    "k alone": (
        (Q8, quantize(make()[1]), V8),
        "int8 q and k with float8_e4m3fn v, got",
    ),
    "v too": ((Q8, K8, replaced(K8, center=None)), "but v is int8, which q and k can"),
    "unbalanced k": (
        (Q8, replaced(K8, balanced=False), V8),
        "one call of quantize_qkv, got balanced=True and balanced=False",
    ),
    "balanced v": ((Q8, K8, replaced(V8, balanced=True)), "nor balanced, got"),
    "q's channels": (
        (replaced(Q8, block=0, channels=True, descale=jnp.ones((2, 4, 16))), K8, V8),
        "channels of v alone, .* but q has channels=True",
    ),
    "tokens of k": ((Q8, replaced(K8, block=1), V8), "or for q 1, but k has 1"),
    "both": (
        (Q8, K8, replaced(V8, block=128)),
        "but v has channels=True and block=128",
    ),
    "shape": (
        (Q8, K8, replaced(V8, descale=V8.descale[..., :3])),
        r"descale is real, of shape \(2, 2, 24\), but v has \(2, 2, 3\)",
    ),
}


@pytest.mark.parametrize(("inputs", "message"), MIXED.values(), ids=MIXED)
def test_attention_says_what_does_not_go_together(inputs, message):
    with pytest.raises(ValueError, match=message):
        attention(*inputs)


def test_plain_int8_needs_descales():
    q8, k8, v8 = (np.asarray(x.values) for x in (Q8, K8, V8))
    with pytest.raises(ValueError, match="int8 inputs with descales, but q_descale"):
        attention(q8, k8, v8)


@pytest.mark.parametrize("platform", ["rocm", "cuda"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_gpus_have_kernels_for_it(platform, precision):
    for implementation in (None, platform):
        of = functools.partial(call, precision=precision, implementation=implementation)
        traced = jax.jit(of).trace(*make(dims=(128, 128)))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "@zyfa_attention(" in text
        assert "@zyfa_quantize" in text


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gpus_round_to_int_what_comes_rotated_in_plain_jax(precision):
    rounded = functools.partial(quantize_qkv, precision=precision, rotated=True)
    traced = jax.jit(rounded).trace(*make(dims=(128, 128)))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("@zyfa_quantize" in text) == (precision == "fp8")
