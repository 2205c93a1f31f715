"""Attention in blocks of keys, in plain JAX: memory linear in the sequence.

Dot products of int8 are exact here, as float32 holds all integers below 2**24.

The forward pass serves every call that no kernel takes, and implementation="reference".
The backward pass serves every platform; it recomputes probabilities from the saved
log-sum-exp (Dao et al., "FlashAttention-2", arXiv:2307.08691, section 3.1).

Shapes: queries (b, t, h, d) are grouped as (b', r, t, k, g, d), where key/value batch
b' serves r query batches and key/value head k serves g query heads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._spec import FLOAT8, KEY_BLOCK, AttentionSpec

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

_LOG2E = np.float32(1.4426950408889634)
_LN2 = np.float32(0.6931471805599453)
_LINEAR_BIAS = np.float32(119.55)
_QUADRATIC_BIAS = np.float32(120)
_QUADRATIC = np.float32(0.3437)
_TOP = np.float32(8)
_MAX_SHIFT = np.float32(120)
_MAX_CODE = np.float32(126)
_CHUNKS = 8
_MIN_CHUNK = 512
_INT32_MAX = 2**31 - 1

_einsum = functools.partial(
    jnp.einsum,
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
)


class _Softmax(NamedTuple):
    """Online softmax of a chunk of queries: maximum (base 2), sum, weighted values,
    and whether the query has seen any key."""

    maximum: Float[Array, "b r k g t"]
    total: Float[Array, "b r k g t"]
    values: Float[Array, "b r k g t e"]
    seen: Bool[Array, "b r k g t"]


class _Block(NamedTuple):
    """One block of keys, with the index of its first key and its descales."""

    start: Int[Array, ""]
    k: Float[Array, "b s k d"]
    v: Float[Array, "b s k e"]
    k_scale: Float[Array, "b k"]
    v_scale: Float[Array, "b k"]


def forward(
    q: Float[Array, "B T H D"],
    k: Float[Array, "b S K D"],
    v: Float[Array, "b S K E"],
    q_scale: Float[Array, "B H nq"],
    k_scale: Float[Array, "b K nk"],
    v_scale: Float[Array, "b K nv"],
    q_offset: Int[Array, " B"],
    q_lengths: Int[Array, " B"],
    kv_lengths: Int[Array, " B"],
    *,
    spec: AttentionSpec,
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
    """Output and log-sum-exp of the canonical call (see `_primitive.attention_p`)."""
    batch, tokens, heads, _ = q.shape
    fp8 = v.dtype == FLOAT8
    if spec.v_channels:
        v, v_scale = _with_channels(v, v_scale)
    scale = per_token(q_scale, spec.q_block, tokens)
    qf = q.astype(jnp.float32)
    sign = jnp.where(scale < 0, np.float32(-1), np.float32(1))
    qf = qf * jnp.moveaxis(sign, 1, 2)[..., None]
    qf, scale = _group(qf, k), _group_rows(jnp.abs(scale), k)
    outs, lses = [], []
    for q_start, q_stop, kv_start, kv_stop in _chunks(tokens, k.shape[1], spec):
        rows = slice(q_start, q_stop)
        qc, sc = qf[:, :, rows], scale[..., rows]
        state = _Softmax(
            jnp.full_like(sc, -np.inf),
            jnp.zeros_like(sc),
            jnp.zeros_like(sc, shape=(*sc.shape, v.shape[-1])),
            jnp.zeros_like(sc, dtype=jnp.bool_),
        )
        step = functools.partial(
            _forward_step,
            qc,
            sc,
            q_start,
            _ints(q_offset, q_lengths, kv_lengths, k),
            spec,
            fp8,
        )
        blocks = _blocks(k, v, k_scale, v_scale, kv_start, kv_stop, spec.kv_block)
        state, _ = jax.lax.scan(step, state, blocks)
        seen = state.seen
        out = jnp.where(
            seen[..., None],
            state.values / jnp.where(seen, state.total, np.float32(1))[..., None],
            np.float32(0),
        )
        top = _TOP if fp8 else np.float32(0)
        lse = _LN2 * (state.maximum + jnp.log2(state.total) - top)
        outs.append(jnp.moveaxis(out, 4, 2))
        lses.append(jnp.where(seen, lse, -np.inf))
    out = jnp.concatenate(outs, axis=2).reshape(batch, tokens, heads, v.shape[-1])
    lse = jnp.moveaxis(jnp.concatenate(lses, axis=-1), -1, 2)
    lse = jnp.moveaxis(lse.reshape(batch, tokens, heads), 1, 2)
    return out.astype(spec.out_dtype), lse


def backward(
    q: Float[Array, "B T H D"],
    k: Float[Array, "b S K D"],
    v: Float[Array, "b S K E"],
    q_scale: Float[Array, "B H nq"],
    k_scale: Float[Array, "b K nk"],
    v_scale: Float[Array, "b K nv"],
    q_offset: Int[Array, " B"],
    q_lengths: Int[Array, " B"],
    kv_lengths: Int[Array, " B"],
    out: Float[Array, "B T H E"],
    lse: Float[Array, "B H T"],
    d_out: Float[Array, "B T H E"],
    d_lse: Float[Array, "B H T"],
    *,
    spec: AttentionSpec,
) -> tuple[Float[Array, "B T H D"], Float[Array, "b S K D"], Float[Array, "b S K E"]]:
    """Cotangents in float32 of (q * q_scale, k * k_scale, v * v_scale)."""
    tokens = q.shape[1]
    if spec.v_channels:
        v, v_scale = _with_channels(v, v_scale)
    # The results of a query that sees no key are constant: nothing of it must spread.
    blind = lse == -np.inf
    d_lse = jnp.where(blind, np.float32(0), d_lse)
    qf, d_out = (
        jnp.where(jnp.moveaxis(blind, 1, 2)[..., None], np.float32(0), x)
        for x in (q.astype(jnp.float32), d_out.astype(jnp.float32))
    )
    scale = per_token(q_scale, spec.q_block, tokens)
    qf = _group(qf * jnp.moveaxis(scale, 1, 2)[..., None], k)
    delta = _einsum("bthe,bthe->bht", d_out, out.astype(jnp.float32))
    shift = _group_rows(d_lse - delta, k)
    lse = _group_rows(jnp.where(blind, np.float32(np.inf), lse), k)
    d_out = _group(d_out, k)
    d_qs = []
    d_k = jnp.zeros_like(k, dtype=jnp.float32)
    d_v = jnp.zeros_like(v, dtype=jnp.float32)
    for q_start, q_stop, kv_start, kv_stop in _chunks(tokens, k.shape[1], spec):
        rows = slice(q_start, q_stop)
        step = functools.partial(
            _backward_step,
            qf[:, :, rows],
            d_out[:, :, rows],
            lse[..., rows],
            shift[..., rows],
            q_start,
            _ints(q_offset, q_lengths, kv_lengths, k),
            spec,
        )
        blocks = _blocks(k, v, k_scale, v_scale, kv_start, kv_stop, spec.kv_block)
        d_qc, (d_kc, d_vc) = jax.lax.scan(step, jnp.zeros_like(qf[:, :, rows]), blocks)
        d_qs.append(d_qc)
        span = slice(kv_start, kv_stop)
        d_k = d_k.at[:, span].add(_unblock(d_kc, kv_stop - kv_start))
        d_v = d_v.at[:, span].add(_unblock(d_vc, kv_stop - kv_start))
    return jnp.concatenate(d_qs, axis=2).reshape(q.shape), d_k, d_v


def _forward_step(
    q: Float[Array, "b r t k g d"],
    q_scale: Float[Array, "b r k g t"],
    q_start: int,
    ints: Int[Array, "3 b r"],
    spec: AttentionSpec,
    fp8: bool,
    state: _Softmax,
    block: _Block,
) -> tuple[_Softmax, None]:
    visible = _visible(block, q.shape[2], q_start, ints, spec.window)
    see = visible[:, :, None, None]
    factor = q_scale * block.k_scale[:, None, :, None, None] * _LOG2E
    dots = _einsum("brtkgd,bskd->brkgts", q, block.k.astype(jnp.float32))
    block_max = jnp.max(jnp.where(see, dots, -np.inf), axis=-1) * factor
    block_max = jnp.where(jnp.any(see, axis=-1), block_max, -np.inf)
    maximum = jnp.maximum(state.maximum, block_max)
    finite = jnp.where(maximum == -np.inf, np.float32(0), maximum)
    decay = jnp.exp2(state.maximum - finite)
    if fp8:
        p = _fp8_probabilities(dots, factor, finite, block_max, spec.quadratic)
    else:
        # Rounding alone could leave more than the maximum.
        excess = dots * factor[..., None] - finite[..., None]
        p = jnp.exp2(jnp.minimum(excess, np.float32(0)))
    p = jnp.where(see, p, np.float32(0))
    # A value that is not finite must reach the queries that see it, and no other.
    v = block.v.astype(jnp.float32)
    bad = ~jnp.isfinite(v)
    v = jnp.where(bad, np.float32(0), v * block.v_scale[:, None, :, None])
    poison = _einsum(
        "brts,bske->brket", visible.astype(jnp.float32), bad.astype(jnp.float32)
    )
    poison = jnp.moveaxis(jnp.where(poison > 0, np.float32(np.nan), 0), 3, 4)
    values = _einsum("brkgts,bske->brkgte", p, v) + poison[:, :, :, None]
    return _Softmax(
        maximum,
        state.total * decay + jnp.sum(p, axis=-1),
        state.values * decay[..., None] + values,
        state.seen | jnp.any(see, axis=-1),
    ), None


def _fp8_probabilities(
    dots: Float[Array, "b r k g t s"],
    factor: Float[Array, "b r k g t"],
    maximum: Float[Array, "b r k g t"],
    block_max: Float[Array, "b r k g t"],
    quadratic: bool | None,
) -> Float[Array, "b r k g t s"]:
    """Probabilities through their e4m3 codes; `reference.fp8_softmax_block` in jnp."""
    shift = jnp.minimum(jnp.floor(maximum - block_max), _MAX_SHIFT)
    shift = jnp.where(block_max == -np.inf, _MAX_SHIFT, shift)
    bias = _QUADRATIC_BIAS if quadratic else _LINEAR_BIAS
    offset = bias - _TOP * (maximum - shift)
    code = dots * (_TOP * factor)[..., None] + offset[..., None]
    code = jnp.clip(code, np.float32(0), _MAX_CODE)
    if quadratic:
        fraction = code - _TOP * jnp.floor(code / _TOP)
        code = code + fraction * (fraction * (_QUADRATIC / _TOP) - _QUADRATIC)
    code = jnp.round(code)
    nan = jnp.isnan(code)
    bits = jnp.where(nan, np.float32(127), code).astype(jnp.uint8)
    p = jax.lax.bitcast_convert_type(bits, FLOAT8).astype(jnp.float32)
    return p * jnp.exp2(-shift)[..., None]


def _backward_step(
    q: Float[Array, "b r t k g d"],
    d_out: Float[Array, "b r t k g e"],
    lse: Float[Array, "b r k g t"],
    shift: Float[Array, "b r k g t"],
    q_start: int,
    ints: Int[Array, "3 b r"],
    spec: AttentionSpec,
    d_q: Float[Array, "b r t k g d"],
    block: _Block,
) -> tuple[
    Float[Array, "b r t k g d"],
    tuple[Float[Array, "b s k d"], Float[Array, "b s k e"]],
]:
    see = _visible(block, q.shape[2], q_start, ints, spec.window)[:, :, None, None]
    # Keys past every length are padding: whatever they hold must not spread.
    held = jnp.any(see, axis=(1, 2, 3, 4))[:, :, None, None]
    k = block.k.astype(jnp.float32) * block.k_scale[:, None, :, None]
    v = block.v.astype(jnp.float32) * block.v_scale[:, None, :, None]
    k, v = (jnp.where(held, x, np.float32(0)) for x in (k, v))
    logits = _einsum("brtkgd,bskd->brkgts", q, k)
    p = jnp.where(see, jnp.exp(logits - lse[..., None]), np.float32(0))
    d_p = _einsum("brtkge,bske->brkgts", d_out, v)
    d_logits = jnp.where(see, p * (d_p + shift[..., None]), np.float32(0))
    d_q = d_q + _einsum("brkgts,bskd->brtkgd", d_logits, k)
    d_k = _einsum("brkgts,brtkgd->bskd", d_logits, q)
    d_v = _einsum("brkgts,brtkge->bske", p, d_out)
    return d_q, (d_k, d_v)


def _visible(
    block: _Block,
    tokens: Any,
    q_start: int,
    ints: Int[Array, "3 b r"],
    window: tuple[int | None, int | None],
) -> Array:
    """Which keys of the block each query sees: bool (b, r, t, s)."""
    offset, q_length, kv_length = (x[:, :, None, None] for x in ints)
    left, right = window
    token = np.int32(q_start) + jnp.arange(tokens, dtype=jnp.int32)[:, None]
    key = block.start + jnp.arange(KEY_BLOCK, dtype=jnp.int32)
    visible = (key < kv_length) & (token < q_length)
    if right is not None:
        visible &= key - token <= _saturating_add(offset, right)
    if left is not None:
        visible &= key - token >= _saturating_add(offset, -left)
    return visible


def _saturating_add(x: Int[Array, "*s"], constant: int) -> Int[Array, "*s"]:
    """x + constant, held to int32's range; the constant may lie outside it."""
    while constant:
        step = max(-_INT32_MAX, min(constant, _INT32_MAX))
        if step > 0:
            x = jnp.minimum(x, np.int32(_INT32_MAX - step)) + np.int32(step)
        else:
            x = jnp.maximum(x, np.int32(-_INT32_MAX - step)) + np.int32(step)
        constant -= step
    return x


def _chunks(
    tokens: Any, kv_tokens: Any, spec: AttentionSpec
) -> Iterator[tuple[int, Any, int, Any]]:
    """Chunks of queries with the keys that they can see: (start, stop) of each.

    A few chunks halve the work of causal attention. Key starts are multiples of
    KEY_BLOCK, so that blocks do not depend on the chunk.
    """
    if not isinstance(tokens, int) or not isinstance(kv_tokens, int):
        yield 0, tokens, 0, kv_tokens
        return
    size = max(_MIN_CHUNK, -(-tokens // _CHUNKS))
    left, right = spec.window
    for start in range(0, max(tokens, 1), size):
        stop = min(start + size, tokens)
        first, last = 0, kv_tokens
        if spec.q_offset is not None:
            if right is not None:
                last = min(max(stop + spec.q_offset + right, 0), kv_tokens)
            if left is not None:
                first = min(max(start + spec.q_offset - left, 0), last)
        yield start, stop, first // KEY_BLOCK * KEY_BLOCK, last


def _blocks(
    k: Float[Array, "b S K D"],
    v: Float[Array, "b S K E"],
    k_scale: Float[Array, "b K nk"],
    v_scale: Float[Array, "b K nv"],
    start: int,
    stop: Any,
    kv_block: int,
) -> _Block:
    """Keys start..stop as a stack of blocks to scan over."""
    count = -(-(stop - start) // KEY_BLOCK)
    starts = np.int32(start) + KEY_BLOCK * jnp.arange(count, dtype=jnp.int32)
    group = starts // kv_block if kv_block else jnp.zeros_like(starts)

    def stack(x: Array) -> Array:
        x = x[:, start:stop]
        pad = count * KEY_BLOCK - x.shape[1]
        x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0)))
        shape = (x.shape[0], count, KEY_BLOCK, *x.shape[2:])
        return jnp.moveaxis(x.reshape(shape), 1, 0)

    def per_block(scale: Array) -> Array:
        return jnp.moveaxis(jnp.take(scale, group, axis=2, mode="clip"), 2, 0)

    return _Block(starts, stack(k), stack(v), per_block(k_scale), per_block(v_scale))


def _with_channels(
    v: Float[Array, "b S K E"], v_scale: Float[Array, "b K E"]
) -> tuple[Float[Array, "b S K E"], Float[Array, "b K one"]]:
    """v times the descales of its channels, and the descales left."""
    v = v.astype(jnp.float32) * v_scale[:, None]
    return v, jnp.ones_like(v_scale, shape=(*v_scale.shape[:2], 1))


def _unblock(x: Float[Array, "n b s k d"], tokens: Any) -> Float[Array, "b S k d"]:
    x = jnp.moveaxis(x, 0, 1)
    shape = (x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
    return x.reshape(shape)[:, :tokens]


def _group(x: Float[Array, "B T H D"], k: Float[Array, "b S K D"]) -> Array:
    kv_batch, kv_heads = k.shape[0], k.shape[2]
    batch, tokens, heads, dim = x.shape
    ratio = batch // kv_batch if kv_batch else 1
    return x.reshape(kv_batch, ratio, tokens, kv_heads, heads // kv_heads, dim)


def _group_rows(x: Float[Array, "B H T"], k: Float[Array, "b S K D"]) -> Array:
    kv_batch, kv_heads = k.shape[0], k.shape[2]
    batch, heads, tokens = x.shape
    ratio = batch // kv_batch if kv_batch else 1
    return x.reshape(kv_batch, ratio, kv_heads, heads // kv_heads, tokens)


def per_token(
    scale: Float[Array, "B H n"], block: int, tokens: Any
) -> Float[Array, "B H T"]:
    """A row of descales, one per block of tokens, as one per token."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    index = token // block if block else jnp.zeros_like(token)
    return jnp.take(scale, index, axis=2, mode="clip")


def _ints(
    q_offset: Int[Array, " B"],
    q_lengths: Int[Array, " B"],
    kv_lengths: Int[Array, " B"],
    k: Float[Array, "b S K D"],
) -> Int[Array, "3 b r"]:
    """Offsets and lengths by batch group."""
    kv_batch = k.shape[0]
    batch = q_offset.shape[0]
    ratio = batch // kv_batch if kv_batch else 1
    rows = jnp.stack([q_offset, q_lengths, kv_lengths])
    return rows.reshape(3, kv_batch, ratio)
