"""Prefill in chunks by the `cache` of the Flax modules, nnx's and linen's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _flax_cases import FEATURES, inputs, randomized, relative
from flax import nnx

from zyfa_jax.flax import linen
from zyfa_jax.flax import nnx as zyfa_nnx
from zyfa_jax.flax.cache import KeyValueCache
from zyfa_jax.flax.rope import YarnScaling

BATCH, TOKENS, CAPACITY = 2, 31, 40
GROUPED = {"num_kv_heads": 2, "head_dim": 16, "qk_norm": True}
LATENT = {
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "rope_scaling": YarnScaling(4.0, 16),
}
LAYERS = {
    "grouped": ("GroupedQueryAttention", GROUPED, (2, 16)),
    "window": (
        "GroupedQueryAttention",
        {**GROUPED, "window": 7, "rope_scaling": YarnScaling(4.0, 16)},
        (2, 16),
    ),
    "latent": ("MultiHeadLatentAttention", LATENT, (1, 8, 20)),
}


@pytest.fixture(autouse=True)
def standard_promotion():
    """Flax's own layers promote dtypes implicitly."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def with_nnx(name, **options):
    """A layer's jitted function of inputs and keywords, with parameters of its own."""
    layer = getattr(zyfa_nnx, name)(4, FEATURES, rngs=nnx.Rngs(0), **options)
    graph, state = nnx.split(layer)
    state = randomized(state)
    return jax.jit(lambda x, **keywords: nnx.merge(graph, state)(x, **keywords))


def with_linen(name, **options):
    layer = getattr(linen, name)(4, **options)
    params = jax.jit(layer.init)(jax.random.key(0), inputs(1, 1, FEATURES))
    return jax.jit(functools.partial(layer.apply, randomized(params)))


both = pytest.mark.parametrize("make", [with_nnx, with_linen])


def in_chunks(layer, x, cache, sizes):
    parts = []
    for part in jnp.split(x, np.cumsum(sizes)[:-1], axis=1):
        y, cache = layer(part, cache=cache)
        parts.append(y)
    return jnp.concatenate(parts, axis=1), cache


@both
@pytest.mark.parametrize("name", LAYERS)
def test_chunks_are_the_whole(make, name):
    kind, options, shape = LAYERS[name]
    layer, x = make(kind, **options), inputs(BATCH, TOKENS, FEATURES)
    cache = KeyValueCache.empty((BATCH,), CAPACITY, *shape, dtype=jnp.float32)
    got, cache = in_chunks(layer, x, cache, (8, 8, 15))
    np.testing.assert_allclose(got, layer(x), atol=2e-5)
    assert cache.length == TOKENS
    assert not np.asarray(cache.keys)[:, TOKENS:].any()


def test_chunks_see_what_came_before():
    kind, options, shape = LAYERS["grouped"]
    layer, x = with_nnx(kind, **options), inputs(BATCH, TOKENS, FEATURES)
    cache = KeyValueCache.empty((BATCH,), CAPACITY, *shape, dtype=jnp.float32)
    _, after = layer(x[:, :16], cache=cache)
    seen, _ = layer(x[:, 16:], cache=after)
    alone, _ = layer(x[:, 16:], cache=cache)
    assert relative(seen, alone) > 0.1


def test_padding_past_the_end_is_not_seen():
    kind, options, shape = LAYERS["grouped"]
    layer, x = with_nnx(kind, **options), inputs(BATCH, TOKENS, FEATURES)
    cache = KeyValueCache.empty((BATCH,), CAPACITY, *shape, dtype=jnp.float32)
    padded = jnp.pad(x, ((0, 0), (0, 1), (0, 0)), constant_values=9)
    got, _ = in_chunks(layer, padded, cache, (16, 16))
    np.testing.assert_allclose(got[:, :TOKENS], layer(x), atol=2e-5)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["grouped", "latent"])
def test_8_bits(name, precision):
    """The capacity that is not filled changes neither descales nor keys' mean."""
    kind, options, shape = LAYERS[name]
    layer = with_nnx(kind, precision=precision, **options)
    x = inputs(BATCH, TOKENS, FEATURES) + 3
    tight, roomy = (
        KeyValueCache.empty((BATCH,), capacity, *shape, dtype=jnp.float32)
        for capacity in (TOKENS, 8 * TOKENS)
    )
    want = layer(x)
    np.testing.assert_array_equal(layer(x, cache=tight)[0], want)
    assert relative(layer(x, cache=roomy)[0], want) < 5e-3
    chunks, _ = in_chunks(layer, x, roomy, (16, 15))
    assert relative(chunks, want) < 0.05


def test_positions_may_be_given():
    kind, options, shape = LAYERS["grouped"]
    layer, x = with_nnx(kind, **options), inputs(BATCH, 9, FEATURES)
    cache = KeyValueCache.empty((BATCH,), CAPACITY, *shape, dtype=jnp.float32)
    positions = 5 * jnp.arange(9)
    got, _ = layer(x, cache=cache, positions=positions)
    np.testing.assert_allclose(got, layer(x, positions=positions), atol=2e-5)


@pytest.mark.parametrize(("tokens", "shape"), [(41, (2, 16)), (9, (4, 16))])
def test_what_never_fits_is_an_error(tokens, shape):
    layer = with_nnx("GroupedQueryAttention", **GROUPED)
    cache = KeyValueCache.empty((BATCH,), CAPACITY, *shape, dtype=jnp.float32)
    with pytest.raises(ValueError, match=rf"up to 40 tokens.*\(2, {tokens}, 2, 16\)"):
        layer(inputs(BATCH, tokens, FEATURES), cache=cache)


def test_a_full_cache_is_an_error():
    cache = KeyValueCache.empty((BATCH,), CAPACITY, 2, 16, dtype=jnp.float32)
    tokens = jnp.ones((BATCH, 25, 2, 16))
    cache = cache.append(tokens, tokens)
    with pytest.raises(ValueError, match=r"of 40 tokens that holds 25 .* for 25"):
        cache.append(tokens, tokens)


@pytest.mark.parametrize("precision", [None, "fp8"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_full_cache_gives_nan_where_its_length_is_traced(name, precision):
    kind, options, shape = LAYERS[name]
    layer = with_nnx(kind, precision=precision, **options)
    x = inputs(BATCH, 20, FEATURES)
    cache = KeyValueCache.empty((BATCH,), 45, *shape, dtype=jnp.float32)
    for _ in range(2):
        y, cache = layer(x, cache=cache)
        assert np.isfinite(y).all()
    for _ in range(2):
        y, cache = layer(x, cache=cache)
        assert np.isnan(y).all()


def test_keys_and_values_of_other_tokens_are_an_error():
    cache = KeyValueCache.empty((BATCH,), CAPACITY, 2, 16, dtype=jnp.float32)
    tokens = jnp.ones((BATCH, 3, 2, 16))
    with pytest.raises(ValueError, match=r"same tokens, not keys of \(2, 3, .*2, 2, "):
        cache.append(tokens, tokens[:, :2])


@both
@pytest.mark.parametrize("name", ["grouped", "latent"])
def test_a_cache_of_another_dtype(make, name):
    kind, options, shape = LAYERS[name]
    layer, x = make(kind, **options), inputs(BATCH, TOKENS, FEATURES)
    cache = KeyValueCache.empty((BATCH,), CAPACITY, *shape, dtype=jnp.bfloat16)
    got, cache = in_chunks(layer, x, cache, (16, 15))
    assert cache.keys.dtype == cache.values.dtype == jnp.bfloat16
    assert got.dtype == jnp.float32
    assert relative(got, layer(x)) < 0.01


def test_lengths_with_a_cache_are_an_error():
    layer = with_nnx("GroupedQueryAttention", **GROUPED)
    cache = KeyValueCache.empty((BATCH,), CAPACITY, 2, 16, dtype=jnp.float32)
    with pytest.raises(ValueError, match="a cache takes no lengths"):
        layer(inputs(BATCH, 9, FEATURES), cache=cache, lengths=jnp.array([3, 9]))


@both
@pytest.mark.parametrize("name", ["grouped", "latent"])
def test_another_attention(make, name):
    """`attention` is called with the arguments of `zyfa_jax.attention`."""
    calls = []

    def zeros(q, k, v, **options):
        calls.append((q.shape, k.shape, v.shape, options))
        return jnp.zeros((*q.shape[:-1], v.shape[-1]), options["out_dtype"])

    kind, options, _ = LAYERS[name]
    x = inputs(BATCH, 9, FEATURES)
    got = make(kind, attention=zeros, **options)(x)
    assert not np.asarray(got).any()
    assert calls[-1][0][:3] == (BATCH, 9, 4)
