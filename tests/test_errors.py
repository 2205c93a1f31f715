"""Every wrong call says what came and what is taken."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _oracle import BF16, F16, FP8, make, normal

from zyfa_jax import Quantized, attention, parallel, quantize, quantize_qkv

NAN = float("nan")
ARRAYS = dict(zip("qkv", make(), strict=True))
FP8_ARRAYS = {
    **dict(zip("qkv", make(dtype=FP8), strict=True)),
    "q_descale": 1.0,
    "k_descale": 1.0,
    "v_descale": 1.0,
}
QUANTIZED = {name: quantize(x) for name, x in ARRAYS.items()}
BLOCKS = {name: quantize(x, granularity="block") for name, x in ARRAYS.items()}


def cast(dtype):
    return {name: x.astype(dtype) for name, x in ARRAYS.items()}


def change(calls, name, **parts):
    """One of the Quantized inputs with some of its parts replaced."""
    return {**calls, name: dataclasses.replace(calls[name], **parts)}


def row(name, message, base=ARRAYS, error=ValueError, **arguments):
    return pytest.param({**base, **arguments}, error, message, id=name)


TAKES = r"takes bfloat16, float16, float32, float8_e4m3fn"

OPERANDS = [
    row(
        "rank 2",
        r"\(batch, tokens, heads, head dim\) or \(tokens.*got q \(3, 8\)",
        {name: normal(3, 8) for name in "qkv"},
    ),
    row(
        "rank 5",
        r"one rank.*got q \(1, 1, 3, 2, 8\)",
        {name: normal(1, 1, 3, 2, 8) for name in "qkv"},
    ),
    row(
        "rank 0",
        r"one rank.*got q \(\)",
        {name: np.ones((), np.float32) for name in "qkv"},
    ),
    row(
        "mixed ranks",
        r"one rank.*got q \(20, 4, 16\), k \(2, 33, 2, 16\)",
        q=ARRAYS["q"][0],
    ),
    row("v of rank 3", r"one rank.*v \(33, 2, 24\)", v=ARRAYS["v"][0]),
    row(
        "batches differ",
        r"one batch size; got q \(3, .*k \(2, ",
        q=normal(3, 20, 4, 16),
    ),
    row(
        "batch of one beside two",
        r"one batch size.*k \(1, 33, 2, 16\)",
        k=ARRAYS["k"][:1],
        v=ARRAYS["v"][:1],
    ),
    row(
        "tokens of k and v",
        r"k and v with as many tokens.*v \(2, 32, 2, 24\)",
        v=ARRAYS["v"][:, 1:],
    ),
    row(
        "heads of k and v",
        r"k and v with as many heads.*v \(2, 33, 1, 24\)",
        v=ARRAYS["v"][:, :, 1:],
    ),
    row(
        "heads not divisible",
        r"multiple of the key/value heads, not 4 query and 3 key",
        k=normal(2, 33, 3, 16),
        v=normal(2, 33, 3, 16),
    ),
    row(
        "more key/value heads",
        r"multiple of the key/value heads, not 4 query and 8 key",
        k=normal(2, 33, 8, 16),
        v=normal(2, 33, 8, 16),
    ),
    row(
        "no key/value heads",
        r"multiple of the key/value heads, not 4 query and 0 key",
        k=normal(2, 33, 0, 16),
        v=normal(2, 33, 0, 16),
    ),
    row(
        "head dims of q and k", r"q and k of one head dim, not 16 and 24", k=ARRAYS["v"]
    ),
    row(
        "no head dim",
        r"head dims of at least 1; got q \(2, 20, 4, 0\)",
        q=ARRAYS["q"][..., :0],
        k=ARRAYS["k"][..., :0],
    ),
    row(
        "no value dim",
        r"head dims of at least 1; got .*v \(2, 33, 2, 0\)",
        v=ARRAYS["v"][..., :0],
    ),
    row(
        "mixed dtypes",
        r"q, k and v of one dtype, .* got float32, bfloat16, float32",
        k=ARRAYS["k"].astype(BF16),
    ),
    row(
        "mixed with FP8",
        r"of one dtype, .* got float32, float32, float8_e4m3fn",
        v=ARRAYS["v"].astype(FP8),
    ),
    row(
        "e4m3fnuz",
        TAKES + r", but q is float8_e4m3fnuz.*half as much",
        cast(ml_dtypes.float8_e4m3fnuz),
    ),
    row("e5m2", TAKES + r", but q is float8_e5m2", cast(ml_dtypes.float8_e5m2)),
    row(
        "e4m3 with infinity",
        TAKES + r", but q is float8_e4m3",
        cast(ml_dtypes.float8_e4m3),
    ),
    row("int8", TAKES + r", but v is int8", cast(np.int8)),
    row("int32", TAKES + r", but v is int32", v=ARRAYS["v"].astype(np.int32)),
    row("bool", TAKES + r", but q is bool", cast(bool)),
    row("float64", TAKES + r", but q is float64", cast(np.float64)),
    row("complex64", TAKES + r", but q is complex64", cast(np.complex64)),
    row("objects", TAKES + r", but q is object", cast(object)),
    row(
        "list",
        r"takes JAX or NumPy arrays or .*Quantized, but q is list",
        q=ARRAYS["q"].tolist(),
    ),
    row("None", r"takes JAX or NumPy arrays.*, but v is NoneType", v=None),
    row("number", r"takes JAX or NumPy arrays.*, but k is float", k=1.0),
    row(
        "shape only",
        r"takes JAX or NumPy arrays.*, but q is ShapeDtypeStruct",
        q=jax.ShapeDtypeStruct((2, 20, 4, 16), np.float32),
    ),
    row(
        "random keys",
        r"takes JAX or NumPy arrays.*, but q is .*key",
        q=jax.random.split(jax.random.key(0), 160).reshape(2, 20, 4),
    ),
]

DESCALES = [
    row(
        "no descales",
        r"float8_e4m3fn and int8 inputs with descales, but q_descale is None",
        {name: FP8_ARRAYS[name] for name in "qkv"},
    ),
    row(
        "no v_descale",
        r"with descales, but v_descale is None",
        FP8_ARRAYS,
        v_descale=None,
    ),
    row(
        "bfloat16 with a descale",
        r"k_descale for float8_e4m3fn and int8 inputs, not for bfloat16",
        cast(BF16),
        k_descale=1.0,
    ),
    row(
        "float32 with a descale",
        r"q_descale for float8_e4m3fn and int8 inputs, not for float32",
        q_descale=1.0,
    ),
    row(
        "negative",
        r"q_descale of finite numbers >= 0.*got -0.5",
        FP8_ARRAYS,
        q_descale=-0.5,
    ),
    row(
        "one negative",
        r"k_descale of finite numbers >= 0.*got -1.0 to 2.0",
        FP8_ARRAYS,
        k_descale=np.array([2.0, -1.0]),
    ),
    row("NaN", r"k_descale of finite numbers >= 0.*got nan", FP8_ARRAYS, k_descale=NAN),
    row(
        "infinity",
        r"v_descale of finite numbers >= 0.*got inf",
        FP8_ARRAYS,
        v_descale=np.inf,
    ),
    row(
        "past float32",
        r"v_descale of finite numbers >= 0.*got 1e\+300",
        FP8_ARRAYS,
        v_descale=1e300,
    ),
    row(
        "bool", r"q_descale as real numbers, not bool True", FP8_ARRAYS, q_descale=True
    ),
    row(
        "bool array",
        r"q_descale as real numbers, not .*bool",
        FP8_ARRAYS,
        q_descale=np.array([True]),
    ),
    row("string", r"q_descale as real numbers, not str '1'", FP8_ARRAYS, q_descale="1"),
    row(
        "list",
        r"q_descale as real numbers, not list \[1.0\]",
        FP8_ARRAYS,
        q_descale=[1.0],
    ),
    row(
        "complex",
        r"q_descale as real numbers, not complex 1j",
        FP8_ARRAYS,
        q_descale=1j,
    ),
    row(
        "object",
        r"q_descale as real numbers, not object <object",
        FP8_ARRAYS,
        q_descale=object(),
    ),
    row(
        "(B,)",
        r"q_descale that broadcasts to \(batch, heads\) = \(2, 4\), not shape "
        r"\(2,\)",
        FP8_ARRAYS,
        q_descale=np.ones(2),
    ),
    row(
        "query heads for keys",
        r"k_descale that broadcasts to \(batch, heads\) = "
        r"\(2, 2\), not shape \(4,\)",
        FP8_ARRAYS,
        k_descale=np.ones(4),
    ),
    row(
        "(B, H, 1)",
        r"v_descale that broadcasts to .*= \(2, 2\), not shape "
        r"\(2, 2, 1\)",
        FP8_ARRAYS,
        v_descale=np.ones((2, 2, 1)),
    ),
    row(
        "empty",
        r"q_descale that broadcasts to .*= \(2, 4\), not shape \(0,\)",
        FP8_ARRAYS,
        q_descale=jnp.ones(0),
    ),
    row(
        "rank 3 with a batch",
        r"q_descale that broadcasts to \(heads,\) = \(4,\), not "
        r"shape \(1, 4\)",
        {**FP8_ARRAYS, **{n: FP8_ARRAYS[n][0] for n in "qkv"}},
        q_descale=np.ones((1, 4)),
    ),
]

INTEGERS = [
    row(
        "kv_lengths too long",
        r"kv_lengths from 0 to 33 tokens, got 34 to 34",
        kv_lengths=34,
    ),
    row(
        "one kv_length too long",
        r"kv_lengths from 0 to 33 tokens, got 1 to 40",
        kv_lengths=np.array([1, 40]),
    ),
    row(
        "negative q_lengths",
        r"q_lengths from 0 to 20 tokens, got -1 to 5",
        q_lengths=np.array([5, -1]),
    ),
    row("length past int64", r"kv_lengths .*1180591620717411303424", kv_lengths=2**70),
    row(
        "float length",
        r"kv_lengths as an integer or an integer array, not float 5.0",
        kv_lengths=5.0,
    ),
    row(
        "float lengths",
        r"q_lengths as an integer .*, not shape \(2,\) of float32",
        q_lengths=np.ones(2, np.float32),
    ),
    row(
        "list of lengths",
        r"kv_lengths as an integer .*, not list \[1, 2\]",
        kv_lengths=[1, 2],
    ),
    row("bool length", r"kv_lengths as an integer .*, not bool True", kv_lengths=True),
    row("string length", r"kv_lengths as an integer .*, not str '5'", kv_lengths="5"),
    row(
        "three lengths for two",
        r"kv_lengths as an integer or an array of shape \(2,\), "
        r"not shape \(3,\)",
        kv_lengths=np.array([1, 2, 3]),
    ),
    row(
        "(B, 1) lengths",
        r"q_lengths as an integer or an array of shape \(2,\), "
        r"not shape \(2, 1\)",
        q_lengths=jnp.ones((2, 1), jnp.int32),
    ),
    row(
        "(1,) offset",
        r"q_offset as an integer or an array of shape \(2,\), not shape "
        r"\(1,\)",
        q_offset=np.array([1]),
    ),
    row(
        "(1,) offset for rank 3",
        r"q_offset as an integer, not shape \(1,\)",
        {name: x[0] for name, x in ARRAYS.items()},
        q_offset=np.array([1]),
    ),
    row("float offset", r"q_offset as an integer .*, not float 1.0", q_offset=1.0),
    row(
        "float jax offset",
        r"q_offset as an integer .*, not shape \(\) of float32",
        q_offset=jnp.float32(1),
    ),
    row(
        "offset past int32", r"q_offset that fits int32, got 2147483648", q_offset=2**31
    ),
    row(
        "offset below int32",
        r"q_offset that fits int32, got -2147483649 to 0",
        q_offset=np.array([0, -(2**31) - 1]),
    ),
    row(
        "object offset",
        r"q_offset as an integer .*, not object <object",
        q_offset=object(),
    ),
]

WINDOW = r"takes window=None, a number of tokens, or \(left, right\).*not "
OPTIONS = [
    row("negative window", WINDOW + "-5", window=-5),
    row("negative side", WINDOW + r"\(1, -2\)", window=(1, -2)),
    row("float window", WINDOW + "1.5", window=1.5),
    row("float side", WINDOW + r"\(1.0, 2\)", window=(1.0, 2)),
    row("bool window", WINDOW + "True", window=True),
    row("bool side", WINDOW + r"\(True, 1\)", window=(True, 1)),
    row("window of three", WINDOW + r"\(1, 2, 3\)", window=(1, 2, 3)),
    row("window of one", WINDOW + r"\(1,\)", window=(1,)),
    row("string window", WINDOW + "'12'", window="12"),
    row("array window", WINDOW + "array", window=np.array([1, 2])),
    row("traced window", WINDOW + "Array", window=jnp.int32(3)),
    row("causal is a number", r"causal=True or False, not 1", causal=1),
    row("causal is None", r"causal=True or False, not None", causal=None),
    row("causal is traced", r"causal=True or False, not Array", causal=jnp.bool_(True)),
    row(
        "return_lse is a string", r"return_lse=True or False, not 'no'", return_lse="no"
    ),
    row(
        "scale of a row",
        r"scale as one real number, not shape \(2,\) of float64",
        scale=np.ones(2),
    ),
    row(
        "scale (1,)",
        r"scale as one real number, not shape \(1,\) of float32",
        scale=jnp.ones(1),
    ),
    row("complex scale", r"scale as one real number, not complex 1j", scale=1j),
    row("string scale", r"scale as one real number, not str 'x'", scale="x"),
    row("bool scale", r"scale as one real number, not bool True", scale=True),
    row("list scale", r"scale as one real number, not list \[1.0\]", scale=[1.0]),
    row("NaN scale", r"scale that float32 holds, not nan", scale=NAN),
    row(
        "infinite scale", r"scale that float32 holds, not inf", scale=np.float32(np.inf)
    ),
    row("scale past float32", r"scale that float32 holds, not 1e\+39", scale=1e39),
    row("scale past float64", r"takes .*scale .*not ", scale=2**2000),
    row(
        "int out_dtype",
        r"out_dtype bfloat16, float16, float32, not int32",
        out_dtype=np.int32,
    ),
    row(
        "float64 out_dtype",
        r"out_dtype bfloat16, float16, float32, not float64",
        out_dtype=float,
    ),
    row(
        "FP8 out_dtype",
        r"out_dtype bfloat16, float16, float32, not float8_e4m3fn",
        out_dtype=FP8,
    ),
    row(
        "no such out_dtype",
        r"out_dtype bfloat16, float16 or float32, not 'halves'",
        out_dtype="halves",
    ),
    row(
        "out_dtype by a name that NumPy warns of",
        r"out_dtype bfloat16, float16 or float32, not \('a', 0\)",
        out_dtype=("a", 0),
    ),
    row(
        "out_dtype of a negative size",
        r"out_dtype bfloat16, float16 or float32, not \('f4', -1\)",
        out_dtype=("f4", -1),
    ),
    row(
        "number out_dtype",
        r"out_dtype bfloat16, float16 or float32, not 3",
        out_dtype=3,
    ),
    row(
        "no such implementation",
        r"implementation=None or one of .*'cpu'.*not 'tpu'",
        implementation="tpu",
    ),
    row(
        "implementation is a number",
        r"implementation=None or one of .*not 3",
        implementation=3,
    ),
    row(
        "implementation is a list",
        r"implementation=None or one of .*not \['cpu'\]",
        implementation=["cpu"],
    ),
    row(
        "rocm on a CPU",
        r"implementation='rocm'.* cpu.*takes None",
        implementation="rocm",
        error=NotImplementedError,
    ),
    row(
        "cuda on a CPU",
        r"implementation='cuda'.* cpu.*takes None",
        implementation="cuda",
        error=NotImplementedError,
    ),
    row(
        "the CPU kernel, head dim 20",
        r"implementation='cpu'.*multiples of 8 up to 256, not 20 and 24",
        implementation="cpu",
        error=NotImplementedError,
        q=normal(2, 20, 4, 20),
        k=normal(2, 33, 2, 20),
    ),
    row(
        "the CPU kernel, value dim 264",
        r"implementation='cpu'.*multiples of 8 up to 256, not 16 and 264",
        implementation="cpu",
        error=NotImplementedError,
        v=normal(2, 33, 2, 264),
    ),
]

PARTS = [
    row(
        "one Quantized",
        r"all Quantized or none, got Quantized, ndarray, ndarray",
        FP8_ARRAYS,
        q=QUANTIZED["q"],
    ),
    row(
        "v not Quantized",
        r"all Quantized or none, got Quantized, Quantized, ndarray",
        QUANTIZED,
        v=FP8_ARRAYS["v"],
    ),
    row(
        "descale beside its own",
        r"q_descale for plain float8_e4m3fn or int8 arrays; a Quantized "
        "has its own",
        QUANTIZED,
        q_descale=1.0,
    ),
    row(
        "q rotated",
        r"q and k both rotated or neither, got rotated=True and "
        "rotated=False",
        QUANTIZED,
        q=quantize(ARRAYS["q"], rotate=True),
    ),
    row(
        "k rotated",
        r"q and k both rotated or neither, got rotated=False and "
        "rotated=True",
        QUANTIZED,
        k=quantize(ARRAYS["k"], rotate=True),
    ),
    row(
        "v rotated",
        r"v that is neither rotated nor balanced, got rotated=True",
        QUANTIZED,
        v=quantize(ARRAYS["v"], rotate=True),
    ),
    row(
        "q centred",
        r"only k centred over tokens, but q is",
        QUANTIZED,
        q=quantize(ARRAYS["q"], center=True),
    ),
    row(
        "v centred",
        r"only k centred over tokens, but v is",
        QUANTIZED,
        v=quantize(ARRAYS["v"], center=True),
    ),
    row(
        "k and v in other blocks",
        r"k and v with one descale block, got 128 and 0",
        QUANTIZED,
        k=BLOCKS["k"],
    ),
    row(
        "k and v in other block sizes",
        r"k and v with one descale block, got 128 and 256",
        BLOCKS,
        v=quantize(ARRAYS["v"], granularity="block", block=256),
    ),
    row(
        "descale of another batch",
        r"descale .*shape \(2, 4\), but q has \(3, 4\)",
        change(QUANTIZED, "q", descale=jnp.ones((3, 4))),
    ),
    row(
        "descale of a batch of one",
        r"descale .*shape \(2, 2\), but k has \(1, 2\)",
        change(QUANTIZED, "k", descale=jnp.ones((1, 2))),
    ),
    row(
        "descale of other heads",
        r"descale .*shape \(2, 2\), but v has \(2, 4\)",
        change(QUANTIZED, "v", descale=jnp.ones((2, 4))),
    ),
    row(
        "descale of more blocks",
        r"descale .*shape \(2, 2, 1\), but k has \(2, 2, 3\)",
        change(BLOCKS, "k", descale=jnp.ones((2, 2, 3))),
    ),
    row(
        "descale of no blocks",
        r"descale .*shape \(2, 2, 1\), but v has \(2, 2, 0\)",
        change(BLOCKS, "v", descale=jnp.ones((2, 2, 0))),
    ),
    row(
        "descale of rank 3 for rank 4",
        r"descale .*shape \(2, 4\), but q has \(4,\)",
        change(QUANTIZED, "q", descale=jnp.ones(4)),
    ),
    row(
        "no descale",
        r"descale .*shape \(2, 2\), but k has NoneType",
        change(QUANTIZED, "k", descale=None),
    ),
    row(
        "complex descale",
        r"descale is real.*but k has .* of complex64",
        change(QUANTIZED, "k", descale=jnp.ones((2, 2), jnp.complex64)),
    ),
    row(
        "block of 100",
        r"block is a multiple of 128 tokens or 0, or for q 1, but k has 100",
        change(BLOCKS, "k", block=100),
    ),
    row(
        "block of -128",
        r"block is a multiple of 128 tokens or 0, or for q 1, but v has -128",
        change(BLOCKS, "v", block=-128),
    ),
    row(
        "values in float32",
        r"Quantized of float8_e4m3fn or int8, but q holds float32",
        {name: Quantized(x, QUANTIZED[name].descale) for name, x in ARRAYS.items()},
    ),
    row(
        "values in e5m2",
        r"takes .*float8_e4m3fn, but k is float8_e5m2",
        change(QUANTIZED, "k", values=ARRAYS["k"].astype(ml_dtypes.float8_e5m2)),
    ),
    row(
        "values in a list",
        r"takes JAX or NumPy arrays.*, but k is list",
        change(QUANTIZED, "k", values=[1.0]),
    ),
    row(
        "center of another shape",
        r"center .*shape \(2, 2, 16\), but k has \(2, 32, 1\)",
        change(QUANTIZED, "k", center=jnp.ones((2, 32, 1))),
    ),
    row(
        "source of another shape",
        r"source .*shape \(2, 20, 4, 16\), but q has \(3,\)",
        change(QUANTIZED, "q", source=jnp.ones(3)),
    ),
    row(
        "head dims that differ",
        r"q and k of one head dim, not 16 and 24",
        QUANTIZED,
        k=QUANTIZED["v"],
    ),
]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    OPERANDS + DESCALES + INTEGERS + OPTIONS + PARTS,
)
def test_attention_refuses(arguments, error, message):
    with pytest.raises(error, match=f"(?s)attention.*{message}"):
        attention(**arguments)


def test_the_table_is_large_and_what_it_starts_from_is_right():
    assert len(OPERANDS + DESCALES + INTEGERS + OPTIONS + PARTS) >= 120
    for right in (ARRAYS, FP8_ARRAYS, QUANTIZED, BLOCKS):
        assert np.isfinite(np.asarray(attention(**right), np.float32)).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [OPERANDS[9], OPERANDS[12], DESCALES[0], DESCALES[15], INTEGERS[9], OPTIONS[33]],
)
def test_the_same_under_jit(arguments, error, message):
    arrays = {name: arguments[name] for name in "qkv"}
    others = {name: x for name, x in arguments.items() if name not in arrays}
    with pytest.raises(error, match=message):
        jax.jit(functools.partial(attention, **others))(**arrays)


def test_traced_integers_must_be_integers_too():
    with pytest.raises(ValueError, match=r"kv_lengths as an integer.*float32"):
        jax.jit(lambda n: attention(**ARRAYS, kv_lengths=n))(np.float32(3))
    with pytest.raises(ValueError, match=r"q_offset as an integer or.*\(2,\).*\(3,\)"):
        jax.jit(lambda n: attention(**ARRAYS, q_offset=n))(np.zeros(3, np.int32))


X = ARRAYS["q"]
STATIC: dict[str, tuple[Any, Any]] = {
    "causal": (lambda y: attention(**ARRAYS, causal=y), True),
    "window": (lambda y: attention(**ARRAYS, window=y), 3),
    "a side": (lambda y: attention(**ARRAYS, window=(y, 0)), 3),
    "return_lse": (lambda y: attention(**ARRAYS, return_lse=y), True),
    "out_dtype": (lambda y: attention(**ARRAYS, out_dtype=y), 1.0),
    "implementation": (lambda y: attention(**ARRAYS, implementation=y), 1),
    "center": (lambda y: quantize(X, center=y), True),
    "block": (lambda y: quantize(X, granularity="block", block=y), 128),
    "rotated": (lambda y: quantize_qkv(**ARRAYS, rotated=y), True),
    "devices": (lambda y: parallel.zigzag(X, y), 2),
    "axis": (lambda y: parallel.zigzag(X, 2, axis=y), 1),
    "return_lse over devices": (
        lambda y: parallel.attention(**ARRAYS, axis_name="t", return_lse=y),
        True,
    ),
}


@pytest.mark.parametrize(("call", "value"), STATIC.values(), ids=STATIC)
def test_what_is_static_says_so_where_it_is_traced(call, value):
    with pytest.raises(ValueError, match="it is static, name it in static_argnames"):
        jax.jit(call)(value)


def test_unknown_arguments_are_a_type_error():
    with pytest.raises(TypeError, match="bias"):
        attention(**ARRAYS, bias=0)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="positional"):
        attention(*ARRAYS.values(), True)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (normal(5, 8), {}, r"\(batch, tokens, heads, dim\).*got \(5, 8\)"),
        (normal(1, 1, 5, 2, 8), {}, r"\(tokens, heads, dim\), got \(1, 1, 5, 2, 8\)"),
        (normal(5, 2, 8).tolist(), {}, "takes a JAX or NumPy array, got list"),
        (normal(5, 2, 8, dtype=np.float64), {}, "bfloat16, float16 or .*float64"),
        (normal(5, 2, 8, dtype=FP8), {}, "bfloat16, float16 or .*float8_e4m3fn"),
        (QUANTIZED["q"], {}, "not yet quantized, got Quantized"),
        (normal(5, 2, 8), {"granularity": "row"}, "one of .*'tensor'.*got 'row'"),
        (normal(5, 2, 8), {"granularity": "block", "block": 64}, "128 .*got 64"),
        (normal(5, 2, 8), {"granularity": "block", "block": 1e3}, "128 .*got 1000.0"),
        (normal(5, 2, 8), {"center": 1}, "center=True or False, got 1"),
        (normal(5, 2, 8), {"rotate": None}, "rotate=True or False, got None"),
    ],
)
def test_quantize_refuses(x, options, message):
    with pytest.raises(ValueError, match=message):
        quantize(x, **options)


def test_dtypes_that_are_taken_are_taken():
    for dtype in (BF16, F16):
        assert attention(**cast(dtype)).dtype == dtype
