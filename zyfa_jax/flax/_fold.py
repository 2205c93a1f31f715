"""The rotation and balance of q and k, put into the weights that make them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from .._quantize_numerics import balance_of, mean_over_tokens, rotated

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

_REASONS = {
    "rope_theta": "rotary embeddings mix channels as well, otherwise at each position",
    "qk_norm": "the norm has a gain for each channel as it was",
    "normalize_qk": "the norm has a gain for each channel as it was",
}


@dataclasses.dataclass(frozen=True)
class Projections:
    """Which projections of a layer make q and k, and how many channels of a head, the
    first ones, reach attention as they were made; None for all."""

    query: str
    key: str
    channels: int | None = None


def projections(layer: Any, grouped: type, latent: type, flax: type) -> Projections:
    """Those of a layer, of one of these classes.

    Raises:
      ValueError: for another, or if something lies between them and attention.
    """
    name = type(layer).__name__
    if isinstance(layer, latent):
        query = "query" if layer.q_lora_rank is None else "query_up"
        return Projections(query, "kv_up", layer.qk_nope_head_dim)
    if not isinstance(layer, grouped | flax):
        names = [x.__name__ for x in (grouped, latent, flax)]
        raise ValueError(f"fold_rotation takes one of {', '.join(names)}, not {name}")
    for option, reason in _REASONS.items():
        value = getattr(layer, option, None)
        if value is not None and value is not False:
            raise ValueError(
                "a rotation in the weights takes a layer with nothing between its "
                f"projections and attention, not {name} with {option}={value!r}: "
                f"{reason}. Leave rotated=False; quantize_qkv rotates after it"
            )
    return Projections("query", "key")


class Recorder:
    """An attention function that keeps the q and k of a call, and gives zeros."""

    q: Array
    k: Array

    def __call__(
        self,
        query: Float[Array, "*b t h d"],
        key: Float[Array, "*b s k d"],
        value: Float[Array, "*b s k e"],
        **options: Any,
    ) -> Float[Array, "*b t h e"]:
        del options
        self.q, self.k = query, key
        return jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)


def exponents(
    q: Float[Array, "*b t h d"], k: Float[Array, "*b s k d"], channels: int | None
) -> tuple[Int[Array, "h d"], Int[Array, "k d"]]:
    """By which powers of two to multiply the first channels of queries and of keys."""
    q, k = (x.reshape(1, -1, *x.shape[-2:])[..., :channels] for x in (q, k))
    of_q = balance_of(q, k, mean_over_tokens(k))[0]
    return jnp.repeat(of_q, q.shape[2] // k.shape[2], axis=0), -of_q


def fold(
    weight: Float[Array, "*f h d"],
    channels: int | None,
    exponent: Int[Array, "h d"] | None,
) -> Float[Array, "*f h d"]:
    """A kernel or bias of a projection to heads, its first channels balanced, then
    rotated: in float32, rounded back to its dtype."""
    y = weight[..., :channels].astype(jnp.float32)
    if exponent is not None:
        y = jnp.ldexp(y, exponent)
    y = rotated(y).astype(weight.dtype)
    if channels is None:
        return y
    return jnp.concatenate([y, weight[..., channels:]], axis=-1)
