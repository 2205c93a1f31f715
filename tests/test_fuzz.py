"""Any call of `attention` gives the oracle's result or a clear error."""

import os

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from _oracle import BF16, F16, F32, FP8, assert_near_oracle, make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zyfa_jax import attention, quantize

INT32 = np.iinfo(np.int32)


def examples(count):
    return settings(
        max_examples=count,
        deadline=None,
        derandomize="CI" in os.environ,
        suppress_health_check=[HealthCheck.too_slow],
    )


tokens = st.sampled_from([0, 1, 2, 7, 12, 63, 65, 128, 129, 300])
dims = st.sampled_from([8, 24, 64, 128])
sides = st.one_of(st.none(), st.integers(-1, 6), st.sampled_from([127, 128, 2**31]))
offsets = st.one_of(
    st.integers(-6, 140), st.sampled_from([INT32.min, -300, 300, INT32.max])
)
scales = st.one_of(
    st.none(), st.floats(-2, 2, width=32), st.sampled_from([0, -0.0, 1, np.float16(3)])
)


def maybe(strategy):
    return st.one_of(st.none(), strategy)


def per_batch(draw, strategy, batch):
    """None, one for all, or one per batch row, in an integer dtype that holds them."""
    kind = draw(st.sampled_from(["none", "one", "each", "traced"]))
    if kind == "none":
        return None
    if kind == "one" or not batch:
        return draw(strategy)
    values = [draw(strategy) for _ in range(batch[0])]
    return jnp.array(values, jnp.int32) if kind == "traced" else np.array(values)


@st.composite
def right_calls(draw, dtypes=(F32, F16, BF16, FP8), head_dims=dims):
    batch = draw(st.sampled_from([(), (1,), (2,), (3,)]))
    t, s = draw(tokens), draw(tokens)
    kv, group = draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 3), (3, 2)]))
    dtype = draw(st.sampled_from(dtypes))
    x = make(
        (t, s), (kv * group, kv), (draw(head_dims), draw(head_dims)), batch, dtype,
        seed=draw(st.integers(0, 99)),
    )  # fmt: skip
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.one_of(sides, st.tuples(sides, sides))),
        "scale": draw(scales),
        "q_offset": per_batch(draw, offsets, batch),
        "q_lengths": per_batch(draw, st.integers(0, t), batch),
        "kv_lengths": per_batch(draw, st.integers(0, s), batch),
    }
    if dtype == FP8:
        shapes = [(), (1,), *([(batch[0], 1)] if batch else [])]
        for name in ("q_descale", "k_descale", "v_descale"):
            shape = draw(st.sampled_from(shapes))
            options[name] = np.full(shape, draw(st.floats(0, 2, width=16)), F32)
    elif s and t and draw(st.booleans()):
        granularity = draw(st.sampled_from(["head", "tensor", "block"]))
        x = tuple(quantize(y, granularity=granularity) for y in x)
    return x, {name: value for name, value in options.items() if value is not None}


@examples(60)
@given(call=right_calls(), out_dtype=maybe(st.sampled_from([F32, F16, BF16])))
def test_right_calls_give_what_the_oracle_gives(call, out_dtype):
    x, options = call
    got = attention(*x, out_dtype=out_dtype, return_lse=True, **options)
    assert_near_oracle(got, x, **options)


@examples(12)
@given(
    call=right_calls(
        dtypes=(F32, FP8), head_dims=st.sampled_from([1, 7, 8, 20, 64, 257])
    ),
    implementation=st.sampled_from([None, "reference"]),
)
def test_right_calls_of_any_head_dim(call, implementation):
    x, options = call
    got = attention(*x, implementation=implementation, return_lse=True, **options)
    assert_near_oracle(got, x, **options)


# Whatever a caller might pass where another thing is meant.
anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([2**31, -(2**31) - 1, 2**63, 2**64, 2**2000, -1]),
    st.floats(),
    st.sampled_from([1j, "", "cpu", "rocm", "reference", "float16", "1", b"x"]),
    st.sampled_from([[], [1, 2], (1, 2), (None, 3), (1,), (-1, -1), {}, {1}, ("a", 0)]),
    st.sampled_from([np.float32, np.int8, FP8, BF16, np.dtype("f4,f4"), "float64"]),
    st.sampled_from(
        [
            np.float64(2), np.float32("nan"), np.int64(2**40), np.bool_(True),
            np.ones(2), np.ones((2, 1)), np.ones((2, 2, 1)), np.zeros((0,)),
            np.array([1, 2]), np.array([5, -1]), np.array([True, False]),
            np.array("a"), np.array([1j]), np.array([None]), np.str_("x"),
            np.ones((2,), BF16), np.ones((), ml_dtypes.int4), np.datetime64("2020"),
            jnp.ones(2), jnp.array([3, 9]), jnp.bool_(True), jnp.complex64(1),
        ]
    ),
)  # fmt: skip
NAMES = (
    "causal", "scale", "window", "q_descale", "k_descale", "v_descale", "q_offset",
    "q_lengths", "kv_lengths", "out_dtype", "implementation", "return_lse",
)  # fmt: skip
SMALL = {
    F32: make(tokens=(3, 5), heads=(2, 2), dims=(8, 8)),
    FP8: make(tokens=(3, 5), heads=(2, 2), dims=(8, 8), dtype=FP8),
}


def taken_or_refused(*inputs, **options):
    """The outcome of a call that may be wrong: its output, or None if refused."""
    try:
        out = attention(*inputs, **options)
    except (ValueError, NotImplementedError) as error:
        message = str(error)
    else:
        return out[0] if isinstance(out, tuple) else out
    assert "attention" in message
    assert "take" in message
    return None


@examples(300)
@given(
    dtype=st.sampled_from([F32, FP8]),
    options=st.dictionaries(st.sampled_from(NAMES), anything, min_size=1, max_size=2),
)
def test_any_argument_is_taken_or_refused(dtype, options):
    given = dict.fromkeys(("q_descale", "k_descale", "v_descale"), 1.0)
    given = {**(given if dtype == FP8 else {}), **options}
    out = taken_or_refused(*SMALL[dtype], **given)
    if out is None:
        return
    assert out.shape == (2, 3, 2, 8)
    # What is taken must mean what it says. Logits past what float32 resolves have a
    # test of their own.
    numbers = (
        isinstance(x, int | float | tuple) and (isinstance(x, tuple) or abs(x) < 1e5)
        for x in given.values()
    )
    if all(numbers) and not {"window", "implementation"} & set(given):
        oracle = {
            name: x
            for name, x in given.items()
            if name not in ("out_dtype", "return_lse")
        }
        got = attention(*SMALL[dtype], **{**given, "return_lse": True})
        assert_near_oracle(got, SMALL[dtype], **oracle)


shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8]), min_size=0, max_size=5)
arrays = st.builds(
    np.ones,
    shapes.map(tuple),
    st.sampled_from(
        [
            F32,
            F32,
            F32,
            F16,
            BF16,
            FP8,
            np.float64,
            np.int8,
            bool,
            ml_dtypes.float8_e5m2,
        ]
    ),
)


@examples(150)
@given(q=arrays, k=arrays, v=arrays)
def test_any_arrays_are_taken_or_refused(q, k, v):
    out = taken_or_refused(q, k, v)
    if out is not None:
        assert out.shape == (*q.shape[:-1], v.shape[-1])
        assert len({q.dtype, k.dtype, v.dtype, out.dtype}) == 1


@examples(60)
@given(
    call=st.lists(st.sampled_from([1, 2, 4]), min_size=4, max_size=4),
    swap=st.sampled_from(["rank", "batch", "tokens", "heads", "dim", "none"]),
)
def test_one_wrong_dimension_is_always_seen(call, swap):
    b, s, kv, d = call
    q, k, v = make(tokens=(3, s), heads=(2 * kv, kv), dims=(8 * d, 8), batch=(b,))
    broken = {
        "rank": (q[0], k, v),
        "batch": (q, np.concatenate([k, k]), np.concatenate([v, v])),
        "tokens": (q, k, v[:, 1:]),
        "heads": (q[:, :, 1:], k, v) if kv > 1 else (q, k, np.repeat(v, 2, axis=2)),
        "dim": (q[..., 1:], k, v),
        "none": (q, k, v),
    }[swap]
    assert (taken_or_refused(*broken) is None) == (swap != "none")
