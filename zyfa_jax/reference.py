"""What the kernels are held to, in NumPy.

`attention` is the oracle: plain softmax attention in float64. `fp8_attention` is the
FP8 arithmetic of the kernels, from FP8 or int8 logits: `fp8_softmax_block` gives the
same codes, bit for bit, as every kernel does from the same logits. The other
probabilities it takes ("exact block", "exact row", "unit") are those of published
kernels, for comparison.

All three take the layout of `zyfa_jax.attention`: q (B, T, H, D), k (B, S, K, D) and
v (B, S, K, Dv), or the same without B; K divides H; a batch of k and v that divides
that of q serves it in groups. Query rows are processed in slices, so the memory used
is proportional to the sequence length.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np

from ._spec import FLOAT8, INT8, canonical_window

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32, Int32, UInt8

__all__ = [
    "KEY_BLOCK",
    "PROBABILITIES",
    "Probabilities",
    "attention",
    "fp8_attention",
    "fp8_softmax_block",
]

KEY_BLOCK = 128
"""Keys that share one power-of-two scale in the FP8 arithmetic."""

Probabilities = Literal[
    "linear", "quadratic", "gfx950", "sm90", "exact block", "exact row", "unit"
]
PROBABILITIES: tuple[Probabilities, ...] = (
    "linear",
    "quadratic",
    "gfx950",
    "sm90",
    "exact block",
    "exact row",
    "unit",
)

_LOG2E = np.float32(1.4426950408889634)
_TOP = 8
"""The row's largest key has probability 2**_TOP before the division by the sum."""
_TOP_CODE = np.float32(120)
_MAX_CODE = np.float32(126)
_SM90_TOP = _TOP_CODE - np.float32(0.45)
_SM90_ROWS, _SM90_MASKED_ROWS = 128, 64
"""Queries of sm90's kernel that visit the same blocks, and that share a mask."""
_MAX_SHIFT = np.float32(120)
_UNORM16 = np.float32(65535)
_LINEAR_CODES = np.float32(2048) / _UNORM16
_LINEAR_TOP = (np.float32(120) - np.float32(0.45) + np.float32(0.5)) * (
    np.float32(256) / _UNORM16
)
_LINEAR_LARGEST = np.float32(127 * 256 - 1) / _UNORM16
_CHORD_BITS = np.float32(1024) / _UNORM16
_CHORD_TOP = (np.float32(15 + _TOP) - np.float32(1.05756)) * _CHORD_BITS
_CHORD_SECOND = np.float16(0.70710678)
_GFX950_CHORD_KEYS = 32
"""Keys of a block, its first ones, whose codes gfx950's kernel makes by chords."""
_GFX950_LOG2_SHARE = 6
"""gfx950's kernel keeps a row's maximum while a larger logit's probability is at most
2**-6 of the row's sum."""
_GFX950_ZERO = np.float32(1.5 * 2**23)
"""What gfx950's kernel starts sums of int8 products from."""
_CURVATURE = np.float32(0.3437)
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_ROWS, _LOGITS = 512, 1 << 22
"""Most queries, and most logits, that are processed at once."""


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    q_block: int = 0,
    kv_block: int = 0,
    v_channels: bool = False,
    q_offset: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
) -> tuple[Float[np.ndarray, "*b t h dv"], Float[np.ndarray, "*b h t"]]:
    """Softmax attention in float64, from inputs of any floating dtype.

    A descale is a scalar, broadcasts to (B, heads), or, with `q_block` or `kv_block`
    tokens per descale, has the shape (B, heads, blocks); with `v_channels` that of v
    has the shape (B, heads, Dv). Query i stands at position
    i + q_offset; by default the last query of a sequence stands at its last key.

    Returns:
      The output, and the natural logarithm of each query's sum of exponentials. A
      query that sees no key has output 0 and logarithm -inf.
    """
    call = _canonical(
        q, k, v, causal, scale, window, q_descale, k_descale, v_descale,
        q_block, kv_block, v_channels, q_offset, q_lengths, kv_lengths,
    )  # fmt: skip
    out, lse = call.empty_result()
    for tile in call.tiles():
        with np.errstate(invalid="ignore", over="ignore"):
            logits = (tile.q * tile.q_scale[:, None]) @ (
                tile.k * tile.k_scale[:, None]
            ).T
        logits = np.where(tile.visible, logits, -np.inf)
        top = logits.max(axis=1, initial=-np.inf)
        with np.errstate(invalid="ignore", divide="ignore"):
            weights = np.exp(logits - np.where(top == -np.inf, 0, top)[:, None])
            total = weights.sum(axis=1)
            mean = _product(weights, tile.v * tile.v_scale[:, None], tile.visible)
            tile.store(out, np.where(total == 0, 0, mean.T / total).T)
            tile.store_lse(lse, top + np.log(total))
    return call.unbatched(out), call.unbatched(lse)


def fp8_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    probabilities: Probabilities = "linear",
    causal: bool = True,
    scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    q_block: int = 0,
    kv_block: int = 0,
    v_channels: bool = False,
    q_offset: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
) -> tuple[Float[np.ndarray, "*b t h dv"], Float[np.ndarray, "*b h t"]]:
    """Attention over float8_e4m3fn inputs with probabilities in float8_e4m3fn.

    q and k may be int8 both, whose dot products are exact in int32 and in float32.
    Arguments and results as for `attention`; products are in float32, as kernels have
    them, and summed over the blocks of keys in float64.

    `probabilities` is how the e4m3 number of a key with the logit t in log2 is made, M
    being the row's running maximum and m the maximum of the key's block of 128:

    - "linear", "quadratic": codes computed without an exponential, see
      `fp8_softmax_block`. The CPU kernel's, the latter by default.
    - "gfx950": the first quarter of a block's keys coded by two chords, the others
      linearly, and M kept while no probability exceeds 1/64 of the row's sum; sums of
      int8 products start from 1.5 * 2**23. What the kernel for AMD's gfx950 does.
    - "sm90": coded linearly against m itself, whose code is that of 256, and weighted
      by `2**(m - M)`, a real number; half of the keys exactly, `2**(t - m + 8)`, in
      blocks that are masked or a query block's last. What the kernel for NVIDIA's
      Hopper does.
    - "exact block": `2**(t - M + n + 8)`, n = floor(M - m), weighted by `2**-n`.
    - "exact row": `2**(t - M + 8)`, as Composable Kernel and FlashAttention-3 do.
    - "unit": `2**(t - M)`, the row sum taken before rounding, as AITER's FP8 prefill
      kernels do (they return bfloat16).

    Raises:
      ValueError: for other probabilities, or inputs of other dtypes.
    """
    if probabilities not in PROBABILITIES:
        raise ValueError(
            f"probabilities must be one of {PROBABILITIES}, got {probabilities!r}"
        )
    dtypes = [np.asarray(x).dtype for x in (q, k, v)]
    if dtypes not in ([FLOAT8] * 3, [INT8, INT8, FLOAT8]):
        raise ValueError(
            "fp8_attention takes float8_e4m3fn inputs, or int8 q and k with "
            f"float8_e4m3fn v, got {', '.join(map(str, dtypes))}"
        )
    call = _canonical(
        q, k, v, causal, scale, window, q_descale, k_descale, v_descale,
        q_block, kv_block, v_channels, q_offset, q_lengths, kv_lengths,
    )  # fmt: skip
    step = _STEPS[probabilities]
    top = 0 if probabilities == "unit" else _TOP
    out, lse = call.empty_result()
    for tile in call.tiles():
        with np.errstate(invalid="ignore", over="ignore"):
            acc = tile.q.astype(np.float32) @ tile.k.astype(np.float32).T
        acc = np.where(tile.q_scale[:, None] < 0, -acc, acc)
        zero = np.copysign(_GFX950_ZERO if dtypes[0] == INT8 else 0, tile.q_scale)
        row_scale = np.abs(tile.q_scale).astype(np.float32)
        maximum = np.full(len(acc), -np.inf, np.float32)
        total = np.zeros(len(acc))
        sums = np.zeros((len(acc), tile.v.shape[1]))
        for start in range(0, acc.shape[1], KEY_BLOCK):
            keys = slice(start, start + KEY_BLOCK)
            visible = tile.visible[:, keys]
            if not visible.any():
                continue
            factor = row_scale * np.float32(tile.k_scale[start]) * _LOG2E
            p, new_maximum, row_sum = step(
                acc[:, keys],
                visible,
                factor,
                maximum,
                total,
                tile.few_keys(keys),
                zero,
            )
            with np.errstate(invalid="ignore"):
                rescale = np.exp2(maximum.astype(np.float64) - new_maximum)
            rescale = np.where(new_maximum == maximum, 1, rescale)
            values = (tile.v[keys] * tile.v_scale[keys, None]).astype(np.float32)
            sums = rescale[:, None] * sums + _product(p, values, visible)
            total = rescale * total + row_sum
            maximum = new_maximum
        with np.errstate(invalid="ignore", divide="ignore"):
            tile.store(out, np.where(total == 0, 0, sums.T / total).T)
            tile.store_lse(lse, math.log(2) * (maximum + np.log2(total) - top))
    return call.unbatched(out), call.unbatched(lse)


def fp8_softmax_block(
    acc: Float32[np.ndarray, "r n"],
    visible: Bool[np.ndarray, "r n"],
    factor: Float32[np.ndarray, " r"],
    running_max: Float32[np.ndarray, " r"],
    quadratic: bool,
    chord_keys: int = 0,
    slack: float | Float32[np.ndarray, " r"] = 0.0,
    zero: float | Float32[np.ndarray, " r"] = 0.0,
) -> tuple[
    UInt8[np.ndarray, "r n"],
    Int32[np.ndarray, " r"],
    Float32[np.ndarray, " r"],
    Float32[np.ndarray, " r"],
]:
    """The e4m3 codes of one block's probabilities, without an exponential.

    In e4m3's normal range the code of `2**u` is 8 (u + 7) to within a ninth of an
    octave, so one fused multiply-add of the logit and a rounding give the code: the
    idea of Schraudolph, "A Fast, Compact Approximation of the Exponential Function",
    Neural Computation 11 (1999). The linear code subtracts 0.45, the constant that
    balances its error, and is made in 1/256 of a code, as a fraction of 65535; the
    quadratic one bends the line: `2**f` is close to 1 + f - 0.3437 f (1 - f) for f in
    [0, 1). Two chords: float16 bits linear in u stand for a number above `2**u` in an
    arch over each octave; the weighted sum with the number half an octave of bits on,
    whose arches are half an octave off, follows `2**u` to within 0.8 %, and is rounded.

    All arithmetic is in float32, and this is its definition: every kernel gives the
    same codes from the same arguments.

    Args:
      acc: dot products of FP8 values, n <= 128 of one key block for each of r rows.
      visible: which of them count.
      factor: what turns acc into a logit in log2, at least 0.
      running_max: the rows' maximum logit so far, in log2; -inf if there is none.
      quadratic: whether the quadratic term is used.
      chord_keys: how many of the first keys are coded by two chords instead.
      slack: how far a logit may exceed `running_max`, in log2, which then stays.
      zero: what a kernel's dot products start from, and what it computes with besides:
        acc + zero, and logits less zero * factor.

    Returns:
      Four arrays:

      - codes: e4m3 bit patterns, 0 where not visible.
      - shift: n: a code stands for its e4m3 value times `2**-n`. Below 0 where the
        block exceeds a maximum that stays.
      - new_max: the maximum after this block.
      - row_sum: the sum of the codes' e4m3 values. NaN if a visible acc is.
    """
    acc = np.asarray(acc, np.float32)
    factor = np.asarray(factor, np.float32)
    zero = np.broadcast_to(np.float32(zero), factor.shape)
    acc, shifted = acc + zero[:, None], zero * factor
    new_max, block_max = _maxima(acc, visible, factor, running_max, shifted)
    with np.errstate(invalid="ignore", over="ignore"):
        stays = block_max <= (running_max + slack).astype(np.float32)
    new_max = np.where(stays, running_max, new_max)
    shift = _block_shift(new_max, block_max)
    reference = new_max + shifted - shift.astype(np.float32)
    per_octave = np.float32(8) if quadratic else _LINEAR_CODES
    top = _TOP_CODE if quadratic else _LINEAR_TOP
    with np.errstate(invalid="ignore", over="ignore"):
        base = top - per_octave * reference
        x = _fma(acc, (per_octave * factor)[:, None], base[:, None])
    valid = visible & ~np.isnan(new_max)[:, None]
    x = np.where(valid, x, np.float32(0))
    if quadratic:
        x = np.clip(x, np.float32(0), _MAX_CODE)
        within = x - 8 * np.floor(x / 8)
        bend = _fma(within, _CURVATURE / 8, -_CURVATURE)
        codes = np.rint(_fma(within, bend, x)).astype(np.uint8)
    else:
        x = np.clip(x, np.float32(0), _LINEAR_LARGEST)
        codes = (np.rint(x * _UNORM16).astype(np.int32) >> 8).astype(np.uint8)
    if chord_keys:
        first = np.s_[:, :chord_keys]
        codes[first] = _chord_codes(acc[first], valid[first], factor, reference)
    row_sum = _E4M3[codes].sum(axis=1, dtype=np.float64)
    row_sum = np.where(np.isnan(new_max), np.nan, row_sum).astype(np.float32)
    return codes, shift, new_max, row_sum


def _chord_codes(acc, valid, factor, reference) -> UInt8[np.ndarray, "r n"]:
    with np.errstate(invalid="ignore", over="ignore"):
        base = _CHORD_TOP - _CHORD_BITS * reference
        x = _fma(acc, (_CHORD_BITS * factor)[:, None], base[:, None])
    x = np.clip(np.where(valid, x, 0), np.float32(0), np.float32(1))
    bits = np.rint(x * _UNORM16).astype(np.uint16)
    arch = bits.view(np.float16)
    shifted = (bits + np.uint16(512)).view(np.float16)
    total = arch.astype(np.float64) + shifted.astype(np.float64) * _CHORD_SECOND
    return total.astype(np.float16).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _maxima(acc, visible, factor, running_max, shifted: Any = 0.0):
    """(the rows' maximum logit after the block, that of the block), in log2, where a
    logit is acc * factor - shifted."""
    top = np.where(visible, acc, -np.inf).max(axis=1, initial=-np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        logit = _fma(top.astype(np.float32), factor, -np.float32(shifted))
        block_max = np.where(top == -np.inf, top, logit)
    block_max = block_max.astype(np.float32)
    return np.maximum(running_max, block_max).astype(np.float32), block_max


def _block_shift(new_max, block_max) -> Int32[np.ndarray, " r"]:
    with np.errstate(invalid="ignore"):
        distance = np.minimum(np.floor(new_max - block_max), _MAX_SHIFT)
    return np.where(np.isfinite(block_max), distance, 0).astype(np.int32)


def _fma(a, b, c) -> Float32[np.ndarray, ...]:
    """a * b + c in float32 with one rounding.

    The product of two float32 numbers is exact in float64. Its sum with c is rounded
    to odd, which makes the second rounding, to float32, right: Boldo and Melquiond,
    "Emulation of a FMA and Correctly Rounded Sums", IEEE Trans. Computers 57 (2008).
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = np.asarray(product + np.float64(c))
    carried = total - product
    error = (product - (total - carried)) + (c - carried)
    bits = total.view(np.int64)
    to_odd = (error != 0) & np.isfinite(error) & (bits & 1 == 0)
    away = (error > 0) == (total > 0)
    return np.where(
        to_odd, np.where(away, bits + 1, bits - 1), bits
    ).view(np.float64).astype(np.float32)  # fmt: skip


def _product(p, v, visible):
    """p @ v, where a value that is not finite reaches only the rows that see it."""
    finite = np.isfinite(v)
    if finite.all():
        return p @ v
    out = p @ np.where(finite, v, 0)
    with np.errstate(invalid="ignore"):
        for key in np.flatnonzero(~finite.all(axis=1)):
            rows = visible[:, key]
            out[rows] += p[rows, key, None] * np.where(finite[key], 0, v[key])
    return out


_Step = Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray]]
"""(acc, visible, factor, running_max, total, few_keys, zero) -> probabilities, new_max,
row_sum.

`total` and row_sum are sums of probabilities, before and of this block; `few_keys` as
`_Tile.few_keys` gives it; `zero` as `fp8_softmax_block` takes it."""


def _gfx950_slack(total) -> Float32[np.ndarray, " r"]:
    """The logarithm of `total`, nearly, from its bits: linear in each octave."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = total.astype(np.float32).view(np.int32).astype(np.float32)
    log2 = _fma(bits, np.float32(2**-23), np.float32(-127 - _TOP - _GFX950_LOG2_SHARE))
    return np.maximum(log2, np.float32(0))


def _codes(quadratic: bool = False) -> _Step:
    def step(acc, visible, factor, running_max, *_):
        return _weighted(
            *fp8_softmax_block(acc, visible, factor, running_max, quadratic)
        )

    return step


def _gfx950(acc, visible, factor, running_max, total, _, zero):
    return _weighted(
        *fp8_softmax_block(
            acc, visible, factor, running_max, False, _GFX950_CHORD_KEYS,
            _gfx950_slack(total), zero,
        )
    )  # fmt: skip


def _sm90(acc, visible, factor, running_max, _, few_keys, __):
    new_max, block_max = _maxima(acc, visible, factor, running_max)
    top = np.where(visible, acc, -np.inf).max(axis=1, initial=-np.inf)
    slope = np.float32(8) * factor
    with np.errstate(invalid="ignore", over="ignore"):
        base = _fma(-np.where(np.isneginf(top), 0, top), slope, _SM90_TOP)
        x = _fma(acc, slope[:, None], base[:, None])
        weight = np.exp2(block_max - np.where(np.isneginf(new_max), 0, new_max))
    valid = visible & ~np.isnan(new_max)[:, None]
    codes = np.rint(np.maximum(np.where(valid, x, 0), np.float32(0))).astype(np.uint8)
    p = _E4M3[codes]
    if few_keys.any():
        with np.errstate(invalid="ignore", over="ignore"):
            logits = np.where(visible, acc * factor[:, None], -np.inf)
            exact = np.exp2(logits - block_max[:, None] + np.float32(_TOP))
        exactly = few_keys[:, None] & (np.arange(acc.shape[1]) % 32 >= 16)
        p = np.where(exactly & valid, _to_e4m3(exact), p)
    p = p * weight[:, None]
    return p, new_max, np.where(np.isnan(new_max), np.nan, p.sum(axis=1))


def _weighted(codes, shift, new_max, row_sum):
    weight = np.exp2(-shift.astype(np.float32))
    return _E4M3[codes] * weight[:, None], new_max, row_sum * weight


def _to_e4m3(x) -> Float32[np.ndarray, ...]:
    return x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _exact(top: int, *, block_scale: bool = False, rounded_sum: bool = True) -> _Step:
    def step(acc, visible, factor, running_max, *_):
        new_max, block_max = _maxima(acc, visible, factor, running_max)
        shift = _block_shift(new_max, block_max)
        if not block_scale:
            shift = np.zeros_like(shift)
        reference = np.where(np.isneginf(new_max), 0, new_max - shift)[:, None]
        logits = np.where(visible, acc * factor[:, None], -np.inf)
        exact = np.exp2(logits - reference + np.float32(top))
        rounded = _to_e4m3(exact)
        weight = np.exp2(-shift.astype(np.float32))[:, None]
        row_sum = rounded if rounded_sum else exact
        return rounded * weight, new_max, (row_sum * weight).sum(axis=1)

    return step


_STEPS: dict[Probabilities, _Step] = {
    "linear": _codes(),
    "quadratic": _codes(quadratic=True),
    "gfx950": _gfx950,
    "sm90": _sm90,
    "exact block": _exact(_TOP, block_scale=True),
    "exact row": _exact(_TOP),
    "unit": _exact(0, rounded_sum=False),
}


def _any_of(x, group) -> Bool[np.ndarray, " r"]:
    """For each row, whether x holds for any of its group."""
    return np.isin(group, group[x])


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Some queries of one head, and the keys that any of them sees."""

    batch: int
    head: int
    rows: slice
    q: Float[np.ndarray, "r d"]
    k: Float[np.ndarray, "n d"]
    v: Float[np.ndarray, "n dv"]
    q_scale: Float[np.ndarray, " r"]
    k_scale: Float[np.ndarray, " n"]
    v_scale: Float[np.ndarray, " n"]
    visible: Bool[np.ndarray, "r n"]

    def few_keys(self, keys: slice) -> Bool[np.ndarray, " r"]:
        """Of which queries sm90's kernel codes half of a block's keys exactly: of 64
        that do not all see all of them, and of 128 that see no later block."""
        rows = np.arange(self.rows.start, self.rows.stop)
        masked = _any_of(~self.visible[:, keys].all(axis=1), rows // _SM90_MASKED_ROWS)
        later = self.visible[:, keys.stop :].any(axis=1)
        return masked | ~_any_of(later, rows // _SM90_ROWS)

    def store(self, out, value) -> None:
        out[self.batch, self.rows, self.head] = value

    def store_lse(self, lse, value) -> None:
        lse[self.batch, self.head, self.rows] = value


@dataclasses.dataclass(frozen=True)
class _Call:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q_scale: np.ndarray
    k_scale: np.ndarray
    v_scale: np.ndarray
    q_offset: np.ndarray
    q_lengths: np.ndarray
    kv_lengths: np.ndarray
    left: int | None
    right: int | None
    batched: bool

    def empty_result(self):
        b, t, h, _ = self.q.shape
        return np.zeros((b, t, h, self.v.shape[3])), np.full((b, h, t), -np.inf)

    def unbatched(self, x):
        return x if self.batched else x[0]

    def tiles(self) -> Iterator[_Tile]:
        b, _, h, _ = self.q.shape
        bk, s, kv_heads, _ = self.k.shape
        rows = max(1, min(_ROWS, _LOGITS // max(s, 1)))
        for batch in range(b):
            kv_batch = batch // (b // bk)
            length = int(self.kv_lengths[batch])
            for head in range(h):
                kv_head = head // (h // kv_heads)
                k = self.k[kv_batch, :length, kv_head].astype(np.float64)
                v = self.v[kv_batch, :length, kv_head].astype(np.float64)
                for first in range(0, int(self.q_lengths[batch]), rows):
                    last = min(first + rows, int(self.q_lengths[batch]))
                    position = np.arange(first, last) + int(self.q_offset[batch])
                    low, high = self._key_range(position, length)
                    if low >= high:
                        continue
                    keys = np.arange(low, high)
                    yield _Tile(
                        batch=batch,
                        head=head,
                        rows=slice(first, last),
                        q=self.q[batch, first:last, head].astype(np.float64),
                        k=k[low:high],
                        v=v[low:high],
                        q_scale=self.q_scale[batch, head, first:last],
                        k_scale=self.k_scale[kv_batch, kv_head, low:high],
                        v_scale=self.v_scale[kv_batch, kv_head, low:high],
                        visible=self._visible(position[:, None], keys),
                    )

    def _key_range(self, position, length: int) -> tuple[int, int]:
        low = 0 if self.left is None else max(0, int(position[0]) - self.left)
        high = length if self.right is None else int(position[-1]) + self.right + 1
        return low // KEY_BLOCK * KEY_BLOCK, min(length, high)

    def _visible(self, position, keys):
        visible = np.ones((len(position), len(keys)), bool)
        if self.left is not None:
            visible &= keys >= position - self.left
        if self.right is not None:
            visible &= keys <= position + self.right
        return visible


def _canonical(
    q, k, v, causal, scale, window, q_descale, k_descale, v_descale,
    q_block, kv_block, v_channels, q_offset, q_lengths, kv_lengths,
) -> _Call:  # fmt: skip
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    batched = q.ndim == 4
    if not batched:
        q, k, v = q[None], k[None], v[None]
    if v_channels:
        v = v.astype(np.float64) * np.asarray(v_descale, np.float64)[..., None, :, :]
        v_descale = None
    (b, t, h, d), (bk, s, kv_heads, _) = q.shape, k.shape
    if (
        k.shape[3] != d
        or v.shape[:3] != k.shape[:3]
        or (b % bk if bk else b)
        or h % kv_heads
    ):
        raise ValueError(
            "q, k, v must be (B, T, H, D), (B, S, K, D), (B, S, K, Dv) with K dividing "
            f"H, got {q.shape}, {k.shape}, {v.shape}"
        )
    scale = 1 / math.sqrt(d) if scale is None else scale
    left, right = canonical_window(window, causal)
    q_lengths = np.clip(_per_batch(q_lengths, t, b), 0, t)
    kv_lengths = np.clip(_per_batch(kv_lengths, s, b), 0, s)
    return _Call(
        q=q,
        k=k,
        v=v,
        q_scale=_per_token(q_descale, b, h, t, q_block) * float(scale),
        k_scale=_per_token(k_descale, bk, kv_heads, s, kv_block),
        v_scale=_per_token(v_descale, bk, kv_heads, s, kv_block),
        q_offset=_per_batch(q_offset, kv_lengths - q_lengths, b),
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        left=left,
        right=right,
        batched=batched,
    )


def _per_batch(x, default, b: int) -> np.ndarray:
    return np.broadcast_to(np.asarray(default if x is None else x, np.int64), (b,))


def _per_token(descale, b: int, heads: int, tokens: int, block: int) -> np.ndarray:
    """A descale for each token: (b, heads, tokens), float64."""
    x = np.asarray(1 if descale is None else descale, np.float64)
    if not block:
        return np.broadcast_to(
            np.broadcast_to(x, (b, heads))[..., None], (b, heads, tokens)
        )
    blocks = -(-tokens // block)
    return np.broadcast_to(x, (b, heads, blocks)).repeat(block, axis=2)[:, :, :tokens]
