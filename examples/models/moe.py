"""DeepSeek-V2's mixture of experts, arXiv:2405.04434: routing and a grouped product.

The rows that tokens give to experts are sorted into tiles of one expert each, so that
the work is that of the experts chosen, whichever they are. (`jax.lax.ragged_dot` says
this in one call, but on CPU and GPU it multiplies every row by every expert.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .config import Experts
from .mlp import GatedMLP

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32

TILE = 128
"""Rows of one expert that are multiplied at once."""
TILES_AT_ONCE = 4
"""Each takes a copy of its expert's matrices."""


class MixtureOfExperts(nnx.Module):
    """`per_token` experts of many for each token, and the shared experts for all.

    The router's kernel is float32, whatever the dtype: small differences decide.
    """

    def __init__(
        self,
        config: Experts,
        width: int,
        *,
        dtype: Any,
        mesh: Mesh | None,
        rngs: nnx.Rngs,
    ):
        def parameter(*shape: int, dtype: Any = dtype) -> nnx.Param[Array]:
            return nnx.Param(jnp.zeros(shape, dtype))

        count, mlp_width = config.count, config.mlp_width
        self.router = parameter(width, count, dtype=jnp.float32)
        self.gate = parameter(count, width, mlp_width)
        self.up = parameter(count, width, mlp_width)
        self.down = parameter(count, mlp_width, width)
        self.shared = GatedMLP(width, config.shared_mlp_width, dtype=dtype, rngs=rngs)
        self.config = config
        self.mesh = mesh

    def __call__(self, x: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
        kernels = self.router[...], self.gate[...], self.up[...], self.down[...]
        if self.mesh is None:
            routed = self._routed(x, *kernels)
        else:
            # Each device runs its tokens through its share of every expert's channels.
            tokens, rows, columns = (
                P(None, "tokens"),
                P(None, "heads"),
                P(None, None, "heads"),
            )
            routed = jax.shard_map(
                lambda *operands: lax.psum(self._routed(*operands), "heads"),
                mesh=self.mesh,
                in_specs=(tokens, P(), columns, columns, rows),
                out_specs=tokens,
            )(x, *kernels)
        return routed.astype(x.dtype) + self.shared(x)

    def _routed(
        self, x: Float[Array, "b t w"], router: Float32[Array, "w e"], *kernels: Array
    ) -> Float32[Array, "b t w"]:
        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = route(rows, router, self.config)
        return expert_mlps(rows, chosen, weights, *kernels).reshape(x.shape)


def route(
    x: Float[Array, "n w"], router: Float32[Array, "w e"], config: Experts
) -> tuple[Int32[Array, "n k"], Float32[Array, "n k"]]:
    """Each token's experts, best first, and what their outputs are multiplied by."""
    x = x.astype(jnp.float32)
    scores = jax.nn.softmax(jnp.dot(x, router, precision=lax.Precision.HIGHEST))
    if config.groups_per_token < config.groups:
        grouped = scores.reshape(len(x), config.groups, -1)
        _, best = lax.top_k(jnp.max(grouped, axis=-1), config.groups_per_token)
        taken = jax.nn.one_hot(best, config.groups, dtype=jnp.bool_).any(axis=1)
        scores = jnp.where(taken[..., None], grouped, 0).reshape(scores.shape)
    weights, chosen = lax.top_k(scores, config.per_token)
    return chosen, weights * np.float32(config.routed_scale)


def expert_mlps(
    x: Float[Array, "n w"],
    chosen: Int32[Array, "n k"],
    weights: Float32[Array, "n k"],
    gate: Float[Array, "e w m"],
    up: Float[Array, "e w m"],
    down: Float[Array, "e m w"],
) -> Float32[Array, "n w"]:
    """The weighted sum of the gated MLPs of each token's chosen experts.

    A token is one row for each expert that it chose. Rows are laid out by expert, each
    expert's from a new tile on; the rest of its last tile is filled with any tokens.
    """
    per_token, experts = chosen.shape[-1], len(gate)
    rows = chosen.size
    tile = min(TILE, rows)
    tiles = rows // tile + min(experts, rows)

    counts = jnp.zeros(experts, jnp.int32).at[chosen].add(1)
    first_row = jnp.cumsum(counts) - counts
    counts_of_tiles = -(-counts // tile)
    end = jnp.cumsum(counts_of_tiles)
    first_place = (end - counts_of_tiles) * tile
    by_expert = jnp.argsort(chosen, axis=None)
    expert = chosen.reshape(-1)[by_expert]
    rank = jnp.arange(rows, dtype=jnp.int32) - first_row[expert]
    place = jnp.zeros(rows, jnp.int32).at[by_expert].set(first_place[expert] + rank)
    token = jnp.arange(rows, dtype=jnp.int32) // per_token
    tokens = jnp.zeros(tiles * tile, jnp.int32).at[place].set(token)

    def run(operands: tuple[Array, Array]) -> Float32[Array, "tile w"]:
        tokens, expert = operands
        y = x[tokens]
        y = jax.nn.silu(y @ gate[expert]) * (y @ up[expert])
        return jnp.dot(y, down[expert], preferred_element_type=jnp.float32)

    tile_expert = jnp.searchsorted(end, jnp.arange(tiles), side="right")
    out = lax.map(
        run, (tokens.reshape(tiles, tile), tile_expert), batch_size=TILES_AT_ONCE
    )
    out = out.reshape(tiles * tile, -1)[place.reshape(chosen.shape)]
    return jnp.einsum("nkw,nk->nw", out, weights)
