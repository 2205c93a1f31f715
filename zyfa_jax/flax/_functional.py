"""What the Flax modules compute, as functions of arrays: shared by linen and nnx."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax.numpy as jnp
import numpy as np

from .. import _attention
from .._quantize import quantize, quantize_qkv
from .._quantize_numerics import rotated as hadamard
from . import rope

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from .cache import KeyValueCache

Precision = Literal["int8", "fp8"] | None
Window = int | tuple[int | None, int | None] | None


class AttentionOptions(Protocol):
    """What layers of both APIs hold alike; their docstrings say what it is."""

    @property
    def rope_scaling(self) -> rope.RopeScaling | None: ...
    @property
    def scale(self) -> float | None: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def implementation(self) -> Any: ...
    @property
    def attention(self) -> Callable[..., Any] | None: ...
    @property
    def rotated(self) -> bool: ...


class GroupedOptions(AttentionOptions, Protocol):
    """Of GroupedQueryAttention."""

    @property
    def rope_theta(self) -> float | None: ...
    @property
    def causal(self) -> bool: ...
    @property
    def window(self) -> Window: ...


class LatentOptions(AttentionOptions, Protocol):
    """Of MultiHeadLatentAttention."""

    @property
    def rope_theta(self) -> float: ...
    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def qk_nope_head_dim(self) -> int: ...


def check_precision(precision: Any) -> None:
    if precision not in (None, "int8", "fp8"):
        raise ValueError(
            "zyfa_jax.flax takes precision=None (the dtype of the inputs), "
            f'"int8" or "fp8", not {precision!r}'
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
    scaling: rope.RopeScaling | None = None,
) -> Float[Array, "*b s h d"]:
    """Rotary position embedding, RoFormer, Su et al., arXiv:2104.09864.

    The halves of each head are rotated against each other (channel i with channel
    i + D/2, as Llama, Gemma and Mistral checkpoints in Hugging Face's format have it),
    by positions * theta ** (-2 i / D) radians, in float32. Positions default to
    0 .. S - 1. A scaling changes the frequencies, and multiplies the result by its
    amplitude.
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
    frequency = rope.frequencies(theta, dim, scaling)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if scaling is not None:
        amplitude = np.float32(scaling.amplitude)
        cos, sin = amplitude * cos, amplitude * sin
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def attend(
    q: Float[Array, "*b t h d"],
    k: Float[Array, "*b s k d"],
    v: Float[Array, "*b s k e"],
    *,
    precision: Precision,
    rotated: bool = False,
    lengths: Int[Array, "*b"] | None = None,
    kv_length: Int[Array, ""] | None = None,
    attention: Callable[..., Any] | None = None,
    **options: Any,
) -> Float[Array, "*b t h e"]:
    """`zyfa_jax.attention` over any number of batch axes, its output in q's dtype.

    With precision="fp8", q, k and v are quantized per head, k centred over tokens; with
    "int8", by `zyfa_jax.quantize_qkv`, which is told if q and k are `rotated`.
    Gradients pass straight through the rounding. `lengths` is the number of tokens of
    each batch element; later ones are not seen and give zeros. `kv_length` is how many
    of the keys of a cache, in any dtype, there are yet; the queries are the last of
    them. `attention` is called in place of `zyfa_jax.attention`.
    """
    check_precision(precision)
    batch = q.shape[:-3]
    if not batch == k.shape[:-3] == v.shape[:-3]:
        raise ValueError(
            "attention takes q, k and v of one batch shape, got "
            f"{batch}, {k.shape[:-3]} and {v.shape[:-3]}"
        )
    dtype = q.dtype
    if kv_length is not None:
        k, v = k.astype(dtype), v.astype(dtype)
    operands: list[Any]
    operands = [x.reshape(math.prod(batch), *x.shape[-3:]) for x in (q, k, v)]
    if lengths is not None:
        lengths = jnp.broadcast_to(lengths, batch).reshape(-1)
        options |= {"q_lengths": lengths, "kv_lengths": lengths}
    if kv_length is not None:
        options |= {"kv_lengths": kv_length}
    if precision is not None:
        q, k, v = operands
        if kv_length is not None:
            k = _filled_up(k, kv_length)
        if precision == "int8":
            operands = [*quantize_qkv(q, k, v, rotated=rotated)]
        else:
            operands = [quantize(q), quantize(k, center=True), quantize(v)]
    attention = attention or _attention.attention
    out = attention(*operands, out_dtype=dtype, **options)
    return out.reshape(*batch, *out.shape[-3:])


def _filled_up(
    k: Float[Array, "b s k d"], length: Int[Array, ""]
) -> Float[Array, "b s k d"]:
    """k with the mean of its first `length` tokens in place of all later ones, so that
    they change no mean over tokens."""
    there = (jnp.arange(k.shape[1]) < length)[:, None, None]
    mean = jnp.mean(k, axis=1, keepdims=True, where=there, dtype=jnp.float32)
    return jnp.where(there, k, mean.astype(k.dtype))


def grouped_attention(
    layer: GroupedOptions,
    q: Float[Array, "*b t h d"],
    k: Float[Array, "*b t k d"],
    v: Float[Array, "*b t k d"],
    *,
    positions: Int[Array, "*b t"] | None,
    lengths: Int[Array, "*b"] | None,
    cache: KeyValueCache | None,
) -> tuple[Float[Array, "*b t h d"], KeyValueCache | None]:
    """What GroupedQueryAttention makes of its projections, and the cache after it."""
    positions = token_positions(positions, q.shape[-3], lengths, cache)
    if layer.rope_theta is not None:
        q = rotary(q, positions, layer.rope_theta, layer.rope_scaling)
        k = rotary(k, positions, layer.rope_theta, layer.rope_scaling)
    if cache is not None:
        cache = cache.append(k, v)
        k, v = cache.keys, cache.values
    options = {"causal": layer.causal, "window": layer.window}
    return _attend(layer, q, k, v, lengths, cache, **options), cache


def latent_attention(
    layer: LatentOptions,
    q: Float[Array, "*b t h d"],
    kv_down: Float[Array, "*b t c"],
    kv_norm: Callable[[Array], Array],
    kv_up: Callable[[Array], Array],
    *,
    positions: Int[Array, "*b t"] | None,
    lengths: Int[Array, "*b"] | None,
    cache: KeyValueCache | None,
) -> tuple[Float[Array, "*b t h v"], KeyValueCache | None]:
    """What MultiHeadLatentAttention makes of its projections, and the cache after it.

    `kv_down` holds the latent vectors of keys and values, then the key channels that
    are rotated by position and shared by all heads. `kv_up` makes each head's key
    channels without that rotation of the normalised latent vectors, then its value.
    """
    positions = token_positions(positions, q.shape[-3], lengths, cache)
    nope, turned = layer.qk_nope_head_dim, layer.rotated and layer.precision == "int8"

    def rotate(x: Array) -> Array:
        x = rotary(x, positions, layer.rope_theta, layer.rope_scaling)
        # Weights cannot rotate these by the Hadamard matrix.
        return hadamard(x.astype(jnp.float32)).astype(x.dtype) if turned else x

    q_nope, q_rope = jnp.split(q, [nope], axis=-1)
    q = jnp.concatenate([q_nope, rotate(q_rope)], axis=-1)
    latent, k_rope = jnp.split(kv_down, [layer.kv_lora_rank], axis=-1)
    k_rope = rotate(k_rope[..., None, :])
    latent = kv_norm(latent)[..., None, :]
    if cache is not None:
        cache = cache.append(k_rope, latent)
        k_rope, latent = cache.keys, cache.values
    k_nope, v = jnp.split(kv_up(latent[..., 0, :]), [nope], axis=-1)
    k_rope = jnp.broadcast_to(k_rope, (*k_nope.shape[:-1], k_rope.shape[-1]))
    k = jnp.concatenate([k_nope, k_rope], axis=-1)
    return _attend(layer, q, k, v, lengths, cache), cache


def _attend(
    layer: AttentionOptions,
    q: Float[Array, "*b t h d"],
    k: Float[Array, "*b s k d"],
    v: Float[Array, "*b s k e"],
    lengths: Int[Array, "*b"] | None,
    cache: KeyValueCache | None,
    **options: Any,
) -> Float[Array, "*b t h e"]:
    return attend(
        q,
        k,
        v,
        precision=layer.precision,
        rotated=layer.rotated,
        lengths=lengths,
        kv_length=None if cache is None else cache.length,
        scale=layer.scale,
        implementation=layer.implementation,
        attention=layer.attention,
        **options,
    )


def token_positions(
    positions: Int[Array, "*b t"] | None,
    tokens: int,
    lengths: Array | None,
    cache: KeyValueCache | None,
) -> Int[Array, "*b t"] | None:
    """`positions`, or by default those after the tokens of the cache."""
    if cache is None:
        return positions
    if lengths is not None:
        raise ValueError(
            "attention with a cache takes no lengths: a call appends as many tokens of "
            "each sequence, and padding after the last ones is seen by no real token"
        )
    if positions is None:
        return cache.length + jnp.arange(tokens, dtype=jnp.int32)
    return positions


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    try:
        return jnp.broadcast_shapes(shape, target) == target
    except ValueError:
        return False
