"""What rounds to FP8 or int8, as a primitive: in jnp, or by the kernels of a platform.

A call has one operand, and two results or, centred, three:

  x (B, S, H, D) bf16, f16 or f32
  -> values (B, S, H, D) float8_e4m3fn or int8;
     descale (B, H), (B, H, ceil(S / block)) or, for each channel, (B, H, D);
     mean (B, H, D) float32, which was subtracted first

The kernels make FP8 alone, with descales that a head's channels share. They take one
pass over x where each of their tiles of 128 tokens of a head has its own descale. Else
they take two: the first finds the descale of each tile, of which XLA takes the largest,
and the second rounds. The mean takes one more, by XLA; or, where a platform's kernels
measure, one that gives the sums, the largest and the smallest number of each channel in
each tile: with the mean they tell the descales as well.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import _axes, _compat, _ffi

if TYPE_CHECKING:
    from jaxtyping import Array

FP8 = np.dtype(jnp.float8_e4m3fn)
INT8 = np.dtype(np.int8)
TILE = 128
"""Tokens of a head that a workgroup of the kernels takes."""

_LARGEST = {FP8: 448.0, INT8: 127.0}
_SMALLEST_NORMAL = float(jnp.finfo(jnp.float32).smallest_normal)
_GUARD_ABOVE = 2.0**64
_MAX_TOKENS = 2**31 - 2**16
_MAX_TOKEN_BYTES = 2**24
_MAX_TILES = 2**23
_ROUNDING = ("round", "both")
"""Steps of the kernels that give values."""
_MEASURING = ("cuda",)
"""Platforms whose kernels take the step "measure"."""
_STATISTICS = 4
_SUM_SCALE = np.float32(2.0**-8)
"""Of csrc/gpu/quantize_args.h."""

quantize_p = Primitive("zyfa_quantize")
quantize_p.multiple_results = True
_compat.lower_with_devices(quantize_p)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Everything static of one call.

    Attributes:
      granularity: what shares a descale, "head", "tensor", "block" or "channel".
      block: tokens that share a descale; 0 if all of a head's tokens do.
      center: whether each head's mean over tokens is subtracted.
      rotate: whether the last axis is rotated.
      dtype: of the values, float8_e4m3fn or int8.
      tensors: how many arrays lie along the batch, each a tensor of its own.
      implementation: the platform whose kernel is asked for; None leaves it to the
        platform.
    """

    granularity: str
    block: int
    center: bool
    rotate: bool
    dtype: np.dtype = FP8
    tensors: int = 1
    implementation: str | None = None


@quantize_p.def_impl
def _impl(*operands: Array, rounding: Rounding) -> Sequence[Array]:
    with jax.disable_jit(False):  # there is nothing inside to step through
        return _jitted(*operands, rounding=rounding)


@functools.partial(jax.jit, static_argnames="rounding")
def _jitted(*operands: Array, rounding: Rounding) -> Sequence[Array]:
    return quantize_p.bind(*operands, rounding=rounding)


@quantize_p.def_abstract_eval
def _shapes(x: ShapedArray, rounding: Rounding) -> tuple[ShapedArray, ...]:
    batch, tokens, heads, dim = x.shape
    mesh = x.sharding.mesh
    b_axes, t_axes, h_axes, _ = _axes.of_dims(x.sharding, 4)
    shape, axes = [batch, heads], [b_axes, h_axes]
    if rounding.block:
        shape.append(-(-tokens // rounding.block))
        axes.append(_even(mesh, t_axes, tokens, rounding.block) or None)
    if rounding.granularity == "channel":
        shape.append(dim)
        axes.append(None)

    def in_float32(shape: list[int], axes: list[Any]) -> ShapedArray:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        dtype = np.dtype(np.float32)
        return x.update(shape=tuple(shape), dtype=dtype, sharding=sharding)

    mean = [in_float32([batch, heads, dim], [b_axes, h_axes, None])]
    return (
        x.update(dtype=rounding.dtype),
        in_float32(shape, axes),
        *(mean if rounding.center else ()),
    )


def _batch(
    axis_data: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    rounding: Rounding,
) -> tuple[Sequence[Array], Sequence[int]]:
    """Folds the mapped axis into the batch, whose front it becomes."""
    size = axis_data.size
    ((x,), (dim,)) = operands, dims
    folded = _axes.fold(x, dim, 0, axis_data)
    rounding = dataclasses.replace(rounding, tensors=rounding.tensors * size)
    unfolded = []
    for y in quantize_p.bind(folded, rounding=rounding):
        y = y.reshape(size, y.shape[0] // size, *y.shape[1:])
        unfolded.append(_axes.constrain(y, 0, axis_data.spmd_name))
    return unfolded, [0] * len(unfolded)


batching.fancy_primitive_batchers[quantize_p] = _batch


def _lower(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    rounding: Rounding,
    platform: str | None,
) -> Any:
    avals: Any = ctx.avals_in
    target = _custom_call(rounding, platform, avals[0])
    context = ctx.module_context
    split = _axes.is_partitioned(context.axis_context)
    if target is None or (split and context.lowering_parameters.for_export):
        _ffi.logger.debug("quantize on %s: jnp, %s", platform, avals[0].shape)
        fun = functools.partial(define, rounding=rounding)
    else:
        _ffi.logger.debug("quantize on %s: kernel, %s", platform, avals[0].shape)
        tiles = functools.partial(_tiles, target=target, rotate=rounding.rotate)
        if split:
            mesh = jax.sharding.get_mesh()
            tiles = functools.partial(_split_tiles, target, rounding, mesh)
        kernel = rounding.implementation or platform
        fun = functools.partial(
            _by_kernel,
            tiles=tiles,
            rounding=rounding,
            measures=kernel in _MEASURING,
        )
    # Devices hold what they hold: what is traced here names no mesh.
    plain = ctx.replace(
        avals_in=[ShapedArray(x.shape, x.dtype) for x in avals],
        avals_out=[ShapedArray(x.shape, x.dtype) for x in ctx.avals_out],
    )
    with _compat.without_mesh():
        return mlir.lower_fun(fun, multiple_results=True)(plain, *operands)


mlir.register_lowering(quantize_p, functools.partial(_lower, platform=None))
for _platform in ("cpu", "rocm", "cuda"):
    mlir.register_lowering(
        quantize_p, functools.partial(_lower, platform=_platform), _platform
    )


# ---- In jnp


def define(x: Array, rounding: Rounding) -> tuple[Array, ...]:
    """(values, descale, mean): what every implementation of a call computes."""
    mean = [mean_over_tokens(x)] if rounding.center else []
    y, guard = prepare(x, *mean, rounding=rounding)
    values, largest = _round(y, rounding)
    # Compilers for GPUs take a conversion to FP8 and back for nothing.
    values = lax.optimization_barrier(values)
    guard = guard.reshape(
        *guard.shape[:1], guard.shape[2], *(1 for _ in largest.shape[2:])
    )
    top = _LARGEST[rounding.dtype]
    descale = _descale(largest, top) / jnp.where(largest == 0, 1, guard)
    return values, descale, *(m.squeeze(1) for m in mean)


def prepare(x: Array, *mean: Array, rounding: Rounding) -> tuple[Array, Array]:
    """(x less the mean, rotated, times a guard; the guard, (B, 1, H, 1)), in float32.

    Means and rotated channels of numbers near float32's maximum would overflow. What
    shares a descale shares the guard, a power of two.
    """
    y = x.astype(jnp.float32)
    if not (mean or rounding.rotate) or x.dtype == jnp.float16:
        guard = jnp.ones((x.shape[0], 1, x.shape[2], 1), jnp.float32)
    else:
        largest = lax.stop_gradient(_largest_of_heads(y, rounding))
        guard = jnp.where(largest > _GUARD_ABOVE, np.float32(1 / _GUARD_ABOVE), 1)
        y = y * guard
    if mean:
        y = y - mean[0] * guard
    return (rotated(y) if rounding.rotate else y), guard


def rotated(y: Array) -> Array:
    """y times an orthonormal Hadamard matrix along the last axis."""
    dim = y.shape[-1]
    size = dim & -dim
    index = jnp.arange(size)
    odd = lax.population_count(index[:, None] & index) % 2
    matrix = jnp.where(odd == 1, -1, 1).astype(jnp.float32) / np.float32(
        math.sqrt(size)
    )
    blocks = y.reshape(*y.shape[:-1], dim // size, size)
    return jnp.matmul(blocks, matrix, precision=lax.Precision.HIGHEST).reshape(y.shape)


def mean_over_tokens(x: Array) -> Array:
    """The mean of the finite numbers of each channel, (B, 1, H, D) in float32.

    Numbers are made small enough, by a power of two, that their sum is finite.
    """
    tokens = x.shape[1]
    bits = tokens.bit_length() if isinstance(tokens, int) else 32
    small = np.float32(1 if x.dtype == jnp.float16 else 2.0**-bits)
    y = x.astype(jnp.float32)
    finite = jnp.isfinite(y)
    count = jnp.maximum(finite.sum(axis=1, keepdims=True), 1)
    total = jnp.where(finite, y * small, 0).sum(axis=1, keepdims=True)
    return total / (count.astype(jnp.float32) * small)


def _round(y: Array, rounding: Rounding) -> tuple[Array, Array]:
    """(y / descale in the dtype of the values, the largest magnitude behind each
    descale)."""
    tokens, block = y.shape[1], rounding.block
    top = _LARGEST[rounding.dtype]
    if rounding.granularity == "channel":
        of_all = _magnitude(y, axis=1)
        per_token, largest = of_all[:, None], of_all
    elif not block:
        per_token = _largest_of_heads(y, rounding)
        largest = per_token[:, 0, :, 0]
    else:
        blocks = -(-tokens // block)
        padded = jnp.pad(y, [(0, 0), (0, blocks * block - tokens), (0, 0), (0, 0)])
        tiles = padded.reshape(y.shape[0], blocks, block, *y.shape[2:])
        largest = _magnitude(tiles, axis=(2, 4))
        per_token = jnp.repeat(largest, block, axis=1)[:, :tokens, :, None]
        largest = jnp.swapaxes(largest, 1, 2)
    scaled = jnp.clip(y / _descale(per_token, top), -top, top)
    if rounding.dtype == INT8:  # which has no NaN
        scaled = jnp.where(jnp.isnan(scaled), 0, jnp.round(scaled))
    return scaled.astype(rounding.dtype), largest


def _descale(largest: Array, top: float) -> Array:
    # A product, as XLA makes of a division by a constant, but in some programs only.
    # A descale below the normal range would be flushed to zero by some devices.
    descale = jnp.maximum(largest * np.float32(1 / top), _SMALLEST_NORMAL)
    return jnp.where(largest == 0, 1.0, descale).astype(jnp.float32)


def _magnitude(y: Array, axis: Any) -> Array:
    """The largest finite magnitude, 0 if there is none."""
    return jnp.max(jnp.abs(y), axis=axis, initial=0.0, where=jnp.isfinite(y))


def _largest_of_heads(y: Array, rounding: Rounding) -> Array:
    """The largest finite magnitude of each head, or of its tensor: (B, 1, H, 1)."""
    largest = _magnitude(y, axis=(1, 3))
    return _shared(largest, rounding)[:, None, :, None]


def _shared(of_head: Array, rounding: Rounding) -> Array:
    """The largest of a tensor where that is what shares a descale; (B, H)."""
    if rounding.granularity != "tensor":
        return of_head
    batch, heads = of_head.shape
    if rounding.tensors == 1:  # no reshape, so that a sharded batch stays so
        tensors = of_head[None]
    else:
        rows = batch // max(rounding.tensors, 1)
        tensors = of_head.reshape(rounding.tensors, rows, heads)
    largest = jnp.max(tensors, axis=(1, 2), initial=0.0, keepdims=True)
    return jnp.broadcast_to(largest, tensors.shape).reshape(of_head.shape)


# ---- By the kernels


def _custom_call(
    rounding: Rounding, platform: str | None, x: ShapedArray
) -> str | None:
    """The name of the custom call to make of a call on x, or None.

    For a platform that this process has no device of, lowering is for another
    machine, and the custom call's handler is that machine's.
    """
    kernel = rounding.implementation or platform
    target = _ffi.target(platform, kernel, _ffi.QUANTIZE_TARGET)
    if not (platform and kernel and target) or not _takes(rounding, x.shape):
        return None
    if not _ffi.has_kernel(kernel) and _ffi.is_present(platform):
        return None
    return target


def _takes(rounding: Rounding, shape: tuple[Any, ...]) -> bool:
    """The limits of csrc/ffi/quantize_call.cc; unknown sizes are taken."""
    if rounding.dtype != FP8 or rounding.granularity == "channel":
        return False
    batch, tokens, heads, dim = shape
    if not isinstance(dim, int) or dim % 8 or not 8 <= dim <= 256:
        return False
    if isinstance(tokens, int) and tokens >= _MAX_TOKENS:
        return False
    if isinstance(heads, int) and heads * dim * 4 >= _MAX_TOKEN_BYTES:
        return False
    known = all(isinstance(x, int) for x in (batch, tokens, heads))
    return not known or batch * heads * -(-tokens // TILE) < _MAX_TILES


def _by_kernel(
    x: Array, *, tiles: Any, rounding: Rounding, measures: bool
) -> tuple[Array, ...]:
    mean: list[Array] = []
    found = None
    if rounding.center and measures:
        (statistics,) = tiles("measure", x)
        mean = [_measured_mean(statistics)]
        if not rounding.rotate:
            found = _measured_descales(statistics, *mean)
    elif rounding.center:
        mean = [mean_over_tokens(x).squeeze(1)]
    return *_rounded(x, *mean, found=found, tiles=tiles, rounding=rounding), *mean


def _measured_mean(statistics: Array) -> Array:
    """`mean_over_tokens`, (B, H, D), of sums in another order."""
    total, count = statistics[:, :, :, 0], statistics[:, :, :, 1]
    bits = 32
    if isinstance(total.shape[2], int):
        bits = total.shape[2].bit_length()
    small = np.float32(2.0**-bits)
    count = jnp.maximum(count.astype(jnp.int32).sum(axis=2), 1).astype(jnp.float32)
    return (total * small).sum(axis=2) / (count * (small * _SUM_SCALE))


def _measured_descales(statistics: Array, mean: Array) -> Array:
    """What the kernels find of x less the mean, bit for bit: (B, H, tiles).

    The largest magnitude of differences is that of the largest or the smallest number:
    rounding keeps the order.
    """
    count, high, low = (statistics[:, :, :, i] for i in (1, 2, 3))
    high, low = (jnp.where(count > 0, x, 0) for x in (high, low))
    mean = jnp.where(count > 0, mean[:, :, None], 0)
    ends = jnp.maximum(jnp.maximum(abs(high), abs(low)), abs(mean))
    largest = jnp.max(ends, axis=3, keepdims=True)
    guard = jnp.where(largest > _GUARD_ABOVE, np.float32(1 / _GUARD_ABOVE), 1)
    differences = jnp.maximum(
        abs(high * guard - mean * guard), abs(low * guard - mean * guard)
    )
    largest = jnp.max(differences, axis=3)
    descale = jnp.where(largest == 0, 0, _descale(largest, _LARGEST[FP8]))
    return descale / guard.squeeze(3)


def _rounded(
    x: Array, *mean: Array, found: Any, tiles: Any, rounding: Rounding
) -> tuple[Array, Array]:
    """(values, descale); `found` are the tiles' descales; None: unknown."""
    if rounding.block == TILE:
        return tiles("both", x, *mean)
    found = tiles("find", x, *mean)[0] if found is None else found
    count = found.shape[2]
    if rounding.block:
        per_block = rounding.block // TILE
        blocks = -(-count // per_block)
        padded = jnp.pad(found, [(0, 0), (0, 0), (0, blocks * per_block - count)])
        largest = padded.reshape(*found.shape[:2], blocks, per_block).max(axis=3)
        descale = jnp.where(largest == 0, 1, largest)
        given = jnp.repeat(descale, per_block, axis=2)[..., :count]
    else:
        largest = _shared(jnp.max(found, axis=2, initial=0.0), rounding)
        descale = jnp.where(largest == 0, 1, largest)
        given = jnp.broadcast_to(descale[..., None], found.shape)
    (values,) = tiles("round", x, given, *mean)
    return values, descale


def _tiles(
    step: str, x: Array, *operands: Array, target: str, rotate: bool
) -> Sequence[Array]:
    """One launch: see csrc/ffi/quantize_handlers.h."""
    batch, tokens, heads, dim = x.shape
    values = jax.ShapeDtypeStruct(x.shape, FP8)
    of_tiles = batch, heads, -(-tokens // TILE)
    found = jax.ShapeDtypeStruct(of_tiles, jnp.float32)
    statistics = jax.ShapeDtypeStruct((*of_tiles, _STATISTICS, dim), jnp.float32)
    results = {
        "find": [found],
        "round": [values],
        "both": [values, found],
        "measure": [statistics],
    }[step]
    call = jax.ffi.ffi_call(target, results)
    return call(x, *operands, step=step, rotate=np.bool_(rotate))


def _split_tiles(
    target: str, rounding: Rounding, set_mesh: Mesh, step: str, *operands: Array
) -> Sequence[Array]:
    """One launch on each device, for what is there of batch, tokens and heads."""
    split = _partitioned(target, rounding.rotate, set_mesh, step)
    # Nothing else in the program tells two of these apart for a compilation cache that
    # leaves the callback's address out of its keys.
    with set_xla_metadata(zyfa_quantize=f"{step}, rotate={rounding.rotate}"):
        return split(*operands)


@functools.cache
def _partitioned(
    target: str, rotate: bool, set_mesh: Mesh, step: str
) -> custom_partitioning:
    """`set_mesh` is the mesh of `jax.set_mesh`, for programs whose inputs name none."""

    @custom_partitioning
    def call(*operands: Array) -> tuple[Array, ...]:
        return tuple(_tiles(step, *operands, target=target, rotate=rotate))

    call.def_partition(
        partition=functools.partial(_partition, target, rotate, set_mesh, step),
        sharding_rule=functools.partial(_sharding_rule, step),
        decode_shardings=False,
    )
    return call


def _sharding_rule(
    step: str, mesh: Mesh, operands: Any, results: Any
) -> tuple[str, dict[str, int]]:
    """Factors in einsum notation, for Shardy's propagation: tokens are (n t)."""
    del mesh, results
    x = operands[0]
    whole = x.shape[1] % TILE == 0 and x.shape[1] > TILE
    tokens = "(n t)" if whole else "s"
    given = ["b h n"] * (step == "round")
    mean = ["b h d"] * (len(operands) - 1 - len(given))
    found = "b h n c d" if step == "measure" else "b h n"
    outs = [f"b {tokens} h d"] * (step in _ROUNDING) + [found] * (step != "round")
    rule = ", ".join([f"b {tokens} h d", *given, *mean]) + " -> " + ", ".join(outs)
    return rule, {"t": TILE} if whole else {}


def _partition(
    target: str,
    rotate: bool,
    set_mesh: Mesh,
    step: str,
    mesh: Mesh,
    operands: Sequence[Any],
    results: Sequence[Any],
) -> tuple[Mesh, Any, Any, Any]:
    """What each device computes: its own batch rows, whole tiles of tokens, heads."""
    x = operands[0]
    mesh = _axes.partition_mesh(mesh, set_mesh, x)
    batch, tokens, heads, _ = _compat.mesh_axes(x.sharding, mesh, 4)
    if results and step == "round":
        wanted = _compat.mesh_axes(results[0].sharding, mesh, 4)
        batch, tokens, heads = (
            mine or other
            for mine, other in zip((batch, tokens, heads), wanted[:3], strict=True)
        )
    batch = _even(mesh, batch, x.shape[0], 1)
    tokens = _even(mesh, tokens, x.shape[1], TILE)
    heads = _even(mesh, heads, x.shape[2], 1)

    def place(*axes: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))

    of_x = place(batch, tokens, heads, None)
    of_tiles = place(batch, heads, tokens)
    given = [of_tiles] * (step == "round")
    mean = [place(batch, heads, None)] * (len(operands) - 1 - len(given))
    outs = [of_x] * (step in _ROUNDING) + [of_tiles] * (step != "round")

    def shard(*operands: Array) -> tuple[Array, ...]:
        with _compat.without_mesh():
            return tuple(_tiles(step, *operands, target=target, rotate=rotate))

    return mesh, shard, tuple(outs), (of_x, *given, *mean)


def _even(mesh: Any, axes: Any, size: int, unit: int) -> tuple[str, ...]:
    """The axes, or none where devices would get unequal shares or parts of a unit."""
    names = _axes.as_names(axes)
    parts = _axes.size(mesh, names)
    return names if parts > 1 and size % (parts * unit) == 0 else ()
