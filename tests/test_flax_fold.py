"""The rotation of queries and keys put into weights, in both Flax APIs."""

import functools
from typing import Any

import _flax_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _flax_cases import FEATURES, inputs, relative
from flax import linen as nn
from flax import nnx

from zyfa_jax.flax import linen as zyfa_linen
from zyfa_jax.flax import nnx as zyfa_nnx
from zyfa_jax.flax.cache import KeyValueCache

GROUPED = {
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "rope_theta": None,
    "use_bias": True,
}  # fmt: skip
LATENT = {
    "num_heads": 2, "kv_lora_rank": 24, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16, "v_head_dim": 8,
}  # fmt: skip
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Flax's": ("flax", {"num_heads": 4, "qkv_features": 128}),
    "grouped": ("GroupedQueryAttention", GROUPED),
    "latent": ("MultiHeadLatentAttention", LATENT),
    "latent queries": ("MultiHeadLatentAttention", {**LATENT, "q_lora_rank": 20}),
}
every_layer = pytest.mark.parametrize(("kind", "options"), LAYERS.values(), ids=LAYERS)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Flax's own layers promote dtypes implicitly."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Linen:
    """A layer of Flax Linen with random parameters."""

    def __init__(self, kind, **options):
        self.flax = kind == "flax"
        make: Any = nn.MultiHeadDotProductAttention if self.flax else None
        make = make or getattr(zyfa_linen, kind)
        self.layer = make(**options)
        x = jnp.ones((1, 3, FEATURES))
        params = jax.jit(self.layer.init)(jax.random.key(0), x)["params"]
        self.params = cases.randomized(params)

    def scale(self, name, channel, factor):
        kernel = self.params[name]["kernel"]
        kernel = kernel.at[..., channel].multiply(factor)
        self.params[name] = {**self.params[name], "kernel": kernel}

    def fold(self, *sample):
        fold = jax.jit(lambda *x: zyfa_linen.fold_rotation(self.layer, *x))
        return fold({"params": self.params}, *sample)

    def run(self, *x, folded=None, precision=None, rotated=False, **arguments) -> Any:
        variables = {"params": self.params} if folded is None else folded
        return self._applied(precision, rotated)(variables, *x, **arguments)

    @functools.cache  # noqa: B019
    def _applied(self, precision, rotated):
        if not self.flax:
            layer = self.layer.clone(precision=precision, rotated=rotated)
        else:
            attention_fn = zyfa_linen.make_attention_fn(
                precision=precision, rotated=rotated
            )
            layer = self.layer.clone(attention_fn=attention_fn)
        return jax.jit(layer.apply)

    def params_of(self, folded):
        return folded["params"] if folded else self.params


class NNX:
    """A layer of Flax NNX with random parameters."""

    def __init__(self, kind, **options):
        self.flax = kind == "flax"
        make: Any = nnx.MultiHeadAttention if self.flax else getattr(zyfa_nnx, kind)
        options |= {"decode": False} if self.flax else {}
        self.layer = make(in_features=FEATURES, rngs=nnx.Rngs(0), **options)
        params = nnx.state(self.layer, nnx.Param)
        nnx.update(self.layer, cases.randomized(params))

    def scale(self, name, channel, factor):
        kernel = getattr(self.layer, name).kernel
        kernel[...] = kernel[...].at[..., channel].multiply(factor)

    def fold(self, *sample):
        return zyfa_nnx.fold_rotation(self.layer, *sample)

    def run(self, *x, folded=None, precision=None, rotated=False, **arguments) -> Any:
        layer = folded or self.layer
        if not self.flax:
            assert layer.rotated == (folded is not None)
        graph, state = self._split(layer, precision, rotated)
        return _merge_and_apply(graph, state, *x, **arguments)

    def _split(self, layer, precision, rotated):
        layer = nnx.clone(layer)
        if self.flax:
            layer.attention_fn = self._attention_fn(precision, rotated)
        else:
            layer.precision, layer.rotated = precision, rotated
        return nnx.split(layer)

    @staticmethod
    @functools.cache
    def _attention_fn(precision, rotated):
        return zyfa_nnx.make_attention_fn(precision=precision, rotated=rotated)

    def params_of(self, folded):
        return nnx.to_pure_dict(nnx.state(folded or self.layer, nnx.Param))


@functools.partial(jax.jit, static_argnums=0)
def _merge_and_apply(graph, state, *x, **arguments):
    return nnx.merge(graph, state)(*x, **arguments)


either_api = pytest.mark.parametrize("api", [Linen, NNX])


@either_api
@every_layer
def test_the_layer_computes_the_same(api, kind, options):
    x = inputs(2, 37, FEATURES)
    layer = api(kind, **options)
    folded = layer.fold(inputs(1, 20, FEATURES, seed=3))
    want = layer.run(x)
    assert relative(layer.run(x, folded=folded), want) < 3e-6
    assert relative(layer.run(x, folded=folded, rotated=True), want) < 3e-6


@either_api
@every_layer
def test_int8_errs_as_little_without_rotating(api, kind, options):
    x = inputs(2, 150, FEATURES)
    layer = api(kind, **options)
    # A channel that is large in queries, and one in keys.
    name = "query_up" if "q_lora_rank" in options else "query"
    layer.scale(name, 3, 12)
    layer.scale("kv_up" if "kv_lora_rank" in options else "key", 5, 12)
    want = layer.run(x)

    def error(**arguments):
        return relative(layer.run(x, precision="int8", **arguments), want)

    own = error()
    rounded = error(rotated=True)
    turned = error(folded=layer.fold(), rotated=True)
    balanced = error(folded=layer.fold(x[:1, :64]), rotated=True)
    assert balanced < 1.2 * own
    assert balanced < 0.8 * turned
    assert balanced < 0.5 * rounded


@either_api
def test_queries_of_other_tokens_than_keys(api):
    q, kv = inputs(2, 9, FEATURES), inputs(2, 20, FEATURES, seed=1)
    layer = api("flax", num_heads=4, dropout_rate=0.1, deterministic=True)
    folded = layer.fold(q, kv)
    got = layer.run(q, kv, folded=folded, precision="int8", rotated=True)
    assert relative(got, layer.run(q, kv)) < 0.05


@either_api
@every_layer
def test_only_weights_of_queries_and_keys_change(api, kind, options):
    layer = api(kind, **options, param_dtype=jnp.bfloat16)
    old, new = layer.params_of(None), layer.params_of(layer.fold())
    latent = "kv_lora_rank" in options
    keys = "kv_up" if latent else "key"
    queries = "query_up" if "q_lora_rank" in options else "query"
    for name, weights in old.items():
        for x, y in zip(*map(jax.tree.leaves, (weights, new[name])), strict=True):
            assert y.dtype == jnp.bfloat16
            assert bool((x == y).all()) == (name not in (queries, keys))
            if latent:
                np.testing.assert_array_equal(x[..., 24:], y[..., 24:])


@either_api
def test_a_cache(api):
    x = inputs(1, 48, FEATURES)
    layer = api("MultiHeadLatentAttention", **LATENT)
    folded = layer.fold()
    want = layer.run(x)
    cache = KeyValueCache.empty((1,), 64, 1, 16, 24, dtype=jnp.float32)
    parts = []
    for part in (x[:, :30], x[:, 30:]):
        out, cache = layer.run(
            part, folded=folded, precision="int8", rotated=True, cache=cache
        )
        parts.append(out)
    assert relative(jnp.concatenate(parts, axis=1), want) < 0.05


def test_partitioned_parameters_stay_so():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "heads", None))
    layer = nn.MultiHeadDotProductAttention(4, kernel_init=init, qkv_features=32)
    x = inputs(1, 5, FEATURES)
    # The output's kernel has other axes, which nothing here looks at.
    variables: Any = layer.init(jax.random.key(0), x)
    folded = zyfa_linen.fold_rotation(layer, variables)
    kernel = folded["params"]["query"]["kernel"]
    assert isinstance(kernel, nn.Partitioned)
    assert kernel.names == (None, "heads", None)


def test_inside_jit_and_gradients():
    x = inputs(1, 17, FEATURES)
    layer = Linen("GroupedQueryAttention", **GROUPED)

    def loss(params, folded):
        variables = {"params": params}
        if folded:
            variables = zyfa_linen.fold_rotation(layer.layer, variables, x)
        return jnp.sum(jnp.sin(layer.layer.apply(variables, x)))

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    got, want = (gradient(layer.params, folded) for folded in (True, False))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "rope": (
        "GroupedQueryAttention",
        {**GROUPED, "rope_theta": 1e4},
        r"nothing between .* GroupedQueryAttention with rope_theta=10000\.0: rotary",
    ),
    "norm": (
        "GroupedQueryAttention",
        {**GROUPED, "qk_norm": True},
        "GroupedQueryAttention with qk_norm=True: the norm has a gain",
    ),
    "Flax's norm": (
        "flax",
        {"num_heads": 4, "normalize_qk": True},
        "with normalize_qk=True: the norm has a gain",
    ),
}


@either_api
@pytest.mark.parametrize(("kind", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_lies_between_is_refused(api, kind, options, message):
    layer = api(kind, **options)
    with pytest.raises(ValueError, match=message):
        layer.fold()
    if kind != "flax":
        with pytest.raises(ValueError, match=message):
            api(kind, **options, rotated=True)


def test_other_layers_are_refused():
    with pytest.raises(ValueError, match=r"takes one of GroupedQuery.*, not Dense"):
        zyfa_linen.fold_rotation(nn.Dense(3), {"params": {}})
    with pytest.raises(ValueError, match=r"takes one of GroupedQuery.*, not Linear"):
        zyfa_nnx.fold_rotation(nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
    layer = zyfa_linen.GroupedQueryAttention(**GROUPED)
    with pytest.raises(ValueError, match=r"of the layer itself, .* got \['layer_0'\]"):
        zyfa_linen.fold_rotation(layer, {"params": {"layer_0": {}}})


def test_a_layer_is_folded_once():
    layer = NNX("GroupedQueryAttention", **GROUPED)
    with pytest.raises(ValueError, match="not yet rotated"):
        zyfa_nnx.fold_rotation(layer.fold())
