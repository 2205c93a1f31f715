"""`zyfa_jax.flax.linen` against Flax's own attention and plain jnp."""

import functools
from typing import Any

import _flax_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _flax_cases import FEATURES, inputs, relative
from flax import linen as nn

from zyfa_jax.flax.linen import (
    GroupedQueryAttention,
    MultiHeadLatentAttention,
    attention_fn,
    make_attention_fn,
)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Flax's own layers promote dtypes implicitly."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def causal_mask(queries, keys=None):
    return np.tri(queries, keys, dtype=bool)[None, None]


def pair(own=attention_fn, **options):
    """Flax's module with its own attention and with ours, and their parameters."""
    make = functools.partial(nn.MultiHeadDotProductAttention, num_heads=4, **options)
    variables = init(make(), jnp.ones((1, 3, FEATURES)))
    return jitted(make(), variables), jitted(make(attention_fn=own), variables)


def init(layer, x, **arguments):
    """The layer's variables, its parameters randomized."""
    variables = jax.jit(functools.partial(layer.init, **arguments))(
        jax.random.key(0), x
    )
    return {**variables, "params": cases.randomized(variables["params"])}


def jitted(layer, variables):
    """Applies the layer under jit; what is given by keyword stays concrete."""

    def apply(*inputs, **keywords):
        return jax.jit(lambda *x: layer.apply(variables, *x, **keywords))(*inputs)

    return apply


@pytest.mark.parametrize(
    ("batch", "mask"),
    [
        ((), "causal"),
        ((2,), "none"),
        ((2,), "causal"),
        ((2,), "float causal"),
        ((2,), "all true"),
        ((2, 3), "float causal"),
    ],
)
def test_same_as_flax(batch, mask):
    x = inputs(*batch, 37, FEATURES)
    masks = {
        "none": None,
        "causal": np.tri(37, dtype=bool),
        "float causal": nn.make_causal_mask(jnp.ones((*batch, 37))),
        "all true": np.ones((37, 37), bool),
    }
    flax, ours = pair()
    np.testing.assert_allclose(
        ours(x, mask=masks[mask]), flax(x, mask=masks[mask]), atol=2e-5
    )


@pytest.mark.parametrize(("queries", "keys"), [(9, 20), (20, 9)])
def test_causal_mask_is_flax_aligned_for_unequal_lengths(queries, keys):
    q, kv = inputs(2, queries, FEATURES), inputs(2, keys, FEATURES, seed=1)
    mask = causal_mask(queries, keys)
    flax, ours = pair()
    np.testing.assert_allclose(
        ours(q, kv, mask=mask), flax(q, kv, mask=mask), atol=2e-5
    )
    _, causal = pair(make_attention_fn(causal=True))
    np.testing.assert_allclose(causal(q, kv), flax(q, kv, mask=mask), atol=2e-5)


def test_without_jit_with_a_causal_mask_of_flax():
    x = inputs(2, 9, FEATURES)
    mask = nn.make_causal_mask(x[..., 0])
    layer = nn.MultiHeadDotProductAttention(4, attention_fn=attention_fn)
    variables = init(layer, x)
    want = jitted(nn.MultiHeadDotProductAttention(4), variables)(x, mask=mask)
    got: Any = layer.apply(variables, x, mask=mask)
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_window_and_scale():
    x = inputs(2, 33, FEATURES)
    band = np.tri(33, dtype=bool) & ~np.tri(33, k=-5, dtype=bool)
    flax, _ = pair()
    _, ours = pair(make_attention_fn(causal=True, window=4))
    np.testing.assert_allclose(ours(x), flax(x, mask=band[None, None]), atol=2e-5)
    _, scaled = pair(make_attention_fn(causal=True, window=4, scale=0.0))
    assert relative(scaled(x), ours(x)) > 0.01


def test_bfloat16_and_normalized_queries_and_keys():
    x = inputs(2, 33, FEATURES, dtype=jnp.bfloat16)
    flax, ours = pair(dtype=jnp.bfloat16, normalize_qk=True)
    got = ours(x, mask=causal_mask(33))
    assert got.dtype == jnp.bfloat16
    assert relative(got, flax(x, mask=causal_mask(33))) < 1e-2


def test_gradients_are_flax_gradients():
    x = inputs(2, 21, FEATURES)
    flax, _ = pair()
    _, ours = pair(make_attention_fn(causal=True))
    want = jax.grad(lambda x: jnp.sum(flax(x, mask=causal_mask(21)) ** 2))(x)
    got = jax.grad(lambda x: jnp.sum(ours(x) ** 2))(x)
    assert relative(got, want) < 1e-5


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_8_bits_are_near(precision):
    x = inputs(2, 200, FEATURES)
    flax, _ = pair()
    _, ours = pair(make_attention_fn(causal=True, precision=precision))
    assert 1e-3 < relative(ours(x), flax(x, mask=causal_mask(200))) < 0.1


def test_deterministic_dropout_is_no_dropout():
    x = inputs(2, 9, FEATURES)
    flax, ours = pair(dropout_rate=0.5, deterministic=True)
    np.testing.assert_allclose(ours(x), flax(x), atol=2e-5)


def test_active_dropout_is_refused():
    _, ours = pair(dropout_rate=0.5, deterministic=False)
    with pytest.raises(NotImplementedError, match=r"no dropout.*dropout_rate=0\.5"):
        ours(inputs(2, 9, FEATURES), rngs={"dropout": jax.random.key(0)})


def test_traced_mask_is_refused():
    _, ours = pair()
    mask = jnp.asarray(causal_mask(9))
    with pytest.raises(
        NotImplementedError, match=r"traced mask.*\(1, 1, 9, 9\).*causal=True"
    ):
        jax.jit(lambda x, mask: ours(x, mask=mask))(inputs(2, 9, FEATURES), mask)


@pytest.mark.parametrize(
    "mask",
    [
        np.arange(9)[None, None, None] < np.array([4, 9])[:, None, None, None],
        np.tri(9, dtype=bool)[::-1].T[None, None],
        np.tri(9, k=1, dtype=bool)[None, None],
        np.zeros((9, 9), bool),
    ],
    ids=["padding", "reversed", "one more key", "nothing"],
)
def test_other_masks_are_refused(mask):
    _, ours = pair()
    with pytest.raises(NotImplementedError, match="another mask"):
        ours(inputs(2, 9, FEATURES), mask=mask)


def test_ill_shaped_mask_is_an_error():
    _, ours = pair()
    with pytest.raises(ValueError, match=r"\(2, 4, 9, 9\), not shape \(8, 8\)"):
        ours(inputs(2, 9, FEATURES), mask=np.tri(8, dtype=bool))


def test_decoding_cache_is_refused():
    layer = nn.MultiHeadDotProductAttention(4, decode=True, attention_fn=attention_fn)
    x = inputs(2, 9, FEATURES)
    variables = init(layer, x)
    apply = jax.jit(functools.partial(layer.apply, mutable=["cache"]))
    with pytest.raises(NotImplementedError, match=r"traced mask.*decoding cache"):
        apply(variables, x[:, :1])


def test_sowing_weights_is_refused():
    _, ours = pair()
    with pytest.raises(NotImplementedError, match="module=None"):
        ours(inputs(2, 9, FEATURES), sow_weights=True, mutable=["intermediates"])


def test_replaced_einsums_are_refused():
    einsums: dict[str, Any] = {
        "qk_attn_weights_einsum_cls": lambda: jnp.einsum,
        "attn_weights_value_einsum_cls": lambda: jnp.einsum,
    }
    layer = nn.MultiHeadDotProductAttention(4, attention_fn=attention_fn, **einsums)
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum=None"):
        layer.init(jax.random.key(0), inputs(2, 9, FEATURES))


def test_bias_is_refused():
    q = inputs(2, 9, 4, 8)
    with pytest.raises(NotImplementedError, match=r"bias=None.*\(4, 9, 9\)"):
        attention_fn(q, q, q, bias=jnp.zeros((4, 9, 9)))


def test_unknown_precision_is_an_error():
    precision: Any = "fp4"
    with pytest.raises(ValueError, match="not 'fp4'"):
        make_attention_fn(precision=precision)
    layer = GroupedQueryAttention(4, precision=precision)
    with pytest.raises(ValueError, match="not 'fp4'"):
        layer.init(jax.random.key(0), inputs(2, 9, FEATURES))


def check_against(want, layer, x, *, gradients=False, **arguments):
    """The layer's output, and its gradients if asked for, are a plain function's."""
    params = init(layer, x, **arguments)["params"]

    def got(params, x):
        return layer.apply({"params": params}, x, **arguments)

    def run(f):
        def loss(params, x):
            out = f(params, x)
            return jnp.sum(jnp.sin(out)), out

        compute = jax.grad(loss, (0, 1), has_aux=True) if gradients else loss
        return jax.jit(compute)(params, x)

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=3e-4),
        run(got),
        run(want),
    )


GROUPED = [
    ({}, {}, {}),
    ({"num_kv_heads": 1, "qk_norm": True}, {}, {}),
    ({"num_kv_heads": 2, "head_dim": 16, "use_bias": True}, {}, {}),
    ({"num_kv_heads": 2, "rope_theta": None}, {}, {"theta": None}),
    ({"rope_theta": 500.0, "window": 7}, {}, {"theta": 500.0, "left": 7}),
    ({"causal": False, "scale": 0.5}, {}, {"causal": False, "scale": 0.5}),
    ({"out_features": 20}, {"lengths": [5, 31]}, {"lengths": [5, 31]}),
    ({}, {"positions": 3 * np.arange(31)}, {"positions": 3 * np.arange(31)}),
    (
        {},
        {"positions": np.arange(62).reshape(2, 31)},
        {"positions": np.arange(62).reshape(2, 31)},
    ),
]


@pytest.mark.parametrize(("options", "arguments", "plain"), GROUPED)
def test_grouped_query_attention(options, arguments, plain):
    layer = GroupedQueryAttention(num_heads=4, **options)
    arguments = {name: jnp.asarray(value) for name, value in arguments.items()}
    want = functools.partial(cases.grouped_query, **plain)
    check_against(want, layer, inputs(2, 31, FEATURES), **arguments)


def test_gradients_of_grouped_query_attention():
    layer = GroupedQueryAttention(num_heads=4, num_kv_heads=2, qk_norm=True, window=7)
    want = functools.partial(cases.grouped_query, left=7)
    check_against(want, layer, inputs(2, 31, FEATURES), gradients=True)


LATENT = {
    "num_heads": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, {}),
        ({"q_lora_rank": 12, "scale": 0.3}, {"lengths": [5, 31]}),
        ({"rope_theta": 500.0}, {"positions": 2 * np.arange(31)}),
    ],
)
def test_latent_attention(options, arguments):
    layer = MultiHeadLatentAttention(**LATENT, **options)
    plain = {"scale": options.get("scale"), "theta": options.get("rope_theta", 1e4)}
    want = functools.partial(cases.latent, rank=20, nope=16, **plain, **arguments)
    arguments = {name: jnp.asarray(value) for name, value in arguments.items()}
    check_against(want, layer, inputs(2, 31, FEATURES), **arguments)


def test_gradients_of_latent_attention():
    layer = MultiHeadLatentAttention(**LATENT, q_lora_rank=12)
    want = functools.partial(cases.latent, rank=20, nope=16)
    check_against(want, layer, inputs(2, 31, FEATURES), gradients=True)


def test_latent_attention_has_deepseek_head_dims_by_default():
    layer = MultiHeadLatentAttention(num_heads=2)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), inputs(1, 4, FEATURES))
    kernels = {
        name: x["kernel"].shape for name, x in shapes["params"].items() if "kernel" in x
    }
    assert kernels == {
        "query": (FEATURES, 2, 192),
        "kv_down": (FEATURES, 512 + 64),
        "kv_up": (512, 2, 256),
        "out": (2, 128, FEATURES),
    }


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize(
    "make",
    [
        lambda **options: GroupedQueryAttention(4, 2, head_dim=32, **options),
        lambda **options: MultiHeadLatentAttention(2, 32, **options),
    ],
    ids=["grouped", "latent"],
)
def test_8_bits_are_near_bfloat16(make, precision):
    x = inputs(2, 200, FEATURES, dtype=jnp.bfloat16)
    exact = make(dtype=jnp.bfloat16)
    rounded = make(dtype=jnp.bfloat16, precision=precision)
    params = init(exact, x)
    weights = inputs(*x.shape, seed=2)

    def output_and_gradients(layer):
        def loss(params):
            out = layer.apply(params, x)
            return jnp.sum(weights * out.astype(jnp.float32)), out

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    got_grads, got = output_and_gradients(rounded)
    want_grads, want = output_and_gradients(exact)
    assert got.dtype == jnp.bfloat16
    assert 1e-3 < relative(got, want) < 0.1
    errors = jax.tree.map(relative, got_grads, want_grads)
    assert max(jax.tree.leaves(errors)) < 0.2


def test_any_number_of_batch_axes():
    x = inputs(2, 3, 11, FEATURES)
    layer = GroupedQueryAttention(4, 2)
    apply = jitted(layer, init(layer, x))
    lengths = jnp.array([[4, 11, 1], [11, 2, 7]])
    got = apply(x, lengths=lengths)
    for row in range(2):
        want = apply(x[row], lengths=lengths[row])
        np.testing.assert_allclose(got[row], want, atol=1e-5)
    np.testing.assert_allclose(got[0, 1], apply(x[0, 1]), atol=1e-5)


def test_remat():
    x = inputs(2, 11, FEATURES)
    params = init(GroupedQueryAttention(4, 2), x)

    def gradients(module):
        layer = module(4, 2)
        return jax.jit(jax.grad(lambda p: jnp.sum(layer.apply(p, x) ** 2)))(params)

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        gradients(nn.remat(GroupedQueryAttention)),
        gradients(GroupedQueryAttention),
    )


def test_partitioned_parameters():
    kernel_init = nn.with_partitioning(
        nn.initializers.lecun_normal(), (None, "heads", None)
    )
    layer = GroupedQueryAttention(4, 2, kernel_init=kernel_init)
    x = inputs(2, 11, FEATURES)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
    assert shapes["params"]["query"]["kernel"].names == (None, "heads", None)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"num_kv_heads": 3}, {}, "num_heads=4 and num_kv_heads=3"),
        ({"num_kv_heads": 0}, {}, "num_heads=4 and num_kv_heads=0"),
        ({"num_heads": 5}, {}, r"features \(48\) that num_heads \(5\)"),
        ({"head_dim": 7}, {}, "even head dim, not 7"),
        ({"window": "all"}, {}, "not 'all'"),
        ({}, {"positions": jnp.arange(8)}, r"not shape \(8,\)"),
        ({}, {"positions": jnp.arange(9.0)}, "integer positions, not float32"),
    ],
)
def test_wrong_grouped_query_attention(options, arguments, message):
    layer = GroupedQueryAttention(**{"num_heads": 4, **options})
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            functools.partial(layer.init, **arguments),
            jax.random.key(0),
            inputs(2, 9, FEATURES),
        )
