"""The rules of shapes and arguments, which neither trace nor run."""

import dataclasses
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from _oracle import BF16, F16, F32, FP8

from zyfa_jax import _spec
from zyfa_jax._spec import AttentionSpec

Q, K, V = (2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 24)


def check(q=Q, k=K, v=V, dtypes=(F32, F32, F32)):
    _spec.check_operands((q, k, v), dtypes)


@pytest.mark.parametrize("dtype", [F32, F16, BF16, FP8], ids=str)
@pytest.mark.parametrize(
    "shapes",
    [
        (Q, K, V),
        (Q[1:], K[1:], V[1:]),
        ((0, 5, 4, 16), (0, 7, 2, 16), (0, 7, 2, 24)),
        ((2, 0, 4, 16), K, V),
        (Q, (2, 0, 2, 16), (2, 0, 2, 24)),
        ((2, 5, 2, 300), (2, 7, 1, 300), (2, 7, 1, 1)),
    ],
)
def test_operands_that_go_together(shapes, dtype):
    check(*shapes, dtypes=(dtype,) * 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": Q[1:]}, "one rank"),
        ({"q": (3, *Q[1:])}, "one batch size"),
        ({"v": (2, 8, 2, 24)}, "as many tokens"),
        ({"v": (2, 7, 1, 24)}, "as many heads"),
        ({"q": (2, 5, 3, 16)}, "not 3 query and 2 key/value heads"),
        ({"q": (2, 5, 4, 8)}, "one head dim, not 8 and 16"),
        ({"v": (2, 7, 2, 0)}, "head dims of at least 1"),
        ({"dtypes": (F32, F32, F16)}, "one dtype, .* got float32, float32, float16"),
        ({"dtypes": (np.dtype(np.int8),) * 3}, "but v is int8"),
        ({"dtypes": (F32, F32, np.dtype(ml_dtypes.float8_e4m3fnuz))}, "v is .*fnuz:"),
    ],
)
def test_operands_that_do_not(changes, message):
    with pytest.raises(ValueError, match=message):
        check(**changes)


def test_every_shape_error_shows_the_shapes():
    for changes in ({"q": Q[1:]}, {"v": (2, 8, 2, 24)}, {"q": (2, 5, 3, 16)}):
        shapes = {"q": Q, "k": K, "v": V, **changes}
        with pytest.raises(ValueError, match="got") as raised:
            check(**changes)
        for name, shape in shapes.items():
            assert f"{name} {shape}" in str(raised.value)


@pytest.mark.parametrize(
    ("window", "causal", "expected"),
    [
        (None, False, (None, None)),
        (None, True, (None, 0)),
        (3, False, (3, 3)),
        (3, True, (3, 0)),
        (0, False, (0, 0)),
        (-1, False, (None, None)),
        (np.int32(4), True, (4, 0)),
        ((2, 5), False, (2, 5)),
        ([2, 5], True, (2, 0)),
        ((None, 1), False, (None, 1)),
        ((1, -1), False, (1, None)),
        ((-1, None), True, (None, 0)),
    ],
)
def test_window(window, causal, expected):
    assert _spec.canonical_window(window, causal) == expected


def test_a_window_wider_than_any_position_fits_the_kernels_attribute():
    left, right = _spec.canonical_window((2**70, 2**70), False)
    # Positions and keys are int32, so that 2**33 apart is further than they can be.
    for side in (left, right):
        assert side is None or 2**32 <= side < 2**63


def repr_without_address(x):
    return "object" if type(x) is object else repr(x)


@pytest.mark.parametrize(
    "window",
    [-2, 1.0, True, (1,), (1, 2, 3), (1, -2), (False, 1), "12", {}, {1, 2}, object()],
    ids=repr_without_address,
)
def test_not_a_window(window):
    with pytest.raises(ValueError, match="takes window=None, a number of tokens, or"):
        _spec.canonical_window(window, False)


@pytest.mark.parametrize("causal", [0, 1, None, "yes", np.int32(1)])
def test_causal_is_a_bool(causal):
    with pytest.raises(ValueError, match="causal=True or False, not"):
        _spec.canonical_window(None, causal)
    assert _spec.canonical_window(None, np.bool_(True)) == (None, 0)


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (lambda x: _spec.check_lengths("kv_lengths", x, 7), [0, 7], [0, 8]),
        (lambda x: _spec.check_lengths("kv_lengths", x, 7), [], [-1]),
        (lambda x: _spec.check_integer("q_offset", x), [-(2**31), 2**31 - 1], [2**31]),
        (lambda x: _spec.check_integer("q_offset", x), [], [0, -(2**31) - 1]),
        (lambda x: _spec.check_descale("k_descale", x), [0.0, 3e38], [1.0, -1e-9]),
        (lambda x: _spec.check_descale("k_descale", x), [], [np.nan, 1.0]),
        (lambda x: _spec.check_descale("k_descale", x), [-0.0], [np.inf]),
    ],
)
def test_numbers_known_when_tracing(check, good, bad):
    check(np.asarray(good))
    with pytest.raises(ValueError, match=r"(kv_lengths|q_offset|k_descale).*got"):
        check(np.asarray(bad))


GPUS = ("rocm", "cuda")


def refusal(kernel, dims=(128, 128), dtype=BF16, q=(1, 5, 2), kv=(1, 7, 1), **options):
    spec = AttentionSpec(**{"window": (None, 0), "out_dtype": BF16, **options})
    shapes = (*q, dims[0]), (*kv, dims[0]), (*kv, dims[1])
    return _spec.kernel_refusal(kernel, shapes, dtype, spec)


@pytest.mark.parametrize("dim", range(1, 300))
def test_the_cpu_kernel_takes_head_dims_by_eight_up_to_256(dim):
    expected = dim in range(8, 257, 8)
    assert (refusal("cpu", (dim, 128)) is None) == expected
    assert (refusal("cpu", (128, dim)) is None) == expected


@pytest.mark.parametrize("dtype", [F32, F16, BF16, FP8], ids=str)
def test_the_kernels_take_dtypes(dtype):
    assert refusal("cpu", dtype=dtype) is None
    for kernel in GPUS:
        assert (refusal(kernel, dtype=dtype) is None) == (dtype != F32)


@pytest.mark.parametrize("kernel", GPUS)
@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_the_gpu_kernels_take_two_pairs_of_head_dims(kernel, dim):
    assert (refusal(kernel, (dim, 128)) is None) == (dim in (128, 192))
    assert (refusal(kernel, (128, dim)) is None) == (dim == 128)


@pytest.mark.parametrize(
    ("taken", "refused", "message"),
    [
        ({"q_block": 128}, {"kv_block": 128}, "one descale for all keys .*, not .*128"),
        ({"q": (1, 2**30 - 2**8 - 1, 1)}, {"q": (1, 2**30 - 2**8, 1)}, "tokens, not"),
        (
            {"kv": (1, 2**30 - 2**8 - 1, 1)},
            {"kv": (1, 2**30 - 2**8, 1)},
            "fewer than 1073741568 tokens, not 1073741568",
        ),
        ({"q": (1, 1, 65535)}, {"q": (1, 1, 65536)}, "bytes of a token, not 65536 x"),
        (
            {"q": (1, 1, 32767), "out_dtype": F32},
            {"q": (1, 1, 32768), "out_dtype": F32},
            "fewer than 16777216 bytes of a token, not 32768 x 512",
        ),
        (
            {"q": (2**15 - 1, 256, 256)},
            {"q": (2**15, 256, 256)},
            "fewer than 8388608 blocks of 256 queries, not 8388608",
        ),
        (
            {"window": (2**31 - 1, 2**32)},
            {"window": (2**31, 0)},
            "windows of fewer than 2147483648 tokens, not 2147483648",
        ),
        ({"window": (None, None)}, {"window": (0, 2**32 - 1)}, "windows .*4294967295"),
    ],
)
@pytest.mark.parametrize("kernel", GPUS)
def test_the_gpu_kernels_count_in_32_bits(kernel, taken, refused, message):
    assert refusal(kernel, **taken) is None
    assert re.search(message, refusal(kernel, **refused) or "")
    assert refusal("cpu", **refused) is None


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({}, None),
        ({"q_block": 1, "kv_block": 128, "v_channels": True}, None),
        ({"v_channels": True}, None),
        ({"kv_block": 256}, "one descale for a channel of v, not one per 256 keys"),
    ],
)
def test_descales_that_gfx950_takes_with_int8(scales, message):
    assert refusal("rocm", dtype=np.dtype(np.int8), **scales) == message


def test_sizes_that_are_not_known_are_taken():
    batch, tokens = jax.export.symbolic_shape("b, t")
    assert refusal("rocm", q=(batch, tokens, 2), kv=(batch, tokens, 1)) is None


def test_defaults():
    assert _spec.default_scale(16) == 0.25
    assert [_spec.default_out_dtype(x) for x in (F32, F16, BF16, FP8)] == [
        F32,
        F16,
        BF16,
        BF16,
    ]


def test_spec_is_a_key():
    spec = AttentionSpec((None, 0), F32)
    assert spec == AttentionSpec((None, 0), F32)
    assert hash(spec) == hash(AttentionSpec((None, 0), F32))
    for change in (
        {"window": (1, 0)},
        {"out_dtype": F16},
        {"kv_block": 128},
        {"q_offset": 0},
        {"quadratic": True},
        {"implementation": "cpu"},
    ):
        assert dataclasses.replace(spec, **change) != spec
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.q_block = 128  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "gpu"}, r"one of .*'rocm'.*not 'gpu'"),
        ({"implementation": ""}, r"one of .*not ''"),
        ({"out_dtype": FP8}, "bfloat16, float16, float32, not float8_e4m3fn"),
        ({"out_dtype": np.dtype(np.float64)}, "float32, not float64"),
    ],
)
def test_spec_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**{"window": (None, None), "out_dtype": F32, **change})
