"""`attention` against the float64 oracle, one capability at a time."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _oracle import BF16, F16, F32, FP8, assert_near_oracle, make, normal

from benchmarks import shapes
from zyfa_jax import attention, quantize, reference

INT32 = np.iinfo(np.int32)
LSE = functools.partial(attention, return_lse=True)


def both(name, cases, plain=()):
    """Parametrizes over all cases with the kernel, some with the path in plain JAX.

    Each of those takes most of a second to compile.
    """
    return pytest.mark.parametrize(
        ("implementation", name),
        [(None, case) for case in cases] + [("reference", case) for case in plain],
        ids=str,
    )


def check(inputs, *, implementation=None, **options):
    """Calls attention and compares it with the oracle; returns what it gave."""
    got = LSE(*inputs, implementation=implementation, **options)
    options.pop("out_dtype", None)
    assert_near_oracle(got, inputs, **options)
    return got


def descales(value=1.0):
    return {f"{name}_descale": value for name in "qkv"}


def fp8_options(dtype):
    return descales(0.75) if dtype == FP8 else {}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["rank3", "rank4"])
@both("dtype", [F32, F16, BF16, FP8])
def test_dtypes_and_layouts(dtype, batch, causal, implementation):
    inputs = make(batch=batch, dtype=dtype)
    options = fp8_options(dtype)
    out, lse = check(inputs, causal=causal, implementation=implementation, **options)
    assert out.shape == (*batch, 20, 4, 24)
    assert lse.shape == (*batch, 4, 20)
    assert out.dtype == (BF16 if dtype == FP8 else dtype)


@pytest.mark.parametrize("out_dtype", [F32, F16, "bfloat16", jnp.bfloat16], ids=str)
@both("dtype", [F32, BF16, FP8])
def test_out_dtype(dtype, out_dtype, implementation):
    inputs = make(dtype=dtype)
    out, _ = check(
        inputs,
        out_dtype=out_dtype,
        implementation=implementation,
        **fp8_options(dtype),
    )
    assert out.dtype == np.dtype(out_dtype)


@both("heads", [(1, 1), (4, 4), (6, 2), (5, 1), (12, 4)], [(6, 2), (5, 1)])
def test_query_heads_share_key_value_heads(heads, implementation):
    check(make(heads=heads), implementation=implementation)


@both(
    "dims",
    [
        (8, 8), (16, 8), (24, 40), (40, 24), (64, 64), (72, 128), (96, 8),
        (128, 128), (192, 128), (136, 248), (256, 256), (8, 256),
    ],
    [(192, 128)],
)  # fmt: skip
def test_head_dims(dims, implementation):
    for dtype in (F32,) if implementation else (F32, F16, BF16, FP8):
        inputs = make(dims=dims, tokens=(19, 140), dtype=dtype)
        check(inputs, implementation=implementation, **fp8_options(dtype))


@pytest.mark.parametrize(
    "model", [shapes.MISTRAL_7B, shapes.QWEN3_8B, shapes.DEEPSEEK_V2_LITE], ids=str
)
@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_heads_of_real_models(model, dtype):
    inputs = make(
        tokens=(130, 130), heads=model.heads, dims=model.head_dims, batch=(1,),
        dtype=dtype,
    )  # fmt: skip
    check(inputs, **fp8_options(dtype))


@pytest.mark.parametrize("dims", [(20, 20), (300, 300), (8, 20), (264, 8), (1, 1)])
def test_head_dims_that_no_kernel_takes(dims):
    dtype = FP8 if dims[0] in (20, 1) else F32
    check(make(dims=dims, dtype=dtype), **fp8_options(dtype))


@both(
    "tokens",
    [
        (0, 5), (5, 0), (0, 0), (1, 1), (1, 300), (7, 1), (127, 128), (128, 127),
        (129, 129), (65, 257), (300, 130), (33, 640),
    ],
    [(0, 5), (5, 0), (1, 1), (65, 257)],
)  # fmt: skip
def test_token_counts(tokens, implementation):
    for dtype in (F32,) if implementation else (F32, BF16, FP8):
        inputs = make(tokens=tokens, dtype=dtype, batch=(1,))
        check(inputs, implementation=implementation, **fp8_options(dtype))


def test_more_queries_than_a_chunk_of_the_plain_path():
    check(make(tokens=(1100, 1030), heads=(1, 1), dims=(8, 8), batch=(1,)))


@both("tokens", [(2, 3), (5, 0), (0, 5), (0, 0)], [(2, 3)])
def test_empty_batch(tokens, implementation):
    for dtype in (F32, FP8):
        inputs = make(tokens=tokens, batch=(0,), dtype=dtype)
        out, lse = LSE(*inputs, implementation=implementation, **fp8_options(dtype))
        assert out.shape == (0, tokens[0], 4, 24)
        assert lse.shape == (0, 4, tokens[0])


@pytest.mark.parametrize("tokens", [(5, 0), (0, 5), (0, 0)], ids=str)
def test_no_tokens_in_rank_three(tokens):
    check(make(tokens=tokens, batch=()), causal=False)


def test_no_query_heads():
    out, lse = LSE(*make(heads=(0, 2)))
    assert out.shape == (2, 20, 0, 24)
    assert lse.shape == (2, 0, 20)


WINDOWS = [
    (True, 0), (True, 3), (False, 3), (False, (2, None)), (True, (140, None)),
    (False, (None, 1)), (False, (-1, 130)), (True, (-1, -1)), (False, [4, 0]),
    (False, (0, 0)), (True, 10**6), (False, (None, None)), (False, np.int64(5)),
    (False, (2**31, 2**31 - 1)), (True, 2**40), (False, (2**70, 3)),
]  # fmt: skip


@both("causal_and_window", WINDOWS, [WINDOWS[2], WINDOWS[4], WINDOWS[-1]])
def test_windows(causal_and_window, implementation):
    causal, window = causal_and_window
    inputs = make(tokens=(150, 200), dims=(8, 8), batch=(1,))
    got = LSE(*inputs, causal=causal, window=window, implementation=implementation)
    if isinstance(window, list):
        window = tuple(window)
    elif not isinstance(window, tuple):
        window = int(window)
    if window == (2**70, 3):
        window = (None, 3)
    assert_near_oracle(got, inputs, causal=causal, window=window)


OFFSETS = [
    0, 5, -7, 180, 10**6, np.int64(3), np.array([0, 40]), np.array([-19, 13], "i1")
]  # fmt: skip


@pytest.mark.parametrize("window", [None, (9, 2)])
@both("q_offset", OFFSETS, OFFSETS[-2:-1])
def test_q_offset(q_offset, window, implementation):
    inputs = make(tokens=(20, 190))
    options = {"window": window, "causal": window is None}
    for offset in (q_offset, jnp.asarray(q_offset, jnp.int32)):
        got = LSE(*inputs, q_offset=offset, implementation=implementation, **options)
        assert_near_oracle(got, inputs, q_offset=q_offset, **options)


# The last queries see every key, some or none of them.
EXTREMES = [
    (INT32.max, None), (INT32.min, None), (INT32.max, (INT32.max, 3)),
    (INT32.max, (INT32.max - 10, None)), (INT32.max, (2**31 + 3, 2**31)),
    (INT32.min, (0, INT32.max)), (INT32.min, (None, 2**31 + 7)),
    (INT32.min, (3, 2**31 - 5)), (2**30 + 5, (2**30, None)),
    (-(2**30) - 9, (None, 2**30)),
]  # fmt: skip


@both("offset_and_window", EXTREMES, EXTREMES[1:7:2])
def test_offsets_at_the_ends_of_int32(offset_and_window, implementation):
    q_offset, window = offset_and_window
    inputs = make(tokens=(20, 190), dims=(8, 8))
    options = {"window": window, "causal": window is None}
    for offset in (q_offset, jnp.int32(q_offset)):
        got = LSE(*inputs, q_offset=offset, implementation=implementation, **options)
        assert_near_oracle(got, inputs, q_offset=q_offset, **options)


LENGTHS = [
    {"kv_lengths": np.array([0, 33])}, {"kv_lengths": np.array([17, 1])},
    {"kv_lengths": 9}, {"kv_lengths": np.int16(0)}, {"q_lengths": np.array([20, 0])},
    {"q_lengths": 4}, {"q_lengths": np.array([7, 20]), "kv_lengths": np.array([33, 5])},
    {"q_lengths": np.array([3, 9]), "kv_lengths": np.array([4, 7]), "causal": False},
    {"kv_lengths": np.array([17, 30]), "q_offset": 2},
    {"q_lengths": np.array([3, 19]), "q_offset": np.array([1, 30]), "window": 4},
]  # fmt: skip


@both("options", LENGTHS, LENGTHS[6:8])
def test_lengths(options, implementation):
    inputs = make()
    check(inputs, implementation=implementation, **options)
    traced = {
        name: jnp.asarray(value, jnp.int32) if name.endswith("lengths") else value
        for name, value in options.items()
    }
    got = LSE(*inputs, implementation=implementation, **traced)
    assert_near_oracle(got, inputs, **options)


@both("dtype", [F16, BF16, FP8], [BF16])
def test_lengths_in_other_dtypes(dtype, implementation):
    check(
        make(tokens=(150, 300), dtype=dtype),
        kv_lengths=np.array([129, 270]),
        q_lengths=np.array([150, 3]),
        implementation=implementation,
        **fp8_options(dtype),
    )


def test_rank_three_takes_one_length_and_offset():
    inputs = make(batch=())
    check(inputs, q_lengths=9, kv_lengths=np.array(20), q_offset=np.int32(4))


@both("dtype", ["int32", "uint32", "int8", "uint8"], ["int32"])
def test_traced_lengths_are_clamped(dtype, implementation):
    inputs = make()
    info = np.iinfo(dtype)
    wild = np.array([info.max, info.min], dtype)
    call = jax.jit(
        lambda q_lengths, kv_lengths: LSE(
            *inputs, q_lengths=q_lengths, kv_lengths=kv_lengths,
            implementation=implementation,
        )
    )  # fmt: skip
    full = np.full(2, 33)
    got = call(wild, full)
    assert_near_oracle(got, inputs, q_lengths=np.array([20, 0]))
    assert_near_oracle(call(full, wild), inputs, kv_lengths=np.array([33, 0]))


SCALES = [0.3, 2, -0.4, 0.0, np.float16(0.5), np.float64(0.7), np.array(0.2)]


@both("dtype", [F32, BF16, FP8], [F32, FP8])
def test_scale(dtype, implementation):
    options = fp8_options(dtype)
    inputs = make(tokens=(9, 140), dtype=dtype)
    for scale in (*SCALES, jnp.bfloat16(0.5)):
        got = LSE(*inputs, scale=scale, implementation=implementation, **options)
        assert_near_oracle(got, inputs, scale=float(scale), **options)
    traced = jax.jit(
        lambda scale: LSE(
            *inputs, scale=scale, implementation=implementation, **options
        )
    )
    for scale in (np.float32(-0.4), np.float32(0)):
        assert_near_oracle(traced(scale), inputs, scale=float(scale), **options)


@both("dtype", [F32, F16, BF16, FP8], [FP8])
def test_traced_scale_that_is_nan_gives_nan_to_those_who_see(dtype, implementation):
    out, lse = LSE(
        *make(tokens=(20, 20), dtype=dtype),
        scale=jnp.float32(np.nan),
        kv_lengths=np.array([0, 20]),
        implementation=implementation,
        **fp8_options(dtype),
    )
    out = np.asarray(out, F32)
    assert not out[0].any()
    assert np.isneginf(lse[0]).all()
    assert np.isnan(out[1]).all()
    assert np.isnan(lse[1]).all()


def some_descales(*shape, seed=0):
    return (0.5 + np.random.default_rng(seed).random(shape)).astype(np.float32)


# Names of the forms of a descale, made for (batch, heads).
FORMS = {
    "float": lambda b, h: 0.75,
    "int": lambda b, h: 2,
    "0-d": lambda b, h: np.float32(1.5),
    "0-d jax": lambda b, h: jnp.float32(1.5),
    "(1,)": lambda b, h: some_descales(1),
    "(H,)": lambda b, h: some_descales(h),
    "(1, 1)": lambda b, h: some_descales(1, 1),
    "(1, H)": lambda b, h: some_descales(1, h),
    "(B, 1)": lambda b, h: some_descales(b, 1),
    "(B, H)": lambda b, h: some_descales(b, h),
    "(B, H) jax": lambda b, h: jnp.asarray(some_descales(b, h)),
    "(B, H) float64": lambda b, h: some_descales(b, h).astype(np.float64),
    "(B, H) bfloat16": lambda b, h: some_descales(b, h).astype(BF16),
    "(B, H) zeros": lambda b, h: np.zeros((b, h)),
}


@both("form", FORMS, FORMS)
def test_descale_forms(form, implementation):
    inputs = make(dtype=FP8)
    options = {
        "q_descale": FORMS[form](2, 4),
        "k_descale": FORMS[form](2, 2),
        "v_descale": FORMS[form](2, 2),
    }
    check(inputs, implementation=implementation, **options)


@both("shape", [(), (1,), (4,)], [(4,)])
def test_descale_forms_of_rank_three(shape, implementation):
    check(
        make(dtype=FP8, batch=(), heads=(4, 4)),
        q_descale=some_descales(*shape),
        k_descale=some_descales(*shape, seed=1),
        v_descale=some_descales(*shape, seed=2),
        implementation=implementation,
    )


def test_descales_may_be_traced():
    inputs = make(dtype=FP8)
    given = (some_descales(2, 4), some_descales(2), some_descales())
    options = dict(zip(descales(), given, strict=True))
    call = jax.jit(lambda **x: LSE(*inputs, **x))
    assert_near_oracle(call(**options), inputs, **options)


@both("name", descales(), ["k_descale"])
def test_traced_negative_descale_gives_nan(name, implementation):
    inputs = make(dtype=FP8, heads=(2, 2))
    value = np.ones((2, 2), np.float32)
    value[1, 0] = -0.5
    call = jax.jit(
        lambda value: LSE(
            *inputs, implementation=implementation, **{**descales(), name: value}
        )
    )
    out, lse = call(value)
    nan = np.zeros((2, 2), bool)
    nan[1, 0] = True
    np.testing.assert_array_equal(np.isnan(out).all(axis=(1, 3)), nan)
    np.testing.assert_array_equal(np.isnan(out).any(axis=(1, 3)), nan)
    np.testing.assert_array_equal(
        np.isnan(lse).all(axis=2), nan & (name != "v_descale")
    )


QUANTIZE = [
    dict(zip(("granularity", "center", "rotate"), choice, strict=True))
    for choice in itertools.product(
        ("head", "tensor", "block"), (False, True), (False, True)
    )
]


def quantized(inputs, granularity="head", center=False, rotate=False, **options):
    q, k, v = inputs
    shared = {"granularity": granularity, **options}
    return (
        quantize(q, rotate=rotate, **shared),
        quantize(k, rotate=rotate, center=center, **shared),
        quantize(v, **shared),
    )


@pytest.mark.parametrize("batch", [(), (2,)], ids=["rank3", "rank4"])
@both("options", QUANTIZE, [QUANTIZE[-1]])
def test_quantized(options, batch, implementation):
    inputs = make(tokens=(150, 300), batch=batch)
    inputs[1][..., 3] += 4
    x = quantized(inputs, **options)
    out, lse = LSE(*x, implementation=implementation)
    assert out.dtype == BF16
    lse = np.asarray(lse)
    if options["center"]:
        taken = np.asarray(x[1].center, np.float64).repeat(2, axis=-2)
        q = np.asarray(x[0].dequantize(), np.float64)
        lse = lse - np.einsum("...thd,...hd->...ht", q, taken) / 4
        lse = lse.astype(F32)
    assert_near_oracle((out, lse), x)


@pytest.mark.parametrize("center", [False, True])
def test_log_sum_exp_is_that_of_the_unquantized_keys(center):
    inputs = make(tokens=(30, 200))
    inputs[1][..., 3] += 4
    _, want = reference.attention(*inputs)
    _, lse = LSE(*quantized(inputs, center=center))
    np.testing.assert_allclose(lse, want, atol=0.6)
    assert np.abs(np.asarray(lse) - want).mean() < 0.15


def test_queries_and_keys_may_differ_in_descale_blocks():
    q, k, v = make(tokens=(150, 500))
    check((
        quantize(q, granularity="block", block=256),
        quantize(k, granularity="block", block=128),
        quantize(v, granularity="block", block=128),
    ))  # fmt: skip
    check((
        quantize(q),
        quantize(k, granularity="block", block=384),
        quantize(v, granularity="block", block=384),
    ), kv_lengths=np.array([390, 100]))  # fmt: skip


def test_quantized_takes_scale_and_every_option():
    x = quantized(make(tokens=(40, 150)), "block")
    check(x, scale=-0.3, window=(60, 10), causal=False, q_offset=90)
    check(x, scale=0.0, q_lengths=np.array([40, 3]), kv_lengths=np.array([0, 140]))
    detached = tuple(y.detach() for y in x)
    np.testing.assert_array_equal(*(np.asarray(attention(*y)) for y in (x, detached)))


@pytest.mark.parametrize("sign", [1, -1])
def test_fp8_is_its_definition(sign):
    """Both probabilities are defined; a platform takes one of them."""
    inputs = make(tokens=(260, 700), dims=(32, 16), dtype=FP8, batch=(1,))
    options = {**descales(0.5), "scale": sign * 0.4}
    out, lse = LSE(*inputs, out_dtype=F32, **options)
    errors = {}
    for name in ("linear", "quadratic"):
        want, want_lse = reference.fp8_attention(*inputs, probabilities=name, **options)
        errors[name] = max(
            np.linalg.norm(out - want) / np.linalg.norm(want),
            np.abs(np.asarray(lse) - want_lse).max(),
        )
    assert min(errors.values()) < 1e-3, errors
    assert max(errors.values()) > 5e-3, errors


@pytest.mark.parametrize(
    "options",
    [
        {"q_offset": -12},
        {"causal": False, "window": (2, 2), "q_offset": 30},
        {"causal": False, "kv_lengths": 0},
        {"q_lengths": np.array([5, 0])},
        {},
    ],
    ids=str,
)
@both("dtype", [F32, F16, BF16, FP8], [F32])
def test_a_query_that_sees_no_key(options, dtype, implementation):
    """Zeros and -inf exactly, also where its own numbers are NaN."""
    tokens = (20, 33) if options else (33, 20)
    inputs = make(tokens=tokens, dtype=dtype)
    given = {**options, **fp8_options(dtype)}
    _, want = reference.attention(*inputs, **given)
    blind = np.isneginf(want)
    assert blind.any()
    for b, i in zip(*np.nonzero(blind.all(axis=1)), strict=True):
        inputs[0][b, i] = np.nan
    out, lse = check(inputs, implementation=implementation, **given)
    assert not np.moveaxis(np.asarray(out), 1, 2)[blind].any()
    assert np.isneginf(np.asarray(lse)[blind]).all()


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("window", [None, (70, 0)])
@both("dtype", [F32, F16, BF16, FP8], [FP8])
def test_nan_reaches_those_who_see_it_and_no_other(dtype, window, name, implementation):
    options = {"window": window, **fp8_options(dtype)}
    inputs = make(tokens=(300, 300), heads=(2, 1), dims=(8, 16), dtype=dtype)
    clean = LSE(*inputs, implementation=implementation, **options)
    poisoned = inputs["qkv".index(name)]
    poisoned[0, 130, 0, 3] = np.nan
    out, lse = check(inputs, implementation=implementation, **options)
    hit = np.isnan(np.asarray(out, np.float32)).any(axis=3)
    assert hit.any()
    for got, want in (
        (out, clean[0]),
        (np.moveaxis(lse, 1, 2), np.moveaxis(clean[1], 1, 2)),
    ):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        np.testing.assert_array_equal(got[~hit], want[~hit])


@both("dtype", [F32, F16, BF16, FP8], [F32])
def test_nothing_past_a_length_is_read(dtype, implementation):
    options = fp8_options(dtype)
    options |= {"q_lengths": np.array([20, 7]), "kv_lengths": np.array([5, 131])}
    clean = make(tokens=(20, 150), dtype=dtype)
    dirty = tuple(x.copy() for x in clean)
    for b, (t, s) in enumerate(((20, 5), (7, 131))):
        dirty[0][b, t:] = np.nan
        dirty[1][b, s:] = np.nan
        dirty[2][b, s:] = np.nan
    for got, want in zip(
        LSE(*dirty, implementation=implementation, **options),
        LSE(*clean, implementation=implementation, **options),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["k", "v"])
def test_infinity_gives_what_the_oracle_gives_or_nan(name, dtype):
    """An infinite value seen is never lost in a finite output."""
    inputs = make(tokens=(9, 9), heads=(1, 1), dtype=dtype, batch=(1,))
    inputs["qkv".index(name)][0, 4, 0, 2] = np.inf
    out, _ = LSE(*inputs)
    with np.errstate(invalid="ignore"):
        want, _ = reference.attention(*inputs)
    out, want = np.asarray(out[0, :, 0], np.float64), want[0, :, 0]
    np.testing.assert_array_equal(np.isfinite(out[:4]), True)
    if name == "v":
        assert not np.isfinite(out[4:, 2]).any()
        np.testing.assert_array_equal(np.isfinite(out[:, 3:]), True)
    else:
        lost = np.isfinite(out) & ~np.isfinite(want)
        assert not lost.any()


@both("dtype", [F32, F16, BF16, FP8], [F32])
def test_the_same_bits_every_time(dtype, implementation):
    options = fp8_options(dtype)
    inputs = make(tokens=(200, 300), heads=(8, 2), dims=(64, 64), dtype=dtype)
    call = functools.partial(LSE, implementation=implementation, **options)
    first = call(*inputs)
    for again in (call(*inputs), call(*inputs), jax.jit(call)(*inputs)):
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@both("dtype", [F32, F16, BF16, FP8], [F32])
def test_chunked_prefill_is_the_whole(dtype, implementation):
    options = fp8_options(dtype)
    q, k, v = make(tokens=(300, 300), dtype=dtype)
    whole = LSE(q, k, v, implementation=implementation, **options)
    call = jax.jit(
        lambda q, start: LSE(
            q, k, v, q_offset=start, kv_lengths=start + np.int32(100),
            implementation=implementation, **options,
        )
    )  # fmt: skip
    outs, lses = zip(
        *(call(q[:, i : i + 100], np.int32(i)) for i in range(0, 300, 100)),
        strict=True,
    )
    chunked = jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=2)
    assert_near_oracle(chunked, (q, k, v), **options)
    for a, b in zip(chunked, whole, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 3e-3 * np.linalg.norm(b)


@both("dtype", [F32, F16, BF16, FP8], [FP8])
def test_a_sink_and_far_blocks(dtype, implementation):
    """Logits hundreds apart: blocks whose weights vanish, and a late maximum."""
    q, k, v = make(tokens=(20, 500), dims=(8, 8), heads=(2, 1))
    q, k = np.abs(q), k / 4
    k[0, 3], k[1, 490] = 6, 5
    k[1, 200:350] = -6
    inputs = tuple(x.astype(dtype) for x in (q, k, v))
    options = {"scale": 8.0, **fp8_options(dtype)}
    out, lse = LSE(*inputs, causal=False, implementation=implementation, **options)
    # Logits of hundreds: a float32 ulp of them is what the exponential amplifies.
    assert_near_oracle(
        (out, lse), inputs, tolerance=2e-3 if dtype == F32 else None, causal=False,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("scale", [2.0**31, -(2.0**60)])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_enormous_logits_pick_the_largest(dtype, scale):
    """Logits whose float32 neighbours are hundreds apart give no NaN."""
    q, k, v = make(tokens=(20, 150), heads=(2, 2), dims=(8, 8), dtype=dtype)
    out, lse = LSE(q, k, v, scale=scale)
    assert np.isfinite(np.asarray(out, F32)).all()
    assert np.isfinite(lse).all()
    _, want = reference.attention(q, k, v, scale=scale)
    np.testing.assert_allclose(lse, want, rtol=1e-5)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_constant_values_come_back(dtype):
    q, k, _ = make(tokens=(150, 300), dtype=dtype)
    v = np.full((2, 300, 2, 8), 3.0, dtype)
    out = np.asarray(attention(4 * q, k, v), np.float32)
    np.testing.assert_allclose(out, 3, rtol={F32: 3e-6, F16: 1e-3, BF16: 8e-3}[dtype])


def test_values_scale_does_not_change_what_is_seen():
    """Small and large values keep their relative precision."""
    q, k, v = make(tokens=(20, 140))
    out = np.asarray(attention(q, k, v))
    for factor in (np.float32(2.0**-100), np.float32(2.0**60)):
        np.testing.assert_allclose(
            np.asarray(attention(q, k, v * factor)) / factor, out, rtol=1e-6, atol=1e-7
        )


@pytest.mark.parametrize("kind", ["fortran", "strided", "reversed", "jax"])
def test_memory_layouts_of_the_caller(kind):
    q, k, v = make()
    change = {
        "fortran": np.asfortranarray,
        "strided": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
        "reversed": lambda x: x[:, ::-1].copy()[:, ::-1],
        "jax": jnp.asarray,
    }[kind]
    given = tuple(change(x) for x in (q, k, v))
    np.testing.assert_array_equal(
        np.asarray(attention(*given)), np.asarray(attention(q, k, v))
    )


def test_log_sum_exp_only_when_asked():
    inputs = make()
    out = attention(*inputs)
    assert isinstance(out, jax.Array)
    both = attention(*inputs, return_lse=True)
    assert isinstance(both, tuple)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(both[0]))


def test_it_differs_from_jax_nn_as_documented():
    q, k, v = make(tokens=(20, 33), dims=(16, 16))
    ours = attention(q, k, v, q_offset=0)
    theirs = jax.nn.dot_product_attention(*map(jnp.asarray, (q, k, v)), is_causal=True)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    both = (
        attention(q, k, v, causal=False),
        jax.nn.dot_product_attention(*map(jnp.asarray, (q, k, v))),
    )
    np.testing.assert_allclose(*both, rtol=1e-4, atol=1e-5)


def test_a_comparison_that_cannot_fail_proves_nothing():
    inputs = make()
    out, lse = LSE(*inputs)
    wrong_row = np.asarray(out).copy()
    wrong_row[1, 19, 3] *= 1.001
    shifted = np.asarray(lse) + np.float32(1e-3)
    lost = np.asarray(out).copy()
    lost[0, 0, 0, 0] = np.nan
    for wrong in ((wrong_row, lse), (out, shifted), (lost, lse)):
        with pytest.raises(AssertionError):
            assert_near_oracle(wrong, inputs)
    with pytest.raises(AssertionError):
        assert_near_oracle((out, lse), inputs, causal=False)
    with pytest.raises(AssertionError):
        assert_near_oracle((out, lse), (normal(2, 20, 4, 16, seed=9), *inputs[1:]))
