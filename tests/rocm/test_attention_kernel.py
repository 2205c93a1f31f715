"""The attention kernels' machine code, run in the emulator through JAX."""

import dataclasses
from typing import Any

import bridge
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _oracle import BF16, F16, F32, FP8, assert_near_oracle, make, plain

import zyfa_jax
from benchmarks import families
from benchmarks import gfx950 as benchmark
from benchmarks.shapes import DEEPSEEK_V2_LITE, MISTRAL_7B
from tools.gfx950 import calls
from zyfa_jax import Quantized, quantize, quantize_qkv, reference

INT8 = np.dtype(np.int8)
DIMS = [MISTRAL_7B.head_dims, DEEPSEEK_V2_LITE.head_dims]
DTYPES = [BF16, FP8, INT8]
QUANTIZED = [FP8, INT8]


def inputs(dtype=BF16, dims=(128, 128), **options) -> tuple[Any, ...]:
    """(q, k, v); for FP8 with a descale of its own for each (batch, head), for int8
    with those of `quantize_qkv`."""
    if dtype not in QUANTIZED:
        return make(dims=dims, dtype=dtype, **options)
    return quantized(make(dims=dims, **options), dtype)


def quantized(arrays, dtype, granularity="head"):
    """(q, k, v) of FP8, or of int8 by `quantize_qkv`: without the arrays that they
    were made of, and the mean of keys, which moves log-sum-exps."""
    arrays = tuple(jnp.asarray(x) for x in arrays)
    if dtype == FP8:
        rounded = [quantize(x, granularity=granularity) for x in arrays]
    else:
        rounded = quantize_qkv(*arrays)
    return tuple(dataclasses.replace(x, source=None, center=None) for x in rounded)


def attend(hip, arrays, **options):
    """(out, lse) of the kernel, in the emulator."""
    with hip.running(bridge.emulate) as launches:
        result = jax.block_until_ready(
            jax.jit(
                lambda *x: zyfa_jax.attention(
                    *x, implementation="rocm", return_lse=True, **options
                )
            )(*arrays)
        )
    assert len(launches) == 1
    return result


def check(hip, arrays, *, tolerance=None, out_dtype=None, **options):
    got = attend(hip, arrays, out_dtype=out_dtype, **options)
    assert_near_oracle(got, arrays, tolerance=tolerance, **options)
    return got


def relative(got, want):
    got = np.asarray(got).astype(np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def to_int8(x):
    """The same in int8, with as many descales."""
    values = (x.values.astype(F32) * (127 / 448)).round().astype(INT8)
    return Quantized(values, x.descale * np.float32(448 / 127))


def last_queries(q, count):
    blocks = {"descale": q.descale[..., -count:]} if q.block else {}
    return dataclasses.replace(q, values=q.values[:, -count:], **blocks)


def eight_bit_errors(hip, name, dims, dtype, *, tokens, queries, seed=0):
    """Errors of the kernel, of its model and of the one that sets the bar."""
    arrays = families.make(name, tokens, qk_dim=dims[0], v_dim=dims[1], seed=seed)
    q, k, v = quantized([x[None] for x in arrays], dtype, "tensor")
    q = last_queries(q, queries)
    out, _ = attend(hip, (q, k, v), out_dtype=jnp.float32)
    raw, descales = plain(q, k, v)
    exact, _ = reference.attention(*raw, **descales)

    def model(probabilities):
        out, _ = reference.fp8_attention(*raw, probabilities=probabilities, **descales)
        return relative(out, exact)

    return relative(out, exact), model("gfx950"), model("exact row")


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("name", families.NAMES)
def test_8_bit_error_within_its_bar(hip, name, dtype, dims):
    kernel, model, bar = np.mean(
        [
            eight_bit_errors(hip, name, dims, dtype, tokens=768, queries=256, seed=i)
            for i in (0, 1)
        ],
        axis=0,
    )
    assert kernel == pytest.approx(model, rel=0.01)
    if name != "sink":  # whose few keys make a sample too small for a bar
        assert kernel < 1.2 * bar


@pytest.mark.slow
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("name", families.NAMES)
def test_8_bit_error_of_a_long_context_within_its_bar(hip, name, dtype, dims):
    # One dominant key for all queries makes a noisy sample.
    seeds = range(3 if name == "sink" else 1)
    kernel, model, bar = np.mean(
        [
            eight_bit_errors(hip, name, dims, dtype, tokens=8192, queries=256, seed=i)
            for i in seeds
        ],
        axis=0,
    )
    assert kernel == pytest.approx(model, rel=0.01)
    assert kernel < 1.2 * bar
    if name == "sink" and dims == (128, 128):
        assert kernel < 0.0015


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("name", families.NAMES)
def test_bf16_error_within_its_bar(hip, name, dims):
    arrays = families.make(name, 512, qk_dim=dims[0], v_dim=dims[1])
    q, k, v = (jnp.asarray(x[None], jnp.bfloat16) for x in arrays)
    out, _ = attend(hip, (q[:, -256:], k, v), out_dtype=jnp.float32)
    exact, _ = reference.attention(q[:, -256:], k, v)
    assert relative(out, exact) < 2.5e-3


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", [BF16, F16, FP8, INT8], ids=str)
def test_close_to_the_cpu_kernel(hip, dtype, dims):
    arrays = inputs(dtype, dims, tokens=(150, 290), heads=(2, 1), batch=(1,))
    out, lse = check(hip, arrays)
    cpu, cpu_lse = zyfa_jax.attention(*arrays, implementation="cpu", return_lse=True)
    bound = {BF16: 4e-3, F16: 1e-3, FP8: 0.04, INT8: 0.04}[dtype]
    assert relative(out, np.asarray(cpu).astype(np.float64)) < bound
    np.testing.assert_allclose(lse, cpu_lse, atol=0.1 if dtype in QUANTIZED else 1e-5)


@pytest.mark.parametrize(
    ("dtype", "largest", "descales"),
    [(FP8, 4, (0.31, 0.31)), (INT8, 127, (0.007, 2**-6))],
)
def test_codes_are_the_reference_bit_for_bit(hip, dtype, largest, descales):
    """Values that pick out one key each show every probability."""
    rng = np.random.default_rng(0)
    # Whole numbers, whose dot products are exact in any order; a power of two, with
    # which so is the order of the factors of a logit.
    q, k = (
        Quantized(
            jnp.asarray(rng.integers(-largest, largest + 1, (1, n, 1, 128)), dtype),
            jnp.full((1, 1), descale, F32),
        )
        for n, descale in zip((256, 128), descales, strict=True)
    )
    v = Quantized(jnp.eye(128, dtype=FP8)[None, :, None], jnp.ones((1, 1), F32))
    out, lse = attend(hip, (q, k, v), causal=False, out_dtype=jnp.float32)

    dots = np.asarray(q.values, np.float32)[0, :, 0] @ (
        np.asarray(k.values, np.float32)[0, :, 0].T
    )
    scale = np.float32(1 / np.sqrt(128))
    factor = np.float32(q.descale[0, 0] * scale) * np.float32(k.descale[0, 0])
    factor = np.full(256, factor * np.float32(np.log2(np.e)), np.float32)
    codes, shift, top, row_sum = reference.fp8_softmax_block(
        dots, np.ones(dots.shape, bool), factor, np.full(256, -np.inf, np.float32),
        quadratic=False, chord_keys=32, zero=1.5 * 2**23 if dtype == INT8 else 0,
    )  # fmt: skip
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) / row_sum[:, None]
    assert not shift.any()
    np.testing.assert_allclose(np.asarray(out)[0, :, 0], want, rtol=3e-7)
    np.testing.assert_allclose(
        lse[0, 0], (top + np.log2(row_sum) - 8) * np.log(2), rtol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 4, 7, 32])
def test_query_heads_that_share_keys(hip, dtype, group):
    check(hip, inputs(dtype, tokens=(70, 140), heads=(group, 1), batch=(1,)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_key_heads_and_batches(hip, dtype):
    check(hip, inputs(dtype, tokens=(70, 140), heads=(6, 3), batch=(2,)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "tokens",
    [(1, 1), (17, 17), (255, 255), (257, 257), (1000, 1000), (40, 700), (300, 65)],
    ids=str,
)
def test_lengths(hip, dtype, tokens):
    check(hip, inputs(dtype, tokens=tokens, heads=(1, 1), batch=(1,)))


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_not_causal(hip, dtype, dims):
    arrays = inputs(dtype, dims, tokens=(130, 333), heads=(1, 1), batch=(1,))
    check(hip, arrays, causal=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("causal", "window"),
    [(True, 0), (True, 5), (True, (128, 0)), (False, (200, 77)), (False, (None, 100))],
)
def test_windows(hip, dtype, causal, window):
    arrays = inputs(dtype, tokens=(520, 600), heads=(1, 1), batch=(1,))
    check(hip, arrays, causal=causal, window=window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_offsets_and_lengths_of_each_sequence(hip, dtype):
    arrays = inputs(dtype, tokens=(200, 400), heads=(1, 1), batch=(5,))
    check(
        hip,
        arrays,
        q_offset=np.array([0, 100, 399, -100, -500], np.int32),
        q_lengths=np.array([200, 0, 130, 200, 200], np.int32),
        kv_lengths=np.array([400, 300, 129, 1, 400], np.int32),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [(10, 0), (100, 30)])
def test_windows_of_queries_beyond_the_keys(hip, dtype, window):
    """The first or the last query of a workgroup, or both, see nothing."""
    arrays = inputs(dtype, tokens=(256, 600), heads=(1, 1), batch=(5,))
    check(
        hip,
        arrays,
        causal=window[1] == 0,
        window=window,
        q_offset=np.array([-120, 500, 500, -120, 2**31 - 50], np.int32),
        kv_lengths=np.array([600, 600, 550, 20, 600], np.int32),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_lies_past_the_lengths_is_not_read(hip, dtype):
    q, k, v = inputs(dtype, tokens=(60, 200), heads=(1, 1), batch=(1,))
    lengths = {"q_lengths": np.array([40], np.int32), "kv_lengths": np.array([130])}
    lengths["kv_lengths"] = lengths["kv_lengths"].astype(np.int32)

    def spoil(x, start):
        if isinstance(x, Quantized):
            return dataclasses.replace(x, values=spoil(x.values, start))
        return jnp.asarray(x).at[:, start:].set(127 if x.dtype == INT8 else jnp.nan)

    want = attend(hip, (q, k, v), **lengths)
    got = attend(hip, (spoil(q, 40), spoil(k, 130), spoil(v, 130)), **lengths)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
@pytest.mark.parametrize("operand", range(3))
def test_nan_in_nan_out(hip, dtype, operand):
    arrays = list(inputs(dtype, tokens=(40, 40), heads=(1, 1), batch=(1,)))
    x = arrays[operand]
    values = jnp.asarray(x.values if dtype == FP8 else x).at[0, 20, 0, 3].set(jnp.nan)
    arrays[operand] = Quantized(values, x.descale) if dtype == FP8 else values
    out, lse = attend(hip, arrays)
    assert np.isnan(np.asarray(out)[0, 20, 0, 3])
    # Rows of other queries are untouched; other keys' rows see it through its tile.
    if operand == 0:
        assert np.isfinite(np.delete(np.asarray(out), 20, axis=1)).all()
    if operand < 2:
        assert np.isnan(np.asarray(lse)[0, 0, 20])


@pytest.mark.parametrize("operand", range(3))
def test_nan_descale_of_int8(hip, operand):
    """Of a query, of a block of keys, of a channel of values. One of keys reaches the
    queries of its tile that do not see them, too."""
    x = list(inputs(INT8, tokens=(512, 512), heads=(1, 1), batch=(1,)))
    descale = x[operand].descale.at[0, 0, 2].set(jnp.nan)
    x[operand] = dataclasses.replace(x[operand], descale=descale)
    out, lse = (np.isnan(np.asarray(y)) for y in attend(hip, x))
    want = np.zeros(out.shape, bool)
    want[(np.s_[:, 2], np.s_[:, 256:], np.s_[..., 2])[operand]] = True
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want.all(axis=-1).transpose(0, 2, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [-0.3, 0.0, 4.0])
def test_any_scale(hip, dtype, scale):
    arrays = inputs(dtype, tokens=(50, 300), heads=(2, 1), batch=(1,))
    check(hip, arrays, scale=scale)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_traced_scale_and_descales(hip, dtype):
    q, k, v = inputs(FP8, tokens=(50, 140), heads=(4, 2), batch=(2,))
    if dtype == INT8:
        q, k = (to_int8(x) for x in (q, k))
    assert np.unique(np.asarray(k.descale)).size == 4

    def call(scale, *descales):
        return zyfa_jax.attention(
            q.values, k.values, v.values, scale=scale, return_lse=True,
            implementation="rocm", **dict(zip(
                ("q_descale", "k_descale", "v_descale"), descales, strict=True)),
        )  # fmt: skip

    with hip.running(bridge.emulate):
        got = jax.block_until_ready(
            jax.jit(call)(jnp.float32(0.1), q.descale, k.descale, v.descale)
        )
    assert_near_oracle(got, (q, k, v), scale=0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_average_the_values(hip, dtype):
    q, k, v = inputs(dtype, tokens=(40, 140), heads=(1, 1), batch=(1,))
    if dtype in QUANTIZED:
        zero = dataclasses.replace(q, values=jnp.zeros_like(q.values))
    else:
        zero = np.zeros_like(q)
    check(hip, (zero, k, v), causal=False)


@pytest.mark.parametrize("block", [256, 512])
def test_int8_keys_with_a_descale_for_several_tiles(hip, block):
    q, k, v = inputs(INT8, tokens=(60, 1100), heads=(2, 2), batch=(2,))
    descale = k.descale[..., :: block // 128] * np.float32(1.5)
    k = dataclasses.replace(k, descale=descale, block=block)
    check(hip, (q, k, v))


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 200}], ids=str)
def test_a_negative_scale_of_int8(hip, options):
    arrays = inputs(INT8, tokens=(150, 600), heads=(1, 1), batch=(1,))
    check(hip, arrays, scale=-0.1, **options)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("sign", [1, -1])
def test_int8_of_the_largest_sums(hip, sign, dims):
    """Whose logits differ from the one nearest to them by a unit of the product."""
    q = np.full((1, 40, 1, dims[0]), -128, INT8)
    k = np.full((1, 200, 1, dims[0]), -128 if sign > 0 else 127, INT8)
    k[0, :, 0, 0] -= sign * np.arange(200).astype(INT8) % 100
    _, _, v = inputs(INT8, dims, tokens=(40, 200), heads=(1, 1), batch=(1,))
    # A unit of the first channel is an eighth of an octave.
    one = np.sqrt(dims[0]) * np.log(2) / 8 / 128
    check(
        hip,
        (
            Quantized(q, np.full((1, 1), one, F32)),
            Quantized(k, np.full((1, 1), 1.0, F32)),
            Quantized(v.values, v.descale[..., 0]),
        ),
        causal=False,
    )


@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_large_logits(hip, size):
    q, k, v = make(tokens=(60, 300), heads=(1, 1), dims=(128, 128), batch=(1,))
    q, k, v = (x.astype(BF16) for x in (size * q, k, v))
    check(hip, (q, k, v), tolerance=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e6, 1e10, 1e30])
def test_no_query_that_sees_keys_is_called_empty(hip, dtype, scale):
    """Whatever its logits: those that have no code may give NaN."""
    arrays = inputs(dtype, tokens=(40, 300), heads=(1, 1), batch=(1,))
    _, lse = attend(hip, arrays, scale=scale)
    assert not np.isneginf(lse).any()


def test_no_query_with_very_negative_logits_is_called_empty(hip):
    q, k, v = inputs(BF16, tokens=(40, 300), heads=(1, 1), batch=(1,))
    _, lse = attend(hip, (np.full_like(q, 1e16), np.full_like(k, -1e16), v))
    assert not np.isneginf(lse).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", [F32, BF16, F16], ids=str)
def test_output_dtypes(hip, dtype, out_dtype):
    arrays = inputs(dtype, tokens=(33, 65), heads=(2, 1), batch=(1,))
    out, _ = check(hip, arrays, out_dtype=out_dtype)
    assert out.dtype == out_dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_input_gives_the_same_bits(hip, dtype):
    arrays = inputs(dtype, tokens=(300, 300), heads=(2, 1), batch=(1,))
    once, again = attend(hip, arrays), attend(hip, arrays)
    jax.tree.map(np.testing.assert_array_equal, once, again)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pairs_of_blocks_give_the_same_bits(hip, dtype):
    arrays = inputs(dtype, tokens=(600, 600), heads=(2, 2), batch=(1,))

    def one_head(i):
        if dtype in QUANTIZED:
            return tuple(
                dataclasses.replace(
                    x,
                    values=x.values[:, :, i : i + 1],
                    descale=x.descale[:, i : i + 1],
                )
                for x in arrays
            )
        return tuple(x[:, :, i : i + 1] for x in arrays)

    with hip.running(bridge.emulate) as launches:
        # Two blocks a workgroup fill the stand-in's few compute units.
        paired, *single = (
            jax.block_until_ready(
                zyfa_jax.attention(*x, implementation="rocm", return_lse=True)
            )
            for x in (arrays, one_head(0), one_head(1))
        )
    assert [x.args.blocks_per_group for x in launches] == [2, 1, 1]
    for i, (out, lse) in enumerate(single):
        np.testing.assert_array_equal(paired[0][:, :, i : i + 1], out)
        np.testing.assert_array_equal(paired[1][:, i : i + 1], lse)


def test_vmap_over_queries_shares_keys(hip):
    q, k, v = inputs(BF16, tokens=(40, 70), heads=(2, 1), batch=(2,))
    with hip.running(bridge.emulate) as launches:
        out = jax.vmap(
            lambda q: zyfa_jax.attention(q, k[:1], v[:1], implementation="rocm")
        )(jnp.asarray(q)[:, None])
        jax.block_until_ready(out)
    (launch,) = launches
    assert (launch.args.batch, launch.args.kv_batch) == (2, 1)
    want, _ = reference.attention(q, k[:1].repeat(2, 0), v[:1].repeat(2, 0))
    assert relative(out[:, 0], want) < 5e-3


def test_gradient_through_the_kernel(hip):
    q, k, v = inputs(BF16, tokens=(40, 70), heads=(2, 1), batch=(1,))

    def loss(implementation, q):
        out = zyfa_jax.attention(q, k, v, implementation=implementation)
        return (out.astype(jnp.float32) ** 2).sum()

    with hip.running(bridge.emulate):
        got = jax.block_until_ready(jax.grad(loss, argnums=1)("rocm", q))
    want = np.asarray(jax.grad(loss, argnums=1)("cpu", q)).astype(np.float64)
    assert relative(got, want) < 2e-2


@pytest.mark.parametrize("kind", ["fp8", "int8", "bf16"])
def test_arrays_beyond_four_gigabytes(kind):
    """Only the pages that are touched exist."""
    kernel = benchmark.kernels()[f"zyfa_attention_{kind}_128x128"]
    tokens, rows = (1 << 25) + 77, slice(-300, None)
    shape = (1, tokens, 1, 128)
    q, near_k, near_v = make(
        tokens=(70, 300), heads=(1, 1), dims=(128, 128), batch=(1,)
    )  # fmt: skip
    dtypes = calls.Shape.of(kernel.name)
    unit = 1 / 16 if kind == "int8" else 1
    q, near_k = ((x / unit).astype(dtypes.dtype) for x in (q, near_k))
    near_v = near_v.astype(dtypes.value_dtype)
    scale = unit**2 / np.sqrt(128)
    k, v = np.zeros(shape, q.dtype), np.zeros(shape, near_v.dtype)
    k[:, rows], v[:, rows] = near_k, near_v
    out, lse, _ = calls.attend(kernel, q, k, v, window=(150, 0), scale=scale)
    want, want_lse = reference.attention(q, near_k, near_v, window=150, scale=scale)
    assert relative(out, want) < (3e-3 if kind == "bf16" else 0.03)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5 if kind == "bf16" else 0.1)
