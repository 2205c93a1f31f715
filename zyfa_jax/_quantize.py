"""FP8 or int8 values with float32 descales, and how to make them."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from . import _compat, _spec
from . import _quantize_numerics as numerics
from ._quantize_primitive import quantize_p, quantize_qkv_p

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int8

    Unquantized = Float[Array, "*b s h d"] | Float[np.ndarray, "*b s h d"]

_BLOCK_UNIT = 128
_GRANULARITIES = ("head", "tensor", "block")
_DTYPES = ("bfloat16", "float16", "float32")
_PRECISIONS = ("int8", "fp8")


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
    return quantize_qkv_by(None, q, k, v, precision=precision, rotated=rotated)


def quantize_qkv_by(
    implementation: str | None,
    q: Any,
    k: Any,
    v: Any,
    *,
    precision: Any = "int8",
    rotated: Any = False,
) -> tuple[Quantized, Quantized, Quantized]:
    """`quantize_qkv` by the kernels of a platform; None leaves it to the platform."""
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
    q8, k8, v8 = _quantize_qkv(
        q,
        k,
        v,
        precision=precision,
        rotated=bool(rotated),
        implementation=implementation,
    )
    if rotated:
        q8 = dataclasses.replace(q8, source=q)
    return q8, k8, dataclasses.replace(v8, source=v)


@functools.partial(jax.jit, static_argnames=("precision", "rotated", "implementation"))
def _quantize_qkv(
    q: Array, k: Array, v: Array, *, rotated: bool, **params: Any
) -> tuple[Quantized, Quantized, Quantized]:
    """The source of v is None, for v itself; so is that of q if it comes rotated."""
    params["rotated"] = rotated
    if q.ndim == 3:
        z = _quantize_qkv(q[None], k[None], v[None], **params)
        return jax.tree.map(lambda leaf: leaf[0], z)
    operands = _compat.match_varying(lax.stop_gradient((q, k, v)))
    results = _bind(quantize_qkv_p, *operands, **params)
    *of_q, k_values, k_descale, mean, v_values, v_descale, exponent = results
    roundings = numerics.together(params["precision"], rotated)
    q8, k8, v8 = (
        Quantized(
            *leaves,
            block=rounding.block,
            channels=rounding.granularity == "channel",
        )
        for leaves, rounding in zip(
            (of_q, (k_values, k_descale), (v_values, v_descale)), roundings, strict=True
        )
    )
    q8, k8 = (
        dataclasses.replace(x, rotated=True, balanced=not rotated) for x in (q8, k8)
    )
    if rotated:
        mean = _as(mean[:, None], numerics.mean_over_tokens(k))
        source, center = _source(k, mean, rounding=roundings[1]), mean.squeeze(1)
    else:
        prepared = _compat.automatic_axes(_prepared, (q, k, mean))
        q_source, source, center = prepared(q, k, mean, exponent)
        q8 = dataclasses.replace(q8, source=q_source)
    return q8, dataclasses.replace(k8, source=source, center=center), v8


def _prepared(
    q: Array, k: Array, mean: Array, exponent: Array
) -> tuple[Array, Array, Array]:
    """What q and k were rounded from, and k's center."""
    of_q, of_k = (w[:, None] for w in numerics.weights(exponent, q.shape[2]))
    mean = _as(mean[:, None], numerics.mean_over_tokens(k))
    q_rounding, k_rounding, _ = numerics.TOGETHER["fp8"]  # in int8 it is the same
    q_source = _source(q, None, of_q, rounding=q_rounding)
    k_source = _source(k, mean, of_k, rounding=k_rounding)
    return q_source, k_source, _center(mean * of_k, rotate=True)


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
    rounding = numerics.Rounding(
        granularity,
        block=int(block) if granularity == "block" else 0,
        center=bool(center),
        rotate=bool(rotate),
    )
    z = _quantize(x, rounding=rounding, implementation=implementation)
    return z if center or rotate else dataclasses.replace(z, source=x)


@functools.partial(jax.jit, static_argnames=("rounding", "implementation"))
def _quantize(
    x: Array, *, rounding: numerics.Rounding, implementation: str | None
) -> Quantized:
    """The source is None where it would be x itself."""
    params = {"rounding": rounding, "implementation": implementation}
    if x.ndim == 3:
        z = _quantize(x[None], **params)
        return jax.tree.map(lambda leaf: leaf[0], z)
    values, descale, *mean = _bind(quantize_p, lax.stop_gradient(x), **params)
    z = Quantized(values, descale, block=rounding.block, rotated=rounding.rotate)
    mean = [_as(m[:, None], numerics.mean_over_tokens(x)) for m in mean]
    if mean:
        center = _center(*mean, rotate=rounding.rotate)
        z = dataclasses.replace(z, center=center)
    if not (mean or rounding.rotate):
        return z
    return dataclasses.replace(z, source=_source(x, *mean, rounding=rounding))


def _source(
    x: Array,
    mean: Array | None = None,
    weight: Array | None = None,
    *,
    rounding: numerics.Rounding,
) -> Array:
    """What is rounded, before the guard."""
    y, guard = numerics.prepare(x, mean, weight, rounding=rounding)
    # Weights may be more than float16 can hold.
    wide = weight is not None and x.dtype == jnp.float16
    return (y / guard).astype(jnp.float32 if wide else x.dtype)


@jax.custom_jvp
def _as(value: Array, like: Array) -> Array:
    """`value`, with the derivatives of `like`, which is not computed but for these."""
    del like
    return value


@_as.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return primals[0], tangents[1]


def _bind(primitive: Primitive, *operands: Array, **params: Any) -> Any:
    bind = functools.partial(primitive.bind, **params)
    return _compat.automatic_axes(bind, jax.eval_shape(bind, *operands))(*operands)


def _center(mean: Array, rotate: bool) -> Array:
    if rotate:
        # Small enough that sums of numbers near float32's maximum do not overflow.
        small = np.float32(2.0**-8)
        mean = numerics.rotated(mean * small) / small
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
