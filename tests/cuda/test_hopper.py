"""The attention kernels on a Hopper GPU, through JAX: `pytest -m cuda`."""

import concurrent.futures
import dataclasses
import functools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _oracle import BF16, F16, F32, FP8, INT8, as_int8, assert_near_oracle, make, plain
from jax.sharding import Mesh, PartitionSpec

import zyfa_jax
from benchmarks import families
from benchmarks.shapes import DEEPSEEK_V2_LITE, MISTRAL_7B
from zyfa_jax import Quantized, quantize, reference
from zyfa_jax.__main__ import main

pytestmark = pytest.mark.cuda

DIMS = [MISTRAL_7B.head_dims, DEEPSEEK_V2_LITE.head_dims]
DTYPES = [BF16, F16, FP8, INT8]
# Relative to the oracle on the same inputs, in bfloat16 output.
BOUNDS = {BF16: 5e-3, F16: 2e-3, FP8: 0.045}


@pytest.fixture(scope="module", autouse=True)
def on_gpu(gpu):
    with jax.default_device(gpu):
        yield


def inputs(dtype=BF16, dims=(128, 128), **options) -> tuple[Any, ...]:
    """(q, k, v); for FP8 with a descale of its own for each (batch, head), for int8
    with those of `quantize_qkv`, on the CPU, which compiles it in less time."""
    if dtype == INT8:
        with jax.default_device(jax.devices("cpu")[0]):
            return as_int8(*make(dims=dims, **options))
    if dtype != FP8:
        return make(dims=dims, dtype=dtype, **options)
    return tuple(quantize(x) for x in make(dims=dims, **options))


@functools.partial(jax.jit, static_argnames=("causal", "window", "out_dtype"))
def attend(*arrays, **options):
    return zyfa_jax.attention(
        *arrays, implementation="cuda", return_lse=True, **options
    )


def check(arrays, *, out_dtype=None, **options):
    """The kernel's result, near the oracle and the same when run again."""
    out, lse = attend(*arrays, out_dtype=out_dtype, **options)
    assert_near_oracle((out, lse), arrays, **options)
    again = attend(*arrays, out_dtype=out_dtype, **options)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(again[0]))
    np.testing.assert_array_equal(np.asarray(lse), np.asarray(again[1]))
    return out, lse


def relative(got, want):
    got = np.asarray(got).astype(np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "tokens",
    [(1, 1), (17, 17), (127, 129), (257, 257), (1000, 1000), (40, 700), (300, 65)],
    ids=str,
)
def test_lengths(dtype, dims, tokens):
    check(inputs(dtype, dims, tokens=tokens, heads=(2, 1), batch=(2,)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (14, 2), (32, 32)], ids=str)
def test_query_heads_that_share_keys(dtype, heads):
    check(inputs(dtype, tokens=(200, 300), heads=heads, batch=(2,)))


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("causal", "window"),
    [
        (False, None),
        (True, 0),
        (True, 5),
        (True, (128, 0)),
        (False, (200, 77)),
        (False, (None, 100)),
    ],
)
def test_masks(dtype, dims, causal, window):
    arrays = inputs(dtype, dims, tokens=(520, 600), heads=(2, 1), batch=(1,))
    check(arrays, causal=causal, window=window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_offsets_and_lengths_of_each_sequence(dtype):
    arrays = inputs(dtype, tokens=(200, 400), heads=(2, 1), batch=(5,))
    check(
        arrays,
        q_offset=np.array([0, 100, 399, -100, -500], np.int32),
        q_lengths=np.array([200, 0, 130, 200, 200], np.int32),
        kv_lengths=np.array([400, 300, 129, 1, 400], np.int32),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", [F32, BF16, F16], ids=str)
def test_output_types(dtype, out_dtype):
    arrays = inputs(dtype, tokens=(150, 150), heads=(2, 1), batch=(1,))
    out, _ = check(arrays, out_dtype=out_dtype)
    assert out.dtype == out_dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.3, -0.2, 0.0])
def test_scales(dtype, scale):
    arrays = inputs(dtype, tokens=(150, 150), heads=(2, 1), batch=(1,))
    check(arrays, scale=scale)


def test_descales_of_blocks_of_queries():
    q, k, v = make(tokens=(300, 300), heads=(2, 1), batch=(1,), dims=(128, 128))
    q = quantize(q, granularity="block")
    check((q, quantize(k), quantize(v)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [(5, 0), (0, 5)], ids=str)
def test_without_keys_or_queries(dtype, tokens):
    arrays = make(tokens=tokens, heads=(2, 1), batch=(2,), dims=(128, 128), dtype=dtype)
    options = dict.fromkeys(("q_descale", "k_descale", "v_descale"), 0.5)
    check(arrays, **(options if dtype == FP8 else {}))


def changed(x, change):
    """What `change` makes of an array, or of its FP8 numbers."""
    if isinstance(x, Quantized):
        return dataclasses.replace(x, values=change(x.values), source=None)
    return change(jnp.asarray(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shares_kv", [False, True])
def test_what_lies_past_the_lengths_is_not_read(dtype, shares_kv):
    q, k, v = inputs(dtype, tokens=(260, 400), heads=(2, 1), batch=(2,))
    lengths = {
        "q_lengths": np.array([140, 7], np.int32),
        "kv_lengths": np.array([330, 130], np.int32),
    }
    call = functools.partial(zyfa_jax.attention, implementation="cuda", return_lse=True)
    kv_ends = [330, 130]
    if shares_kv:  # one array of keys, of which the queries see different parts
        k, v = (jax.tree.map(lambda x: jnp.asarray(x)[0], x) for x in (k, v))
        call = jax.vmap(
            lambda q, k, v, q_lengths, kv_lengths: functools.partial(
                zyfa_jax.attention, implementation="cuda", return_lse=True
            )(q, k, v, q_lengths=q_lengths, kv_lengths=kv_lengths),
            (0, None, None, 0, 0),
        )
        kv_ends = [330]

    def spoil(ends):
        def change(x):
            for b, end in enumerate(ends):
                x = x.at[
                    (b, slice(end, None)) if x.ndim == 4 else slice(end, None)
                ].set(jnp.asarray(-128 if x.dtype == INT8 else np.nan, x.dtype))
            return x

        return change

    spoiled = (
        changed(q, spoil([140, 7])), changed(k, spoil(kv_ends)),
        changed(v, spoil(kv_ends)),
    )  # fmt: skip
    want, got = (
        call(*x, *lengths.values()) if shares_kv else call(*x, **lengths)
        for x in ((q, k, v), spoiled)
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_nan_in_an_int8_query_is_its_descale():
    q, k, v = inputs(INT8, tokens=(300, 300), heads=(1, 1), batch=(1,))
    q = dataclasses.replace(q, descale=q.descale.at[0, 0, 150].set(np.nan))
    out, lse = (np.asarray(x, F32) for x in attend(q, k, v))
    assert (np.isnan(out[0, :, 0]).all(axis=1) == (np.arange(300) == 150)).all()
    assert (np.isnan(lse[0, 0]) == (np.arange(300) == 150)).all()


@pytest.mark.parametrize("dtype", [BF16, F16, FP8], ids=str)
@pytest.mark.parametrize("operand", range(3))
def test_nan_in_nan_out(dtype, operand):
    arrays = list(inputs(dtype, tokens=(300, 300), heads=(1, 1), batch=(1,)))
    arrays[operand] = changed(
        arrays[operand],
        lambda x: x.at[0, 150, 0, 3].set(jnp.asarray(np.nan, x.dtype)),
    )
    out, lse = (np.asarray(x, F32) for x in attend(*arrays))
    assert np.isnan(out[0, 150, 0, 3])
    if operand < 2:
        assert np.isnan(lse[0, 0, 150])
    # Other keys' rows see it through its tile, other queries' do not.
    clean = np.delete(np.arange(300), 150) if operand == 0 else np.arange(128)
    assert np.isfinite(out[0, clean]).all()
    assert np.isfinite(lse[0, 0, clean]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e6, 1e10, 1e30])
def test_no_query_that_sees_keys_is_called_empty(dtype, scale):
    """Whatever its logits: those that have no code may give NaN."""
    arrays = inputs(dtype, tokens=(40, 300), heads=(1, 1), batch=(1,))
    _, lse = attend(*arrays, scale=scale)
    assert not np.isneginf(lse).any()


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", [FP8, INT8], ids=str)
@pytest.mark.parametrize(
    ("shift", "scale"),
    [(0.0, None), (-4.0, None), (4.0, None), (0.0, 2.0), (0.0, 1e-4)],
)
def test_logits_in_16_bits_or_not(dtype, dims, shift, scale):
    """Above zero and below it, and too large or too small for 16 bits."""
    q, k, v = make(tokens=(300, 900), heads=(2, 1), batch=(1,), dims=dims)
    arrays = np.abs(q), k + F32.type(shift), v
    arrays = as_int8(*arrays) if dtype == INT8 else tuple(map(quantize, arrays))
    check(arrays, causal=False, scale=scale)


@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_large_logits(size):
    q, k, v = make(tokens=(60, 300), heads=(1, 1), dims=(128, 128), batch=(1,))
    arrays = tuple(x.astype(BF16) for x in (size * q, k, v))
    out, lse = attend(*arrays)
    assert_near_oracle((out, lse), arrays, tolerance=2e-2)


def test_traced_descales():
    q, k, v = inputs(FP8, tokens=(50, 140), heads=(4, 2), batch=(2,))
    got = attend(
        q.values, k.values, v.values, scale=np.float32(0.1), q_descale=q.descale,
        k_descale=k.descale, v_descale=v.descale,
    )  # fmt: skip
    assert_near_oracle(got, (q, k, v), scale=0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunked_prefill_is_the_whole(dtype):
    q, k, v = inputs(dtype, tokens=(384, 384), heads=(2, 1), batch=(1,))
    whole, _ = attend(q, k, v, out_dtype=F32)

    def chunk(i):
        part = changed(q, lambda x: x[:, i : i + 128])
        if dtype == INT8:
            part = dataclasses.replace(part, descale=q.descale[..., i : i + 128])
        return part

    chunks = [
        attend(
            chunk(i), k, v, out_dtype=F32,
            q_offset=np.int32(i), kv_lengths=np.int32(i + 128),
        )[0]
        for i in range(0, 384, 128)
    ]  # fmt: skip
    np.testing.assert_array_equal(np.concatenate(chunks, axis=1), np.asarray(whole))


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("name", families.NAMES)
def test_int8_error_within_its_bar(name, dims):
    arrays = families.make(name, 4096, qk_dim=dims[0], v_dim=dims[1])
    q, k, v = as_int8(*(jnp.asarray(x[None]) for x in arrays))
    out, _ = attend(q, k, v, out_dtype=F32)
    last = dataclasses.replace(
        q, values=q.values[:, -256:], descale=q.descale[..., -256:]
    )
    raw, descales = plain(last, k, v)
    exact, _ = reference.attention(*raw, **descales)
    bar, _ = reference.fp8_attention(*raw, probabilities="exact row", **descales)
    error = relative(out[:, -256:], exact)
    assert error < 1.2 * relative(bar, exact), error / relative(bar, exact)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("name", families.NAMES)
def test_fp8_error_within_its_bar(name, dims):
    kernels, models, bars = [], [], []
    for seed in range(3 if name == "sink" else 1):
        arrays = families.make(name, 8192, qk_dim=dims[0], v_dim=dims[1], seed=seed)
        q, k, v = (quantize(jnp.asarray(x[None]), granularity="tensor") for x in arrays)
        out, _ = attend(q, k, v, out_dtype=F32)
        last = Quantized(q.values[:, -256:], q.descale)
        raw, descales = plain(last, k, v)
        exact, _ = reference.attention(*raw, **descales)
        model, bar = (
            reference.fp8_attention(*raw, probabilities=x, **descales)[0]
            for x in ("sm90", "exact row")
        )
        kernels.append(relative(out[:, -256:], exact))
        models.append(relative(model, exact))
        bars.append(relative(bar, exact))
    # The matrix unit's sums of FP8 products keep fewer bits than float32.
    assert np.mean(kernels) == pytest.approx(np.mean(models), rel=0.1)
    assert np.mean(kernels) < 1.2 * np.mean(bars)
    if name == "sink" and dims == (128, 128):
        assert np.mean(kernels) < 0.0015


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_error_of_two_byte_types(dtype, dims):
    arrays = families.make("gauss", 4096, qk_dim=dims[0], v_dim=dims[1])
    q, k, v = (jnp.asarray(x[None], dtype) for x in arrays)
    out, _ = attend(q, k, v, out_dtype=F32)
    exact, _ = reference.attention(q[:, -256:], k, v)
    assert relative(out[:, -256:], exact) < 2.5e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vmap_over_queries_alone_and_all(dtype):
    q, k, v = inputs(dtype, tokens=(70, 140), heads=(2, 1), batch=(3,))
    each = jax.vmap(functools.partial(zyfa_jax.attention, implementation="cuda"))
    out, _ = attend(q, k, v)
    np.testing.assert_array_equal(np.asarray(jax.jit(each)(q, k, v)), np.asarray(out))


def test_gradient():
    arrays = make(
        tokens=(150, 150), heads=(2, 1), batch=(1,), dims=(128, 128), dtype=BF16
    )

    def loss(path, q, k, v):
        out = zyfa_jax.attention(q, k, v, implementation=path)
        return jnp.sum(jnp.square(out.astype(F32)))

    gradient = jax.jit(jax.grad(loss, (1, 2, 3)), static_argnums=0)
    got, want = (gradient(path, *arrays) for path in ("cuda", "reference"))
    for x, y in zip(got, want, strict=True):
        assert relative(x, np.asarray(y, np.float64)) < 0.02


def test_calls_in_one_program_and_from_threads():
    """Several kernels in a program may become one graph; streams run side by side."""
    arrays = inputs(FP8, tokens=(512, 512), heads=(4, 2), batch=(2,))

    @jax.jit
    def twice(q, k, v):
        out = zyfa_jax.attention(q, k, v, implementation="cuda", out_dtype=BF16)
        return zyfa_jax.attention(quantize(out), k, v, implementation="cuda")

    want = np.asarray(twice(*arrays))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda _: np.asarray(twice(*arrays)), range(16))
        for got in results:
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_three_hundred_thousand_tokens(dtype):
    """Offsets past 32 bits: 64 heads of 128 are 2.5e9 elements."""
    tokens, heads = 300_000, 64
    numbers = [
        jax.random.normal(jax.random.key(i), (1, tokens, h, 128), BF16).astype(dtype)
        for i, h in enumerate((heads, 1, 1))
    ]
    arrays: list[Any] = list(numbers)
    if dtype == FP8:
        arrays = [Quantized(x, jnp.ones((1, x.shape[2]))) for x in numbers]
    out, _ = attend(*arrays, window=(1000, 0))
    first, kept = tokens - 64, 1200
    q, k, v = numbers
    tail = (q[:, first:, -1:], k[:, -kept:], v[:, -kept:])
    exact, _ = reference.attention(*map(np.asarray, tail), window=(1000, 0))
    assert relative(out[:, first:, -1:], exact) < BOUNDS[dtype]


# Each custom call may then be part of a graph, and every program becomes one.
GRAPHS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL "
    "--xla_gpu_graph_min_graph_size=1"
)
IN_A_GRAPH = """
import jax, jax.numpy as jnp, numpy as np
from zyfa_jax import attention, quantize

@jax.jit
def layers(q, k, v):
    out = attention(q, k, v, implementation="cuda") * jnp.bfloat16(2)
    return attention(*map(quantize, (out, k, v)), implementation="cuda")

rng = np.random.default_rng(0)
compiled = None
for step in range(6):  # other arrays each time: the graph is brought up to date
    shapes = ((2, 300, h, 128) for h in (4, 2, 2))
    x = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    compiled = compiled or layers.lower(*x).compile()
    out = attention(*x, implementation="cuda") * jnp.bfloat16(2)
    want = attention(*map(quantize, (out, *x[1:])), implementation="cuda")
    got, want = (np.asarray(y, np.float64) for y in (compiled(*x), want))
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)
"""


def test_in_a_graph(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", IN_A_GRAPH],
        env=os.environ | {"XLA_FLAGS": f"{GRAPHS} --xla_dump_to={tmp_path}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [thunks] = tmp_path.glob("*jit_layers.thunk_sequence_after_thunk_passes.txt")
    # All of the program: nothing is before it, and nothing after.
    assert "000: kCommandBuffer [source | sink]" in thunks.read_text()


def test_the_check_of_every_kernel_passes(capfd):
    assert main(["check", "--platform", "cuda"]) == 0, capfd.readouterr().out


@pytest.mark.parametrize("spread", ["jit", "shard_map", "pmap"])
def test_several_gpus(spread):
    devices = jax.devices("cuda")
    if len(devices) < 2:
        pytest.skip("one GPU here")
    count = len(devices)
    arrays = make(tokens=(256, 256), heads=(2, 1), batch=(count,), dims=(128, 128),
                  dtype=BF16)  # fmt: skip
    call = functools.partial(zyfa_jax.attention, implementation="cuda")
    want = np.asarray(jax.jit(call)(*arrays))
    if spread == "pmap":
        per = [x[:, None] for x in arrays]
        got = np.asarray(jax.pmap(call, devices=devices)(*per))[:, 0]
    else:
        mesh = Mesh(np.array(devices), ("batch",))
        place = jax.sharding.NamedSharding(mesh, PartitionSpec("batch"))
        arrays = tuple(jax.device_put(x, place) for x in arrays)
        if spread == "shard_map":
            spec = PartitionSpec("batch")
            call = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
        got = np.asarray(jax.jit(call)(*arrays))
    np.testing.assert_array_equal(got, want)
