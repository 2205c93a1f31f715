"""The CPU kernel itself, through a bare FFI call, on every instruction set there is."""

import dataclasses
import hashlib
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from zyfa_jax import _ext, reference

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
INT8 = np.dtype(np.int8)
DTYPES = (F32, F16, BF16, FP8)
QK_DTYPES = (*DTYPES, INT8)
BFLOAT16_TARGETS = ("amx",)  # these round operands and probabilities to bfloat16

_FFI_TARGET = "zyfa_attention_under_test"
jax.ffi.register_ffi_target(_FFI_TARGET, _ext.registrations()["cpu"], platform="cpu")


@pytest.fixture(params=_ext.cpu_targets())
def target(request):
    _ext.force_cpu_target(request.param)
    yield request.param
    _ext.force_cpu_target(None)


INT8_UNIT = 0.02
"""What int8 queries and keys of a case count."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the FFI target; None is the operand's neutral value."""

    batch: int = 1
    kv_batch: int | None = None
    q_len: int = 64
    kv_len: int = 64
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    value_dim: int = 32
    left: int = -1
    right: int = 0
    scale: float | None = None
    q_block: int = 0
    kv_block: int = 0
    q_offset: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    quadratic: bool = True

    @property
    def key_batch(self):
        return self.batch if self.kv_batch is None else self.kv_batch

    def arrays(self, dtype=F32, seed=0):
        rng = np.random.default_rng(seed)
        shapes = (
            (self.batch, self.q_len, self.heads, self.head_dim),
            (self.key_batch, self.kv_len, self.kv_heads, self.head_dim),
            (self.key_batch, self.kv_len, self.kv_heads, self.value_dim),
        )
        arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
        if dtype != INT8:
            return [x.astype(dtype) for x in arrays]
        *qk, v = arrays
        qk = [np.clip(np.rint(x / INT8_UNIT), -127, 127).astype(INT8) for x in qk]
        return [*qk, v.astype(FP8)]

    def scales(self, seed=1):
        """Scales, one per block where there are blocks, about one elsewhere."""
        rng = np.random.default_rng(seed)

        def draw(batch, heads, length, block):
            count = -(-length // block) if block else 1
            values = np.exp2(rng.uniform(-1, 1, (batch, heads, count)))
            return values.astype(np.float32)

        keys = (self.key_batch, self.kv_heads, self.kv_len, self.kv_block)
        queries = draw(self.batch, self.heads, self.q_len, self.q_block)
        return queries * np.float32(self.softmax_scale), draw(*keys), draw(*keys)

    @property
    def softmax_scale(self):
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def per_batch(self, value, default):
        return np.broadcast_to(
            np.asarray(default if value is None else value, np.int32), (self.batch,)
        )

    def integers(self):
        return (
            self.per_batch(self.q_offset, self.kv_len - self.q_len),
            self.per_batch(self.q_lengths, self.q_len),
            self.per_batch(self.kv_lengths, self.kv_len),
        )


def scales_of(case, q):
    q_scale, *others = case.scales()
    unit = INT8_UNIT**2 if q.dtype == INT8 else 1
    return q_scale * np.float32(unit), *others


def run(case, q, k, v, scales=None, out_dtype=F32):
    out, lse = run_raw(
        (q, k, v, *(scales or scales_of(case, q)), *case.integers()),
        (q.shape[:3] + v.shape[3:], out_dtype),
        (q.shape[0], q.shape[2], q.shape[1]),
        window_left=case.left,
        window_right=case.right,
        q_block=case.q_block,
        kv_block=case.kv_block,
        quadratic=case.quadratic,
    )
    return np.asarray(out), np.asarray(lse)


def run_raw(operands, out, lse, *, quadratic=True, **integers):
    call = jax.ffi.ffi_call(
        _FFI_TARGET,
        (jax.ShapeDtypeStruct(*out), jax.ShapeDtypeStruct(lse, jnp.float32)),
    )
    return jax.block_until_ready(
        call(
            *(jax.device_put(x, may_alias=True) for x in operands),
            quadratic=quadratic,
            **{name: np.int64(value) for name, value in integers.items()},
        )
    )


def expected(case, q, k, v, scales=None, **options):
    """The oracle's output and lse, or with `probabilities` the FP8 model's."""
    q_scale, k_scale, v_scale = scales or scales_of(case, q)
    v_channels = v_scale.ndim == 4
    v_descale = v_scale if case.kv_block else v_scale[..., 0]
    q_offset, q_lengths, kv_lengths = case.integers()
    oracle = reference.fp8_attention if options else reference.attention
    return oracle(
        q, k, v,
        causal=False,
        window=(case.left, case.right),
        scale=1.0,
        q_descale=q_scale if case.q_block else q_scale[..., 0],
        k_descale=k_scale if case.kv_block else k_scale[..., 0],
        v_descale=v_scale[:, :, 0] if v_channels else v_descale,
        v_channels=v_channels,
        q_block=case.q_block,
        kv_block=case.kv_block,
        q_offset=q_offset,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        **options,
    )  # fmt: skip


def relative_error(got, want):
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def check(case, target, dtype, *, seed=0):
    q, k, v = case.arrays(dtype, seed)
    out, lse = run(case, q, k, v)
    if v.dtype == FP8:
        name = "quadratic" if case.quadratic else "linear"
        want, want_lse = expected(case, q, k, v, probabilities=name)
        # The dot products are summed in another order, which may move a code.
        tolerance, lse_tolerance = 2e-3, 1e-3
    elif dtype == BF16 and target in BFLOAT16_TARGETS:
        want, want_lse = expected(case, q, k, v)
        tolerance, lse_tolerance = 4e-3, 2e-5
    else:
        want, want_lse = expected(case, q, k, v)
        tolerance, lse_tolerance = 2e-6, 1e-5
    assert relative_error(out, want) < tolerance
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    seen = np.isfinite(want_lse)
    np.testing.assert_allclose(
        lse[seen], want_lse[seen], rtol=lse_tolerance, atol=lse_tolerance
    )
    assert np.all(out[np.isneginf(np.moveaxis(want_lse, 1, 2))] == 0)


CASES = {
    "one": Case(q_len=1, kv_len=1),
    "decode": Case(q_len=1, kv_len=300),
    "square": Case(q_len=200, kv_len=200, heads=8, kv_heads=2, head_dim=128),
    "one block": Case(q_len=128, kv_len=128),
    "block and one": Case(q_len=129, kv_len=129),
    "block but one": Case(q_len=127, kv_len=127),
    "many tiles": Case(q_len=300, kv_len=300, heads=4, kv_heads=1, head_dim=64),
    "full": Case(q_len=70, kv_len=150, right=-1),
    "short queries": Case(q_len=37, kv_len=300),
    "short keys": Case(q_len=150, kv_len=40),
    "window": Case(q_len=400, kv_len=400, left=50),
    "window both": Case(q_len=250, kv_len=250, left=20, right=3),
    "window right": Case(q_len=140, kv_len=140, left=0, right=130),
    "window zero": Case(q_len=140, kv_len=140, left=0, right=0),
    "offset": Case(batch=3, q_len=50, kv_len=200, q_offset=(0, 130, -20)),
    "far offset": Case(
        batch=4, q_len=9, kv_len=9, q_offset=(2**31 - 1, -(2**31), 2**31 - 9, 1)
    ),
    "far window": Case(
        batch=2, q_len=9, kv_len=9, left=2**62, right=2**62, q_offset=(5, 2**31 - 1)
    ),
    "lengths": Case(
        batch=4,
        q_len=140,
        kv_len=260,
        q_lengths=(140, 0, 1, 129),
        kv_lengths=(260, 100, 0, 129),
        right=-1,
    ),
    "wild lengths": Case(
        batch=2, q_len=5, kv_len=6, q_lengths=(-3, 2**31 - 1), kv_lengths=(99, -1)
    ),
    "no keys": Case(q_len=5, kv_len=0),
    "batch group": Case(batch=6, kv_batch=2, q_len=33, kv_len=140),
    "one key batch": Case(batch=4, kv_batch=1, q_len=20, kv_len=20, heads=6),
    "grouped heads": Case(q_len=90, kv_len=90, heads=15, kv_heads=3),
    "many groups": Case(q_len=30, kv_len=30, heads=64, kv_heads=1, head_dim=16),
    "query blocks": Case(q_len=70, kv_len=300, q_block=32),
    "scale blocks": Case(q_len=130, kv_len=520, q_block=128, kv_block=128, heads=4),
    "wide scale blocks": Case(q_len=40, kv_len=600, kv_block=256, left=400),
    "negative scale": Case(q_len=150, kv_len=150, scale=-0.3),
    "zero scale": Case(q_len=150, kv_len=150, scale=0.0),
    "large scale": Case(q_len=150, kv_len=150, scale=3.0),
    "linear": Case(q_len=200, kv_len=200, quadratic=False),
    "many blocks": Case(q_len=90, kv_len=1500, heads=4, kv_heads=2, head_dim=64),
    "odd blocks": Case(q_len=40, kv_len=650, right=-1, head_dim=128, value_dim=160),
}


@pytest.mark.parametrize("dtype", QK_DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_matches_the_oracle(target, name, dtype):
    check(CASES[name], target, dtype)


@pytest.mark.parametrize("dtype", QK_DTYPES, ids=str)
@pytest.mark.parametrize(
    "dims",
    [(8, 8), (24, 40), (56, 64), (72, 8), (96, 112), (192, 128), (248, 256), (256, 56)],
    ids=str,
)
def test_head_dims(target, dtype, dims):
    head_dim, value_dim = dims
    check(
        Case(
            q_len=45, kv_len=170, heads=4, kv_heads=2,
            head_dim=head_dim, value_dim=value_dim,
        ),
        target,
        dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", QK_DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", [BF16, F16, F32], ids=str)
def test_output_is_the_rounded_float32_output(target, dtype, out_dtype):
    case = Case(q_len=50, kv_len=140, value_dim=40)
    q, k, v = case.arrays(dtype)
    exact, _ = run(case, q, k, v)
    out, _ = run(case, q, k, v, out_dtype=out_dtype)
    np.testing.assert_array_equal(out, exact.astype(out_dtype))


@pytest.mark.parametrize("dtype", [FP8, INT8], ids=str)
@pytest.mark.parametrize("kv_block", [0, 128])
def test_a_scale_for_each_channel_of_v(target, dtype, kv_block):
    case = Case(
        batch=2, q_len=50, kv_len=200, heads=4, kv_heads=2, value_dim=40,
        kv_block=kv_block, q_block=1,
    )  # fmt: skip
    q, k, v = case.arrays(dtype)
    channels = np.exp2(np.random.default_rng(3).uniform(-3, 3, (2, 2, 1, 40)))
    scales = (*scales_of(case, q)[:2], channels.astype(np.float32))
    out, lse = run(case, q, k, v, scales)
    want, want_lse = expected(case, q, k, v, scales, probabilities="quadratic")
    assert relative_error(out, want) < 2e-3
    np.testing.assert_allclose(lse, want_lse, rtol=1e-3, atol=1e-3)


def test_int8_of_the_largest_sums(target):
    """Both signs of the largest products that there are, and all numbers of int8."""
    case = Case(q_len=256, kv_len=256, heads=1, head_dim=256, value_dim=8, right=-1)
    _, _, v = case.arrays(INT8)
    q = np.full((1, 256, 1, 256), -128, INT8)
    q[:, ::2] = 127
    q[:, 0, 0] = np.arange(-128, 128)
    k = np.roll(q, 1, axis=1)
    scales = tuple(np.full((1, 1, 1), x, np.float32) for x in (1e-6, 1, 1))
    out, lse = run(case, q, k, v, scales)
    want, want_lse = expected(case, q, k, v, scales, probabilities="quadratic")
    assert relative_error(out, want) < 2e-3
    np.testing.assert_allclose(lse, want_lse, rtol=1e-3, atol=1e-3)


def test_every_float16_output_is_rounded_right(target):
    """One key: the output is the value, so any float32 can be sent through."""
    values = np.ldexp(
        np.float32(1) + np.arange(4096, dtype=np.float32) / 4096,
        np.arange(-28, 18)[:, None],
    ).astype(np.float32)
    v = np.concatenate([values, -values]).reshape(-1, 1, 1, 256)
    case = Case(batch=len(v), q_len=1, kv_len=1, heads=1, head_dim=8, value_dim=256)
    q, k, _ = (np.zeros_like(x) for x in case.arrays())
    ones = (np.ones((len(v), 1, 1), np.float32),) * 3
    for out_dtype in (F16, BF16):
        out, _ = run(case, q, k, v, ones, out_dtype)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(out, v.astype(out_dtype))


@pytest.mark.parametrize("dtype", [F16, BF16, FP8], ids=str)
def test_every_input_number_is_read_right(target, dtype):
    """One key: the output is the value, of every bit pattern that is a normal float."""
    bits = np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}")
    v = bits.view(dtype).reshape(-1, 1, 1, 256)
    case = Case(batch=len(v), q_len=1, kv_len=1, heads=1, head_dim=8, value_dim=256)
    q, k, _ = (np.zeros_like(x) for x in case.arrays(dtype))
    ones = (np.ones((len(v), 1, 1), np.float32),) * 3
    out, _ = run(case, q, k, v, ones)
    want = v.astype(np.float32)
    flushed = np.abs(want) < np.finfo(np.float32).tiny
    np.testing.assert_array_equal(out, np.where(flushed, 0, want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_reaches_the_queries_that_see_it(target, dtype):
    case = Case(q_len=200, kv_len=200, heads=4, kv_heads=2, left=140)
    clean = case.arrays(dtype)
    out, lse = run(case, *clean)
    row = np.arange(case.q_len)
    for operand, token in ((0, 77), (1, 33), (1, 150), (2, 33), (2, 150)):
        arrays = [x.copy() for x in clean]
        arrays[operand][0, token, 0, 5] = np.nan
        got, got_lse = run(case, *arrays)
        if operand == 0:
            touched, heads = row == token, slice(0, 1)
        else:
            touched, heads = (row >= token) & (row - token <= case.left), slice(0, 2)
        want, want_lse = out.copy(), lse.copy()
        if operand == 2:
            want[0, touched, heads, 5] = np.nan
        else:
            want[0, touched, heads] = np.nan
            want_lse[0, heads, touched] = np.nan
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(got_lse, want_lse)


@pytest.mark.parametrize("operand", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_past_the_length_do_not_matter(target, dtype, operand):
    case = Case(q_len=20, kv_len=300, kv_lengths=171, right=-1)
    arrays = case.arrays(dtype)
    out, lse = run(case, *arrays)
    arrays[operand][0, 171:] = np.nan
    got, got_lse = run(case, *arrays)
    np.testing.assert_array_equal(got, out)
    np.testing.assert_array_equal(got_lse, lse)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_infinite_values(target, dtype):
    case = Case(q_len=40, kv_len=40)
    q, k, v = case.arrays(dtype)
    v[0, 10, 0, 3] = np.inf
    v[0, 20, 0, 3] = -np.inf
    out, _ = run(case, q, k, v)
    assert np.all(np.isfinite(out[0, :10]))
    assert np.all(np.isposinf(out[0, 10:20, :, 3]))
    assert np.all(np.isnan(out[0, 20:, :, 3]))
    assert np.all(np.isfinite(np.delete(out, 3, axis=3)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_rows_of_very_different_blocks(target, dtype):
    """Maxima that rise and fall by hundreds of octaves between blocks."""
    case = Case(q_len=64, kv_len=700, right=-1, scale=1.0)
    q, k, v = case.arrays(dtype)
    height = np.repeat([1.0, 12.0, 0.1, 14.0, 9.0, 0.5], 128)[:700, None, None]
    k = (k.astype(np.float32) * height).astype(np.float32).astype(dtype)
    scales = (np.ones((1, 2, 1), np.float32), *case.scales()[1:])
    out, lse = run(case, q, k, v, scales)
    options = {"probabilities": "quadratic"} if dtype == FP8 else {}
    want, want_lse = expected(case, q, k, v, scales, **options)
    loose = dtype == FP8 or (dtype == BF16 and target in BFLOAT16_TARGETS)
    assert relative_error(out, want) < (4e-3 if loose else 2e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_touch_each_other(target, dtype):
    """A query of huge logits, or NaN, beside others: those keep every bit."""
    case = Case(q_len=64, kv_len=700, right=-1)
    q, k, v = case.arrays(dtype)
    out, lse = run(case, q, k, v)
    for value in (100.0, np.nan):
        other = q.copy()
        other[0, ::13] = np.float32(value) * np.sign(q[0, ::13].astype(np.float32))
        got, got_lse = run(case, other, k, v)
        same = np.arange(64) % 13 != 0
        np.testing.assert_array_equal(got[:, same], out[:, same])
        np.testing.assert_array_equal(got_lse[..., same], lse[..., same])


def bits_of(rng, shape, low=-12.0, high=12.0):
    return (rng.standard_normal(shape) * np.exp2(rng.uniform(low, high, shape))).astype(
        np.float32
    )


@pytest.mark.parametrize("quadratic", [False, True], ids=["linear", "quadratic"])
@pytest.mark.parametrize("keys", [1, 7, 64, 127, 128])
def test_fp8_codes_are_the_reference_bit_for_bit(target, keys, quadratic):
    rng = np.random.default_rng(keys)
    rows = 4000
    acc = bits_of(rng, (rows, keys))
    visible = rng.random((rows, keys)) < rng.choice([0.02, 0.5, 1.0], (rows, 1))
    factor = np.exp2(rng.uniform(-10, 2, rows)).astype(np.float32)
    factor[::50] = 0
    block_max = np.where(visible, acc, -np.inf).max(1, initial=-np.inf)
    running_max = (block_max + rng.uniform(-150, 150, rows)).astype(np.float32)
    running_max[~np.isfinite(running_max)] = 3.0
    running_max[::3] = -np.inf
    acc[::101, keys // 2] = np.nan
    arguments = (acc, visible, factor, running_max, quadratic)
    names = ("codes", "shift", "new_max", "row_sum")
    got = _ext.fp8_softmax_block(target, *arguments)
    want = reference.fp8_softmax_block(*arguments)
    for name, one, other in zip(names, got, want, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)


@pytest.mark.parametrize("quadratic", [False, True], ids=["linear", "quadratic"])
def test_fp8_codes_at_the_edges_of_rounding(target, quadratic):
    """Arguments one unit apart around every code's boundary."""
    halves = np.arange(0, 126, 0.5, dtype=np.float32)
    acc = ((halves - 120) / 8)[:, None] + np.arange(-64, 64) * np.float32(2.0**-20)
    acc = acc.astype(np.float32)
    acc[:, 0] = 0.0  # the maximum
    arguments = (
        acc,
        np.ones(acc.shape, bool),
        np.ones(len(acc), np.float32),
        np.full(len(acc), -np.inf, np.float32),
        quadratic,
    )
    got = _ext.fp8_softmax_block(target, *arguments)
    want = reference.fp8_softmax_block(*arguments)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_fp8_softmax_block_says_what_it_takes():
    acc = np.zeros((2, 3), np.float32)
    row = np.zeros(2, np.float32)
    seen = np.ones((2, 3), bool)
    with pytest.raises(ValueError, match=r"portable.*got 'mmx'"):
        _ext.fp8_softmax_block("mmx", acc, seen, row, row, True)
    wide = np.zeros((2, 129), np.float32)
    with pytest.raises(ValueError, match="keys <= 128"):
        _ext.fp8_softmax_block("portable", wide, wide > 1, row, row, True)
    with pytest.raises(ValueError, match="takes acc and visible"):
        _ext.fp8_softmax_block("portable", acc, seen, row[:1], row, True)


def test_targets():
    usable = _ext.cpu_targets()
    assert usable[-1] == "portable"
    assert set(usable) <= set(_ext.compiled_cpu_targets())
    with pytest.raises(ValueError, match=r"usable here are.*got 'mmx'"):
        _ext.force_cpu_target("mmx")


def digest_of_results():
    """A digest of all result bits of several calls, on this process's cores."""
    digest = hashlib.sha256()
    for name in ("square", "many tiles", "lengths", "grouped heads", "scale blocks"):
        for dtype in DTYPES:
            for part in run(CASES[name], *CASES[name].arrays(dtype)):
                digest.update(part.tobytes())
    return digest.hexdigest()


_ONE_CORE = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
sys.path.insert(0, sys.argv[1])
import test_cpu_kernel as kernel
kernel._ext.force_cpu_target(sys.argv[2])
print(kernel.digest_of_results())
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here"
)
def test_same_bits_on_any_number_of_threads(target):
    here = digest_of_results()
    assert digest_of_results() == here
    one_core = subprocess.run(
        [sys.executable, "-c", _ONE_CORE, os.path.dirname(__file__), target],
        capture_output=True,
        text=True,
        check=True,
    )
    assert one_core.stdout.split()[-1] == here


def test_concurrent_calls(target):
    """More calls at a time than the pool has threads, in one program."""
    case = Case(q_len=150, kv_len=150, heads=4, kv_heads=2)
    inputs = [case.arrays(BF16, seed) for seed in range(6)]
    alone = [run(case, *arrays) for arrays in inputs]

    @jax.jit
    def together(inputs):
        call = jax.ffi.ffi_call(
            _FFI_TARGET,
            (
                jax.ShapeDtypeStruct((1, 150, 4, 32), jnp.float32),
                jax.ShapeDtypeStruct((1, 4, 150), jnp.float32),
            ),
        )
        constants = (*case.scales(), *case.integers())
        attributes = dict.fromkeys(("q_block", "kv_block", "window_right"), np.int64(0))
        return [
            call(
                *arrays,
                *constants,
                **attributes,
                window_left=np.int64(-1),
                quadratic=True,
            )
            for arrays in inputs
        ]

    for _ in range(5):
        got = together([list(map(jnp.asarray, arrays)) for arrays in inputs])
        for one, other in zip(got, alone, strict=True):
            np.testing.assert_array_equal(one[0], other[0])
            np.testing.assert_array_equal(one[1], other[1])


def good_call():
    case = Case(batch=2, q_len=6, kv_len=7, heads=4, kv_heads=2)
    return {
        "operands": [*case.arrays(), *case.scales(), *case.integers()],
        "out": ((2, 6, 4, 32), F32),
        "lse": (2, 4, 6),
        "window_left": -1,
        "window_right": 0,
        "q_block": 0,
        "kv_block": 0,
    }


def resized(index, shape, dtype=F32):
    def change(call):
        call["operands"][index] = np.zeros(shape, dtype)

    return change


def replaced(**values):
    return lambda call: call.update(values)


WRONG_CALLS = {
    "q rank": (resized(0, (2, 6, 128)), r"q takes 4 dimensions, got .*\(2, 6, 128\)"),
    "q dtype": (resized(0, (2, 6, 4, 32), np.int16), "q takes dtype bfloat16"),
    "int8 q alone": (resized(0, (2, 6, 4, 32), np.int8), "k takes dtype code 2, got"),
    "v scale of channels": (
        resized(5, (2, 2, 1, 8)),
        r"v_scale takes shape \(2, 2, 1, 32\), got",
    ),
    "e5m2": (
        resized(0, (2, 6, 4, 32), ml_dtypes.float8_e5m2),
        "q takes dtype bfloat16.*got code 19",
    ),
    "mixed dtypes": (resized(1, (2, 7, 2, 32), F16), "k takes dtype code"),
    "k head dim": (resized(1, (2, 7, 2, 40)), r"k takes shape .*got \(2, 7, 2, 40\)"),
    "v length": (resized(2, (2, 8, 2, 32)), r"v takes shape .*got \(2, 8, 2, 32\)"),
    "q scale": (resized(3, (2, 4, 2)), r"q_scale takes shape \(2, 4, 1\), got"),
    "k scale": (resized(4, (2, 4, 1)), r"k_scale takes shape \(2, 2, 1\), got"),
    "v scale": (resized(5, (1, 2, 1)), r"v_scale takes shape \(2, 2, 1\), got"),
    "scale dtype": (resized(3, (2, 4, 1), F16), "q_scale takes dtype code 11"),
    "offset": (resized(6, (3,), np.int32), r"q_offset takes shape \(2\), got \(3\)"),
    "lengths": (resized(7, (2,), F32), "q_lengths takes dtype code 4, got 11"),
    "kv lengths": (resized(8, (), np.int32), "kv_lengths takes shape"),
    "kv heads": (resized(1, (2, 7, 3, 32)), "multiple of key/value heads, got 4 and 3"),
    "kv batch": (resized(1, (4, 7, 2, 32)), "multiple of k's, got 2 and 4"),
    "head dim": (resized(0, (2, 6, 4, 30)), "multiples of 8 in 8..256, got 30 and 32"),
    "value dim": (resized(2, (2, 7, 2, 264)), "in 8..256, got 32 and 264"),
    "out dtype": (
        replaced(out=((2, 6, 4, 32), np.dtype(ml_dtypes.float8_e4m3fn))),
        "out takes dtype",
    ),
    "out shape": (replaced(out=((2, 6, 4, 64), F32)), "out takes shape"),
    "lse shape": (replaced(lse=(2, 6, 4)), "lse takes shape"),
    "window": (replaced(window_left=-2), "window bounds are -1 or more, got -2"),
    "q block": (replaced(q_block=-1), "q_block is 0 or more, got -1"),
    "kv block": (replaced(kv_block=64), "kv_block is a multiple of 128, got 64"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls_are_refused(name):
    change, message = WRONG_CALLS[name]
    run_raw(**good_call())
    call = good_call()
    change(call)
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=f"(?s)INVALID_ARGUMENT: zyfa_attention: .*{message}",
    ):
        run_raw(**call)


def test_a_missing_attribute_is_refused():
    call = good_call()
    del call["q_block"]
    with pytest.raises(jax.errors.JaxRuntimeError, match="Wrong number of attributes"):
        run_raw(**call)


def untouched_zeros(shape):
    """FP8 zeros that JAX takes without a copy, so pages never read cost no memory."""
    memory = np.zeros(np.prod(shape) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + np.prod(shape)].view(FP8).reshape(shape)


def test_offsets_beyond_32_bits():
    """Keys of more than 2**31 elements, of which the last few are seen."""
    last = 384
    case = Case(
        q_len=8, kv_len=(1 << 31) // 256 + last, heads=1, head_dim=256, value_dim=8,
        left=200,
    )  # fmt: skip
    short = dataclasses.replace(case, kv_len=last)
    q, short_k, short_v = short.arrays(FP8)
    k = untouched_zeros((1, case.kv_len, 1, 256))
    v = untouched_zeros((1, case.kv_len, 1, 8))
    k[:, -last:] = short_k
    v[:, -last:] = short_v
    got = run(case, q, k, v)
    want = run(short, q, short_k, short_v)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
