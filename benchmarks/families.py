"""Made-up inputs with the traits of captured activations, deterministic by seed.

gauss: standard normal. sharp: logits three times as wide. sink: every query has one
dominant key, token 0, whose value is small, as attention sinks have. koutlier: two
channels of k with a large common offset, as models with rotary embeddings show.
local: each query prefers its neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float32

NAMES = ("gauss", "sharp", "sink", "koutlier", "local")


def make(
    name: str,
    tokens: int,
    *,
    q_heads: int = 1,
    kv_heads: int = 1,
    qk_dim: int = 128,
    v_dim: int = 128,
    seed: int = 0,
) -> tuple[
    Float32[np.ndarray, "s h d"],
    Float32[np.ndarray, "s k d"],
    Float32[np.ndarray, "s k dv"],
]:
    """(q, k, v) of the family `name`."""
    rng = np.random.default_rng([seed, NAMES.index(name)])
    q = rng.standard_normal((tokens, q_heads, qk_dim))
    k = rng.standard_normal((tokens, kv_heads, qk_dim))
    v = rng.standard_normal((tokens, kv_heads, v_dim))
    if name == "sharp":
        q *= 3
    elif name == "sink":
        direction = rng.standard_normal(qk_dim)
        direction /= np.linalg.norm(direction)
        q = 1.5 * (q + 6 * direction)
        k[0] += 24 * direction
        v[0] *= 0.05
    elif name == "koutlier":
        q *= 1.5
        k[..., 5 % qk_dim] += 20
        k[..., 70 % qk_dim] -= 15
    elif name == "local":
        position = np.arange(tokens)[:, None, None]
        frequency = 2 * np.pi / (64 * 1.3 ** np.arange(8))
        angle = position * frequency
        wave = 4 * np.concatenate([np.cos(angle), np.sin(angle)], axis=-1)
        q[..., :16] = wave
        k[..., :16] = wave
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)
