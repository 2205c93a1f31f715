"""Keys and values of the tokens before, for prefill in chunks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

if TYPE_CHECKING:
    from flax.typing import Dtype
    from jaxtyping import Array, Float, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValueCache:
    """What an attention layer keeps of earlier tokens, in arrays of fixed capacity.

    A pytree, made by `empty`, and taken and returned by the layers' `cache`. Latent
    attention keeps one "head": as keys the rotated channels that all heads share, as
    values the normalised latent vectors.

    Attributes:
      keys: (batch..., capacity, key/value heads, head dim).
      values: (batch..., capacity, key/value heads, value head dim).
      length: how many tokens there are, int32.
    """

    keys: Float[Array, "*b s k d"]
    values: Float[Array, "*b s k e"]
    length: Int32[Array, ""]

    @classmethod
    def empty(
        cls,
        batch: tuple[int, ...],
        capacity: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        dtype: Dtype,
    ) -> KeyValueCache:
        """A cache with room for `capacity` tokens, and none in it."""
        keys, values = (
            jnp.zeros((*batch, capacity, kv_heads, dim), dtype)
            for dim in (head_dim, v_head_dim or head_dim)
        )
        return cls(keys, values, jnp.int32(0))

    def append(
        self, keys: Float[Array, "*b t k d"], values: Float[Array, "*b t k e"]
    ) -> KeyValueCache:
        """With the next tokens' keys and values, in the cache's dtype.

        There must be room for them. A traced length cannot tell; where there is none,
        the cache's last tokens become NaN, and with them what attention makes of them.

        Raises:
          ValueError: for keys or values that do not fit the cache or each other.
        """
        if keys.shape[-3] != values.shape[-3]:
            raise ValueError(
                "a cache takes keys and values of the same tokens, not keys of "
                f"{keys.shape} and values of {values.shape}"
            )
        parts = []
        for name, old, new in (
            ("keys", self.keys, keys),
            ("values", self.values, values),
        ):
            *batch, capacity, heads, dim = old.shape
            tokens = new.shape[-3]
            if new.shape != (*batch, tokens, heads, dim) or tokens > capacity:
                raise ValueError(
                    f"a cache whose {name} have shape {old.shape} takes up to "
                    f"{capacity} tokens of that shape, not {name} of {new.shape}"
                )
            # As an int: inside jit even a known array's sum would be traced.
            known = None if isinstance(self.length, Tracer) else int(self.length)
            if known is not None and known + tokens > capacity:
                raise ValueError(
                    f"a cache of {capacity} tokens that holds {known} has no room for "
                    f"{tokens}"
                )
            fits = self.length <= capacity - tokens
            new = jnp.where(fits, new.astype(old.dtype), jnp.array(np.nan, old.dtype))
            # A scatter, unlike a dynamic update of a slice, is split by the compiler
            # where the cache's tokens are sharded.
            start = jnp.minimum(self.length, np.int32(capacity - tokens))
            place = old.at[..., start + jnp.arange(tokens, dtype=jnp.int32), :, :]
            parts.append(
                place.set(
                    new,
                    mode="promise_in_bounds",
                    indices_are_sorted=True,
                    unique_indices=True,
                )
            )
        length = self.length + np.int32(keys.shape[-3])
        return KeyValueCache(parts[0], parts[1], length)
