"""The oracle against plain loops, and the FP8 arithmetic against the extension."""

from fractions import Fraction
from typing import Any, cast

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from benchmarks import families
from zyfa_jax import _ext, reference

FP8 = ml_dtypes.float8_e4m3fn
E4M3 = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float64)


def loops(q, k, v, scale, sees):
    """softmax(q k^T) v, one query of one head at a time; sees(b, i) -> keys."""
    b, t, h, _ = q.shape
    out = np.zeros((b, t, h, v.shape[3]))
    lse = np.full((b, h, t), -np.inf)
    for batch in range(b):
        kv_batch = batch * k.shape[0] // b
        for head in range(h):
            kv_head = head * k.shape[2] // h
            for i in range(t):
                keys = sees(batch, i)
                if not len(keys):
                    continue
                logits = k[kv_batch, keys, kv_head] @ q[batch, i, head] * scale
                p = np.exp(logits)
                out[batch, i, head] = p @ v[kv_batch, keys, kv_head] / p.sum()
                lse[batch, head, i] = np.log(p.sum())
    return out, lse


def inputs(b=2, t=7, s=11, h=4, kv=2, d=8, dv=5, kv_batch=None, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((b, t, h, d), (kv_batch or b, s, kv, d), (kv_batch or b, s, kv, dv))
    return [rng.standard_normal(shape) for shape in shapes]


def fp8(x):
    """(x in FP8, its descale), per tensor."""
    descale = np.float32(np.abs(x).max() / 448)
    return (x / descale).astype(FP8), descale


def fp8_family(name, tokens, **dims) -> tuple[list[np.ndarray], dict[str, Any]]:
    names = ("q_descale", "k_descale", "v_descale")
    pairs = [fp8(x) for x in families.make(name, tokens, **dims)]
    return [x for x, _ in pairs], dict(zip(names, (d for _, d in pairs), strict=True))


def relative(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(
    ("options", "sees"),
    [
        ({"causal": False}, lambda b, i: range(11)),
        ({}, lambda b, i: range(i + 5)),
        ({"q_offset": 1}, lambda b, i: range(i + 2)),
        ({"q_offset": [-3, 30]}, lambda b, i: range(min(11, max(0, i + (-2, 31)[b])))),
        ({"kv_lengths": [4, 0]}, lambda b, i: range(max(0, (i - 2, 0)[b]))),
        ({"q_lengths": [3, 7]}, lambda b, i: range((i + 9 if i < 3 else 0, i + 5)[b])),
        ({"window": 2}, lambda b, i: range(i + 2, i + 5)),
        ({"window": (None, 1), "causal": False}, lambda b, i: range(min(11, i + 6))),
        ({"window": (1, -1), "causal": False}, lambda b, i: range(i + 3, 11)),
    ],
)  # fmt: skip
def test_attention_is_what_loops_give(options, sees):
    q, k, v = inputs()

    def keys(batch, i):
        return np.array(list(sees(batch, i)), int)

    expected = loops(q, k, v, 8**-0.5, keys)
    for got, want in zip(
        reference.attention(q, k, v, **options), expected, strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


def test_rank_three_and_grouped_batches():
    q, k, v = inputs(b=4, kv_batch=2)
    out, lse = reference.attention(q, k, v)
    for batch in range(4):
        one, one_lse = reference.attention(q[batch], k[batch // 2], v[batch // 2])
        np.testing.assert_array_equal(one, out[batch])
        np.testing.assert_array_equal(one_lse, lse[batch])


def test_descales_multiply():
    q, k, v = inputs(b=2, t=300, s=300)
    rng = np.random.default_rng(1)
    q_descale, k_descale = rng.random((2, 4)), rng.random((2, 2, 3))
    v_descale = rng.random((2, 2, 3))
    got = reference.attention(
        q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        kv_block=128,
    )  # fmt: skip
    per_token = np.arange(300) // 128
    want = reference.attention(
        q * q_descale[:, None, :, None],
        k * np.moveaxis(k_descale[..., per_token], 2, 1)[..., None],
        v * np.moveaxis(v_descale[..., per_token], 2, 1)[..., None],
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_reaches_only_those_who_see_it(name):
    tensors = inputs(b=1, t=9, s=9, h=1, kv=1)
    clean, _ = reference.attention(*tensors)
    tensors["qkv".index(name)][0, 4] = np.nan
    out, lse = reference.attention(*tensors)
    hit = np.isnan(out[0, :, 0]).all(axis=1)
    expected = np.arange(9) == 4 if name == "q" else np.arange(9) >= 4
    np.testing.assert_array_equal(hit, expected)
    np.testing.assert_array_equal(out[0, ~hit], clean[0, ~hit])
    assert np.isnan(lse[0, 0]).any() == (name != "v")


def test_no_keys():
    q, k, v = inputs(s=0)
    for out, lse in (
        reference.attention(q, k, v),
        reference.fp8_attention(*(x.astype(FP8) for x in (q, k, v))),
    ):
        assert not out.any()
        assert np.isneginf(lse).all()


@pytest.mark.parametrize("model", reference.PROBABILITIES)
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"q_offset": -100}])
def test_fp8_models_are_near_the_oracle(model, options):
    (q, k, v), descales = fp8_family("gauss", 300, q_heads=2, qk_dim=32, v_dim=16)
    exact, exact_lse = reference.attention(q, k, v, **descales, **options)
    out, lse = reference.fp8_attention(
        q, k, v, probabilities=model, **descales, **options
    )
    assert relative(out, exact) < 0.05
    seen = np.isfinite(exact_lse)
    np.testing.assert_array_equal(np.isfinite(lse), seen)
    np.testing.assert_allclose(lse[seen], exact_lse[seen], atol=0.06)


def test_fp8_takes_negative_scale_and_block_descales():
    (q, k, v), _ = fp8_family("gauss", 300, q_heads=2, kv_heads=2, qk_dim=16, v_dim=8)
    descale = np.random.default_rng(0).random((1, 2, 3)) * 0.02
    options = {"k_descale": descale, "v_descale": descale, "kv_block": 128}
    options |= {"q_block": 128, "q_descale": descale, "scale": -0.3}
    exact, _ = reference.attention(q, k, v, **options)
    out, _ = reference.fp8_attention(q, k, v, probabilities="quadratic", **options)
    assert relative(out, exact) < 0.03


@pytest.mark.parametrize("name", families.NAMES)
def test_exp_free_error_within_its_bar(name):
    errors: dict[reference.Probabilities, list[float]] = {
        model: [] for model in reference.PROBABILITIES
    }
    for seed in range(2):
        (q, k, v), descales = fp8_family(name, 512, seed=seed)
        exact, _ = reference.attention(q, k, v, **descales)
        for model, samples in errors.items():
            out, _ = reference.fp8_attention(q, k, v, probabilities=model, **descales)
            samples.append(relative(out, exact))
    error = {model: np.mean(samples) for model, samples in errors.items()}
    exp_free = ("linear", "quadratic", "gfx950", "sm90")
    if name == "sink":
        assert max(error[x] for x in exp_free) < min(0.0015, error["unit"] / 4)
    else:
        assert error["gfx950"] < 1.2 * error["exact row"]
        assert error["quadratic"] < min(1.05 * error["exact row"], error["unit"])
        assert max(error["linear"], error["sm90"]) < 1.25 * error["exact row"]
    assert error["exact block"] < 1.001 * error["exact row"]


def test_fp8_attention_refuses_other_inputs():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="float8_e4m3fn v, got float64"):
        reference.fp8_attention(q, k, v)
    with pytest.raises(ValueError, match="probabilities must be one of"):
        reference.fp8_attention(q, k, v, probabilities=cast(Any, "cubic"))


def test_fma_rounds_once():
    rng = np.random.default_rng(0)
    scale = 2.0 ** rng.integers(-20, 20, (2, 400))
    a, b = (rng.standard_normal((2, 400)) * scale).astype(np.float32)
    # c that nearly cancels a b, and c far below it: where a second rounding shows.
    for c in (-a * b, a * b * np.float32(2.0**-24), np.full_like(a, 1e-30)):
        expected = [rounded_once(*numbers) for numbers in zip(a, b, c, strict=True)]
        np.testing.assert_array_equal(reference._fma(a, b, c), expected)


def rounded_once(a, b, c):
    """The float32 nearest to a b + c, ties to even, by exact fractions."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    guess = np.float32(float(exact))
    near = [guess, *(np.nextafter(guess, np.float32(to)) for to in (-np.inf, np.inf))]

    def distance(x):
        return abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1

    return min(near, key=distance)


def block(
    acc, factor=1.0, running_max=-np.inf, quadratic=False, visible=None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, bool]:
    acc = np.atleast_2d(np.asarray(acc, np.float32))
    rows = len(acc)
    return (
        acc,
        np.ones(acc.shape, bool) if visible is None else visible,
        np.full(rows, factor, np.float32),
        np.full(rows, running_max, np.float32),
        quadratic,
    )


@pytest.mark.parametrize("quadratic", [False, True])
def test_codes_follow_the_logits(quadratic):
    acc = np.linspace(-20, 3.3, 128)
    codes, shift, new_max, row_sum = reference.fp8_softmax_block(
        *block(acc, quadratic=quadratic)
    )
    assert codes[0, -1] == 0x78
    assert new_max[0] == np.float32(3.3)
    assert shift[0] == 0
    assert (np.diff(codes[0].astype(int)) >= 0).all()
    assert row_sum[0] == E4M3[codes[0]].sum()
    normal = codes[0] >= 8
    ratio = E4M3[codes[0]] / 2.0 ** (acc - 3.3 + 8)
    assert abs(ratio[normal] - 1).max() < (0.0665 if quadratic else 0.105)


@pytest.mark.parametrize("quadratic", [False, True])
def test_a_low_block_fills_the_range(quadratic):
    codes, shift, new_max, row_sum = reference.fp8_softmax_block(
        *block([[-30.0, -31.0]], running_max=5.25, quadratic=quadratic)
    )
    assert (shift[0], new_max[0]) == (35, np.float32(5.25))
    np.testing.assert_allclose(E4M3[codes[0]], 2.0 ** np.array([7.75, 6.75]), rtol=0.11)
    assert row_sum[0] == E4M3[codes[0]].sum()


def test_the_shift_stops_at_120():
    codes, shift, _, row_sum = reference.fp8_softmax_block(
        *block([[-1000.0]], running_max=0)
    )
    assert (codes[0, 0], shift[0], row_sum[0]) == (0, 120, 0)


def test_a_block_nobody_sees():
    codes, shift, new_max, row_sum = reference.fp8_softmax_block(
        *block([[np.nan, 2.0]], running_max=3.0, visible=np.zeros((1, 2), bool))
    )
    assert not codes.any()
    assert (shift[0], new_max[0], row_sum[0]) == (0, 3, 0)


special = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 448.0**2 * 256, -(448.0**2) * 256, 2.0**-18]
)
logits = st.one_of(
    special,
    st.integers(-4000, 4000).map(lambda n: n / 32),
    st.floats(-5e7, 5e7, width=32, allow_subnormal=False),
)
factors = st.one_of(
    st.sampled_from([0.0, 1 / 16, 1 / 8, 1.0, 0.1275]),
    st.floats(0, 100, width=32, allow_subnormal=False),
)
maxima = st.one_of(
    st.just(-np.inf),
    st.integers(-200, 200).map(float),
    st.floats(-1e6, 1e6, width=32, allow_subnormal=False),
)


@st.composite
def blocks(draw, values=logits):
    rows = draw(st.integers(1, 5))
    keys = draw(st.sampled_from([1, 2, 7, 8, 15, 16, 31, 33, 64, 100, 127, 128]))
    spread = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(spread)
    acc = draw(hnp.arrays(np.float32, (rows, keys), elements=values, fill=values))
    noise = draw(st.sampled_from([0.0, 0.5, 20.0, 1e4]))
    acc = acc + (noise * rng.standard_normal(acc.shape)).astype(np.float32)
    visible = rng.random((rows, keys)) < draw(st.sampled_from([0.0, 0.1, 0.9, 1.0]))
    factor = draw(hnp.arrays(np.float32, rows, elements=factors))
    running_max = draw(hnp.arrays(np.float32, rows, elements=maxima))
    return acc, visible, factor, running_max


def both(target, arguments, quadratic):
    """(the extension's results, the reference's) for one block."""
    acc, visible, factor, running_max = arguments
    codes, shift, new_max, row_sum = reference.fp8_softmax_block(
        acc, visible, factor, running_max, quadratic
    )
    # The kernels flush subnormal numbers.
    new_max = np.where(np.abs(new_max) < np.finfo(np.float32).tiny, 0, new_max)
    return (
        _ext.fp8_softmax_block(target, acc, visible, factor, running_max, quadratic),
        (codes, shift, new_max, row_sum),
    )


@pytest.mark.parametrize("quadratic", [False, True], ids=["linear", "quadratic"])
@pytest.mark.parametrize("target", _ext.cpu_targets())
@settings(max_examples=200, deadline=None)
@given(arguments=blocks())
def test_extension_gives_the_same_bits(target, quadratic, arguments):
    got, expected = both(target, arguments, quadratic)
    for name, a, b in zip(("codes", "shift", "new_max"), got, expected, strict=False):
        np.testing.assert_array_equal(a, b, err_msg=name)
    np.testing.assert_allclose(got[3], expected[3], rtol=1e-6)


@pytest.mark.parametrize("quadratic", [False, True], ids=["linear", "quadratic"])
@pytest.mark.parametrize("target", _ext.cpu_targets())
@settings(max_examples=100, deadline=None)
@given(arguments=blocks(st.one_of(logits, st.just(float("nan")))))
def test_extension_marks_rows_that_see_nan(target, quadratic, arguments):
    acc, visible, _, _ = arguments
    sees_nan = (np.isnan(acc) & visible).any(axis=1)
    got, expected = both(target, arguments, quadratic)
    for _, _, new_max, row_sum in (expected, got):
        np.testing.assert_array_equal(np.isnan(new_max) | np.isnan(row_sum), sees_nan)
    for a, b in zip(got[:3], expected, strict=False):
        np.testing.assert_array_equal(a[~sees_nan], b[~sees_nan])


def test_families_are_deterministic():
    for name in families.NAMES:
        q, k, v = families.make(name, 16, q_heads=2, qk_dim=192, v_dim=128, seed=3)
        again = families.make(name, 16, q_heads=2, qk_dim=192, v_dim=128, seed=3)
        assert (q.shape, k.shape, v.shape) == ((16, 2, 192), (16, 1, 192), (16, 1, 128))
        for a, b in zip((q, k, v), again, strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == np.float32


def test_codes_are_jax_float8_bits():
    codes = np.arange(127, dtype=np.uint8)
    values = jnp.asarray(codes).view(jnp.float8_e4m3fn).astype(jnp.float32)
    np.testing.assert_array_equal(np.asarray(values), E4M3[:127])
