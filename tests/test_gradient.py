"""grad and vjp against automatic differentiation of plain attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zyfa_jax
from zyfa_jax import attention, quantize

TOLERANCES = {jnp.float32: 1e-5, jnp.float16: 4e-3, jnp.bfloat16: 2e-2}


def plain(q, k, v, *, causal=True, scale=None, window=None, q_offset=None):
    """Attention in float32 by jnp alone, with the whole matrix of logits."""
    tokens, kv_tokens, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scale = jnp.float32(q.shape[-1] ** -0.5) if scale is None else scale
    logits = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") * scale
    position = np.arange(tokens)[:, None] + (
        kv_tokens - tokens if q_offset is None else q_offset
    )
    ahead = np.arange(kv_tokens) - position
    left, right = (None, None) if window is None else window
    see = np.ones_like(ahead, bool)
    see &= ahead <= (0 if causal else np.inf if right is None else right)
    see &= ahead >= (-np.inf if left is None else -left)
    some = see.any(-1, keepdims=True)
    logits = jnp.where(see | ~some, logits, -jnp.inf)
    p = jnp.where(some, jax.nn.softmax(logits, axis=-1), np.float32(0))
    lse = jnp.where(some[:, 0], jax.nn.logsumexp(logits, axis=-1), np.float32(0))
    return jnp.einsum("bhts,bshd->bthd", p, v, precision="highest"), lse


def inputs(tokens, kv_tokens, dtype=jnp.float32, heads=(4, 2), dims=(16, 24)):
    shapes = (
        (2, tokens, heads[0], dims[0]),
        (2, kv_tokens, heads[1], dims[0]),
        (2, kv_tokens, heads[1], dims[1]),
    )
    return tuple(
        jax.random.normal(jax.random.key(i), shape, jnp.float32).astype(dtype)
        for i, shape in enumerate(shapes)
    )


def cotangents(tokens):
    """Cotangents of the output and of the log-sum-exp, of heads (4, 2), dim 24."""
    return (
        jax.random.normal(jax.random.key(7), (2, tokens, 4, 24), jnp.float32),
        jax.random.normal(jax.random.key(8), (2, 4, tokens), jnp.float32),
    )


def weighted(call, tokens):
    """A scalar that depends on output and log-sum-exp, where there is one."""
    d_out, d_lse = cotangents(tokens)

    def loss(*operands):
        out, lse = call(*operands)
        lse = jnp.where(jnp.isfinite(lse), lse, np.float32(0))
        return jnp.sum(out.astype(jnp.float32) * d_out) + jnp.sum(lse * d_lse)

    return loss


def gradients(loss):
    return jax.jit(jax.grad(loss, (0, 1, 2)))


def pull_back(call, arrays, d_out):
    return jax.jit(lambda *x: jax.vjp(call, *x)[1](d_out))(*arrays)


def assert_near(got, want, tolerance):
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y)


CASES = {
    "square": (40, 40, {}),
    "more keys": (20, 150, {}),
    "more queries": (150, 20, {}),
    "not causal": (33, 129, {"causal": False}),
    "window": (150, 150, {"window": (17, 0)}),
    "window on both sides": (100, 100, {"window": (17, 3), "causal": False}),
    "offset": (40, 200, {"q_offset": 3}),
    "several chunks": (1100, 1100, {}),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, jnp.float32) for case in CASES]
    + [("square", jnp.float16), ("square", jnp.bfloat16), ("window", jnp.bfloat16)],
)
def test_operands(case, dtype):
    tokens, kv_tokens, options = CASES[case]
    arrays = inputs(tokens, kv_tokens, dtype)
    call = functools.partial(attention, return_lse=True, **options)
    got = gradients(weighted(call, tokens))(*arrays)
    want = gradients(weighted(functools.partial(plain, **options), tokens))(
        *(x.astype(jnp.float32) for x in arrays)
    )
    assert [x.dtype for x in got] == [dtype] * 3
    assert_near(got, want, TOLERANCES[dtype])


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.2])
def test_scale(scale):
    arrays = inputs(20, 33)

    def of(call):
        loss = weighted(lambda s: call(*arrays, scale=s), 20)
        return jax.jit(jax.grad(loss))(jnp.float32(scale))

    got = of(functools.partial(attention, return_lse=True))
    np.testing.assert_allclose(got, of(plain), rtol=1e-4)


def test_vjp_of_one_result():
    arrays = inputs(20, 33)
    d_out, _ = cotangents(20)
    got = pull_back(attention, arrays, d_out)
    want = pull_back(lambda *x: plain(*x)[0], arrays, d_out)
    assert_near(got, want, 1e-5)


def test_queries_and_keys_past_the_lengths_get_none():
    arrays = inputs(20, 33)
    d_out, _ = cotangents(20)
    lengths = {"q_lengths": np.array([20, 7]), "kv_lengths": np.array([33, 12])}
    call = functools.partial(attention, **lengths)
    d_q, d_k, d_v = pull_back(call, arrays, d_out)
    for d, n in ((d_q, 7), (d_k, 12), (d_v, 12)):
        assert np.all(d[1, n:] == 0)
        assert np.any(d[1, :n] != 0)


def test_nothing_spreads_from_past_the_lengths():
    """Neither from what padding holds, nor from the cotangents of its results."""
    shapes = ((1, 24, 4, 16), (1, 24, 2, 16), (1, 24, 2, 16))
    arrays = [
        jax.random.normal(jax.random.key(i), x, jnp.float32)
        for i, x in enumerate(shapes)
    ]
    call = functools.partial(attention, q_lengths=20, kv_lengths=21, return_lse=True)
    zeros = [x.at[:, 21:].set(0) for x in arrays]
    holes = [x.at[:, 21:].set(jnp.nan) for x in arrays]
    d_out, d_lse = call(*zeros)[0], jnp.ones((1, 4, 24), jnp.float32)
    cotangents = d_out, d_lse
    spoiled = d_out.at[:, 20:].set(jnp.nan), d_lse.at[..., 20:].set(jnp.nan)
    wants = jax.vjp(call, *zeros)[1](cotangents)
    gots = jax.vjp(call, *holes)[1](spoiled)
    for got, want in zip(gots, wants, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("granularity", ["head", "tensor", "block"])
@pytest.mark.parametrize("options", [{}, {"center": True}, {"rotate": True}], ids=str)
def test_straight_through(granularity, options):
    arrays = inputs(140, 140)
    d_out, _ = cotangents(140)

    def call(q, k, v):
        rotate = options.get("rotate", False)
        return attention(
            quantize(q, granularity=granularity, rotate=rotate),
            quantize(k, granularity=granularity, **options),
            quantize(v, granularity=granularity),
            out_dtype=jnp.float32,
        )

    got = pull_back(call, arrays, d_out)
    want = pull_back(lambda *x: plain(*x)[0], arrays, d_out)
    assert_near(got, want, 0.15)  # FP8 rounding of the inputs alone gives about 0.1


def test_detached_gets_none():
    q, k, v = inputs(20, 33)
    k8, v8 = (quantize(x).detach() for x in (k, v))
    got = jax.grad(
        lambda q: jnp.sum(attention(quantize(q), k8, v8, out_dtype=q.dtype))
    )(q)
    assert np.any(got != 0)


def test_descales():
    q, k, v = (x.astype(jnp.float8_e4m3fn) for x in inputs(20, 33))
    d_out, _ = cotangents(20)

    def by_scaled_inputs(*descales):
        scaled = (
            x.astype(jnp.float32) * d[:, None, :, None]
            for x, d in zip((q, k, v), descales, strict=True)
        )
        return plain(*scaled)[0]

    def by_descales(*descales):
        options = dict(
            zip(("q_descale", "k_descale", "v_descale"), descales, strict=True)
        )
        return attention(q, k, v, out_dtype=jnp.float32, **options)

    descales = tuple(jnp.full((2, h), 0.7, jnp.float32) for h in (4, 2, 2))
    got = pull_back(by_descales, descales, d_out)
    want = pull_back(by_scaled_inputs, descales, d_out)
    assert_near(got, want, 0.1)


def test_second_derivative():
    arrays = inputs(9, 13)

    def norm(call):
        first = jax.grad(lambda q: jnp.sum(jnp.square(call(q, *arrays[1:]))))
        second = jax.grad(lambda q: jnp.sum(jnp.square(first(q))))
        return jax.jit(second)(arrays[0])

    assert_near([norm(attention)], [norm(lambda *x: plain(*x)[0])], 1e-4)


def test_forward_mode_is_refused():
    q, k, v = inputs(9, 13)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attention(q, k, v), (q,), (q,))


def calls(jaxpr):
    """How often the primitive stands in a program, inner programs included."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == "zyfa_attention"
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    count += calls(inner)
    return count


def test_checkpoint_saves_the_named_results():
    arrays = inputs(20, 33)

    def loss(q, k, v):
        return jnp.sum(jnp.sin(attention(jnp.cos(q), k, v)))

    names = jax.checkpoint_policies.save_only_these_names(*zyfa_jax.CHECKPOINT_NAMES)
    want = gradients(loss)(*arrays)
    for policy, count in ((names, 1), (jax.checkpoint_policies.nothing_saveable, 2)):
        gradient = jax.grad(jax.checkpoint(loss, policy=policy), (0, 1, 2))
        assert calls(jax.make_jaxpr(gradient)(*arrays).jaxpr) == count
        assert_near(jax.jit(gradient)(*arrays), want, 1e-6)


def test_memory_is_linear():
    """The backward pass of 8192 tokens never holds a matrix of logits (256 MiB)."""
    shape = jax.ShapeDtypeStruct((1, 8192, 1, 64), jnp.float32)

    def loss(q, k, v):
        return jnp.sum(jnp.square(attention(q, k, v)))

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    analysis = gradient.lower(shape, shape, shape).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 64 * 2**20
