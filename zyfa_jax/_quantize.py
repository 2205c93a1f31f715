"""FP8 or int8 values with float32 descales, and how to make them."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _compat, _spec
from . import _quantize_primitive as primitive

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int8

    Unquantized = Float[Array, "*b s h d"] | Float[np.ndarray, "*b s h d"]

_BLOCK_UNIT = 128
_GRANULARITIES = ("head", "tensor", "block")
_DTYPES = ("bfloat16", "float16", "float32")
_PRECISIONS = ("int8", "fp8")
_MOST_BALANCE = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array as float8_e4m3fn or int8: an element is its value times its descale.

    A pytree, made by `quantize` or `quantize_qkv` and taken by `attention` as q, k or
    v.

    Attributes:
      values: float8_e4m3fn or int8, (B, S, H, D) or (S, H, D).
      descale: float32, (B, H); or (B, H, ceil(S / block)) if `block` is not 0; or (B,
        H, D) if `channels`; without B for (S, H, D).
      center: what was subtracted from every token of a head, float32 (B, H, D) or
        (H, D), in the rotated basis if `rotated`; None if nothing was.
      source: what was rounded to `values * descale`, in the dtype that was given.
        Gradients with respect to the values go here, as if the rounding were not
        there (the straight-through estimator). None if there are to be no gradients.
      block: tokens that share a descale; 0 if all of a head's tokens do.
      rotated: whether the last axis was rotated by a Hadamard matrix.
      channels: whether each channel of a head has its own descale, for v alone.
      balanced: whether channels were weighted, q's against k's, by `quantize_qkv`.
    """

    values: Float[Array, "*b s h d"] | Int8[Array, "*b s h d"]
    descale: (
        Float32[Array, "*b h"] | Float32[Array, "*b h n"] | Float32[Array, "*b h d"]
    )
    center: Float32[Array, "*b h d"] | None = None
    source: Float[Array, "*b s h d"] | None = None
    block: int = dataclasses.field(default=0, metadata={"static": True})
    rotated: bool = dataclasses.field(default=False, metadata={"static": True})
    channels: bool = dataclasses.field(default=False, metadata={"static": True})
    balanced: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    def detach(self) -> Quantized:
        """Without `source`: a constant to differentiation, and less to keep."""
        return dataclasses.replace(self, source=None)

    def dequantize(self) -> Float32[Array, "*b s h d"]:
        """`values` times `descale`, in float32: still centred, balanced, rotated."""
        tokens = self.values.shape[-3]
        descale = self.descale
        if self.channels:
            per_token = descale[..., None, :, :]
        elif self.block:
            descale = jnp.repeat(descale, self.block, axis=-1)[..., :tokens]
            per_token = jnp.moveaxis(descale, -1, -2)[..., None]
        else:
            per_token = descale[..., None, :, None]
        return self.values.astype(jnp.float32) * per_token


def quantize(
    x: Unquantized,
    *,
    granularity: Literal["head", "tensor", "block"] = "head",
    block: int = 128,
    center: bool = False,
    rotate: bool = False,
) -> Quantized:
    """Rounds x to float8_e4m3fn, scaled so that its largest magnitude becomes 448.

    Finite inputs give finite values: a magnitude of zero has the descale 1. Infinities
    saturate and NaN stays NaN; neither has a part in the descale or the mean.

    Gradients pass through the rounding unchanged, to x.

    Args:
      x: bfloat16, float16 or float32, (B, S, H, D) or (S, H, D).
      granularity: what shares a descale: "head", the tokens of one head of one batch
        element; "tensor", all of x; "block", `block` consecutive tokens of one head.
      block: a positive multiple of 128, the kernels' key tile. Used with "block".
      center: subtract each head's mean over tokens, as SageAttention does (Zhang et
        al., arXiv:2410.02367). For k alone: it takes one number off all logits of a
        query, which softmax ignores. Keys that a query sees together must be quantized
        together.
      rotate: multiply the last axis by an orthonormal Hadamard matrix, in blocks of
        the largest power of two that divides D, as QuaRot does (Ashkboos et al.,
        arXiv:2404.00456). For q and k, both of them: it leaves their products as they
        are. It evens out the channels, which FP8, having exponents, profits from less
        than integers do; a few very large channels can even lose by it. Measure.

    `python -m benchmarks accuracy` prints the error that each option leaves.

    Raises:
      ValueError: if x has another rank or dtype, or an option is not one of these.
    """
    return quantize_by(
        None, x, granularity=granularity, block=block, center=center, rotate=rotate
    )


def quantize_qkv(
    q: Unquantized,
    k: Unquantized,
    v: Unquantized,
    *,
    precision: Literal["int8", "fp8"] = "int8",
    rotated: bool = False,
) -> tuple[Quantized, Quantized, Quantized]:
    """Rounds q, k and v to 8 bits so that attention over them errs least.

    Logits do not change, in exact arithmetic, by what is done to q and k together:

    - k is centred: see `quantize`.
    - Channels are balanced: those of q are multiplied, and those of k divided, by the
      power of two nearest to the root of the ratio of k's root mean square to q's. Of
      all weights, that ratio's root makes the sum of squares of both least, which the
      rounding error goes with; SmoothQuant (Xiao et al., arXiv:2211.10438) weighs
      activations against weights so, by their maxima.
    - Both are rotated: see `quantize`.

    Finite inputs give finite values. A NaN in a query makes its result NaN; a NaN in a
    key makes its value NaN, and so the results of the queries that see it. Infinities
    saturate. Neither has a part in descales, means or weights.

    Gradients pass through the rounding unchanged, to q, k and v.

    Args:
      q: bfloat16, float16 or float32, (B, T, H, D) or (T, H, D).
      k: of q's dtype, (B, S, K, D) or (S, K, D); H is a multiple of K. All of the keys
        that these queries see: k's mean and both balances are over tokens.
      v: of q's dtype, (B, S, K, E) or (S, K, E).
      precision: of q and k. "int8": with a descale for each query, and for each 128
        keys; v in float8_e4m3fn with a descale for each of its channels. "fp8":
        float8_e4m3fn with one descale for all tokens of a head, v likewise, which
        every kernel takes.
      rotated: whether q and k come rotated, and balanced if they are to be, from
        weights that were changed so (`fold_rotation` in `zyfa_jax.flax.linen` and
        `zyfa_jax.flax.nnx`). They are then centred and rounded alone. Any orthogonal
        matrix will do: nothing undoes it.

    Returns:
      q, k and v for `attention`, which takes them together alone.

    Raises:
      ValueError: if the arrays do not go together, or for another precision.
    """
    if precision not in _PRECISIONS:
        raise ValueError(
            f"quantize_qkv takes precision {' or '.join(map(repr, _PRECISIONS))}, not "
            f"{precision!r}"
        )
    _check_flags("quantize_qkv", rotated=rotated)
    for x in (q, k, v):
        _check(x, "head", 0, "quantize_qkv")
    _spec.check_operands([x.shape for x in (q, k, v)], [x.dtype for x in (q, k, v)])
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    int8, rotated = precision == "int8", bool(rotated)
    q8, k8, v8 = _quantize_qkv(q, k, v, int8=int8, rotated=rotated)
    if rotated:
        q8 = dataclasses.replace(q8, source=q)
    return q8, k8, dataclasses.replace(v8, source=v)


@functools.partial(jax.jit, static_argnames=("int8", "rotated"))
def _quantize_qkv(
    q: Array, k: Array, v: Array, *, int8: bool, rotated: bool
) -> tuple[Quantized, Quantized, Quantized]:
    """The source of v is None, for v itself; so is that of q if it comes rotated."""
    if q.ndim == 3:
        z = _quantize_qkv(q[None], k[None], v[None], int8=int8, rotated=rotated)
        return jax.tree.map(lambda leaf: leaf[0], z)
    rotate = not rotated
    if rotated:
        balanced_q, balanced_k = q, k
    else:
        balanced_q, balanced_k = _compat.automatic_axes(_balanced, (q, k))(q, k)
    head = primitive.Rounding("head", 0, center=False, rotate=False)
    if not int8:
        of_q = dataclasses.replace(head, rotate=rotate)
        q8 = _quantize(balanced_q, rounding=of_q)
        centred = dataclasses.replace(of_q, center=True)
        k8 = _quantize(balanced_k, rounding=centred)
        v8 = _quantize(v, rounding=head)
    else:
        of_int8 = functools.partial(
            primitive.Rounding, "block", rotate=rotate, dtype=primitive.INT8
        )
        q8 = _quantize(balanced_q, rounding=of_int8(block=1, center=False))
        k8 = _quantize(balanced_k, rounding=of_int8(block=_BLOCK_UNIT, center=True))
        # What int8 cannot say, the descales of queries and the values of keys do.
        nan = jnp.swapaxes(jnp.isnan(q).any(axis=-1), 1, 2)
        q8 = dataclasses.replace(q8, descale=jnp.where(nan, np.nan, q8.descale))
        nan = jnp.isnan(k).any(axis=-1, keepdims=True)
        by_channel = dataclasses.replace(head, granularity="channel")
        v = jnp.where(nan, jnp.asarray(np.nan, v.dtype), v)
        v8 = _quantize(v, rounding=by_channel)
    q8, k8 = (
        dataclasses.replace(x, rotated=True, balanced=not rotated) for x in (q8, k8)
    )
    return q8, k8, v8


def _balanced(q: Array, k: Array) -> tuple[Array, Array]:
    """q and k with their channels weighted against each other."""
    exponent = balance(*lax.stop_gradient((q, k)))
    of_q = jnp.repeat(exponent, q.shape[2] // k.shape[2], axis=2)
    return _times(q, of_q), _times(k, -exponent)


def balance(q: Array, k: Array) -> Array:
    """The exponent by which each channel of k is too large: int32 (B, 1, K, D).

    Relative to a head's other channels, so that padding with the mean changes nothing.
    """
    k = k.astype(jnp.float32) - primitive.mean_over_tokens(k)
    of_q = _mean_square(q.astype(jnp.float32))
    batch, _, heads, dim = k.shape
    of_q = of_q.reshape(batch, 1, heads, of_q.shape[2] // heads, dim).mean(axis=3)
    log_ratio = jnp.log2(_mean_square(k)) - jnp.log2(of_q)
    # Channels without numbers, or with too large ones, stay as they are.
    known = jnp.isfinite(log_ratio)
    mean = jnp.mean(log_ratio, axis=-1, keepdims=True, where=known)
    log_ratio = jnp.where(known, log_ratio - mean, 0)
    most = np.float32(_MOST_BALANCE)
    return jnp.clip(jnp.round(log_ratio / 4), -most, most).astype(jnp.int32)


def _mean_square(x: Array) -> Array:
    """Of the finite numbers of each channel, (B, 1, H, D)."""
    finite = jnp.isfinite(x)
    count = jnp.maximum(finite.sum(axis=1, keepdims=True), 1)
    total = jnp.where(finite, x * x, 0).sum(axis=1, keepdims=True)
    return total / count.astype(jnp.float32)


def _times(x: Array, exponent: Array) -> Array:
    """x times a power of two: exactly, but for numbers near the ends of the range."""
    dtype = jnp.float32 if x.dtype == jnp.float16 else x.dtype
    one = jnp.ones(exponent.shape, jnp.float32)
    return x.astype(dtype) * jnp.ldexp(one, exponent).astype(dtype)


def quantize_by(
    implementation: str | None,
    x: Any,
    *,
    granularity: Any = "head",
    block: Any = 128,
    center: Any = False,
    rotate: Any = False,
) -> Quantized:
    """`quantize` by the kernel of a platform; None leaves it to the platform."""
    _check(x, granularity, block)
    _check_flags("quantize", center=center, rotate=rotate)
    x = jnp.asarray(x)
    rounding = primitive.Rounding(
        granularity,
        block=int(block) if granularity == "block" else 0,
        center=bool(center),
        rotate=bool(rotate),
        implementation=implementation,
    )
    z = _quantize(x, rounding=rounding)
    return z if center or rotate else dataclasses.replace(z, source=x)


@functools.partial(jax.jit, static_argnames="rounding")
def _quantize(x: Array, *, rounding: primitive.Rounding) -> Quantized:
    """The source is None where it would be x itself."""
    if x.ndim == 3:
        z = _quantize(x[None], rounding=rounding)
        return jax.tree.map(lambda leaf: leaf[0], z)
    values, descale, *means = _bind(lax.stop_gradient(x), rounding=rounding)
    channels = rounding.granularity == "channel"
    z = Quantized(values, descale, block=rounding.block, channels=channels)
    if not (rounding.center or rounding.rotate):
        return z
    means = [_as(m[:, None], primitive.mean_over_tokens(x)) for m in means]
    y, guard = primitive.prepare(x, *means, rounding=rounding)
    return dataclasses.replace(
        z,
        center=_center(*means, rotate=rounding.rotate) if means else None,
        source=(y / guard).astype(x.dtype),
        rotated=rounding.rotate,
    )


@jax.custom_jvp
def _as(value: Array, like: Array) -> Array:
    """`value`, with the derivatives of `like`, which is not computed but for these."""
    del like
    return value


@_as.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return primals[0], tangents[1]


def _bind(x: Array, rounding: primitive.Rounding) -> Any:
    bind = functools.partial(primitive.quantize_p.bind, rounding=rounding)
    return _compat.automatic_axes(bind, jax.eval_shape(bind, x))(x)


def _center(mean: Array, rotate: bool) -> Array:
    if rotate:
        # Small enough that sums of numbers near float32's maximum do not overflow.
        small = np.float32(2.0**-8)
        mean = primitive.rotated(mean * small) / small
    return mean.squeeze(1)


def _check(x: Any, granularity: Any, block: Any, name: str = "quantize") -> None:
    if isinstance(x, Quantized):
        raise ValueError(
            f"{name} takes an array that is not yet quantized, got Quantized"
        )
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(f"{name} takes a JAX or NumPy array, got {type(x).__name__}")
    if str(x.dtype) not in _DTYPES:
        raise ValueError(f"{name} takes bfloat16, float16 or float32, got {x.dtype}")
    if x.ndim not in (3, 4):
        raise ValueError(
            f"{name} takes an array of shape (batch, tokens, heads, dim) or (tokens, "
            f"heads, dim), got {x.shape}"
        )
    if granularity not in _GRANULARITIES:
        raise ValueError(
            f"granularity must be one of {_GRANULARITIES}, got {granularity!r}"
        )
    if granularity != "block":
        return
    integer = isinstance(block, (int, np.integer)) and not isinstance(block, bool)
    if not integer or block <= 0 or block % _BLOCK_UNIT:
        raise ValueError(
            f"block must be a positive multiple of {_BLOCK_UNIT} tokens, got "
            f"{_spec.static(block)}"
        )


def _check_flags(function: str, **flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise ValueError(
                f"{function} takes {name}=True or False, got {_spec.static(flag)}"
            )
