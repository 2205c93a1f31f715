"""Where parameters and activations lie on a mesh of devices.

The mesh has two axes. Over "heads" devices share the work of each token: attention
heads, the channels inside an MLP or expert, the vocabulary (tensor parallelism, as in
Megatron-LM, arXiv:1909.08053). Over "tokens" they share the sequence.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zyfa_jax import parallel

from .errors import InputError

AXES = ("heads", "tokens")

# By the last parts of a parameter's path; what is not here is on all devices.
_PARAMETERS = {
    "embed/embedding": P("heads", None),
    "head/kernel": P(None, "heads"),
    "query/kernel": P(None, "heads", None),
    "query_up/kernel": P(None, "heads", None),
    "key/kernel": P(None, "heads", None),
    "value/kernel": P(None, "heads", None),
    "kv_up/kernel": P(None, "heads", None),
    "out/kernel": P("heads", None, None),
    "gate/kernel": P(None, "heads"),
    "up/kernel": P(None, "heads"),
    "down/kernel": P("heads", None),
    "mlp/gate": P(None, None, "heads"),
    "mlp/up": P(None, None, "heads"),
    "mlp/down": P(None, "heads", None),
}


def make_mesh(heads: int = 1, tokens: int = 1) -> Mesh:
    """A mesh of heads x tokens devices.

    Raises:
      InputError: where there are fewer devices.
    """
    if heads < 1 or tokens < 1 or heads * tokens > len(jax.devices()):
        raise InputError(
            f"a mesh of heads={heads} x tokens={tokens} takes {heads * tokens} "
            f"devices; there are {len(jax.devices())}"
        )
    devices = jax.devices()[: heads * tokens]
    return jax.make_mesh(
        (heads, tokens), AXES, (AxisType.Auto, AxisType.Auto), devices=devices
    )


def of_parameter(
    path: str, shape: tuple[int, ...], mesh: Mesh | None
) -> NamedSharding | None:
    """Where the parameter at `path` ("layers/0/attention/query/kernel") lies.

    One that the axis "heads" does not divide, as that of few key/value heads, is on all
    devices.
    """
    if mesh is None:
        return None
    spec = _PARAMETERS.get("/".join(path.split("/")[-2:]), P())
    divides = all(
        axis is None or size % mesh.shape[axis] == 0
        for size, axis in zip(shape, spec, strict=False)
    )
    return NamedSharding(mesh, spec if divides else P())


def constrain(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """x (batch, tokens, ...) with its tokens spread, and its heads if it has them.

    Anything else stays as it is.
    """
    if mesh is None or x.ndim < 3:
        return x
    spec = P(None, "tokens")
    if x.ndim == 4 and x.shape[2] % mesh.shape["heads"] == 0:
        spec = P(None, "tokens", "heads")
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def devices_over_tokens(mesh: Mesh | None) -> int:
    return 1 if mesh is None else mesh.shape["tokens"]


def spread_attention(q: Any, k: Any, v: Any, *, mesh: Mesh, **options: Any) -> Any:
    """`zyfa_jax.attention` with tokens and heads spread over the mesh.

    Whole sequences are in zig-zag order, so that every device has as much to compute.
    The keys of a cache, which has `kv_lengths`, are in their own: all of a chunk's
    queries see about as many of them.

    Raises:
      InputError: unless the devices get as many key/value heads each.
    """
    if k.shape[2] % mesh.shape["heads"]:
        raise InputError(
            f"a mesh of tokens={mesh.shape['tokens']} takes heads=N that divide the "
            f"model's {k.shape[2]} key/value heads, not heads={mesh.shape['heads']}"
        )
    order = "contiguous" if "kv_lengths" in options else "zigzag"
    return parallel.attention(
        q,
        k,
        v,
        mesh=mesh,
        axis_name="tokens",
        head_axes="heads",
        order=order,
        **options,
    )
