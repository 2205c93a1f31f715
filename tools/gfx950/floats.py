"""Number formats and roundings that NumPy does not have, on whole arrays."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]


def round_to_odd_sum(a: F64, b: F64) -> F64:
    """a + b in float64, inexact sums rounded to odd.

    A second rounding to at most 51 bits then gives what one rounding of the exact sum
    would (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums").
    """
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error)
    toward_zero = inexact & (np.signbit(error) != np.signbit(total))
    odd = (bits - toward_zero) | 1
    return np.where(inexact, odd, bits).view(np.float64)


def fma32(a: Any, b: Any, c: Any) -> F32:
    """a * b + c on float32, rounded once."""
    product = a.astype(np.float64) * b.astype(np.float64)  # exact: 48 bits
    addend = c.astype(np.float64)
    total = product + addend
    low = np.atleast_1d(total).view(np.int64) & 0x1FFFFFFF
    doubtful = (low == 0x10000000) | (np.abs(np.atleast_1d(total)) < 2.0**-125)
    if doubtful.any():
        total = round_to_odd_sum(
            *(np.atleast_1d(x).copy() for x in np.broadcast_arrays(product, addend))
        ).reshape(total.shape)
    return total.astype(np.float32)


def fma32_unrounded(a: Any, b: Any, c: Any) -> F64:
    """a * b + c in float64, to be scaled and rounded to float32 once."""
    product = a.astype(np.float64) * b.astype(np.float64)
    arrays = np.broadcast_arrays(product, c.astype(np.float64))
    return round_to_odd_sum(*(x.copy() for x in arrays))


def fma16(a: Any, b: Any, c: Any) -> NDArray[np.float16]:
    """a * b + c on float16: exact in float64 up to one sum, rounded once."""
    product = a.astype(np.float64) * b.astype(np.float64)
    arrays = np.broadcast_arrays(product, c.astype(np.float64))
    return round_to_odd_sum(*(x.copy() for x in arrays)).astype(np.float16)


def fma64(a: Any, b: Any, c: Any) -> F64:
    """a * b + c on float64 through exact integers: slow, for the rare f64 code."""
    from fractions import Fraction

    def one(x: float, y: float, z: float) -> float:
        if not (np.isfinite(x) and np.isfinite(y) and np.isfinite(z)):
            return float(np.float64(x) * np.float64(y) + np.float64(z))
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        if exact == 0:
            return float(np.float64(x) * np.float64(y) + np.float64(z))
        try:
            return float(exact)
        except OverflowError:
            return float("inf") if exact > 0 else float("-inf")

    return np.vectorize(one, otypes=[np.float64])(a, b, c)


def bf16_to_f32(codes: NDArray[Any]) -> F32:
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: NDArray[Any]) -> U16:
    """Round to nearest even; a NaN stays one, made quiet."""
    bits = np.atleast_1d(values).view(np.uint32)
    rounded = (
        bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    ) >> 16
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def f32_to_f16_toward_zero(values: NDArray[Any]) -> U16:
    nearest = values.astype(np.float16)
    over = np.abs(nearest.astype(np.float32)) > np.abs(values)
    bits = np.atleast_1d(nearest).view(np.uint16)
    return np.where(over, bits - np.uint16(1), bits).astype(np.uint16)


@functools.cache
def decode_table(format: str) -> F32:
    """The value of every code of an 8-bit or 4-bit float format."""
    exponent_bits, mantissa_bits, bias, special = {
        "e4m3": (4, 3, 7, "top"),
        "e5m2": (5, 2, 15, "ieee"),
        "e2m1": (2, 1, 1, "none"),
        "e2m3": (2, 3, 1, "none"),
        "e3m2": (3, 2, 3, "none"),
    }[format]
    width = 1 + exponent_bits + mantissa_bits
    codes = np.arange(1 << width)
    sign = np.where(codes >> (width - 1), -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = (1 + mantissa) * 2.0 ** (exponent - bias)
    value = sign * np.where(exponent > 0, normal, mantissa * 2.0 ** (1 - bias))
    magnitude = codes & ((1 << (width - 1)) - 1)
    if special == "top":
        value[magnitude == 0x7F] = np.nan
    if special == "ieee":
        value[magnitude == 0x7C] *= np.inf
        value[magnitude > 0x7C] = np.nan
    return value.astype(np.float32)


def encode_fp8(values: NDArray[Any], format: str, saturate: NDArray[Any] | bool) -> U8:
    """Round to nearest even into e4m3 (fn) or e5m2.

    What is beyond the largest value becomes NaN (e4m3) or infinity (e5m2), or the
    largest value where `saturate` (MODE.FP16_OVFL) is set; infinities included.
    """
    mantissa_bits, bias, top = {"e4m3": (3, 7, 0x7E), "e5m2": (2, 15, 0x7B)}[format]
    values = values.astype(np.float64)
    magnitude = np.abs(values)
    _, exponent = np.frexp(np.where(np.isfinite(magnitude), magnitude, 0.0))
    exponent = np.where(magnitude == 0, 1 - bias, np.maximum(exponent - 1, 1 - bias))
    steps = np.rint(np.ldexp(magnitude, mantissa_bits - exponent))
    code = ((exponent - (1 - bias)) << mantissa_bits) + np.where(
        np.isfinite(steps), steps, 0
    ).astype(np.int64)
    over = (code > top) | np.isinf(magnitude)
    beyond = 0x7F if format == "e4m3" else 0x7C
    code = np.where(over, np.where(saturate, top, beyond), code)
    code = np.where(np.isnan(values), 0x7F, code)
    return (code | (np.signbit(values) << 7)).astype(np.uint8)


def e8m0(codes: NDArray[Any]) -> F64:
    """2^(code - 127); 255 is NaN."""
    value = np.ldexp(1.0, codes.astype(np.int32) - 127)
    return np.where(codes == 255, np.nan, value)
