"""What JAX's stable interface does not reach, in one file; tested on each version."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import dispatch
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.extend.core import Primitive
from jax.sharding import Mesh, NamedSharding, Sharding


def lower_with_devices(primitive: Primitive) -> None:
    """Has JAX name the devices when it lowers the primitive.

    `custom_partitioning` needs them, and JAX looks for it in the program as traced,
    where it stands hidden in our primitive's lowering.
    """
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def mesh_axes(sharding: Sharding, mesh: Mesh, rank: int) -> tuple[Any, ...]:
    """The mesh axes of each dimension of what the partitioner hands over.

    All None for a sharding that no axis names can say, such as by half an axis.
    """
    hlo = sharding._to_xla_hlo_sharding(rank)
    try:
        spec = tuple(parse_flatten_op_sharding(hlo, mesh)[0])
    except (KeyError, ValueError):
        return (None,) * rank
    return spec + (None,) * (rank - len(spec))


def without_mesh() -> contextlib.AbstractContextManager:
    """Traces one device's share of a computation: no mesh is left to shard over."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def automatic_axes(fun: Callable, results_like: Any) -> Callable:
    """Lets the compiler choose shardings within `fun`, where a mesh is explicit.

    Results are sharded as `results_like`. The mesh is the one that is set, or else the
    one in their types.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(results_like))
        mesh = next((x for x in meshes if not x.empty), mesh)
    if not mesh.explicit_axes:
        return fun
    shardings = jax.tree.map(
        lambda x: NamedSharding(mesh, jax.typeof(x).sharding.spec), results_like
    )
    return jax.sharding.auto_axes(fun, out_sharding=shardings)


def match_varying(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Gives every operand the mesh axes that any of them varies over in shard_map.

    A custom derivative must return cotangents of its operands' own types. Once all
    operands vary alike it can, and the transpose of this cast sums the gradients of
    replicated operands over the devices that share them.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(sorted(union - axes)), to="varying")
        if union - axes
        else x
        for x, axes in zip(operands, varying, strict=True)
    ]
