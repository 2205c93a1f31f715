"""The gated MLP of Llama and its kin: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

if TYPE_CHECKING:
    from jaxtyping import Array, Float


class GatedMLP(nnx.Module):
    def __init__(self, width: int, mlp_width: int, *, dtype: Any, rngs: nnx.Rngs):
        linear = functools.partial(
            nnx.Linear, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.gate = linear(width, mlp_width)
        self.up = linear(width, mlp_width)
        self.down = linear(mlp_width, width)

    def __call__(self, x: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
