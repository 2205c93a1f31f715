"""What every implementation of `quantize` and `quantize_qkv` computes, in jnp."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import lax

if TYPE_CHECKING:
    from jaxtyping import Array

FP8 = np.dtype(jnp.float8_e4m3fn)
INT8 = np.dtype(np.int8)
LARGEST = {FP8: 448.0, INT8: 127.0}
GUARD_ABOVE = 2.0**64
KEY_BLOCK = 128
"""Keys that share a descale in int8."""

_SMALLEST_NORMAL = float(jnp.finfo(jnp.float32).smallest_normal)
_MOST_BALANCE = 16


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Everything static of the rounding of one array.

    Attributes:
      granularity: what shares a descale, "head", "tensor", "block" or "channel".
      block: tokens that share a descale; 0 if all of a head's tokens do.
      center: whether each head's mean over tokens is subtracted.
      rotate: whether the last axis is rotated.
      dtype: of the values, float8_e4m3fn or int8.
      tensors: how many arrays lie along the batch, each a tensor of its own.
    """

    granularity: str = "head"
    block: int = 0
    center: bool = False
    rotate: bool = False
    dtype: np.dtype = FP8
    tensors: int = 1


TOGETHER = {
    "fp8": (
        Rounding(rotate=True),
        Rounding(center=True, rotate=True),
        Rounding(),
    ),
    "int8": (
        Rounding("block", 1, rotate=True, dtype=INT8),
        Rounding("block", KEY_BLOCK, center=True, rotate=True, dtype=INT8),
        Rounding("channel"),
    ),
}
"""How `quantize_qkv` rounds q, k and v, by its precision."""


def together(precision: str, rotated: bool) -> tuple[Rounding, Rounding, Rounding]:
    """`TOGETHER`, without a rotation of what comes rotated."""
    q, k, v = TOGETHER[precision]
    q, k = (dataclasses.replace(x, rotate=not rotated) for x in (q, k))
    return q, k, v


def define(x: Array, rounding: Rounding) -> tuple[Array, ...]:
    """`quantize`: (values, descale, mean)."""
    mean = mean_over_tokens(x) if rounding.center else None
    values, descale = rounded(x, mean, rounding=rounding)
    return values, descale, *([] if mean is None else [mean.squeeze(1)])


def define_together(
    q: Array, k: Array, v: Array, precision: str, rotated: bool
) -> tuple[tuple[Array, ...], tuple[Array, ...], tuple[Array, ...], Array]:
    """`quantize_qkv`: q's (values, descale), k's (values, descale, mean), v's (values,
    descale), the exponent of `balance`, 0 for what comes rotated."""
    roundings = together(precision, rotated)
    mean = mean_over_tokens(k)
    if rotated:
        exponent, of_q, of_k = jnp.zeros_like(mean.squeeze(1), jnp.int32), None, None
    else:
        exponent = balance_of(q, k, mean)
        of_q, of_k = (w[:, None] for w in weights(exponent, q.shape[2]))
    q8, q_descale = rounded(q, None, of_q, rounding=roundings[0])
    k8, k_descale = rounded(k, mean, of_k, rounding=roundings[1])
    v8, v_descale = rounded(v, rounding=roundings[2])
    if precision == "int8":
        # What int8 cannot say, the descales of queries and the values of keys do.
        nan = jnp.swapaxes(jnp.isnan(q).any(axis=-1), 1, 2)
        q_descale = jnp.where(nan, np.float32(np.nan), q_descale)
        nan = jnp.isnan(k).any(axis=-1, keepdims=True)
        v8 = jnp.where(nan, jnp.asarray(np.nan, v8.dtype), v8)
    return (q8, q_descale), (k8, k_descale, mean.squeeze(1)), (v8, v_descale), exponent


def rounded(
    x: Array,
    mean: Array | None = None,
    weight: Array | None = None,
    *,
    rounding: Rounding,
) -> tuple[Array, Array]:
    """(values, descale) of x less the mean, times the weight, rotated."""
    y, guard = prepare(x, mean, weight, rounding=rounding)
    values, largest = _round(y, rounding)
    # Compilers for GPUs take a conversion to FP8 and back for nothing.
    values = lax.optimization_barrier(values)
    guard = guard.reshape(
        *guard.shape[:1], guard.shape[2], *(1 for _ in largest.shape[2:])
    )
    top = LARGEST[rounding.dtype]
    return values, descale_of(largest, top) / jnp.where(largest == 0, 1, guard)


def prepare(
    x: Array,
    mean: Array | None = None,
    weight: Array | None = None,
    *,
    rounding: Rounding,
) -> tuple[Array, Array]:
    """(x less the mean, times the weight, rotated, times a guard; the guard), float32.

    Mean and weight, powers of two, are (B, 1, H, D), the guard (B, 1, H, 1). Means and
    rotated channels of numbers near float32's maximum would overflow. What shares a
    descale shares the guard, a power of two.
    """
    y = x.astype(jnp.float32)
    if (mean is None and not rounding.rotate) or x.dtype == jnp.float16:
        guard = jnp.ones((x.shape[0], 1, x.shape[2], 1), jnp.float32)
    else:
        largest = lax.stop_gradient(_largest_of_heads(y, rounding))
        guard = jnp.where(largest > GUARD_ABOVE, np.float32(1 / GUARD_ABOVE), 1)
        y = y * guard
    if mean is not None:
        y = y - mean * guard
    if weight is not None:
        y = y * weight
    return (rotated(y) if rounding.rotate else y), guard


def rotated(y: Array) -> Array:
    """y times an orthonormal Hadamard matrix along the last axis."""
    dim = y.shape[-1]
    size = dim & -dim
    index = jnp.arange(size)
    odd = lax.population_count(index[:, None] & index) % 2
    matrix = jnp.where(odd == 1, -1, 1).astype(jnp.float32) / np.float32(
        math.sqrt(size)
    )
    blocks = y.reshape(*y.shape[:-1], dim // size, size)
    return jnp.matmul(blocks, matrix, precision=lax.Precision.HIGHEST).reshape(y.shape)


def mean_over_tokens(x: Array) -> Array:
    """The mean of the finite numbers of each channel, (B, 1, H, D) in float32.

    Numbers are made small enough, by a power of two, that their sum is finite.
    """
    tokens = x.shape[1]
    bits = tokens.bit_length() if isinstance(tokens, int) else 32
    small = np.float32(1 if x.dtype == jnp.float16 else 2.0**-bits)
    y = x.astype(jnp.float32)
    finite = jnp.isfinite(y)
    count = jnp.maximum(finite.sum(axis=1, keepdims=True), 1)
    total = jnp.where(finite, y * small, 0).sum(axis=1, keepdims=True)
    return total / (count.astype(jnp.float32) * small)


def balance_of(q: Array, k: Array, mean: Array) -> Array:
    """`balance` of q and k, whose `mean_over_tokens` is `mean`."""
    k = k.astype(jnp.float32) - mean
    return balance(_mean_square(q.astype(jnp.float32)), _mean_square(k))


def balance(of_q: Array, of_k: Array) -> Array:
    """The exponent by which each channel of k is too large: int32 (B, K, D).

    Of the channels' mean squares (B, H, D) and (B, K, D). Relative to a head's other
    channels, so that padding with the mean changes nothing.
    """
    batch, heads, dim = of_k.shape
    of_q = of_q.reshape(batch, heads, of_q.shape[1] // heads, dim).mean(axis=2)
    log_ratio = jnp.log2(of_k) - jnp.log2(of_q)
    # Channels without numbers, or with too large ones, stay as they are.
    known = jnp.isfinite(log_ratio)
    mean = jnp.mean(log_ratio, axis=-1, keepdims=True, where=known)
    log_ratio = jnp.where(known, log_ratio - mean, 0)
    most = np.float32(_MOST_BALANCE)
    return jnp.clip(jnp.round(log_ratio / 4), -most, most).astype(jnp.int32)


def weights(exponent: Array, heads: int) -> tuple[Array, Array]:
    """What balances q, (B, H, D), and k, (B, K, D): powers of two in float32."""
    one = jnp.ones(exponent.shape, jnp.float32)
    of_q, of_k = jnp.ldexp(one, exponent), jnp.ldexp(one, -exponent)
    return jnp.repeat(of_q, heads // exponent.shape[1], axis=1), of_k


def _mean_square(x: Array) -> Array:
    """Of the finite numbers of each channel, (B, H, D)."""
    finite = jnp.isfinite(x)
    count = jnp.maximum(finite.sum(axis=1), 1)
    total = jnp.where(finite, x * x, 0).sum(axis=1)
    return total / count.astype(jnp.float32)


def _round(y: Array, rounding: Rounding) -> tuple[Array, Array]:
    """(y / descale in the dtype of the values, the largest magnitude behind each
    descale)."""
    tokens, block = y.shape[1], rounding.block
    top = LARGEST[rounding.dtype]
    if rounding.granularity == "channel":
        of_all = _magnitude(y, axis=1)
        per_token, largest = of_all[:, None], of_all
    elif not block:
        per_token = _largest_of_heads(y, rounding)
        largest = per_token[:, 0, :, 0]
    else:
        blocks = -(-tokens // block)
        padded = jnp.pad(y, [(0, 0), (0, blocks * block - tokens), (0, 0), (0, 0)])
        tiles = padded.reshape(y.shape[0], blocks, block, *y.shape[2:])
        largest = _magnitude(tiles, axis=(2, 4))
        per_token = jnp.repeat(largest, block, axis=1)[:, :tokens, :, None]
        largest = jnp.swapaxes(largest, 1, 2)
    scaled = jnp.clip(y / descale_of(per_token, top), -top, top)
    if rounding.dtype == INT8:  # which has no NaN
        scaled = jnp.where(jnp.isnan(scaled), 0, jnp.round(scaled))
    return scaled.astype(rounding.dtype), largest


def descale_of(largest: Array, top: float) -> Array:
    # A product, as XLA makes of a division by a constant, but in some programs only.
    # A descale below the normal range would be flushed to zero by some devices.
    descale = jnp.maximum(largest * np.float32(1 / top), _SMALLEST_NORMAL)
    return jnp.where(largest == 0, 1.0, descale).astype(jnp.float32)


def _magnitude(y: Array, axis: Any) -> Array:
    """The largest finite magnitude, 0 if there is none."""
    return jnp.max(jnp.abs(y), axis=axis, initial=0.0, where=jnp.isfinite(y))


def _largest_of_heads(y: Array, rounding: Rounding) -> Array:
    """The largest finite magnitude of each head, or of its tensor: (B, 1, H, 1)."""
    return shared(_magnitude(y, axis=(1, 3)), rounding)[:, None, :, None]


def shared(of_head: Array, rounding: Rounding) -> Array:
    """The largest of a tensor where that is what shares a descale; (B, H)."""
    if rounding.granularity != "tensor":
        return of_head
    batch, heads = of_head.shape
    if rounding.tensors == 1:  # no reshape, so that a sharded batch stays so
        tensors = of_head[None]
    else:
        rows = batch // max(rounding.tensors, 1)
        tensors = of_head.reshape(rounding.tensors, rows, heads)
    largest = jnp.max(tensors, axis=(1, 2), initial=0.0, keepdims=True)
    return jnp.broadcast_to(largest, tensors.shape).reshape(of_head.shape)
