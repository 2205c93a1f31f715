"""The derivative of the primitive: blockwise recomputation, memory O(sequence)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from . import _blockwise, _compat
from ._primitive import attention_p
from ._spec import FLOAT8, AttentionSpec

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

CHECKPOINT_NAMES = ("zyfa_attention_out", "zyfa_attention_lse")
"""Names of the saved results, for `jax.checkpoint_policies.save_only_these_names`."""


class Operands(NamedTuple):
    """The canonical call before the softmax scale is folded into the descales.

    Sources are the arrays before FP8 rounding, or None: the gradient passes straight
    through the rounding to them (Bengio et al., arXiv:1308.3432).
    """

    q: Float[Array, "B T H D"]
    k: Float[Array, "b S K D"]
    v: Float[Array, "b S K E"]
    q_descale: Float[Array, "B H nq"]
    k_descale: Float[Array, "b K nk"]
    v_descale: Float[Array, "b K nv"]
    scale: Float[Array, ""]
    q_offset: Int[Array, " B"]
    q_lengths: Int[Array, " B"]
    kv_lengths: Int[Array, " B"]
    q_source: Float[Array, "B T H D"] | None
    k_source: Float[Array, "b S K D"] | None
    v_source: Float[Array, "b S K E"] | None

    def canonical(self) -> tuple[Array, ...]:
        return (
            *self[:3],
            self.q_descale * self.scale,
            *self[4:6],
            *self[7:10],
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(
    spec: AttentionSpec, operands: Operands
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
    """Output and log-sum-exp, differentiable in reverse mode, also by both results."""
    return tuple(attention_p.bind(*operands.canonical(), spec=spec))


def _forward(
    spec: AttentionSpec, operands: Operands
) -> tuple[tuple[Array, Array], tuple[Operands, Array, Array]]:
    results: Any = attention(spec, operands)
    out, lse = results
    out = checkpoint_name(out, CHECKPOINT_NAMES[0])
    lse = checkpoint_name(lse, CHECKPOINT_NAMES[1])
    return (out, lse), (operands, out, lse)


def _backward(
    spec: AttentionSpec,
    residuals: tuple[Operands, Array, Array],
    cotangents: tuple[Array, Array],
) -> tuple[Operands]:
    operands = residuals[0]
    cotangent = _compat.automatic_axes(
        functools.partial(_cotangent, spec), _differentiable(operands, operands)
    )(residuals, cotangents)
    return (with_integers(operands, cotangent),)


@functools.partial(jax.jit, static_argnums=0)
def _cotangent(
    spec: AttentionSpec,
    residuals: tuple[Operands, Array, Array],
    cotangents: tuple[Array, Array],
) -> list[Array | None]:
    """Cotangents of the operands that are not integers, in order."""
    x, out, lse = residuals
    arrays = [*x.canonical(), out, lse, *cotangents]
    return of_operands(spec, x, *_blockwise.backward(*arrays, spec=spec))


def of_operands(
    spec: AttentionSpec, x: Operands, d_q: Array, d_k: Array, d_v: Array
) -> list[Array | None]:
    """Cotangents of the operands that are not integers, in order.

    Args:
      spec: of the call.
      x: its operands.
      d_q: the float32 cotangent of q * q_descale * scale, which logits are made of.
      d_k: that of k * k_descale.
      d_v: that of v * v_descale, which the output is made of.
    """
    d_q_descale = _over_tokens(d_q, x.q, x.q_descale, spec.q_block)
    if spec.v_channels:
        d_v_descale = jnp.sum(d_v * x.v.astype(jnp.float32), axis=1)
        of_v = x.v_descale[:, None]
    else:
        d_v_descale = _over_tokens(d_v, x.v, x.v_descale, spec.kv_block)
        of_v = _of_tokens(x.v_descale, spec.kv_block, x.v)
    cotangents = Operands(
        _cast(d_q * x.scale, x.q, _of_tokens(x.q_descale, spec.q_block, x.q)),
        _cast(d_k, x.k, _of_tokens(x.k_descale, spec.kv_block, x.k)),
        _cast(d_v, x.v, of_v),
        d_q_descale * x.scale,
        _over_tokens(d_k, x.k, x.k_descale, spec.kv_block),
        d_v_descale,
        jnp.sum(d_q_descale * x.q_descale),
        *x[7:10],
        _straight_through(d_q * x.scale, x.q_source),
        _straight_through(d_k, x.k_source),
        _straight_through(d_v, x.v_source),
    )
    return _differentiable(x, cotangents)


def with_integers(operands: Operands, cotangents: list[Array | None]) -> Operands:
    """Cotangents of all operands, given those of all that are not integers."""
    rest = iter(cotangents)
    # None stands for the cotangent of an integer.
    return Operands._make(
        next(rest) if x is None or _is_inexact(x) else None for x in operands
    )


def _differentiable(operands: Operands, of_each: Operands) -> list[Array | None]:
    """What there is of each operand, for those that are not integers."""
    pairs = zip(operands, of_each, strict=True)
    return [y for x, y in pairs if x is None or _is_inexact(x)]


attention.defvjp(_forward, _backward)


def _cast(d_value: Array, x: Array, descale: Array) -> Array:
    """The cotangent of the numbers themselves, saturating where they are FP8.

    `descale` broadcasts to x.
    """
    if x.dtype == FLOAT8:
        d_value = d_value * descale
        d_value = jnp.clip(d_value, np.float32(-448), np.float32(448))
    return d_value.astype(x.dtype) if _is_inexact(x) else d_value


def _of_tokens(descale: Array, block: int, x: Array) -> Array:
    """The descale of each token, (B, S, H, 1)."""
    tokens = _blockwise.per_token(descale, block, x.shape[1])
    return jnp.moveaxis(tokens, 1, 2)[..., None]


def _over_tokens(d_value: Array, x: Array, descale: Array, block: int) -> Array:
    """The cotangent of descales: the sum over the tokens that share one."""
    per_token = jnp.sum(d_value * x.astype(jnp.float32), axis=-1)
    per_token = jnp.moveaxis(per_token, 1, 2)
    if not block:
        return jnp.sum(per_token, axis=-1, keepdims=True)
    batch, heads, tokens = per_token.shape
    count = descale.shape[2]
    padded = jnp.pad(per_token, ((0, 0), (0, 0), (0, count * block - tokens)))
    return jnp.sum(padded.reshape(batch, heads, count, block), axis=-1)


def _straight_through(d_value: Array, source: Array | None) -> Array | None:
    return None if source is None else d_value.astype(source.dtype)


def _is_inexact(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
