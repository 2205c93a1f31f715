"""What rounds to FP8 or int8, as primitives: in jnp, or by the kernels of a platform.

`quantize_p` rounds one array, in FP8. It has two results or, centred, three:

  x (B, S, H, D) bf16, f16 or f32
  -> values (B, S, H, D) float8_e4m3fn;
     descale (B, H) or (B, H, ceil(S / block));
     mean (B, H, D) float32, which was subtracted first

`quantize_qkv_p` rounds q, k and v together, by `numerics.TOGETHER`:

  q (B, T, H, D), k (B, S, K, D), v (B, S, K, E) of one dtype
  -> values and descale of q; values, descale and mean of k; values and descale of v;
     exponent (B, K, D) int32: q was multiplied, and k divided, by 2 to it

The kernels take one pass over x where each of their tiles of 128 tokens of a head, or
each token, has its own descale. Else they take two: the first finds the descale of each
tile, of which XLA takes the largest, and the second rounds. Means, the balance and the
descales of channels take one more that measures each channel in each tile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from . import _axes, _compat, _ffi
from . import _quantize_numerics as numerics
from . import _quantize_steps as steps
from ._quantize_numerics import FP8, GUARD_ABOVE, LARGEST, Rounding

if TYPE_CHECKING:
    from jaxtyping import Array

_SUM_SCALE = np.float32(2.0**-8)
"""Of csrc/gpu/quantize_args.h."""

quantize_p, quantize_qkv_p = map(Primitive, ("zyfa_quantize", "zyfa_quantize_qkv"))
for _primitive in (quantize_p, quantize_qkv_p):
    _primitive.multiple_results = True
    _compat.lower_with_devices(_primitive)


@quantize_p.def_impl
def _quantize_impl(*operands: Array, **params: Any) -> Sequence[Array]:
    return _impl(quantize_p, operands, tuple(params.items()))


@quantize_qkv_p.def_impl
def _together_impl(*operands: Array, **params: Any) -> Sequence[Array]:
    return _impl(quantize_qkv_p, operands, tuple(params.items()))


def _impl(primitive: Primitive, operands: Any, params: Any) -> Sequence[Array]:
    with jax.disable_jit(False):  # there is nothing inside to step through
        return _jitted(primitive, params, *operands)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _jitted(primitive: Primitive, params: Any, *operands: Array) -> Sequence[Array]:
    return primitive.bind(*operands, **dict(params))


# ---- Shapes


@quantize_p.def_abstract_eval
def _quantize_shapes(
    x: ShapedArray, rounding: Rounding, implementation: str | None
) -> tuple[ShapedArray, ...]:
    del implementation
    return _shapes(x, rounding)


@quantize_qkv_p.def_abstract_eval
def _together_shapes(
    *operands: ShapedArray, precision: str, rotated: bool, implementation: str | None
) -> tuple[ShapedArray, ...]:
    del implementation
    roundings = numerics.together(precision, rotated)
    of_q, of_k, of_v = map(_shapes, operands, roundings)
    exponent = of_k[-1].update(dtype=np.dtype(np.int32))
    return (*of_q, *of_k, *of_v, exponent)


def _shapes(x: ShapedArray, rounding: Rounding) -> tuple[ShapedArray, ...]:
    """Values, descale and, centred, mean: sharded as x is."""
    batch, tokens, heads, dim = x.shape
    mesh = x.sharding.mesh
    b_axes, t_axes, h_axes, _ = _axes.of_dims(x.sharding, 4)
    shape, axes = [batch, heads], [b_axes, h_axes]
    if rounding.block:
        shape.append(-(-tokens // rounding.block))
        axes.append(steps.even(mesh, t_axes, tokens, rounding.block) or None)
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


# ---- vmap: the mapped axis is folded into the batch, whose front it becomes


def _quantize_batch(
    axis_data: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    rounding: Rounding,
    **params: Any,
) -> tuple[Sequence[Array], Sequence[int]]:
    tensors = rounding.tensors * axis_data.size
    params["rounding"] = dataclasses.replace(rounding, tensors=tensors)
    return _batch(quantize_p, axis_data, operands, dims, params)


def _together_batch(
    axis_data: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    **params: Any,
) -> tuple[Sequence[Array], Sequence[int]]:
    return _batch(quantize_qkv_p, axis_data, operands, dims, params)


def _batch(
    primitive: Primitive, axis_data: Any, operands: Any, dims: Any, params: Any
) -> tuple[Sequence[Array], Sequence[int]]:
    size = axis_data.size
    folded = [
        _axes.fold(x, dim, 0, axis_data) for x, dim in zip(operands, dims, strict=True)
    ]
    unfolded = []
    for y in primitive.bind(*folded, **params):
        y = y.reshape(size, y.shape[0] // size, *y.shape[1:])
        unfolded.append(_axes.constrain(y, 0, axis_data.spmd_name))
    return unfolded, [0] * len(unfolded)


batching.fancy_primitive_batchers[quantize_p] = _quantize_batch
batching.fancy_primitive_batchers[quantize_qkv_p] = _together_batch


# ---- Lowering


def _lower_quantize(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    rounding: Rounding,
    implementation: str | None,
    platform: str | None,
) -> Any:
    kernel = implementation or platform
    define = functools.partial(numerics.define, rounding=rounding)
    by_kernel = functools.partial(_quantize_by_kernel, rounding=rounding)
    return _lower(ctx, operands, platform, kernel, define, by_kernel)


def _lower_together(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    precision: str,
    rotated: bool,
    implementation: str | None,
    platform: str | None,
) -> Any:
    params = {"precision": precision, "rotated": rotated}
    define = functools.partial(numerics.define_together, **params)
    by_kernel = functools.partial(_together_by_kernel, **params)
    kernel = implementation or platform
    if rotated and precision == "int8":
        kernel = None  # those that make int8 rotate
    return _lower(ctx, operands, platform, kernel, define, by_kernel)


def _lower(
    ctx: mlir.LoweringRuleContext,
    operands: Sequence[Any],
    platform: str | None,
    kernel: str | None,
    define: Callable[..., Any],
    by_kernel: Callable[..., Any],
) -> Any:
    """In jnp; or by launches of a platform's kernel, on shards where there are."""
    avals: Any = ctx.avals_in
    name, shapes = str(ctx.primitive), [x.shape for x in avals]
    target = _custom_call(platform, kernel, shapes)
    context = ctx.module_context
    split = _axes.is_partitioned(context.axis_context)
    if target is None or (split and context.lowering_parameters.for_export):
        _ffi.logger.debug("%s on %s: jnp, %s", name, platform, shapes)
        fun = define
    else:
        _ffi.logger.debug("%s on %s: kernel, %s", name, platform, shapes)
        fun = functools.partial(by_kernel, launch=steps.launcher(target, split=split))
    # Devices hold what they hold: what is traced here names no mesh.
    plain = ctx.replace(
        avals_in=[ShapedArray(x.shape, x.dtype) for x in avals],
        avals_out=[ShapedArray(x.shape, x.dtype) for x in ctx.avals_out],
    )
    with _compat.without_mesh():
        lower = mlir.lower_fun(
            lambda *operands: jax.tree.leaves(fun(*operands)), multiple_results=True
        )
        return lower(plain, *operands)


for _primitive, _rule in (
    (quantize_p, _lower_quantize),
    (quantize_qkv_p, _lower_together),
):
    for _platform in (None, "cpu", "rocm", "cuda"):
        mlir.register_lowering(
            _primitive, functools.partial(_rule, platform=_platform), _platform
        )


def _custom_call(
    platform: str | None, kernel: str | None, shapes: Sequence[tuple[Any, ...]]
) -> str | None:
    """The name of the custom call to make of a call on these shapes, or None.

    For a platform that this process has no device of, lowering is for another
    machine, and the custom call's handler is that machine's.
    """
    target = _ffi.target(platform, kernel, _ffi.QUANTIZE_TARGET)
    if not (platform and kernel and target) or not all(map(steps.takes, shapes)):
        return None
    if not _ffi.has_kernel(kernel) and _ffi.is_present(platform):
        return None
    return target


# ---- By the kernels


def _quantize_by_kernel(
    x: Array, *, launch: steps.Launch, rounding: Rounding
) -> tuple[Array, ...]:
    if not rounding.center:
        return _rounded(x, launch=launch, rounding=rounding)
    (statistics,) = launch("measure", x)
    mean = _Measured.of(statistics).mean
    found = None if rounding.rotate else _measured_descales(statistics, mean)
    return *_rounded(x, mean, found=found, launch=launch, rounding=rounding), mean


def _together_by_kernel(
    q: Array, k: Array, v: Array, *, launch: steps.Launch, precision: str, rotated: bool
) -> Any:
    """What `numerics.define_together` gives."""
    of_k = _Measured.of(*launch("measure", k))
    mean = of_k.mean
    if rotated:
        exponent, q_weight, k_weight = jnp.zeros_like(mean, jnp.int32), None, None
    else:
        of_q = _Measured.of(*launch("measure", q))
        squares = of_q.variance + of_q.mean * of_q.mean
        exponent = numerics.balance(squares, of_k.variance)
        q_weight, k_weight = numerics.weights(exponent, q.shape[2])
    if precision == "fp8":
        of = [
            functools.partial(_rounded, launch=launch, rounding=rounding)
            for rounding in numerics.together(precision, rotated)
        ]
        q8, k8 = of[0](q, None, q_weight), of[1](k, mean, k_weight)
        return q8, (*k8, mean), of[2](v), exponent
    q8 = launch("tokens", q, weight=q_weight, rotate=True)
    k8, k_descale, nan = launch("blocks", k, mean=mean, weight=k_weight, rotate=True)
    largest = _Measured.of(*launch("measure", v)).largest
    v_descale = numerics.descale_of(largest, LARGEST[FP8])
    (v8,) = launch("channels", v, v_descale, nan)
    return q8, (k8, k_descale, mean), (v8, v_descale), exponent


@dataclasses.dataclass(frozen=True)
class _Measured:
    """Of the finite numbers of each channel, over all tokens: (B, H, D) float32.

    Attributes:
      mean: as `numerics.mean_over_tokens`, of sums in another order.
      variance: the mean of squares about the mean.
      largest: magnitude.
    """

    mean: Array
    variance: Array
    largest: Array

    @classmethod
    def of(cls, statistics: Array) -> _Measured:
        """From those of tiles, which the step "measure" gives."""
        total, count, high, low, squares = _each(statistics)
        bits = 32
        if isinstance(total.shape[2], int):
            bits = total.shape[2].bit_length()
        small = np.float32(2.0**-bits)
        whole = jnp.maximum(count.astype(jnp.int32).sum(axis=2), 1).astype(jnp.float32)
        mean = (total * small).sum(axis=2) / (whole * (small * _SUM_SCALE))
        # The variance within tiles, and that of their means.
        of_tile = total / (jnp.maximum(count, 1) * _SUM_SCALE)
        squares += count * jnp.square(of_tile - mean[:, :, None])
        ends = jnp.where(count > 0, jnp.maximum(abs(high), abs(low)), 0)
        largest = jnp.max(ends, axis=2, initial=0.0)
        return cls(mean, squares.sum(axis=2) / whole, largest)


def _each(statistics: Array) -> list[Array]:
    """The statistics, (B, H, tiles, D) each."""
    return [statistics[:, :, :, i] for i in range(steps.STATISTICS)]


def _measured_descales(statistics: Array, mean: Array) -> Array:
    """What the kernels find of x less the mean, bit for bit: (B, H, tiles).

    The largest magnitude of differences is that of the largest or the smallest number:
    rounding keeps the order.
    """
    _, count, high, low, _ = _each(statistics)
    high, low = (jnp.where(count > 0, x, 0) for x in (high, low))
    mean = jnp.where(count > 0, mean[:, :, None], 0)
    ends = jnp.maximum(jnp.maximum(abs(high), abs(low)), abs(mean))
    largest = jnp.max(ends, axis=3, keepdims=True)
    guard = jnp.where(largest > GUARD_ABOVE, np.float32(1 / GUARD_ABOVE), 1)
    differences = jnp.maximum(
        abs(high * guard - mean * guard), abs(low * guard - mean * guard)
    )
    largest = jnp.max(differences, axis=3)
    descale = jnp.where(largest == 0, 0, numerics.descale_of(largest, LARGEST[FP8]))
    return descale / guard.squeeze(3)


def _rounded(
    x: Array,
    mean: Array | None = None,
    weight: Array | None = None,
    *,
    found: Array | None = None,
    launch: steps.Launch,
    rounding: Rounding,
) -> tuple[Array, Array]:
    """(values, descale) in FP8; `found` are the tiles' descales; None: unknown."""
    launch = functools.partial(launch, mean=mean, weight=weight, rotate=rounding.rotate)
    if rounding.block == steps.TILE:
        values, descale = launch("both", x)
        return values, descale
    of_tiles: Array = launch("find", x)[0] if found is None else found
    count = of_tiles.shape[2]
    if rounding.block:
        per_block = rounding.block // steps.TILE
        blocks = -(-count // per_block)
        padded = jnp.pad(of_tiles, [(0, 0), (0, 0), (0, blocks * per_block - count)])
        largest = padded.reshape(*of_tiles.shape[:2], blocks, per_block).max(axis=3)
        descale = jnp.where(largest == 0, 1, largest)
        given = jnp.repeat(descale, per_block, axis=2)[..., :count]
    else:
        largest = numerics.shared(jnp.max(of_tiles, axis=2, initial=0.0), rounding)
        descale = jnp.where(largest == 0, 1, largest)
        given = jnp.broadcast_to(descale[..., None], of_tiles.shape)
    (values,) = launch("round", x, given)
    return values, descale
