"""Launches of the quantisation kernels, on one device or on shards.

csrc/ffi/quantize_handlers.h says what each step takes and gives.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import _axes, _compat
from ._quantize_numerics import FP8, INT8

if TYPE_CHECKING:
    from jaxtyping import Array

TILE = 128
"""Tokens of a head that a workgroup of the kernels takes."""
STATISTICS = 5
"""Of each channel in a tile, in this order: see csrc/gpu/quantize_args.h."""

_MAX_TOKENS = 2**31 - 2**16
_MAX_TOKEN_BYTES = 2**24
_MAX_TILES = 2**23

Launch = Callable[..., Sequence[Any]]
"""(step, x, *given, mean=None, weight=None, rotate=False) -> the step's results."""


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What an operand or a result has numbers of; batch and head come always.

    Attributes:
      factors: its dimensions in einsum notation; {t} stands for tokens.
      dtype: None for that of x.
    """

    factors: str
    dtype: np.dtype | None

    def shape(self, x: Any) -> tuple[int, ...]:
        batch, tokens, heads, dim = x.shape
        sizes = {
            "b": batch, "h": heads, "d": dim, "n": -(-tokens // TILE),
            "{t}": tokens, "c": STATISTICS,
        }  # fmt: skip
        return tuple(sizes[factor] for factor in self.factors.split())

    def spec(self, batch: Any, tokens: Any, heads: Any) -> PartitionSpec:
        axes = {"b": batch, "h": heads, "n": tokens, "{t}": tokens}
        return PartitionSpec(*(axes.get(factor) for factor in self.factors.split()))


_F32 = np.dtype(np.float32)
_X = _Kind("b {t} h d", None)
_IN_FP8, _IN_INT8 = (_Kind(_X.factors, dtype) for dtype in (FP8, INT8))
_OF_TILES = _Kind("b h n", _F32)
_OF_TOKENS = _Kind("b h {t}", _F32)
_OF_CHANNELS = _Kind("b h d", _F32)
_MARKS = _Kind("b h {t}", np.dtype(bool))
_STATISTICS = _Kind("b h n c d", _F32)

_GIVEN = {"round": (_OF_TILES,), "channels": (_OF_CHANNELS, _MARKS)}
_RESULTS = {
    "measure": (_STATISTICS,),
    "find": (_OF_TILES,),
    "round": (_IN_FP8,),
    "both": (_IN_FP8, _OF_TILES),
    "tokens": (_IN_INT8, _OF_TOKENS),
    "blocks": (_IN_INT8, _OF_TILES, _MARKS),
    "channels": (_IN_FP8,),
}


@dataclasses.dataclass(frozen=True)
class _Step:
    """Everything static of a launch."""

    target: str
    name: str
    center: bool
    weigh: bool
    rotate: bool

    @property
    def operands(self) -> tuple[_Kind, ...]:
        of_channels = (_OF_CHANNELS,) * (self.center + self.weigh)
        return (_X, *_GIVEN.get(self.name, ()), *of_channels)

    @property
    def results(self) -> tuple[_Kind, ...]:
        return _RESULTS[self.name]

    def __str__(self) -> str:
        weigh = ", weigh" if self.weigh else ""
        return f"{self.name}, rotate={self.rotate}{weigh}"

    def __call__(self, x: Array, *operands: Array) -> Sequence[Array]:
        results = [
            jax.ShapeDtypeStruct(kind.shape(x), kind.dtype) for kind in self.results
        ]
        return jax.ffi.ffi_call(self.target, results)(
            x,
            *operands,
            step=self.name,
            center=np.bool_(self.center),
            weigh=np.bool_(self.weigh),
            rotate=np.bool_(self.rotate),
        )


def takes(shape: tuple[Any, ...]) -> bool:
    """The limits of csrc/ffi/quantize_call.cc; unknown sizes are taken."""
    batch, tokens, heads, dim = shape
    if not isinstance(dim, int) or dim % 8 or not 8 <= dim <= 256:
        return False
    if isinstance(tokens, int) and tokens >= _MAX_TOKENS:
        return False
    if isinstance(heads, int) and heads * dim * 4 >= _MAX_TOKEN_BYTES:
        return False
    known = all(isinstance(x, int) for x in (batch, tokens, heads))
    return not known or batch * heads * -(-tokens // TILE) < _MAX_TILES


def launcher(target: str, *, split: bool) -> Launch:
    """Launches by the custom call `target`; `split`: on the devices of a mesh."""
    mesh = jax.sharding.get_mesh() if split else None

    def launch(
        name: str,
        *operands: Array,
        mean: Array | None = None,
        weight: Array | None = None,
        rotate: bool = False,
    ) -> Sequence[Array]:
        step = _Step(target, name, mean is not None, weight is not None, rotate)
        operands += tuple(x for x in (mean, weight) if x is not None)
        if mesh is None:
            return step(*operands)
        # Nothing else in the program tells two of these apart for a compilation cache
        # that leaves the callback's address out of its keys.
        with set_xla_metadata(zyfa_quantize=str(step)):
            return _partitioned(step, mesh)(*operands)

    return launch


@functools.cache
def _partitioned(step: _Step, set_mesh: Mesh) -> custom_partitioning:
    """`set_mesh` is the mesh of `jax.set_mesh`, for programs whose inputs name none."""

    @custom_partitioning
    def call(*operands: Array) -> tuple[Array, ...]:
        return tuple(step(*operands))

    call.def_partition(
        partition=functools.partial(_partition, step, set_mesh),
        sharding_rule=functools.partial(_sharding_rule, step),
        decode_shardings=False,
    )
    return call


def _sharding_rule(
    step: _Step, mesh: Mesh, operands: Any, results: Any
) -> tuple[str, dict[str, int]]:
    """Factors in einsum notation, for Shardy's propagation: tokens are (n t)."""
    del mesh, results
    tokens = operands[0].shape[1]
    tiled = any("n" in kind.factors for kind in step.operands + step.results)
    whole = tiled and tokens % TILE == 0 and tokens > TILE
    of_token = "(n t)" if whole else "s"
    ins, outs = (
        ", ".join(kind.factors.format(t=of_token) for kind in kinds)
        for kinds in (step.operands, step.results)
    )
    return f"{ins} -> {outs}", {"t": TILE} if whole else {}


def _partition(
    step: _Step,
    set_mesh: Mesh,
    mesh: Mesh,
    operands: Sequence[Any],
    results: Sequence[Any],
) -> tuple[Mesh, Any, Any, Any]:
    """What each device computes: its own batch rows, whole tiles of tokens, heads."""
    x = operands[0]
    mesh = _axes.partition_mesh(mesh, set_mesh, x)
    batch, tokens, heads, _ = _compat.mesh_axes(x.sharding, mesh, 4)
    if results and step.name == "round":
        wanted = _compat.mesh_axes(results[0].sharding, mesh, 4)
        batch, tokens, heads = (
            mine or other
            for mine, other in zip((batch, tokens, heads), wanted[:3], strict=True)
        )
    batch = even(mesh, batch, x.shape[0], 1)
    tokens = even(mesh, tokens, x.shape[1], TILE)
    heads = even(mesh, heads, x.shape[2], 1)

    def place(kinds: Sequence[_Kind]) -> tuple[NamedSharding, ...]:
        specs = (kind.spec(batch, tokens, heads) for kind in kinds)
        return tuple(NamedSharding(mesh, spec) for spec in specs)

    def shard(*operands: Array) -> tuple[Array, ...]:
        with _compat.without_mesh():
            return tuple(step(*operands))

    return mesh, shard, place(step.results), place(step.operands)


def even(mesh: Any, axes: Any, size: int, unit: int) -> tuple[str, ...]:
    """The axes, or none where devices would get unequal shares or parts of a unit."""
    names = _axes.as_names(axes)
    parts = _axes.size(mesh, names)
    return names if parts > 1 and size % (parts * unit) == 0 else ()
