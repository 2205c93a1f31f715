"""What several test files share: inputs, and the comparison with the oracle."""

import dataclasses

import ml_dtypes
import numpy as np

from zyfa_jax import Quantized, quantize_qkv, reference

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
INT8 = np.dtype(np.int8)

# Largest error of an output, relative to the same weighted mean of the values'
# magnitudes, and largest error of the log-sum-exp (relative to 1 + its magnitude, and
# absolute for FP8). Rounding the output to bfloat16 is 2**-9 of it and rounding the
# probabilities as much again; logits of a hundred carry 1e-5 of float32 rounding; an
# e4m3 probability without an exponential is up to a tenth off, on both sides of the
# quotient.
TOLERANCES = {F32: (4e-5, 1e-5), F16: (3e-3, 1e-4), BF16: (1.2e-2, 1e-3)}
FP8_TOLERANCES = (0.2, 0.11)
FP8_RELATIVE = 0.06
FP8_SMALLEST = 2.0**-15


def normal(*shape, dtype=F32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def make(tokens=(20, 33), heads=(4, 2), dims=(16, 24), batch=(2,), dtype=F32, seed=0):
    """Standard normal (q, k, v): (queries, keys), (query, kv) heads, (qk, v) dims."""
    (t, s), (h, kv), (d, dv) = tokens, heads, dims
    shapes = ((*batch, t, h, d), (*batch, s, kv, d), (*batch, s, kv, dv))
    return tuple(
        normal(*shape, dtype=dtype, seed=3 * seed + i) for i, shape in enumerate(shapes)
    )


def as_int8(q, k, v):
    """What `quantize_qkv` makes of them, less the centre of the keys, a part of the
    log-sum-exp that the oracle does not know of."""
    q, k, v = (x.detach() for x in quantize_qkv(q, k, v))
    return q, dataclasses.replace(k, center=None), v


def plain(*inputs):
    """(arrays, options) for the oracle from what `attention` takes as q, k and v."""
    if not isinstance(inputs[0], Quantized):
        return inputs, {}
    q, k, v = inputs
    options = {
        f"{name}_descale": np.asarray(x.descale)
        for name, x in zip("qkv", inputs, strict=True)
    }
    options |= {"q_block": q.block, "kv_block": k.block, "v_channels": v.channels}
    return tuple(np.asarray(x.values) for x in (q, k, v)), options


def assert_near_oracle(got, inputs, *, tolerance=None, **options):
    """Asserts that (out, lse) is what the float64 oracle gives for the same call."""
    out, lse = (np.asarray(x) for x in got)
    (q, k, v), descales = plain(*inputs)
    options |= descales
    want, want_lse = reference.attention(q, k, v, **options)
    assert out.shape == want.shape
    assert lse.shape == want_lse.shape
    assert lse.dtype == F32
    fp8 = v.dtype == FP8
    out_bound, lse_bound = FP8_TOLERANCES if fp8 else TOLERANCES[q.dtype]
    out_bound = max(out_bound if tolerance is None else tolerance, rounding(out.dtype))
    out = out.astype(np.float64)

    np.testing.assert_array_equal(np.isnan(out), np.isnan(want))
    known = ~np.isnan(want)
    magnitude = np.abs(v.astype(np.float64))
    size, _ = reference.attention(q, k, magnitude, **options)
    if fp8:
        # Weights below 2**-15 of their block's largest become 0.
        descale = np.asarray(options["v_descale"], np.float64)
        largest = np.nanmax(magnitude, initial=0) * np.max(descale, initial=0)
        size = size + FP8_SMALLEST * k.shape[-3] * largest
    error = np.abs(out - want)[known]
    assert (error <= out_bound * size[known] + 1e-7).all(), (
        f"largest error {np.max(error / (size[known] + 1e-30)):.3g} of {out_bound:.3g}"
    )
    if fp8:
        assert np.linalg.norm(error) <= FP8_RELATIVE * np.linalg.norm(size[known])

    np.testing.assert_array_equal(np.isnan(lse), np.isnan(want_lse))
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    seen = np.isfinite(want_lse)
    np.testing.assert_allclose(
        lse[seen], want_lse[seen], rtol=1e-5 if fp8 else lse_bound, atol=lse_bound
    )


def rounding(out_dtype):
    """What an output of this dtype may be off by, relatively."""
    return 4 * float(ml_dtypes.finfo(out_dtype).eps)
