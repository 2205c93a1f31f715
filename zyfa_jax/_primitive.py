"""The primitive: one rule for each thing that JAX does to a call.

The canonical call has nine operands and two results:

  q (B, T, H, D), k (b, S, K, D), v (b, S, K, E)    one of bf16, f16, f32, e4m3fn;
                                                    or q and k int8, v e4m3fn
  q_scale (B, H, nq), k_scale (b, K, nk), v_scale (b, K, nv)             float32
  q_offset (B,), q_lengths (B,), kv_lengths (B,)                         int32
  -> out (B, T, H, E), lse (B, H, T) float32, natural logarithm

B is a multiple of b and H of K: query batch i reads key/value batch i // (B / b), as
query head h reads key/value head h // (H / K). A logit is dot(q, k) * q_scale *
k_scale; a value is v * v_scale, where v_scale has the blocks of k_scale or, with
`AttentionSpec.v_channels`, a number for each channel of v. Query i stands at position
i + q_offset and sees the keys of `AttentionSpec.window` around it that lie below
kv_lengths; a query at or past q_lengths, or one that sees no key, gives zeros and
lse = -inf.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import _axes, _blockwise, _compat, _ffi, _spec
from ._spec import AttentionSpec

if TYPE_CHECKING:
    from jaxtyping import Array

attention_p = Primitive("zyfa_attention")
attention_p.multiple_results = True
_compat.lower_with_devices(attention_p)


def export_safety_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The checks to hand to `jax.export.export(disabled_checks=...)`.

    JAX refuses to export custom calls whose stability it does not know; ours keep
    their name and attributes within a minor version.
    """
    return [
        jax.export.DisabledSafetyCheck.custom_call(target)
        for target in (_ffi.TARGET, _ffi.QUANTIZE_TARGET)
    ]


@attention_p.def_impl
def _impl(*operands: Array, spec: AttentionSpec) -> Sequence[Array]:
    with jax.disable_jit(False):  # there is nothing inside to step through
        return _jitted(*operands, spec=spec)


@functools.partial(jax.jit, static_argnames="spec")
def _jitted(*operands: Array, spec: AttentionSpec) -> Sequence[Array]:
    return attention_p.bind(*operands, spec=spec)


@attention_p.def_abstract_eval
def _shapes(
    q: ShapedArray,
    k: ShapedArray,
    v: ShapedArray,
    *_: ShapedArray,
    spec: AttentionSpec,
) -> tuple[ShapedArray, ShapedArray]:
    """Results keep the queries' mesh axes: those they are sharded or vary over."""
    del k
    batch, tokens, heads, _ = q.shape
    b_axes, t_axes, h_axes, _ = _axes.of_dims(q.sharding, 4)
    mesh = q.sharding.mesh
    out = q.update(
        shape=(batch, tokens, heads, v.shape[-1]),
        dtype=spec.out_dtype,
        sharding=NamedSharding(mesh, PartitionSpec(b_axes, t_axes, h_axes, None)),
    )
    lse = q.update(
        shape=(batch, heads, tokens),
        dtype=np.dtype(np.float32),
        sharding=NamedSharding(mesh, PartitionSpec(b_axes, h_axes, t_axes)),
    )
    return out, lse


def _batch(
    axis_data: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    spec: AttentionSpec,
) -> tuple[Sequence[Array], tuple[int, int]]:
    """Folds the mapped axis into the batch.

    Where keys and values are not mapped they stay as they are: the axis goes inside
    the query batch, whose members then share them. Otherwise it goes in front of both.
    """
    shares_kv = all(dims[i] is None for i in (1, 2, 4, 5))
    where = 1 if shares_kv else 0
    kv_operands = (1, 2, 4, 5) if shares_kv else ()

    folded = [
        x if i in kv_operands else _axes.fold(x, dim, where, axis_data)
        for i, (x, dim) in enumerate(zip(operands, dims, strict=True))
    ]
    q_shape = list(operands[0].shape)
    if dims[0] is not None:
        del q_shape[dims[0]]
    lead = [q_shape[0]]
    lead.insert(where, axis_data.size)
    unfolded = []
    for x in attention_p.bind(*folded, spec=spec):
        x = x.reshape(*lead, *x.shape[1:])
        unfolded.append(_axes.constrain(x, where, axis_data.spmd_name))
    return unfolded, (where, where)


batching.fancy_primitive_batchers[attention_p] = _batch


def _lower(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    spec: AttentionSpec,
    platform: str | None,
) -> Any:
    """The custom call, the blockwise path, or either of them on shards."""
    forced = spec.implementation not in (None, "reference")
    kernel = spec.implementation if forced else platform
    if forced and _ffi.target(platform, kernel) is None:
        raise NotImplementedError(
            f"attention(implementation={spec.implementation!r}) was lowered for "
            f"{platform or 'a platform without a kernel'}: it takes None, 'reference' "
            f"or the platform's own name there"
        )
    if _axes.is_partitioned(ctx.module_context.axis_context):
        if ctx.module_context.lowering_parameters.for_export:
            raise NotImplementedError(
                "attention under jit with sharded inputs cannot be exported, since "
                "the compiler calls back to split it; shard it by jax.shard_map, "
                "which can"
            )
        # The handlers must be there if a cache holds the split program, and the
        # callback that would lower it is not called.
        _ffi.load()
        partitioned = _partitioned(spec, jax.sharding.get_mesh())

        def lower(*operands: Array) -> tuple[Array, ...]:
            # Nothing else in the program tells two specs apart for a compilation
            # cache that leaves the callback's address out of its keys.
            with set_xla_metadata(zyfa_attention=str(spec)):
                return partitioned(*operands)

        return mlir.lower_fun(lower, multiple_results=True)(ctx, *operands)
    avals: Any = ctx.avals_in
    q = avals[0]
    target = _custom_call(spec, platform, kernel, avals[:3])
    if target is None:
        _ffi.logger.debug("attention on %s: blockwise path, %s", platform, q.shape)
        forward = functools.partial(_blockwise.forward, spec=spec)
        with _compat.without_mesh():
            # In shard_map, types name axes of the mesh that is hidden here.
            local = ctx.replace(avals_in=[ShapedArray(x.shape, x.dtype) for x in avals])
            return mlir.lower_fun(forward, multiple_results=True)(local, *operands)
    _ffi.logger.debug("attention on %s: kernel, %s", platform, q.shape)
    left, right = (-1 if side is None else side for side in spec.window)
    quadratic = kernel == "cpu" if spec.quadratic is None else spec.quadratic
    workspace = [_workspace(avals[2])] if kernel == "cuda" else []
    ctx = ctx.replace(avals_out=[*ctx.avals_out, *workspace])
    if spec.v_channels:
        ctx, operands = _with_rank_for_channels(ctx, operands)
    results = jax.ffi.ffi_lowering(target)(
        ctx,
        *operands,
        window_left=np.int64(left),
        window_right=np.int64(right),
        q_block=np.int64(spec.q_block),
        kv_block=np.int64(spec.kv_block),
        quadratic=np.bool_(quadratic),
    )
    return results[: len(ctx.avals_out) - len(workspace)]


mlir.register_lowering(attention_p, functools.partial(_lower, platform=None))
for _platform in ("cpu", "rocm", "cuda"):
    mlir.register_lowering(
        attention_p, functools.partial(_lower, platform=_platform), _platform
    )


def _custom_call(
    spec: AttentionSpec,
    platform: str | None,
    kernel: str | None,
    avals: Sequence[ShapedArray],
) -> str | None:
    """The target of the custom call that a call on q, k and v becomes, or None.

    For a platform that this process has no device of, lowering is for another
    machine, and the custom call's handler is that machine's.
    """
    target = _ffi.target(platform, kernel)
    if not (platform and kernel and target) or spec.implementation == "reference":
        return None
    shapes = [x.shape for x in avals]
    refusal = _spec.kernel_refusal(kernel, shapes, avals[0].dtype, spec)
    if refusal is not None:
        if spec.implementation is not None:
            raise NotImplementedError(
                f"attention(implementation={spec.implementation!r}) takes {refusal}; "
                "implementation=None takes any"
            )
        _ffi.logger.debug("attention on %s: the kernel takes %s", platform, refusal)
        return None
    if not _ffi.has_kernel(kernel) and _ffi.is_present(platform):
        if spec.implementation is not None:
            raise NotImplementedError(
                f"attention(implementation={spec.implementation!r}): no kernel was "
                f"built for {kernel}; zyfa_jax.backends() says what is and the remedy"
            )
        _ffi.logger.debug("attention on %s: %s", platform, _ffi.detail(kernel))
        return None
    return target


def _with_rank_for_channels(
    ctx: mlir.LoweringRuleContext, operands: Sequence[Any]
) -> tuple[mlir.LoweringRuleContext, tuple[Any, ...]]:
    """The descales of v's channels as (b, K, 1, E), which the handlers know by rank."""
    avals: Any = list(ctx.avals_in)
    batch, heads, dim = avals[5].shape
    of_blocks = ShapedArray((batch, heads, 1, dim), avals[5].dtype)
    reshape = mlir.lower_fun(lambda x: x[:, :, None], multiple_results=False)
    [scale] = reshape(
        ctx.replace(avals_in=[avals[5]], avals_out=[of_blocks]), operands[5]
    )
    avals[5] = of_blocks
    return ctx.replace(avals_in=avals), (*operands[:5], scale, *operands[6:])


def _workspace(v: ShapedArray) -> ShapedArray:
    """A third result of the CUDA kernels' call, at least as large as they take.

    csrc/cuda/launch_plan.h says for what: a counter in 128 bytes and, with values in
    FP8, those transposed, in tiles of 128 keys, and a number for each tile.
    """
    batch, tokens, heads, dim = v.shape
    rows = 1
    if v.dtype == _spec.FLOAT8:
        rows += batch * heads * (dim + 1) * (tokens // _spec.KEY_BLOCK + 1)
    return ShapedArray((rows, 128), np.dtype(np.uint8))


@functools.cache
def _partitioned(spec: AttentionSpec, set_mesh: Mesh) -> custom_partitioning:
    """The call with batch and heads left where they are sharded.

    `set_mesh` is the mesh of `jax.set_mesh`, for programs whose inputs name none.

    Any other sharded axis (tokens, head dim, descale blocks) is gathered first, by
    the compiler: every query needs all of them.
    """

    @custom_partitioning
    def call(*operands: Array) -> tuple[Array, ...]:
        return tuple(attention_p.bind(*operands, spec=spec))

    call.def_partition(
        partition=functools.partial(_partition, spec, set_mesh),
        sharding_rule=_sharding_rule,
        decode_shardings=False,
    )
    return call


def _sharding_rule(
    mesh: Mesh, operands: Any, results: Any
) -> tuple[str, dict[str, int]]:
    """Batch and head factors in einsum notation, for Shardy's propagation.

    Query heads are key/value heads times the query heads of each: (h g), and query
    batches likewise (b r).
    """
    del mesh, results
    batch, _, heads, _ = operands[0].shape
    kv_batch, _, kv_heads, _ = operands[1].shape
    sizes: dict[str, int] = {}

    def factors(outer: str, inner: str, whole: int, shared: int) -> tuple[str, str]:
        if whole == shared:
            return outer, outer
        if shared == 1:
            return inner, f"{outer}_one"
        sizes[inner] = whole // shared
        return f"({outer} {inner})", outer

    b, kv_b = factors("b", "r", batch, kv_batch)
    h, kv_h = factors("h", "g", heads, kv_heads)
    rule = (
        f"{b} t {h} d, {kv_b} s {kv_h} d, {kv_b} s {kv_h} e, {b} {h} m, {kv_b} {kv_h} "
        f"n, {kv_b} {kv_h} p, {b}, {b}, {b} -> {b} t {h} e, {b} {h} t"
    )
    return rule, sizes


def _partition(
    spec: AttentionSpec,
    set_mesh: Mesh,
    mesh: Mesh,
    operands: Sequence[Any],
    results: Sequence[Any],
) -> tuple[Mesh, Any, Any, Any]:
    """What each device computes: its own batch rows and query heads.

    Key/value heads go with the query heads that read them. Where a mesh splits query
    heads more finely than there are key/value heads, several devices hold the same
    one, or all of them and pick theirs.
    """
    q, k = operands[:2]
    mesh = _axes.partition_mesh(mesh, set_mesh, q)
    out_axes = _compat.mesh_axes(results[0].sharding, mesh, 4)
    q_axes = _compat.mesh_axes(q.sharding, mesh, 4)
    batch = _split(mesh, out_axes[0] or q_axes[0], q.shape[0], k.shape[0])
    heads = _split(mesh, out_axes[2] or q_axes[2], q.shape[2], k.shape[2])

    def place(*axes: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))

    q_place = place(batch.axes, None, heads.axes, None)
    q_rows, ints = place(batch.axes, heads.axes, None), place(batch.axes)
    placed = []
    picks = []
    for x, head_dim in zip(operands[1:6], (2, 2, None, 1, 1), strict=True):
        if head_dim is None:
            placed.append(q_rows)
            picks.append(lambda x: x)
        elif _is_aligned(x, head_dim, q, q_place):
            placed.append(x.sharding)
            picks.append(lambda x: x)
        else:
            axes: list[Any] = [batch.kv_axes, *[None] * (len(x.shape) - 1)]
            axes[head_dim] = heads.kv_axes
            placed.append(place(*axes))
            picks.append(
                lambda x, head_dim=head_dim: heads.pick(batch.pick(x, 0), head_dim)
            )

    def shard(q: Array, *rest: Array) -> tuple[Array, ...]:
        with _compat.without_mesh():
            picked = [pick(x) for pick, x in zip(picks, rest, strict=False)]
            results = attention_p.bind(q, *picked, *rest[len(picks) :], spec=spec)
        return tuple(results)

    return mesh, shard, (q_place, q_rows), (q_place, *placed, ints, ints, ints)


@dataclasses.dataclass(frozen=True)
class _Split:
    """How mesh axes split a query dimension and the key/value one that serves it.

    Attributes:
      mesh: the mesh.
      axes: axes that split the query dimension.
      kv_axes: the leading ones of them, which split the key/value dimension too.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    kv_axes: tuple[str, ...]

    def pick(self, x: Array, dim: int) -> Array:
        """The one key/value row or head that this device's queries read, where the
        axes that do not split that dimension would leave several."""
        rest = self.axes[len(self.kv_axes) :]
        if not rest or x.shape[dim] == 1:
            return x
        index = jnp.int32(0)
        for name in rest:
            index = index * np.int32(self.mesh.shape[name]) + jax.lax.axis_index(name)
        start = index * np.int32(x.shape[dim]) // np.int32(_axes.size(self.mesh, rest))
        return jax.lax.dynamic_slice_in_dim(x, start, 1, dim)


def _split(mesh: Mesh, axes: Any, whole: int, shared: int) -> _Split:
    """The split by `axes`, or none where devices would get unequal shares."""
    names = _axes.as_names(axes)
    kv_names = names
    while shared % _axes.size(mesh, kv_names):
        kv_names = kv_names[:-1]
    left = shared // _axes.size(mesh, kv_names)
    rest = _axes.size(mesh, names[len(kv_names) :])
    if whole % _axes.size(mesh, names) or (rest > 1 and rest % left):
        return _Split(mesh, (), ())
    return _Split(mesh, names, kv_names)


def _is_aligned(x: Any, head_dim: int, q: Any, q_place: NamedSharding) -> bool:
    """Whether every device holds just the key/value rows and heads that its share of
    the queries reads."""
    try:
        held = x.sharding.devices_indices_map(tuple(x.shape))
    except ValueError:  # unequal shares
        return False
    for device, read in q_place.devices_indices_map(tuple(q.shape)).items():
        for dim, size in enumerate(x.shape):
            want = (0, size)
            if dim in (0, head_dim):
                q_dim = 0 if dim == 0 else 2
                start, stop, _ = read[q_dim].indices(q.shape[q_dim])
                want = (
                    start * size // q.shape[q_dim],
                    -(-stop * size // q.shape[q_dim]),
                )
            if held[device][dim].indices(size)[:2] != want:
                return False
    return True
