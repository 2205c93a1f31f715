"""jit, scan, ahead-of-time compilation, donation, 64-bit mode, nesting, threads."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zyfa_jax import attention, quantize


def inputs(tokens=40, dtype=jnp.float32, batch=2, dim=16):
    return tuple(
        jax.random.normal(jax.random.key(i), (batch, tokens, h, dim)).astype(dtype)
        for i, h in enumerate((4, 2, 2))
    )


def test_jit_and_ahead_of_time():
    arrays = inputs()
    want = attention(*arrays)
    np.testing.assert_array_equal(jax.jit(attention)(*arrays), want)
    compiled = jax.jit(attention).lower(*arrays).compile()
    np.testing.assert_array_equal(compiled(*arrays), want)


def test_with_jit_disabled():
    arrays = inputs()
    want = attention(*arrays), attention(*map(quantize, arrays))
    with jax.disable_jit():
        got = attention(*arrays), attention(*map(quantize, arrays))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x.astype(jnp.float32), y, rtol=1e-2, atol=1e-2)


def test_jit_within_jit():
    arrays = inputs()
    outer = jax.jit(lambda q, k, v: jax.jit(attention)(q, k, v) * np.float32(2))
    np.testing.assert_array_equal(outer(*arrays), 2 * np.asarray(attention(*arrays)))


def test_eval_shape():
    q, k, v = inputs(dtype=jnp.bfloat16)
    out, lse = jax.eval_shape(lambda *x: attention(*x, return_lse=True), q, k, v)
    assert (out.shape, out.dtype) == (q.shape, jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 4, 40), jnp.float32)
    quantized = jax.eval_shape(lambda *x: attention(*map(quantize, x)), q, k, v)
    assert (quantized.shape, quantized.dtype) == (q.shape, jnp.bfloat16)


def test_scan_over_layers():
    q, k, v = inputs()
    layers = jnp.linspace(0.5, 1.5, 3, dtype=jnp.float32)

    def layer(x, scale):
        return attention(x, k, v, scale=scale), None

    want = q
    for scale in layers:
        want = attention(want, k, v, scale=scale)
    got, _ = jax.lax.scan(layer, q, layers)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_while_loop_and_cond():
    q, k, v = inputs()

    def body(state):
        i, x = state
        x = jax.lax.cond(i > 0, lambda x: attention(x, k, v), lambda x: x, x)
        return i + 1, x

    _, got = jax.lax.while_loop(lambda s: s[0] < 3, body, (0, q))
    np.testing.assert_allclose(got, attention(attention(q, k, v), k, v), atol=1e-6)


def test_donated_queries():
    q, k, v = inputs()
    want = attention(q, k, v)
    got = jax.jit(attention, donate_argnums=0)(jnp.copy(q), k, v)
    np.testing.assert_array_equal(got, want)


def test_64_bit_mode():
    arrays = inputs()
    want, want_lse = attention(*arrays, return_lse=True, q_offset=0, scale=0.25)
    with jax.enable_x64(True):
        got, lse = jax.jit(
            lambda q, k, v, offset, scale: attention(
                q, k, v, q_offset=offset, scale=scale, return_lse=True
            )
        )(*arrays, np.int64(0), np.float64(0.25))
        gradient = jax.grad(lambda q: jnp.sum(attention(q, *arrays[1:])))(arrays[0])
        quantized, quantized_lse = attention(*map(quantize, arrays), return_lse=True)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(lse, want_lse)
    assert gradient.dtype == lse.dtype == quantized_lse.dtype == jnp.float32
    assert quantized.dtype == jnp.bfloat16


def test_numpy_inputs():
    arrays = inputs()
    got = attention(*(np.asarray(x) for x in arrays))
    np.testing.assert_array_equal(got, attention(*arrays))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_concurrent_calls(dtype):
    """Several threads share the pool of XLA's threads; all get the same bits."""
    arrays = inputs(300, dtype, dim=64)
    call = jax.jit(lambda q, k, v: attention(attention(q, k, v), k, v))
    want = np.asarray(call(*arrays))
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda _: np.asarray(call(*arrays)), range(32)))
    for got in results:
        np.testing.assert_array_equal(got, want)
