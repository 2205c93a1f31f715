"""Attention whose token axis is spread over the devices of a mesh axis.

    order = functools.partial(zyfa_jax.parallel.zigzag, devices=8)
    q, k, v = map(order, (q, k, v))
    out = zyfa_jax.parallel.attention(
        q, k, v, mesh=mesh, axis_name="tokens", order="zigzag"
    )

docs/parallel.md says which order and which method to take.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from . import _attention, _compat, _gradient, _parallel_ring
from ._parallel_order import Order as Order
from ._parallel_order import (
    axis_size,
    check_blocks,
    check_order,
    check_tokens,
    chunks,
)
from ._parallel_order import local_positions as local_positions
from ._parallel_order import positions as positions
from ._parallel_order import unzigzag as unzigzag
from ._parallel_order import zigzag as zigzag
from ._parallel_ring import Method as Method
from ._parallel_ring import Plan
from ._quantize import Quantized
from ._spec import QUANTIZED_DTYPES, AttentionSpec, static

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from ._attention import Input, LogSumExp, Options, Output

    Axes = str | tuple[str, ...]

GATHERED_BYTES = 4 << 30
"""Of keys and values that method=None lets every device gather: a few hundredths of a
GPU's memory. Where there is more to gather, a ring of eight hides its transfers, by the
model of docs/parallel.md even over the slowest links there (those of an MI355X, for
heads with keys and values of their own)."""


@overload
def attention(
    q: Input,
    k: Input,
    v: Input,
    *,
    axis_name: Axes,
    mesh: Mesh | AbstractMesh | None = ...,
    batch_axes: Axes | None = ...,
    head_axes: Axes | None = ...,
    order: Order = ...,
    method: Method | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Output: ...


@overload
def attention(
    q: Input,
    k: Input,
    v: Input,
    *,
    axis_name: Axes,
    mesh: Mesh | AbstractMesh | None = ...,
    batch_axes: Axes | None = ...,
    head_axes: Axes | None = ...,
    order: Order = ...,
    method: Method | None = ...,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Output, LogSumExp]: ...


def attention(
    q: Input,
    k: Input,
    v: Input,
    *,
    axis_name: Axes,
    mesh: Mesh | AbstractMesh | None = None,
    batch_axes: Axes | None = None,
    head_axes: Axes | None = None,
    order: Order = "contiguous",
    method: Method | None = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Output | tuple[Output, LogSumExp]:
    """`zyfa_jax.attention` with tokens spread over a mesh axis.

    With a mesh, given or set by `jax.set_mesh`, arrays are whole and get sharded as the
    axes say. Inside `jax.shard_map` (or pmap) over `axis_name`, arrays are this
    device's, and `mesh`, `batch_axes` and `head_axes` are not taken.

    Results are those of one device up to rounding: each block of keys that a device
    computes gives a result in `out_dtype`, and these are merged in float32. FP8 numbers
    travel as FP8. Gradients take memory linear in a device's own tokens, by a ring for
    both methods.

    Args:
      q: queries, as for `zyfa_jax.attention`, in the order named by `order`. Their
        tokens are shared evenly by the devices, in "zigzag" by twice as many chunks;
        blocks of a `Quantized` lie within a chunk.
      k: keys, likewise.
      v: values, likewise.
      axis_name: the mesh axis, or axes, that tokens are spread over.
      mesh: the mesh; None inside shard_map.
      batch_axes: mesh axes that the batch is spread over as well.
      head_axes: mesh axes that heads are spread over as well; key/value heads must be
        a multiple of their size.
      order: "contiguous", tokens as they follow each other; or "zigzag", as `zigzag`
        puts them, so that every device has as much to compute where `causal`.
      method: "ring": keys and values go round from device to device behind the
        computation; memory stays that of a device's own. "all_gather": every device
        gathers all of them, and computes with fewer and longer kernels. None takes
        "all_gather" for three devices or more if what they gather is at most
        `GATHERED_BYTES`.
      return_lse: as for `zyfa_jax.attention`.
      **options: likewise. Offsets and lengths count the tokens of all devices, in their
        own order. Descales are those of a device's keys; inside shard_map they may
        differ between devices, and then only "ring" takes them. The mean of centred
        keys may not, and is taken only where shard_map knows that (check_vma=True).

    Returns:
      As `zyfa_jax.attention`, in the order and with the sharding of q.

    Raises:
      ValueError: for operands, arguments or axes that do not go together.
      NotImplementedError: as `zyfa_jax.attention`, and for symbolic sizes of
        `jax.export`.
    """
    check_order(order)
    _check_method(method)
    if not isinstance(return_lse, bool):
        raise ValueError(
            f"attention takes return_lse=True or False, not {static(return_lse)}"
        )
    for name in options.keys() - _attention.Options.__annotations__:
        raise TypeError(f"attention() got an unexpected keyword argument {name!r}")
    tokens_axes = _names("axis_name", axis_name)
    if not tokens_axes:
        raise ValueError(f"attention takes axis_name as mesh axes, not {axis_name!r}")
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if set(tokens_axes) <= set(manual):
        if mesh is not None:
            raise ValueError(
                "attention inside shard_map takes no mesh, since its arrays are one "
                f"device's; got {mesh}"
            )
        if batch_axes is not None or head_axes is not None:
            raise ValueError(
                "attention inside shard_map takes no batch_axes or head_axes, since "
                f"its arrays are one device's; got {batch_axes!r} and {head_axes!r}"
            )
        out, lse = _inside(q, k, v, tokens_axes, order, method, options)
    else:
        axes = (_names("batch_axes", batch_axes), tokens_axes)
        axes = (*axes, _names("head_axes", head_axes))
        mesh = _mesh(mesh, axes)
        plan, operands = _over_mesh(q, k, v, mesh, axes, order, method, options)
        center = k.center if isinstance(k, Quantized) else None
        if center is not None and q.ndim == 3:
            center = center[None]
        out, lse = _sharded(operands, center, plan=plan, mesh=mesh, axes=axes)
    if q.ndim == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _inside(
    q: Input,
    k: Input,
    v: Input,
    axis: tuple[str, ...],
    order: Order,
    method: Method | None,
    options: Any,
) -> tuple[Array, Array]:
    devices = axis_size(axis)
    index = jax.lax.axis_index(axis)
    descales = [
        x.descale if isinstance(x, Quantized) else options.get(f"{name}_descale")
        for name, x in (("k", k), ("v", v))
    ]
    same = all(_is_same(x, index, axis) for x in descales)
    center = k.center if isinstance(k, Quantized) else None
    if not _is_same(center, index, axis):
        raise ValueError(
            "zyfa_jax.parallel takes k centred by the mean over all tokens, but each "
            f"device along {axis} has, or may have, a mean of its own: quantize "
            "outside of shard_map, and leave its check_vma on"
        )
    spec, operands = _attention.canonical(q, k, v, devices=devices, **options)
    _check_sizes(operands)
    spread = _Spread(axis, devices, order, method, same_descales=same)
    shares = (devices, 1)
    return _local(_plan(spec, operands, options, spread, shares), operands, center)


def _over_mesh(
    q: Input,
    k: Input,
    v: Input,
    mesh: Mesh | AbstractMesh,
    axes: tuple[tuple[str, ...], ...],
    order: Order,
    method: Method | None,
    options: Any,
) -> tuple[Plan, _gradient.Operands]:
    """The plan and the operands of a call over a mesh, checked.

    Args:
      mesh: the mesh.
      axes: its axes that batch, tokens and heads are spread over.
      options: of `zyfa_jax.attention`.
    """
    spec, operands = _attention.canonical(q, k, v, **options)
    _check_sizes(operands)
    batch, tokens, heads = (
        math.prod(mesh.shape[name] for name in names) for names in axes
    )
    for dim, size, what, names in (
        (operands.q.shape[0], batch, "batch rows", axes[0]),
        (operands.q.shape[2], heads, "query heads", axes[2]),
        (operands.k.shape[2], heads, "key/value heads", axes[2]),
    ):
        if dim % size:
            raise ValueError(
                f"zyfa_jax.parallel takes {what} that the {size} devices along {names} "
                f"share evenly, not {dim}"
            )
    spread = _Spread(axes[1], tokens, order, method, same_descales=True)
    return _plan(spec, operands, options, spread, (1, batch * heads)), operands


@functools.partial(jax.jit, static_argnames=("plan", "mesh", "axes"))
def _sharded(
    operands: _gradient.Operands,
    center: Float[Array, "B K D"] | None,
    *,
    plan: Plan,
    mesh: Mesh | AbstractMesh,
    axes: tuple[tuple[str, ...], ...],
) -> tuple[Array, Array]:
    """Output and log-sum-exp of a call over a mesh, as `_over_mesh` gives it."""
    batch, tokens, heads = (names or None for names in axes)
    array = PartitionSpec(batch, tokens, heads, None)
    ints = PartitionSpec(batch)

    def of_descale(block: int) -> PartitionSpec:
        return PartitionSpec(batch, heads, tokens if block else None)

    k_descale = of_descale(plan.spec.kv_block)
    v_descale = of_descale(0) if plan.spec.v_channels else k_descale
    specs = _gradient.Operands._make((
        array, array, array,
        of_descale(plan.spec.q_block), k_descale, v_descale,
        PartitionSpec(), ints, ints, ints,
        *(None if x is None else array for x in operands[-3:]),
    ))  # fmt: skip
    of_center = None if center is None else PartitionSpec(batch, heads, None)
    if any(kind == jax.sharding.AxisType.Explicit for kind in mesh.axis_types):
        operands, center = jax.tree.map(
            lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)),
            (operands, center),
            (specs, of_center),
        )
    return jax.shard_map(
        functools.partial(_local, plan),
        mesh=mesh,
        in_specs=(specs, of_center),
        out_specs=(array, PartitionSpec(batch, heads, tokens)),
    )(operands, center)


def _local(
    plan: Plan, operands: _gradient.Operands, center: Float[Array, "*B K D"] | None
) -> tuple[Array, Array]:
    leaves, structure = jax.tree.flatten(operands)
    # The device's index varies over the axis, and everything else shall as well.
    index = jax.lax.axis_index(plan.axis)
    *leaves, _ = _compat.match_varying([*leaves, index])
    operands = jax.tree.unflatten(structure, leaves)
    if plan.spec.v_channels:
        out, lse = _with_channels(plan, operands)
    else:
        out, lse = _parallel_ring.attention(plan, operands)
    if center is not None:
        lse = lse + _attention.center_logits(plan.spec, operands, center)
    return out, lse


def _with_channels(plan: Plan, operands: _gradient.Operands) -> tuple[Array, Array]:
    """Multiplies by the descales of v's channels when all devices' shares are there:
    what goes round has then one for all channels."""
    of_channels, source = operands.v_descale, operands.v_source
    spec = dataclasses.replace(
        plan.spec, v_channels=False, out_dtype=np.dtype(np.float32)
    )
    one = jnp.ones_like(operands.k_descale)
    if source is not None:
        source = source.astype(jnp.float32) / of_channels[:, None]
    operands = operands._replace(v_descale=one, v_source=source)
    out, lse = _parallel_ring.attention(dataclasses.replace(plan, spec=spec), operands)
    batch, tokens, heads, dim = out.shape
    kv_heads = of_channels.shape[1]
    grouped = out.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    out = (grouped * of_channels[:, None, :, None]).reshape(out.shape)
    return out.astype(plan.spec.out_dtype), lse


class _Spread(NamedTuple):
    """How tokens are spread: over which axis, and by what method, if one was asked for.

    `same_descales` is whether all devices are known to have the same.
    """

    axis: tuple[str, ...]
    devices: int
    order: Order
    method: Method | None
    same_descales: bool


def _plan(
    spec: AttentionSpec,
    operands: _gradient.Operands,
    options: Any,
    spread: _Spread,
    shares: tuple[int, int],
) -> Plan:
    """The plan, checked.

    `shares` is how many times as many tokens there are in all as the operands have, and
    over how many devices the operands' batch rows and heads are spread.
    """
    axis, devices, order, method, same_descales = spread
    parts = chunks(order) * devices
    for name, x, block in (
        ("q", operands.q, spec.q_block),
        ("k", operands.k, spec.kv_block),
    ):
        tokens = x.shape[1] * shares[0]
        check_tokens(name, tokens, devices, order)
        if parts > 1:
            check_blocks(name, block, tokens // parts)
    same_descales = same_descales or operands.k.dtype not in QUANTIZED_DTYPES
    can_gather = same_descales or bool(spec.kv_block)
    if method is None:
        nbytes = sum(x.size * x.dtype.itemsize for x in (operands.k, operands.v))
        fits = nbytes * shares[0] <= GATHERED_BYTES * shares[1]
        # Two devices of a ring hold as much as if they had gathered.
        method = "all_gather" if devices > 2 and fits and can_gather else "ring"
    if method == "all_gather" and not can_gather:
        raise ValueError(
            "zyfa_jax.parallel takes method='all_gather' where all devices have the "
            "same descales, but those of k or v may differ along "
            f"{axis}: method='ring' takes them"
        )
    bounded = any(options.get(x) is not None for x in ("q_lengths", "kv_lengths"))
    return Plan(
        spec, axis, devices, order, method, bounded, same_descales and not spec.kv_block
    )


def _is_same(x: Any, index: Array, axis: tuple[str, ...]) -> bool:
    """Whether x is known to be the same for all devices along the axis.

    Nothing that is traced is, where shard_map does not track that (check_vma=False).
    """
    if not isinstance(x, Tracer):
        return True
    tracked = set(axis) <= jax.typeof(index).manual_axis_type.varying
    return tracked and not set(axis) & jax.typeof(x).manual_axis_type.varying


def _mesh(
    mesh: Mesh | AbstractMesh | None, axes: tuple[tuple[str, ...], ...]
) -> Mesh | AbstractMesh:
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(
            f"zyfa_jax.parallel takes mesh as a jax.sharding.Mesh, not {mesh!r}"
        )
    names = [name for some in axes for name in some]
    missing = [name for name in names if name not in mesh.axis_names]
    if missing:
        has = f"with axes {mesh.axis_names}" if mesh.axis_names else "of None"
        raise ValueError(
            f"zyfa_jax.parallel takes axes of its mesh, or of a shard_map that it is "
            f"called in, but {missing[0]!r} is no axis: got a mesh {has}"
        )
    if len(set(names)) != len(names):
        raise ValueError(
            "zyfa_jax.parallel takes a mesh axis for one of batch, tokens and heads, "
            f"got {axes}"
        )
    return mesh


def _names(what: str, axes: Any) -> tuple[str, ...]:
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, tuple) or not all(isinstance(x, str) for x in names):
        raise ValueError(
            f"zyfa_jax.parallel takes {what} as the name of a mesh axis or a tuple of "
            f"names, not {axes!r}"
        )
    return names


def _check_sizes(operands: _gradient.Operands) -> None:
    for name, x in zip("qkv", operands[:3], strict=True):
        if not all(isinstance(size, int) for size in x.shape):
            raise NotImplementedError(
                "zyfa_jax.parallel takes sizes that are known when tracing, but "
                f"{name} has shape {x.shape}"
            )


def _check_method(method: Any) -> None:
    if method is not None and method not in get_args(Method):
        raise ValueError(
            f"zyfa_jax.parallel takes method=None, 'ring' or 'all_gather', "
            f"not {method!r}"
        )
