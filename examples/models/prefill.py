"""A prompt through a model, whole or in chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .decoder import Caches, Decoder
from .sharding import devices_over_tokens

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

KEYS_OF_A_DESCALE = 128
"""In int8, of which a device holds all."""


def prefill(
    model: Decoder,
    tokens: Int[np.ndarray, "b t"],
    *,
    chunk: int | None = None,
    last_only: bool = True,
    on_chunk: Callable[[int], Any] | None = None,
) -> Float[Array, "b v"] | Float[Array, "b t v"]:
    """Logits of the next token, float32.

    Args:
      model: the model.
      tokens: the prompts, of one length.
      chunk: how many tokens go through the model at once, after those before them; by
        default all. The memory for activations and logits is that of one chunk.
      last_only: whether to return the logits after the last token alone, (b, v); those
        after each token are (b, t, v).
      on_chunk: called with the number of its tokens when a chunk is computed.

    Raises:
      ValueError: for no tokens, or a chunk of none.
    """
    batch, length = tokens.shape
    size = min(length if chunk is None else chunk, length)
    if size < 1:
        raise ValueError(
            f"prefill takes a token or more and chunks of one or more, not {length} "
            f"tokens in chunks of {chunk}"
        )
    # Every device gets an early and a late piece of one length.
    devices = devices_over_tokens(model.mesh)
    unit = KEYS_OF_A_DESCALE if model.precision == "int8" else 1
    size += -size % (2 * devices * unit if devices > 1 else 1)
    graph, state = nnx.split(model)
    starts = range(0, length, size)
    # The last chunk is filled up with tokens that come after all real ones.
    padded = np.pad(tokens, ((0, 0), (0, len(starts) * size - length)))
    caches = None
    if len(starts) > 1:
        caches = init_caches(graph, state, batch, len(starts) * size)
    last = (length - 1) % size
    parts = []
    for start in starts:
        piece = jnp.asarray(padded[:, start : start + size], jnp.int32)
        keep = jnp.int32(last) if last_only else None
        logits, caches = step(graph, state, piece, caches, keep)
        if on_chunk is not None:
            jax.block_until_ready(logits)
            on_chunk(min(size, length - start))
        parts = [logits] if last_only else [*parts, logits]
    return parts[0] if last_only else jnp.concatenate(parts, 1)[:, :length]


@functools.partial(jax.jit, static_argnums=0, donate_argnames="caches")
def step(
    graph: nnx.GraphDef[Decoder],
    state: nnx.State,
    tokens: Int[Array, "b t"],
    caches: Caches | None,
    keep: Int[Array, ""] | None,
) -> tuple[Array, Caches | None]:
    """One chunk: the logits after token `keep` of it, or after each, and the caches."""
    model = nnx.merge(graph, state)
    x, caches = model.hidden(tokens, caches)
    return model.logits(x if keep is None else jnp.take(x, keep, axis=1)), caches


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def init_caches(
    graph: nnx.GraphDef[Decoder], state: nnx.State, batch: int, capacity: int
) -> Caches:
    return nnx.merge(graph, state).init_caches(batch, capacity)
