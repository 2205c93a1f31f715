"""`zyfa_jax.flax.nnx` against Flax's own attention, linen's modules and plain jnp."""

import functools
import inspect
from typing import Any

import _flax_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _flax_cases import FEATURES, inputs, relative
from flax import nnx

from zyfa_jax.flax import linen
from zyfa_jax.flax.nnx import (
    GroupedQueryAttention,
    MultiHeadLatentAttention,
    attention_fn,
    make_attention_fn,
)

HAS_IS_CAUSAL = (
    "is_causal" in inspect.signature(nnx.MultiHeadAttention.__call__).parameters
)
needs_is_causal = pytest.mark.skipif(
    not HAS_IS_CAUSAL, reason="this Flax's MultiHeadAttention has no is_causal"
)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Flax's own layers promote dtypes implicitly."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def randomize(layer):
    params = nnx.state(layer, nnx.Param)
    nnx.update(layer, cases.randomized(params))
    return layer


def parameters(layer):
    return nnx.to_pure_dict(nnx.state(layer, nnx.Param))


def jitted(layer):
    """Applies the layer under jit; what is given by keyword stays concrete."""

    graph, state = nnx.split(layer)

    def apply(*inputs, **keywords):
        run = jax.jit(lambda state, *x: nnx.merge(graph, state)(*x, **keywords))
        return run(state, *inputs)

    return apply


def pair(own=attention_fn, **options):
    """Flax's module with its own attention and with ours, of the same parameters."""

    def make(attention_fn):
        return nnx.MultiHeadAttention(
            4,
            in_features=FEATURES,
            attention_fn=attention_fn,
            rngs=nnx.Rngs(0),
            **{"decode": False, **options},
        )

    return (
        jitted(randomize(make(nnx.dot_product_attention))),
        jitted(randomize(make(own))),
    )


@pytest.mark.parametrize(
    ("batch", "arguments"),
    [
        ((2,), {}),
        ((2,), {"mask": np.tri(37, dtype=bool)[None, None]}),
        ((2, 3), {"mask": np.tri(37, dtype=bool)[None, None]}),
        ((2,), {"mask": np.ones((1, 1, 37, 37), bool)}),
        pytest.param((2,), {"is_causal": True}, marks=needs_is_causal),
        pytest.param((2, 3), {"is_causal": True}, marks=needs_is_causal),
    ],
)
def test_same_as_flax(batch, arguments):
    x = inputs(*batch, 37, FEATURES)
    flax, ours = pair()
    expected = dict(arguments)
    if "mask" in arguments:
        expected["mask"] = np.broadcast_to(arguments["mask"], (*batch, 4, 37, 37))
    np.testing.assert_allclose(ours(x, **arguments), flax(x, **expected), atol=2e-5)


@needs_is_causal
@pytest.mark.parametrize(("queries", "keys"), [(9, 20), (20, 9)])
def test_causal_is_flax_aligned_for_unequal_lengths(queries, keys):
    q, kv = inputs(2, queries, FEATURES), inputs(2, keys, FEATURES, seed=1)
    flax, ours = pair()
    want = flax(q, kv, is_causal=True)
    np.testing.assert_allclose(ours(q, kv, is_causal=True), want, atol=2e-5)
    _, causal = pair(make_attention_fn(causal=True))
    np.testing.assert_allclose(causal(q, kv), want, atol=2e-5)


def test_grouped_heads_of_flax():
    x, mask = inputs(2, 21, FEATURES), np.tri(21, dtype=bool)[None, None]
    try:
        flax, ours = pair(num_kv_heads=2)
    except TypeError:
        pytest.skip("this Flax's MultiHeadAttention has no num_kv_heads")
    np.testing.assert_allclose(ours(x, mask=mask), flax(x, mask=mask), atol=2e-5)


def test_gradients_are_flax_gradients():
    x, mask = inputs(2, 21, FEATURES), np.tri(21, dtype=bool)[None, None]
    flax, _ = pair()
    _, ours = pair(make_attention_fn(causal=True))
    want = jax.grad(lambda x: jnp.sum(flax(x, mask=mask) ** 2))(x)
    got = jax.grad(lambda x: jnp.sum(ours(x) ** 2))(x)
    assert relative(got, want) < 1e-5


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_8_bits_are_near(precision):
    x, mask = inputs(2, 200, FEATURES), np.tri(200, dtype=bool)[None, None]
    flax, _ = pair()
    _, ours = pair(make_attention_fn(causal=True, precision=precision))
    assert 1e-3 < relative(ours(x), flax(x, mask=mask)) < 0.1


def test_deterministic_dropout_is_no_dropout():
    x = inputs(2, 9, FEATURES)
    flax, ours = pair(dropout_rate=0.5, deterministic=True)
    np.testing.assert_allclose(ours(x), flax(x), atol=2e-5)


def test_active_dropout_is_refused():
    _, ours = pair(dropout_rate=0.5, deterministic=False)
    with pytest.raises(NotImplementedError, match=r"no dropout.*dropout_rate=0\.5"):
        ours(inputs(2, 9, FEATURES))


def test_traced_mask_is_refused():
    _, ours = pair()
    mask = jnp.ones((1, 1, 9, 9), bool)
    with pytest.raises(NotImplementedError, match=r"traced mask.*give is_causal=True"):
        jax.jit(lambda x, mask: ours(x, mask=mask))(inputs(2, 9, FEATURES), mask)


def test_padding_mask_is_refused():
    _, ours = pair()
    mask = (np.arange(9) < np.array([4, 9])[:, None])[:, None, None]
    with pytest.raises(NotImplementedError, match=r"another mask.*`lengths`"):
        ours(inputs(2, 9, FEATURES), mask=mask)


def test_decoding_cache_is_refused():
    layer = nnx.MultiHeadAttention(
        4,
        in_features=FEATURES,
        attention_fn=attention_fn,
        decode=True,
        rngs=nnx.Rngs(0),
    )
    layer.init_cache((2, 9, FEATURES))
    with pytest.raises(NotImplementedError, match=r"traced mask.*decoding cache"):
        nnx.jit(lambda layer, x: layer(x))(layer, inputs(2, 1, FEATURES))


def test_sowing_weights_is_refused():
    _, ours = pair()
    with pytest.raises(NotImplementedError, match="module=None"):
        ours(inputs(2, 9, FEATURES), sow_weights=True)


@pytest.mark.parametrize("name", ["bias", "input_positions"])
def test_other_arguments_are_refused(name):
    q = inputs(2, 9, 4, 8)
    with pytest.raises(NotImplementedError, match=rf"{name}=None.*\(4, 9, 9\)"):
        attention_fn(q, q, q, **{name: jnp.zeros((4, 9, 9))})


def test_takes_every_argument_that_flax_passes():
    """Flax nnx filters nothing, so an unknown keyword would be a TypeError."""
    own = inspect.signature(attention_fn).parameters
    flax = inspect.signature(nnx.dot_product_attention).parameters
    assert set(flax) <= set(own)


def test_unknown_precision_is_an_error():
    precision: Any = "fp4"
    with pytest.raises(ValueError, match="not 'fp4'"):
        make_attention_fn(precision=precision)
    for make in (GroupedQueryAttention, MultiHeadLatentAttention):
        with pytest.raises(ValueError, match="not 'fp4'"):
            make(4, FEATURES, precision=precision, rngs=nnx.Rngs(0))


def check_against_linen(layer, module, x, **arguments):
    params = parameters(layer)
    want = jax.jit(lambda p: module.apply({"params": p}, x, **arguments))(params)
    np.testing.assert_allclose(
        jitted(layer)(x, **arguments), want, rtol=1e-3, atol=1e-4
    )


GROUPED = [
    ({}, {}),
    ({"num_kv_heads": 1, "qk_norm": True}, {"lengths": jnp.array([5, 31])}),
    (
        {"num_kv_heads": 2, "head_dim": 16, "use_bias": True, "out_features": 20},
        {"positions": 3 * jnp.arange(31)},
    ),
    ({"rope_theta": None, "causal": False, "scale": 0.5}, {}),
    ({"rope_theta": 500.0, "window": 7}, {}),
]


@pytest.mark.parametrize(("options", "arguments"), GROUPED)
def test_grouped_query_attention(options, arguments):
    layer = GroupedQueryAttention(4, FEATURES, **options, rngs=nnx.Rngs(0))
    module = linen.GroupedQueryAttention(4, **options)
    x = inputs(2, 31, FEATURES)
    check_against_linen(randomize(layer), module, x, **arguments)


def test_grouped_query_attention_is_plain_attention():
    layer = GroupedQueryAttention(
        4, FEATURES, 2, qk_norm=True, window=7, rngs=nnx.Rngs(0)
    )
    x = inputs(2, 31, FEATURES)
    want = cases.grouped_query(parameters(randomize(layer)), x, left=7)
    np.testing.assert_allclose(jitted(layer)(x), want, atol=1e-4)


def test_gradients_of_grouped_query_attention():
    layer = randomize(GroupedQueryAttention(4, FEATURES, 2, rngs=nnx.Rngs(0)))
    x = inputs(2, 31, FEATURES)
    got = nnx.jit(nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(x)))))(layer)
    want = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(cases.grouped_query(p, x)))))(
        parameters(layer)
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=3e-4),
        nnx.to_pure_dict(got),
        want,
    )


LATENT: dict[str, Any] = {
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"rope_theta": 500.0}, {"positions": 2 * jnp.arange(31)}),
        ({"q_lora_rank": 12, "scale": 0.3}, {"lengths": jnp.array([5, 31])}),
    ],
)
def test_latent_attention(options, arguments):
    options = {**LATENT, **options}
    layer = MultiHeadLatentAttention(3, FEATURES, **options, rngs=nnx.Rngs(0))
    module = linen.MultiHeadLatentAttention(3, **options)
    x = inputs(2, 31, FEATURES)
    check_against_linen(randomize(layer), module, x, **arguments)


@pytest.mark.parametrize("q_lora_rank", [None, 12])
def test_latent_attention_is_plain_attention(q_lora_rank):
    layer = MultiHeadLatentAttention(
        3, FEATURES, q_lora_rank=q_lora_rank, **LATENT, rngs=nnx.Rngs(0)
    )
    x = inputs(2, 31, FEATURES)
    want = cases.latent(parameters(randomize(layer)), x, rank=20, nope=16)
    np.testing.assert_allclose(jitted(layer)(x), want, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize(
    "make",
    [
        functools.partial(GroupedQueryAttention, 4, FEATURES, 2, 32),
        functools.partial(MultiHeadLatentAttention, 2, FEATURES, 32),
    ],
    ids=["grouped", "latent"],
)
def test_8_bits_are_near_bfloat16(make, precision):
    x = inputs(2, 200, FEATURES, dtype=jnp.bfloat16)
    make = functools.partial(make, dtype=jnp.bfloat16)
    exact = randomize(make(rngs=nnx.Rngs(0)))
    rounded = randomize(make(precision=precision, rngs=nnx.Rngs(0)))
    weights = inputs(*x.shape, seed=2)

    @nnx.jit
    def output_and_gradients(layer):
        def loss(layer):
            out = layer(x)
            return jnp.sum(weights * out.astype(jnp.float32)), out

        return nnx.grad(loss, has_aux=True)(layer)

    got_grads, got = output_and_gradients(rounded)
    want_grads, want = output_and_gradients(exact)
    assert got.dtype == jnp.bfloat16
    assert 1e-3 < relative(got, want) < 0.1
    errors = jax.tree.map(
        relative, nnx.to_pure_dict(got_grads), nnx.to_pure_dict(want_grads)
    )
    assert max(jax.tree.leaves(errors)) < 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads=4 and num_kv_heads=3"),
        ({"num_heads": 5}, r"features \(48\) that num_heads \(5\)"),
    ],
)
def test_wrong_grouped_query_attention(options, message):
    arguments: dict[str, Any] = {"num_heads": 4, "in_features": FEATURES, **options}
    with pytest.raises(ValueError, match=message):
        GroupedQueryAttention(**arguments, rngs=nnx.Rngs(0))
