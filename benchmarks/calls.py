"""An attention call that several implementations are given alike."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Call = Callable[[], Any]
"""Gives an output, which is not waited for."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
      dtype: of q, k and v.
      head_dims: of queries and keys, and of values.
      causal: whether a query sees no later key.
      tokens: of a batch row.
      batch: rows.
      heads: query heads and key/value heads.
    """

    dtype: str
    head_dims: tuple[int, int]
    causal: bool
    tokens: int
    batch: int
    heads: tuple[int, int]

    @property
    def kind(self) -> str:
        """What shapes of one panel, or one row, have in common."""
        qk, v = self.head_dims
        return f"{self.dtype} {qk}/{v}, {'causal' if self.causal else 'no mask'}"

    @property
    def flops(self) -> float:
        scores = self.batch * self.heads[0] * self.tokens**2
        return 2.0 * sum(self.head_dims) * scores / (2 if self.causal else 1)

    @property
    def logit_bytes(self) -> int:
        return 4 * self.batch * self.heads[0] * self.tokens**2

    def inputs(self) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(0)
        heads, kv_heads = self.heads
        return tuple(
            rng.standard_normal((self.batch, self.tokens, h, d), dtype=np.float32)
            for h, d in (
                (heads, self.head_dims[0]),
                (kv_heads, self.head_dims[0]),
                (kv_heads, self.head_dims[1]),
            )
        )


@dataclasses.dataclass(frozen=True)
class Given:
    """The inputs as every implementation gets them.

    Attributes:
      arrays: q, k and v, in bfloat16 or as FP8 numbers.
      descales: of each tensor; 1 for bfloat16.
    """

    arrays: tuple[np.ndarray, ...]
    descales: tuple[float, ...]


def descales_of(case: Case, given: Given) -> dict[str, Any]:
    if case.dtype == "bfloat16":
        return {}
    return {f"{n}_descale": d for n, d in zip("qkv", given.descales, strict=True)}


def jax_nn(case: Case, given: Given) -> Call:
    """jax.nn's own, which holds all logits of a head."""

    @jax.jit
    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):  # it promotes implicitly
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=case.causal, implementation="xla"
            )

    return functools.partial(attention, *map(jnp.asarray, given.arrays))


class Tensor:
    """A tensor of torch's that waits as JAX's arrays do."""

    def __init__(self, torch: Any, tensor: Any) -> None:
        self._torch = torch
        self._tensor = tensor

    def __getitem__(self, index: Any) -> Any:
        return self._tensor[index]

    def block_until_ready(self) -> Tensor:
        if self._tensor.is_cuda:
            self._torch.cuda.synchronize()
        return self


def torch_device(torch: Any) -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def tensors_of(torch: Any, given: Given) -> list[Any]:
    tensors = []
    for x in given.arrays:
        bits = np.dtype(f"i{x.dtype.itemsize}")
        kind = torch.bfloat16 if x.dtype.itemsize == 2 else torch.float8_e4m3fn
        tensors.append(
            torch.from_numpy(x.view(bits)).view(kind).to(torch_device(torch))
        )
    return tensors


def text_of(error: Exception) -> str:
    """In a line."""
    if isinstance(error, ImportError):
        return f"not here: {error}".splitlines()[0]
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def platform_of(device: Any) -> str:
    """ "rocm", "cuda" or "cpu"; JAX calls the first two "gpu"."""
    version = device.client.platform_version
    return next((x for x in ("rocm", "cuda") if version.startswith(x)), "cpu")
