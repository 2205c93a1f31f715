"""The decoder: embeddings, layers of attention and MLP, and the logits."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from zyfa_jax import parallel
from zyfa_jax.flax.cache import KeyValueCache
from zyfa_jax.flax.nnx import GroupedQueryAttention, MultiHeadLatentAttention

from . import sharding
from .config import Config, GroupedHeads
from .mlp import GatedMLP
from .moe import MixtureOfExperts

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

Caches = tuple[KeyValueCache, ...]


def make_attention(
    config: Config, layer: int, *, mesh: Mesh | None, **options: Any
) -> GroupedQueryAttention | MultiHeadLatentAttention:
    """The attention of one layer, from zyfa_jax's modules for Flax."""
    heads, rope = config.attention, config.rope
    options |= {"rope_theta": rope.theta, "rope_scaling": rope.scaling}
    if mesh is not None and sharding.devices_over_tokens(mesh) > 1:
        options["attention"] = functools.partial(sharding.spread_attention, mesh=mesh)
    if isinstance(heads, GroupedHeads):
        window = heads.windows[layer]
        return GroupedQueryAttention(
            heads.heads,
            config.width,
            heads.kv_heads,
            heads.head_dim,
            qk_norm=heads.qk_norm,
            norm_epsilon=config.epsilon,
            # The models' windows count the own token.
            window=None if window is None else window - 1,
            **options,
        )
    return MultiHeadLatentAttention(
        heads.heads,
        config.width,
        heads.kv_lora_rank,
        heads.q_lora_rank,
        qk_nope_head_dim=heads.qk_nope_head_dim,
        qk_rope_head_dim=heads.qk_rope_head_dim,
        v_head_dim=heads.v_head_dim,
        scale=heads.scale,
        **options,
    )


class Layer(nnx.Module):
    """Attention, then an MLP or a mixture of experts, each added to what goes in."""

    def __init__(
        self,
        config: Config,
        layer: int,
        *,
        dtype: Any,
        precision: Any,
        mesh: Mesh | None,
        rngs: nnx.Rngs,
    ):
        dtypes = {"dtype": dtype, "param_dtype": dtype}
        norm = functools.partial(
            nnx.RMSNorm, config.width, epsilon=config.epsilon, rngs=rngs, **dtypes
        )
        self.attention_norm = norm()
        self.attention = make_attention(
            config, layer, mesh=mesh, precision=precision, rngs=rngs, **dtypes
        )
        self.mlp_norm = norm()
        if config.experts is not None and config.has_experts(layer):
            self.mlp = MixtureOfExperts(
                config.experts, config.width, dtype=dtype, mesh=mesh, rngs=rngs
            )
        else:
            self.mlp = GatedMLP(config.width, config.mlp_width, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "b t w"],
        positions: Int[Array, "t"] | None,
        cache: KeyValueCache | None,
    ) -> tuple[Float[Array, "b t w"], KeyValueCache | None]:
        y = self.attention_norm(x)
        if cache is None:
            y = self.attention(y, positions=positions)
        else:
            y, cache = self.attention(y, positions=positions, cache=cache)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache


class Decoder(nnx.Module):
    """A causal language model.

    Args:
      config: what it is made of.
      dtype: bfloat16 or float32, for parameters and computation.
      precision: None, "fp8" for attention in FP8, or "int8" with queries and keys in
        int8.
      mesh: devices with the axes "heads" and "tokens" (`sharding.make_mesh`), or None
        for one device.
      rngs: random keys; `weights.load` gives the parameters their values.
    """

    def __init__(
        self,
        config: Config,
        *,
        dtype: Any = jnp.bfloat16,
        precision: Any = None,
        mesh: Mesh | None = None,
        rngs: nnx.Rngs,
    ):
        dtypes = {"dtype": dtype, "param_dtype": dtype}
        self.embed = nnx.Embed(config.vocabulary, config.width, rngs=rngs, **dtypes)
        self.layers = nnx.List(
            Layer(config, i, dtype=dtype, precision=precision, mesh=mesh, rngs=rngs)
            for i in range(config.layers)
        )
        self.norm = nnx.RMSNorm(
            config.width, epsilon=config.epsilon, rngs=rngs, **dtypes
        )
        if not config.tied:
            self.head = nnx.Linear(
                config.width, config.vocabulary, use_bias=False, rngs=rngs, **dtypes
            )
        self.config = config
        self.dtype = dtype
        self.precision = precision
        self.mesh = mesh

    def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t v"]:
        """Float32 logits of the token after each of `tokens`."""
        x, _ = self.hidden(tokens)
        return self.logits(x)

    def hidden(
        self, tokens: Int[Array, "b t"], caches: Caches | None = None
    ) -> tuple[Float[Array, "b t w"], Caches | None]:
        """What the logits are made of, and the caches with these tokens in them.

        Args:
          tokens: the tokens, or the next of them after those in the caches.
          caches: one for each layer, from `init_caches`; None for whole sequences.
        """
        devices, positions = sharding.devices_over_tokens(self.mesh), None
        in_zigzag = devices > 1 and caches is None
        if in_zigzag:
            tokens = parallel.zigzag(tokens, devices)
            positions = jnp.asarray(parallel.positions(tokens.shape[1], devices))
        constrain = functools.partial(sharding.constrain, mesh=self.mesh)
        x = constrain(self.embed(tokens))
        after = []
        for layer, cache in zip(
            self.layers, caches or [None] * len(self.layers), strict=True
        ):
            x, cache = layer(x, positions, cache)
            x = constrain(x)
            after.append(jax.tree.map(constrain, cache))
        x = self.norm(x)
        if in_zigzag:
            x = constrain(parallel.unzigzag(x, devices))
        return x, None if caches is None else tuple(after)

    def logits(self, x: Float[Array, "*n w"]) -> Float[Array, "*n v"]:
        if self.config.tied:
            kernel = self.embed.embedding[...].T
        else:
            kernel = self.head.kernel[...]
        return jnp.dot(x, kernel, preferred_element_type=jnp.float32)

    def init_caches(self, batch: int, capacity: int) -> Caches:
        """Caches for `capacity` tokens, with none in them, one for each layer."""
        heads = self.config.attention
        if isinstance(heads, GroupedHeads):
            shape = heads.kv_heads, heads.head_dim, heads.head_dim
        else:
            shape = 1, heads.qk_rope_head_dim, heads.kv_lora_rank
        caches = tuple(
            KeyValueCache.empty((batch,), capacity, *shape, dtype=self.dtype)
            for _ in range(self.config.layers)
        )
        return jax.tree.map(lambda x: sharding.constrain(x, self.mesh), caches)
