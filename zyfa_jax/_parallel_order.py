"""Which tokens each device holds where the token axis is spread over devices."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np

from . import _compat
from ._quantize import Quantized
from ._spec import static

if TYPE_CHECKING:
    from jaxtyping import Array, Int

    AnyArray = TypeVar("AnyArray", Array, np.ndarray, Quantized)

Order = Literal["contiguous", "zigzag"]


def zigzag(x: AnyArray, devices: int, *, axis: int | None = None) -> AnyArray:
    """Reorders tokens so that each of `devices` equal parts is early and late ones.

    The tokens are cut into 2 * devices chunks, and part i is made of chunk i and of the
    i-th from the end: of causal attention every part then has as much to compute. A
    permutation of one axis, for NumPy arrays too. Where the axis is sharded already it
    moves tokens between devices; reordering token ids, before they are embedded, costs
    least.

    Args:
      x: an array, or a `Quantized`.
      devices: how many parts the axis is to be cut into.
      axis: of the tokens; 1 by default, as in (batch, tokens, ...). Arrays without a
        batch, (tokens, heads, dim), need 0: nothing tells them from (batch, tokens,
        features) but that their first axis is longer than the second, where axis has to
        be given. A `Quantized` knows its own.

    Raises:
      ValueError: the tokens cannot be cut so, or axis is not given where it has to be.
    """
    return _reorder(x, devices, axis, _to_zigzag)


def unzigzag(x: AnyArray, devices: int, *, axis: int | None = None) -> AnyArray:
    """Puts tokens back into their own order: the inverse of `zigzag`."""
    return _reorder(x, devices, axis, from_zigzag)


def positions(
    tokens: int, devices: int, order: Order = "zigzag"
) -> Int[np.ndarray, " tokens"]:
    """The position of each token in this order, as rotary embeddings need it: int32.

    Raises:
      ValueError: the tokens cannot be cut so, or for another order.
    """
    check_order(order)
    check_tokens("tokens", tokens, devices, order)
    natural = np.arange(tokens, dtype=np.int32)
    return zigzag(natural, devices, axis=0) if order == "zigzag" else natural


def local_positions(
    tokens: int, axis_name: str | tuple[str, ...], order: Order = "zigzag"
) -> Int[Array, " tokens"]:
    """`positions` of this device's own tokens, inside `jax.shard_map`: int32.

    Args:
      tokens: of this device.
      axis_name: the mesh axis, or axes, over which tokens are spread.
      order: of the tokens.
    """
    check_order(order)
    devices = axis_size(axis_name)
    check_tokens("tokens", tokens * devices, devices, order)
    rows = starts(jax.lax.axis_index(axis_name), devices, tokens, order)
    chunk = jnp.arange(tokens // len(rows), dtype=jnp.int32)
    return jnp.concatenate([start + chunk for start in rows])


def starts(index: Any, devices: int, tokens: int, order: Order) -> list[Any]:
    """The position at which each chunk of a device begins.

    Args:
      index: of the device, an integer or traced.
      devices: how many there are.
      tokens: of one device.
      order: of the tokens.
    """
    if order == "contiguous":
        return [index * tokens]
    chunk = tokens // 2
    return [index * chunk, (2 * devices - 1 - index) * chunk]


def chunks(order: Order) -> int:
    """Of one device."""
    return 2 if order == "zigzag" else 1


def axis_size(axis_name: str | tuple[str, ...]) -> int:
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    return math.prod(jax.lax.axis_size(name) for name in names)


def check_order(order: Any) -> None:
    """Raises ValueError unless it is one."""
    if not isinstance(order, str) or order not in get_args(Order):
        raise ValueError(
            f"zyfa_jax.parallel takes order 'contiguous' or 'zigzag', not {order!r}"
        )


def check_tokens(name: str, tokens: int, devices: Any, order: Order) -> None:
    """Raises ValueError unless tokens can be cut into equal chunks."""
    integer = isinstance(devices, int | np.integer) and not isinstance(devices, bool)
    if not integer or devices < 1:
        raise ValueError(
            "zyfa_jax.parallel takes devices as an integer above 0, not "
            f"{static(devices)}"
        )
    count = chunks(order) * devices
    if tokens % count:
        raise ValueError(
            f"zyfa_jax.parallel takes {order} tokens that {count} chunks, "
            f"{chunks(order)} for each of {devices} devices, share evenly, but {name} "
            f"has {tokens}"
        )


def check_blocks(name: str, block: int, chunk: int) -> None:
    """Raises ValueError where tokens of two chunks share a descale."""
    if block and chunk % block:
        raise ValueError(
            f"zyfa_jax.parallel takes a Quantized whose blocks no chunk cuts, but "
            f"{name} has a descale for {block} tokens, and chunks of {chunk}"
        )


def _reorder(x: Any, devices: int, axis: int | None, permute: Any) -> Any:
    if isinstance(x, Quantized):
        if axis is not None:
            raise ValueError(
                f"zyfa_jax.parallel takes no axis for a Quantized, got {axis!r}"
            )
        tokens = x.values.shape[-3]
        check_tokens("the Quantized", tokens, devices, "zigzag")
        check_blocks("it", x.block, tokens // (2 * devices))
        source, descale = x.source, x.descale
        return dataclasses.replace(
            x,
            values=_permuted(x.values, devices, -3, permute),
            descale=_permuted(descale, devices, -1, permute) if x.block else descale,
            source=None if source is None else _permuted(source, devices, -3, permute),
        )
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(
            "zyfa_jax.parallel takes a JAX or NumPy array or a Quantized, not "
            f"{type(x).__name__}"
        )
    if axis is None and x.ndim == 3 and x.shape[0] > x.shape[1]:
        raise ValueError(
            "zyfa_jax.parallel takes an axis for three-dimensional arrays whose first "
            "axis is longer than the second: 0 for (tokens, heads, dim), 1 for (batch, "
            f"tokens, features), got none for {x.shape}"
        )
    axis = 1 if axis is None else axis
    if not isinstance(axis, int | np.integer):
        raise ValueError(
            f"zyfa_jax.parallel takes axis as an integer, not {static(axis)}"
        )
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"zyfa_jax.parallel takes an axis of the array, not {axis} of shape "
            f"{x.shape}"
        )
    check_tokens(f"axis {axis} of {x.shape}", x.shape[axis], devices, "zigzag")
    return _permuted(x, devices, axis, permute)


def _permuted(x: Any, devices: int, axis: int, permute: Any) -> Any:
    if isinstance(x, np.ndarray):
        return permute(x, devices, axis)
    # No sharding rule knows reshapes of an axis that is spread over an explicit mesh.
    return _compat.automatic_axes(lambda x: permute(x, devices, axis), x)(x)


def _to_zigzag(x: Any, devices: int, axis: int) -> Any:
    parts, axis = _parts(x, (2, devices), axis)
    early, late = _halves(parts, axis)
    return _stack(early, _flip(late, axis), axis + 1).reshape(x.shape)


def from_zigzag(x: Any, devices: int, axis: int) -> Any:
    """`unzigzag` of an array, unchecked."""
    parts, axis = _parts(x, (devices, 2), axis)
    early, late = _halves(parts, axis + 1)
    return _stack(early, _flip(late, axis), axis).reshape(x.shape)


def take_chunks(x: Array, places: Int[Array, " n"], axis: int) -> Array:
    """x with its equal chunks along the axis taken from these places."""
    parts, axis = _parts(x, (1, len(places)), axis)
    return jnp.take(parts, places, axis=axis + 1, mode="clip").reshape(x.shape)


def _parts(x: Any, counts: tuple[int, int], axis: int) -> tuple[Any, int]:
    """x with the axis cut in so many, and in so many each: and which axis that was."""
    axis %= x.ndim
    chunk = x.shape[axis] // math.prod(counts)
    shape = (*x.shape[:axis], *counts, chunk, *x.shape[axis + 1 :])
    return x.reshape(shape), axis


def _halves(x: Any, axis: int) -> tuple[Any, Any]:
    at = (slice(None),) * axis
    return x[(*at, 0)], x[(*at, 1)]


def _flip(x: Any, axis: int) -> Any:
    return x[(*(slice(None),) * axis, slice(None, None, -1))]


def _stack(first: Any, second: Any, axis: int) -> Any:
    module = np if isinstance(first, np.ndarray) else jnp
    return cast(Any, module).stack([first, second], axis=axis)
