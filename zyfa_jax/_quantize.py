"""FP8 values with float32 descales, and how to make them."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _compat
from . import _quantize_primitive as primitive

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32

_BLOCK_UNIT = 128
_GRANULARITIES = ("head", "tensor", "block")
_DTYPES = ("bfloat16", "float16", "float32")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array as float8_e4m3fn: an element is its value times its descale.

    A pytree, made by `quantize` and taken by `attention` as q, k or v.

    Attributes:
      values: float8_e4m3fn, (B, S, H, D) or (S, H, D).
      descale: float32, (B, H), or (B, H, ceil(S / block)) if `block` is not 0; without
        B for (S, H, D).
      center: what was subtracted from every token of a head, float32 (B, H, D) or
        (H, D), in the rotated basis if `rotated`; None if nothing was.
      source: what was rounded to `values * descale`, in the dtype given to `quantize`.
        Gradients with respect to the values go here, as if the rounding were not
        there (the straight-through estimator). None if there are to be no gradients.
      block: tokens that share a descale; 0 if all of a head's tokens do.
      rotated: whether the last axis was rotated by `quantize(..., rotate=True)`.
    """

    values: Float[Array, "*b s h d"]
    descale: Float32[Array, "*b h"] | Float32[Array, "*b h n"]
    center: Float32[Array, "*b h d"] | None = None
    source: Float[Array, "*b s h d"] | None = None
    block: int = dataclasses.field(default=0, metadata={"static": True})
    rotated: bool = dataclasses.field(default=False, metadata={"static": True})

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
        """`values` times `descale`, in float32: still centred and rotated."""
        tokens = self.values.shape[-3]
        descale = self.descale
        if self.block:
            descale = jnp.repeat(descale, self.block, axis=-1)[..., :tokens]
            per_token = jnp.moveaxis(descale, -1, -2)[..., None]
        else:
            per_token = descale[..., None, :, None]
        return self.values.astype(jnp.float32) * per_token


def quantize(
    x: Float[Array, "*b s h d"] | Float[np.ndarray, "*b s h d"],
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
    _check_flags(center=center, rotate=rotate)
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
    z = Quantized(values, descale, block=rounding.block)
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


def _check(x: Any, granularity: Any, block: Any) -> None:
    if isinstance(x, Quantized):
        raise ValueError(
            "quantize takes an array that is not yet quantized, got Quantized"
        )
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(f"quantize takes a JAX or NumPy array, got {type(x).__name__}")
    if str(x.dtype) not in _DTYPES:
        raise ValueError(f"quantize takes bfloat16, float16 or float32, got {x.dtype}")
    if x.ndim not in (3, 4):
        raise ValueError(
            "quantize takes an array of shape (batch, tokens, heads, dim) or (tokens, "
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
            f"block must be a positive multiple of {_BLOCK_UNIT} tokens, got {block!r}"
        )


def _check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise ValueError(f"quantize takes {name}=True or False, got {flag!r}")
