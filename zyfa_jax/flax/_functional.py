"""What the Flax modules compute, as functions of arrays: shared by linen and nnx."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp

from .._attention import attention
from .._quantize import quantize

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

Precision = Literal["fp8"] | None
Window = int | tuple[int | None, int | None] | None


def check_precision(precision: Any) -> None:
    if precision not in (None, "fp8"):
        raise ValueError(
            'zyfa_jax.flax takes precision=None (the dtype of the inputs) or "fp8", '
            f"not {precision!r}"
        )


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            "GroupedQueryAttention takes num_heads that is a multiple of num_kv_heads, "
            f"not num_heads={num_heads} and num_kv_heads={num_kv_heads}"
        )


def default_head_dim(features: int, num_heads: int) -> int:
    if features % num_heads:
        raise ValueError(
            f"GroupedQueryAttention takes features ({features}) that num_heads "
            f"({num_heads}) divides, or head_dim"
        )
    return features // num_heads


def rotary(
    x: Float[Array, "*b s h d"],
    positions: Int[Array, "*b s"] | None,
    theta: float,
) -> Float[Array, "*b s h d"]:
    """Rotary position embedding, RoFormer, Su et al., arXiv:2104.09864.

    The halves of each head are rotated against each other (channel i with channel
    i + D/2, as Llama, Gemma and Mistral checkpoints in Hugging Face's format have it),
    by positions * theta ** (-2 i / D) radians, in float32. Positions default to
    0 .. S - 1.
    """
    tokens, _, dim = x.shape[-3:]
    if dim % 2:
        raise ValueError(f"rotary embeddings take an even head dim, not {dim}")
    if positions is None:
        positions = jnp.arange(tokens)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(
            f"rotary embeddings take integer positions, not {positions.dtype}"
        )
    if not _broadcasts(positions.shape, x.shape[:-2]):
        raise ValueError(
            f"rotary embeddings take positions that broadcast to {x.shape[:-2]}, not "
            f"shape {positions.shape}"
        )
    frequency = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def attend(
    q: Float[Array, "*b t h d"],
    k: Float[Array, "*b s k d"],
    v: Float[Array, "*b s k e"],
    *,
    precision: Precision,
    lengths: Int[Array, "*b"] | None = None,
    **options: Any,
) -> Float[Array, "*b t h e"]:
    """`zyfa_jax.attention` over any number of batch axes, its output in q's dtype.

    With precision="fp8", q, k and v are quantized per head, k centred over tokens;
    gradients pass straight through the rounding. `lengths` is the number of tokens of
    each batch element; later ones are not seen and give zeros.
    """
    check_precision(precision)
    batch = q.shape[:-3]
    if not batch == k.shape[:-3] == v.shape[:-3]:
        raise ValueError(
            "attention takes q, k and v of one batch shape, got "
            f"{batch}, {k.shape[:-3]} and {v.shape[:-3]}"
        )
    dtype = q.dtype
    operands: list[Any]
    operands = [x.reshape(math.prod(batch), *x.shape[-3:]) for x in (q, k, v)]
    if lengths is not None:
        lengths = jnp.broadcast_to(lengths, batch).reshape(-1)
        options |= {"q_lengths": lengths, "kv_lengths": lengths}
    if precision == "fp8":
        q, k, v = operands
        operands = [quantize(q), quantize(k, center=True), quantize(v)]
    out = attention(*operands, out_dtype=dtype, **options)
    return out.reshape(*batch, *out.shape[-3:])


def latent_heads(
    q: Float[Array, "*b s h d"],
    kv: Float[Array, "*b s h e"],
    k_rope: Float[Array, "*b s r"],
    *,
    qk_nope_head_dim: int,
    rope_theta: float,
    positions: Int[Array, "*b s"] | None,
) -> tuple[Array, Array, Array]:
    """q, k, v of multi-head latent attention from its projections.

    The last channels of each query head, and one key shared by all heads, carry the
    rotary embedding; `kv` holds each head's other key channels, then its value.
    """
    q_nope, q_rope = jnp.split(q, [qk_nope_head_dim], axis=-1)
    k_nope, v = jnp.split(kv, [qk_nope_head_dim], axis=-1)
    q_rope = rotary(q_rope, positions, rope_theta)
    k_rope = rotary(k_rope[..., None, :], positions, rope_theta)
    k_rope = jnp.broadcast_to(k_rope, (*k_nope.shape[:-1], k_rope.shape[-1]))
    return (
        jnp.concatenate([q_nope, q_rope], axis=-1),
        jnp.concatenate([k_nope, k_rope], axis=-1),
        v,
    )


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    try:
        return jnp.broadcast_shapes(shape, target) == target
    except ValueError:
        return False
