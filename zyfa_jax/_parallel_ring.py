"""One device's part of attention whose tokens are spread over devices.

Forward, "ring": keys and values go round while the block before is computed, and the
results of blocks are merged by their log-sum-exps (Liu et al., "Ring Attention with
Blockwise Transformers", arXiv:2310.01889). "all_gather": every device gathers them.
Backward, for both: a ring, in which the cotangents of keys and values go round with
them; in between, nothing is kept that is not a device's own.

In zigzag order (Llama Team, "The Llama 3 Herd of Models", arXiv:2407.21783, section
3.3) of plain causal attention, device i has the chunks i and 2n-1-i of 2n. The keys of
another device j are seen in whole chunks: if j is before i, both chunks of queries see
the early chunk, and else the late queries see both. So every step has two of four pairs
of chunks, without a mask.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from . import _blockwise, _gradient
from . import _parallel_order as order_of
from ._gradient import CHECKPOINT_NAMES, Operands
from ._parallel_order import Order
from ._primitive import attention_p
from ._spec import FLOAT8, AttentionSpec

if TYPE_CHECKING:
    from jaxtyping import Array, Float

Method = Literal["ring", "all_gather"]
_MERGED_AT_ONCE = 3
"""Partial results: each merge reads and writes the float32 result so far, which takes
memory bandwidth that kernels do not hide, so two new ones wait for each other."""
_FAR = 2**30
"""Positions beyond all tokens, to which the start of a chunk can still be added."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static of one device's part.

    Attributes:
      spec: of the whole call; `q_offset` where known when tracing.
      axis: the mesh axis, or axes, that tokens are spread over.
      devices: along it.
      order: of the tokens.
      method: of the forward pass.
      bounded: whether lengths were given.
      same_descales: whether all devices have one descale of a key/value head.
      exchange: False leaves collectives out: a device goes on with its own keys and
        values. Wrong results in the same time: what is left is that of collectives.
    """

    spec: AttentionSpec
    axis: str | tuple[str, ...]
    devices: int
    order: Order
    method: Method
    bounded: bool
    same_descales: bool
    exchange: bool = True

    @property
    def chunks(self) -> int:
        return order_of.chunks(self.order)

    @property
    def unmasked(self) -> bool:
        """Every query sees every key."""
        return self.spec.window == (None, None) and not self.bounded

    def causal_chunks(self, q_tokens: int, kv_tokens: int) -> bool:
        """Whether queries see all keys of chunks before theirs, and none after."""
        return (
            self.spec.window == (None, 0)
            and self.spec.q_offset == 0
            and q_tokens == kv_tokens
            and not self.bounded
        )

    def shifts(self, q_tokens: int, kv_tokens: int) -> list[int]:
        """From how many devices back keys come, step by step; those that no query of
        any device sees are left out.

        Args:
          q_tokens: of a device.
          kv_tokens: likewise.
        """
        everything = range(self.devices)
        if self.spec.q_offset is None:
            return list(everything)
        left, right = self.spec.window
        q_chunk, kv_chunk = q_tokens // self.chunks, kv_tokens // self.chunks

        def sees(q_start: int, kv_start: int) -> bool:
            first = q_start + (self.spec.q_offset or 0)
            ahead = kv_start - (first + q_chunk - 1)
            behind = first - (kv_start + kv_chunk - 1)
            return (right is None or ahead <= right) and (
                left is None or behind <= left
            )

        def is_seen(shift: int) -> bool:
            return any(
                sees(q_start, kv_start)
                for device in everything
                for q_start in self._starts(device, q_tokens)
                for kv_start in self._starts((device - shift) % self.devices, kv_tokens)
            )

        return [0, *(shift for shift in everything[1:] if is_seen(shift))]

    def _starts(self, device: int, tokens: int) -> list[int]:
        return order_of.starts(device, self.devices, tokens, self.order)


class _Keys(NamedTuple):
    """What travels: keys and values of one device."""

    k: Float[Array, "b S K D"]
    v: Float[Array, "b S K E"]
    k_descale: Float[Array, "b K nk"]
    v_descale: Float[Array, "b K nk"]


class _Queries(NamedTuple):
    """What stays. Results and their cotangents are there in the backward pass."""

    q: Float[Array, "B T H D"]
    q_scale: Float[Array, "B H nq"]
    out: Float[Array, "B T H E"] | None = None
    lse: Float[Array, "B H T"] | None = None
    d_out: Float[Array, "B T H E"] | None = None
    d_lse: Float[Array, "B H T"] | None = None


class _Block(NamedTuple):
    """One call of the primitive in a step.

    Attributes:
      rows: how many chunks the queries are cut into, each a batch row of its own.
      keys: the keys, all of those that came or one chunk of them.
      chunk: which; None for all.
      spec: of the call.
      ints: q_offset, q_lengths and kv_lengths of its batch rows.
    """

    rows: int
    keys: _Keys
    chunk: int | None
    spec: AttentionSpec
    ints: tuple[Array, Array, Array]


def attention(plan: Plan, operands: Operands) -> tuple[Array, Array]:
    """Output and log-sum-exp of this device's queries, inside shard_map.

    Offsets and lengths count the tokens of all devices; operands vary over the axis.
    """
    return _attention(plan, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: Plan, x: Operands) -> Any:
    forward = _gathered if plan.method == "all_gather" else _ring
    parts = forward(plan, x)
    out, lse = parts[0] if len(parts) == 1 else merge(parts)
    return out.astype(plan.spec.out_dtype), lse


def _forward(plan: Plan, x: Operands) -> Any:
    results: Any = _attention(plan, x)
    out, lse = results
    out = checkpoint_name(out, CHECKPOINT_NAMES[0])
    lse = checkpoint_name(lse, CHECKPOINT_NAMES[1])
    return (out, lse), (x, out, lse)


def merge(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """The result over all keys of partial results over some each, in float32."""
    outs, lses = zip(*parts, strict=True)
    top = functools.reduce(jnp.maximum, lses)
    # A query that sees no key has weight 0 everywhere.
    top = jnp.where(top == -np.inf, np.float32(0), top)
    weights = [jnp.exp(lse - top) for lse in lses]
    total = functools.reduce(jnp.add, weights)
    seen = jnp.where(total == 0, np.float32(1), total)
    out = functools.reduce(
        jnp.add,
        (
            out.astype(jnp.float32) * jnp.swapaxes(weight / seen, 1, 2)[..., None]
            for out, weight in zip(outs, weights, strict=True)
        ),
    )
    return out, top + jnp.log(total)


def _ring(plan: Plan, x: Operands) -> list[tuple[Array, Array]]:
    """Steps are unrolled: the compiler overlaps a permute with the kernel beside it
    within one computation, and not across turns of a loop."""
    keys, parts = _keys(x), []
    for shift, following in _steps(plan, x):
        arriving = _send_keys(plan, keys, following - shift) if following else keys
        queries = _Queries(x.q, x.q_descale * x.scale)
        for block in _blocks(plan, x, keys, shift):
            parts.append(_bind(block, queries))
            if len(parts) == _MERGED_AT_ONCE:
                parts = [merge(parts)]
        keys = arriving
    return parts


def _gathered(plan: Plan, x: Operands) -> list[tuple[Array, Array]]:
    """Where chunks are seen whole, their own diagonal is computed meanwhile."""
    queries = _Queries(x.q, x.q_descale * x.scale)
    every = _gather(plan, _keys(x))
    index = jax.lax.axis_index(plan.axis)
    starts = order_of.starts(index, plan.devices, x.q.shape[1], plan.order)
    if plan.causal_chunks(x.q.shape[1], x.k.shape[1]):
        rows = plan.chunks
        chunk = jnp.full_like(_row_ints(x.q_lengths, rows), x.q.shape[1] // rows)
        zero = jnp.zeros_like(chunk)
        own = _in_rows(_keys(x), rows)
        before = dataclasses.replace(plan.spec, window=(None, None))
        seen = _row_ints(jnp.zeros_like(x.kv_lengths), rows, starts)
        return [
            _bind(_Block(rows, own, None, plan.spec, (zero, chunk, chunk)), queries),
            _bind(_Block(rows, every, None, before, (zero, chunk, seen)), queries),
        ]
    if plan.unmasked:
        return [_bind(_whole(plan, x, every), queries)]
    spec = dataclasses.replace(plan.spec, q_offset=None)
    q_offset, q_lengths = _query_ints(plan, x, starts)
    kv_lengths = _row_ints(x.kv_lengths, plan.chunks)
    ints = (q_offset, q_lengths, kv_lengths)
    return [_bind(_Block(plan.chunks, every, None, spec, ints), queries)]


def _backward(plan: Plan, residuals: Any, cotangents: Any) -> tuple[Operands]:
    x, out, lse = residuals
    d_out, d_lse = cotangents
    queries = _Queries(x.q, x.q_descale * x.scale, out, lse, d_out, d_lse)
    keys, d_q = _keys(x), jnp.zeros_like(x.q, dtype=jnp.float32)
    home = moving = None
    at = 0
    # The other way round: had the forward pass sent the same, the compiler would keep
    # all that came then, and send nothing now.
    for shift, following in _steps(plan, x, backwards=True):
        arriving = _send_keys(plan, keys, following - shift) if following else keys
        if moving is not None:
            moving = _send(plan, moving, shift - at)
        d_q, d_keys = _step_gradient(plan, x, queries, keys, shift, d_q)
        if shift == 0:
            home = d_keys
        elif moving is None:
            moving = d_keys
        else:
            moving = jax.tree.map(jnp.add, moving, d_keys)
        keys, at = arriving, shift
    if moving is not None:
        home = jax.tree.map(jnp.add, home, _send(plan, moving, plan.devices - at))
    assert home is not None
    d_operands = _gradient.of_operands(plan.spec, x, d_q, *home)
    return (_gradient.with_integers(x, d_operands),)


_attention.defvjp(_forward, _backward)


def _step_gradient(
    plan: Plan, x: Operands, queries: _Queries, keys: _Keys, shift: int, d_q: Array
) -> tuple[Array, tuple[Array, Array]]:
    """d_q with what this step adds, and what it gives for its keys and values."""
    if shift and _halved(plan, x):
        return _halved_gradient(plan, x, queries, keys, shift, d_q)
    d_k, d_v = (jnp.zeros_like(y, dtype=jnp.float32) for y in keys[:2])
    for block in _blocks(plan, x, keys, shift):
        d_rows, d_k_part, d_v_part = _pull(block, _in_rows(queries, block.rows))
        d_q = d_q + d_rows.reshape(d_q.shape)
        if block.chunk is None:
            d_k, d_v = d_k + d_k_part, d_v + d_v_part
        else:
            size = d_k_part.shape[1]
            at = slice(block.chunk * size, (block.chunk + 1) * size)
            d_k, d_v = d_k.at[:, at].add(d_k_part), d_v.at[:, at].add(d_v_part)
    return d_q, (d_k, d_v)


def _halved_gradient(
    plan: Plan, x: Operands, queries: _Queries, keys: _Keys, shift: int, d_q: Array
) -> tuple[Array, tuple[Array, Array]]:
    """The two pairs of chunks alone, since plain JAX does not skip what is masked.

    Late queries see the early keys in any case; the other pair is of two early chunks
    or of two late ones.
    """
    before = _is_before(plan, shift)

    def choose(early: Any, late: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(before, a, b), early, late)

    def both(first: Any, second: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, second)

    (early_q, late_q), (early, late) = _chunks(queries, 2), _chunks(keys, 2)
    two_keys = both(early, choose(early, late))
    chunk = jnp.full_like(_row_ints(x.q_lengths, 2), late.k.shape[1])
    spec = dataclasses.replace(plan.spec, window=(None, None), q_offset=0)
    ints = (jnp.zeros_like(chunk), chunk, chunk)
    block = _Block(1, two_keys, None, spec, ints)
    d_rows, *d_keys = _pull(block, both(late_q, choose(early_q, late_q)))

    def spread(x: Array) -> tuple[Array, Array, Array]:
        first, second = jnp.split(x, 2)
        zero = jnp.zeros_like(second)
        return first, jnp.where(before, second, zero), jnp.where(before, zero, second)

    first, to_early, to_late = spread(d_rows)
    d_q = d_q + jnp.concatenate([to_early, first + to_late], axis=1)
    d_k, d_v = (
        jnp.concatenate([first + to_early, to_late], axis=1)
        for first, to_early, to_late in map(spread, d_keys)
    )
    return d_q, (d_k, d_v)


def _blocks(plan: Plan, x: Operands, keys: _Keys, shift: int) -> list[_Block]:
    """The calls of the step with the keys of so many devices back."""
    if plan.unmasked:
        return [_whole(plan, x, keys)]
    if _halved(plan, x):
        if shift == 0:
            return [_whole(plan, x, keys)]  # the chunks as they lie are causal
        before = _is_before(plan, shift)
        chunk = x.q.shape[1] // 2
        lengths = [jnp.where(before, chunk, y) for y in (0, 2 * chunk)]
        q_lengths = jnp.full_like(_row_ints(x.q_lengths, 2), chunk)
        kv_lengths = _row_ints(jnp.zeros_like(x.kv_lengths), 2, lengths)
        spec = dataclasses.replace(plan.spec, window=(None, None))
        ints = (jnp.zeros_like(q_lengths), q_lengths, kv_lengths)
        return [_Block(2, keys, None, spec, ints)]
    index = jax.lax.axis_index(plan.axis)
    source = (index - shift) % plan.devices
    starts = order_of.starts(index, plan.devices, x.q.shape[1], plan.order)
    kv_starts = order_of.starts(source, plan.devices, x.k.shape[1], plan.order)
    q_offset, q_lengths = _query_ints(plan, x, starts)
    own = shift == 0 and plan.chunks == 1 and x.q.shape[1] == x.k.shape[1]
    spec = plan.spec if own else dataclasses.replace(plan.spec, q_offset=None)
    size = x.k.shape[1] // plan.chunks
    ends = _row_ints(x.kv_lengths, plan.chunks)
    return [
        _Block(
            plan.chunks,
            chunk,
            i,
            spec,
            (q_offset - start, q_lengths, _clipped(ends - start, size)),
        )
        for i, (chunk, start) in enumerate(
            zip(_chunks(keys, plan.chunks), kv_starts, strict=True)
        )
    ]


def _whole(plan: Plan, x: Operands, keys: _Keys) -> _Block:
    """All of the queries with all of the keys, as they lie."""
    q_lengths = jnp.full_like(x.q_lengths, x.q.shape[1])
    kv_lengths = jnp.full_like(x.kv_lengths, keys.k.shape[1])
    spec = dataclasses.replace(plan.spec, q_offset=0)
    return _Block(
        1, keys, None, spec, (jnp.zeros_like(q_lengths), q_lengths, kv_lengths)
    )


def _halved(plan: Plan, x: Operands) -> bool:
    return plan.order == "zigzag" and plan.causal_chunks(x.q.shape[1], x.k.shape[1])


def _is_before(plan: Plan, shift: int) -> Array:
    """Whether the device whose keys came by this shift is an earlier one."""
    return jax.lax.axis_index(plan.axis) >= shift


def _query_ints(plan: Plan, x: Operands, starts: list[Any]) -> tuple[Array, Array]:
    """The position of each row's first query, and the number of its queries."""
    rows = plan.chunks
    q_offset = jnp.clip(x.q_offset, np.int32(-_FAR), np.int32(_FAR))
    q_offset = _row_ints(q_offset, rows, starts)
    minus = [-start for start in starts]
    q_lengths = _row_ints(x.q_lengths, rows, minus)
    return q_offset, _clipped(q_lengths, x.q.shape[1] // rows)


def _clipped(lengths: Array, most: int) -> Array:
    return jnp.clip(lengths, np.int32(0), np.int32(most))


def _row_ints(x: Array, rows: int, add: Sequence[Any] | None = None) -> Array:
    """One integer of each batch row as one of each of its chunks."""
    repeated = jnp.repeat(x, rows)
    if add is None:
        return repeated
    return repeated + jnp.tile(jnp.stack(add).astype(jnp.int32), x.shape[0])


def _bind(block: _Block, queries: _Queries) -> tuple[Array, Array]:
    rows, keys = _in_rows(queries, block.rows), block.keys
    out, lse = attention_p.bind(
        rows.q, keys.k, keys.v, rows.q_scale, keys.k_descale, keys.v_descale,
        *block.ints, spec=block.spec,
    )  # fmt: skip
    batch, tokens, heads, _ = queries.q.shape
    out = out.reshape(batch, tokens, heads, out.shape[-1])
    lse = lse.reshape(batch, block.rows, heads, tokens // block.rows)
    return out, jnp.moveaxis(lse, 1, 2).reshape(batch, heads, tokens)


def _pull(block: _Block, rows: _Queries) -> tuple[Array, Array, Array]:
    keys = block.keys
    results: Any = (rows.out, rows.lse, rows.d_out, rows.d_lse)
    return _blockwise.backward(
        rows.q, keys.k, keys.v, rows.q_scale, keys.k_descale, keys.v_descale,
        *block.ints, *results, spec=block.spec,
    )  # fmt: skip


def _keys(x: Operands) -> _Keys:
    return _Keys(x.k, x.v, x.k_descale, x.v_descale)


def _steps(plan: Plan, x: Operands, backwards: bool = False) -> list[tuple[int, int]]:
    """Pairs of a shift and the following one, 0 after the last."""
    shifts = plan.shifts(x.q.shape[1], x.k.shape[1])
    if backwards:
        shifts = [0, *reversed(shifts[1:])]
    return list(zip(shifts, [*shifts[1:], 0], strict=True))


def _send(plan: Plan, arrays: Sequence[Array], hops: int) -> tuple[Array, ...]:
    """To the device so many further on."""
    n = plan.devices
    if not plan.exchange:
        return tuple(arrays)
    to = [(i, (i + hops) % n) for i in range(n)]
    return tuple(_as_bits(jax.lax.ppermute, x, plan.axis, to) for x in arrays)


def _as_bits(collective: Any, x: Array, *args: Any, **options: Any) -> Array:
    """FP8 as bytes: some compilers make collectives of it ones of 16-bit floats."""
    if x.dtype != FLOAT8:
        return collective(x, *args, **options)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint8)
    return jax.lax.bitcast_convert_type(collective(bits, *args, **options), FLOAT8)


def _send_keys(plan: Plan, keys: _Keys, hops: int) -> _Keys:
    descales = keys[2:]
    if not plan.same_descales:
        descales = _send(plan, descales, hops)
    return _Keys(*_send(plan, keys[:2], hops), *descales)


def _gather(plan: Plan, x: _Keys) -> _Keys:
    """Of all devices, in the order of their positions."""

    def gather(y: Array, axis: int) -> Array:
        if plan.exchange:
            gather_all = functools.partial(jax.lax.all_gather, axis=axis, tiled=True)
            every = _as_bits(gather_all, y, plan.axis)
        else:
            every = jnp.concatenate([y] * plan.devices, axis=axis)
        if plan.order == "contiguous" or plan.unmasked:
            return every
        return order_of.from_zigzag(every, plan.devices, axis)

    blocks = bool(plan.spec.kv_block)
    descales = (gather(y, 2) if blocks else y for y in x[2:])
    return _Keys(gather(x.k, 1), gather(x.v, 1), *descales)


def _chunk(x: Array, i: int, count: int) -> Array:
    """One of so many chunks of tokens: of (B, T, H, D), of (B, H, T), or of descales
    (B, H, n); one descale serves all tokens."""
    axis = 1 if x.ndim == 4 else 2
    if x.ndim == 3 and x.shape[2] == 1:
        return x
    size = x.shape[axis] // count
    return jax.lax.slice_in_dim(x, i * size, (i + 1) * size, axis=axis)


def _rows(x: Array, count: int) -> Array:
    """Each chunk of tokens, as `_chunk` takes them, as a batch row of its own."""
    if x.ndim == 4:
        return x.reshape(x.shape[0] * count, x.shape[1] // count, *x.shape[2:])
    batch, heads, tokens = x.shape
    if tokens == 1:
        return jnp.repeat(x, count, axis=0)
    x = x.reshape(batch, heads, count, tokens // count)
    return jnp.moveaxis(x, 2, 1).reshape(batch * count, heads, tokens // count)


def _chunks(tree: Any, count: int) -> list[Any]:
    return [
        jax.tree.map(functools.partial(_chunk, i=i, count=count), tree)
        for i in range(count)
    ]


def _in_rows(tree: Any, count: int) -> Any:
    return jax.tree.map(functools.partial(_rows, count=count), tree)
