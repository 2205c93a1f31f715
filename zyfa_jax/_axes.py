"""Mapped axes and mesh axes: what the rules of every primitive share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jax.sharding import Mesh, PartitionSpec

if TYPE_CHECKING:
    from jaxtyping import Array


def fold(x: Array, dim: int | None, where: int, axis_data: Any) -> Array:
    """x with the axis that vmap maps made part of the batch, before or inside it.

    The axis, `dim` of x, or none where x is not mapped, comes to `where`, 0 or 1.
    """
    if dim is None:
        x = jnp.broadcast_to(
            jnp.expand_dims(x, where),
            (*x.shape[:where], axis_data.size, *x.shape[where:]),
        )
    else:
        x = jnp.moveaxis(x, dim, where)
    x = constrain(x, where, axis_data.spmd_name)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def constrain(x: Array, dim: int, names: Any) -> Array:
    """Keeps a mapped axis on the mesh axes that vmap's spmd_axis_name gives it."""
    if not set(names or ()) <= set(jax.sharding.get_abstract_mesh().auto_axes):
        return x
    if not names:
        return x
    spec = [PartitionSpec.UNCONSTRAINED] * x.ndim
    spec[dim] = names
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def is_partitioned(axis_context: Any) -> bool:
    """Whether the compiler splits this computation over devices all by itself.

    Under a shard_map over some axes of a mesh it does so over the others; there the
    call is left whole, and the compiler gathers what is sharded over those.
    """
    return isinstance(axis_context, mlir.ShardingContext) and (
        axis_context.num_devices > 1
    )


def partition_mesh(mesh: Mesh, set_mesh: Mesh, operand: Any) -> Mesh:
    """The mesh to split over: the partitioner's, that of `jax.set_mesh`, or, where no
    mesh names the shardings and every device computes it all, one of all devices."""
    for named in (mesh, set_mesh):
        if not named.empty:
            return named
    return Mesh(np.array(list(operand.sharding.device_set)), ("devices",))


def of_dims(sharding: Any, rank: int) -> tuple[Any, ...]:
    """The mesh axes of each dimension, None where there are none."""
    spec = tuple(sharding.spec)
    return spec + (None,) * (rank - len(spec))


def as_names(axes: Any) -> tuple[str, ...]:
    """One dimension's mesh axes, which JAX writes as a tuple, a name or None."""
    return axes if isinstance(axes, tuple) else (axes,) if axes else ()


def size(mesh: Any, names: tuple[str, ...]) -> int:
    """How many parts these mesh axes make."""
    return math.prod(mesh.shape[name] for name in names)
