"""DeepSeek-V2's mixture of experts, arXiv:2405.04434: routing and a grouped product.

The rows that tokens give to an expert are gathered into tiles of one expert each, so
that the work is that of the experts chosen, whichever they are. (`jax.lax.ragged_dot`
says the same in one call, but on CPU and GPU it multiplies every row by every expert.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from .config import Experts
from .mlp import GatedMLP

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32

TILE = 128
AT_ONCE = 16


class Router(nnx.Module):
    """Which experts each token goes to, and what their outputs are multiplied by."""

    def __init__(self, config: Experts, width: int):
        self.kernel = nnx.Param(jnp.zeros((width, config.count), jnp.float32))
        self.config = config

    def __call__(
        self, x: Float[Array, "n w"]
    ) -> tuple[Int32[Array, "n k"], Float[Array, "n k"]]:
        """In float32: a token's experts, best first, and their probabilities."""
        config = self.config
        logits = jnp.dot(
            x.astype(jnp.float32), self.kernel[...], precision=lax.Precision.HIGHEST
        )
        scores = jax.nn.softmax(logits)
        if config.groups_per_token < config.groups:
            grouped = scores.reshape(len(x), config.groups, -1)
            _, best = lax.top_k(jnp.max(grouped, -1), config.groups_per_token)
            taken = jax.nn.one_hot(best, config.groups, dtype=jnp.bool_).any(1)
            scores = jnp.where(taken[..., None], grouped, 0).reshape(scores.shape)
        weights, chosen = lax.top_k(scores, config.per_token)
        return chosen, weights * np.float32(config.routed_scale)


class MixtureOfExperts(nnx.Module):
    """`per_token` experts of many for each token, and the shared experts for all."""

    def __init__(
        self,
        config: Experts,
        width: int,
        *,
        dtype: Any,
        mesh: Mesh | None,
        rngs: nnx.Rngs,
    ):
        self.router = Router(config, width)
        up, down = (
            (config.count, width, config.mlp_width),
            (config.count, config.mlp_width, width),
        )
        self.gate = nnx.Param(jnp.zeros(up, dtype))
        self.up = nnx.Param(jnp.zeros(up, dtype))
        self.down = nnx.Param(jnp.zeros(down, dtype))
        self.shared = GatedMLP(width, config.shared_mlp_width, dtype=dtype, rngs=rngs)
        self.mesh = mesh

    def __call__(self, x: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
        chosen, weights = self.router(x.reshape(-1, x.shape[-1]))
        by_token = (*x.shape[:2], chosen.shape[-1])
        operands = x, chosen.reshape(by_token), weights.reshape(by_token)
        kernels = self.gate[...], self.up[...], self.down[...]
        if self.mesh is None:
            routed = expert_mlps(*operands, *kernels)
        else:
            # Each device runs its tokens through its share of every expert's channels.
            tokens = PartitionSpec(None, "tokens", None)
            columns = PartitionSpec(None, None, "heads")
            rows = PartitionSpec(None, "heads", None)
            routed = jax.shard_map(
                lambda *operands: lax.psum(expert_mlps(*operands), "heads"),
                mesh=self.mesh,
                in_specs=(tokens, tokens, tokens, columns, columns, rows),
                out_specs=tokens,
            )(*operands, *kernels)
        return routed.astype(x.dtype) + self.shared(x)


def expert_mlps(
    x: Float[Array, "b t w"],
    chosen: Int32[Array, "b t k"],
    weights: Float[Array, "b t k"],
    gate: Float[Array, "e w m"],
    up: Float[Array, "e w m"],
    down: Float[Array, "e m w"],
) -> Float[Array, "b t w"]:
    """The weighted sum, in float32, of each token's chosen experts' gated MLPs.

    Rows, one for each choice of each token, are laid out by expert, every expert's
    beginning at a new tile. The loop runs over the tiles that are in use.
    """
    shape, per_token = x.shape, chosen.shape[-1]
    x, chosen = x.reshape(-1, shape[-1]), chosen.reshape(-1)
    rows, experts = len(chosen), len(gate)
    tile = min(TILE, rows)

    sizes = jnp.zeros(experts, jnp.int32).at[chosen].add(1)
    last_tile = jnp.cumsum(-(-sizes // tile))
    order = jnp.argsort(chosen)
    # A row's place: its expert's first tile, and its rank among the expert's rows.
    begin = jnp.concatenate([jnp.zeros(1, jnp.int32), last_tile[:-1]]) * tile
    rank = (
        jnp.arange(rows, dtype=jnp.int32) - (jnp.cumsum(sizes) - sizes)[chosen[order]]
    )
    place = jnp.zeros(rows, jnp.int32).at[order].set(begin[chosen[order]] + rank)

    tiles = rows // tile + min(experts, rows)
    source = (
        jnp.zeros(tiles * tile, jnp.int32)
        .at[place]
        .set(jnp.arange(rows, dtype=jnp.int32) // per_token)
    )

    tile_expert = jnp.searchsorted(last_tile, jnp.arange(tiles), side="right")

    def run(operands: tuple[Array, Array]) -> Array:
        rows, expert = operands
        y = x[rows]
        y = jax.nn.silu(y @ gate[expert]) * (y @ up[expert])
        return jnp.dot(y, down[expert], preferred_element_type=jnp.float32)

    out = lax.map(run, (source.reshape(tiles, tile), tile_expert), batch_size=AT_ONCE)
    out = out.reshape(-1, shape[-1])
    chosen_rows = out[place].reshape(-1, per_token, shape[-1])
    mixed = jnp.einsum("nkw,nk->nw", chosen_rows, weights.reshape(-1, per_token))
    return mixed.reshape(shape)
