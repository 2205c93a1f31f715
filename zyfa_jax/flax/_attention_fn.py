"""What an `attention_fn` of Flax may be asked for, and what is refused of it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ._functional import Precision, Window, attend


def call(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Any,
    causal: bool,
    precision: Precision,
    rotated: bool,
    window: Window,
    scale: Any,
    implementation: Any,
    hint: str,
) -> jax.Array:
    """Attention with Flax's meaning of causal: query i sees the keys up to i."""
    causal = _with_mask(mask, causal, q, k, hint)
    options = {"causal": causal, "window": window, "scale": scale}
    if q.shape[-3] != k.shape[-3]:
        options["q_offset"] = 0
    return attend(
        q,
        k,
        v,
        precision=precision,
        rotated=rotated,
        implementation=implementation,
        **options,
    )


def refuse_dropout(dropout_rate: float, deterministic: bool | None) -> None:
    if dropout_rate > 0 and not deterministic:
        raise NotImplementedError(
            "zyfa_jax.flax attention takes no dropout, got dropout_rate="
            f"{dropout_rate} that is not deterministic; set dropout_rate=0 or "
            "deterministic=True"
        )


def refuse(**arguments: Any) -> None:
    """Raises for each argument that Flax may pass but that was given here."""
    reasons = {
        "bias": "no bias is added to the logits",
        "module": "the attention weights are never formed (leave sow_weights out)",
        "qk_attn_weights_einsum": "the products are the kernel's own",
        "attn_weights_value_einsum": "the products are the kernel's own",
        "input_positions": "use GroupedQueryAttention for rotary embeddings",
    }
    for name, value in arguments.items():
        if value is not None:
            got = f"an array of shape {value.shape}" if hasattr(value, "shape") else ""
            raise NotImplementedError(
                f"zyfa_jax.flax attention takes {name}=None, not "
                f"{got or type(value).__name__}: {reasons[name]}"
            )


def _with_mask(mask: Any, causal: bool, q: jax.Array, k: jax.Array, hint: str) -> bool:
    """Whether attention is causal, given that `mask` is None, full or causal."""
    if mask is None:
        return causal
    taken = (
        "zyfa_jax.flax attention takes no mask but a causal or an all-true one whose "
        "values are known when tracing"
    )
    remedy = (
        f"for causal attention leave the mask out and {hint}; for padded rows use "
        "`lengths` of GroupedQueryAttention; a decoding cache is not offered"
    )
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3], k.shape[-3])
    if isinstance(mask, Tracer):
        raise NotImplementedError(
            f"{taken}, got a traced mask of shape {mask.shape}: {remedy}"
        )
    if not getattr(mask, "is_fully_addressable", True):
        raise NotImplementedError(
            f"{taken}, got a mask of shape {mask.shape} that spans several processes: "
            f"{remedy}"
        )
    seen = np.asarray(mask).astype(bool)
    try:
        fits = np.broadcast_shapes(seen.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            "attention takes a mask that broadcasts to (batch..., heads, queries, "
            f"keys) = {shape}, not shape {seen.shape}"
        )
    if seen.all():
        return causal
    if np.array_equal(
        seen,
        np.broadcast_to(np.tri(*shape[-2:], dtype=bool), seen.shape[:-2] + shape[-2:]),
    ):
        return True
    raise NotImplementedError(
        f"{taken}, got another mask of shape {seen.shape}: {remedy}"
    )
