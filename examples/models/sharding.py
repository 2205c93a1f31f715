"""Where parameters and activations lie on a mesh of devices.

The mesh has two axes. Over "heads" devices share the work of each token: attention
heads, the channels inside an MLP or expert, the vocabulary (tensor parallelism, as in
Megatron-LM, arXiv:1909.08053). Over "tokens" they share the sequence.
"""

from __future__ import annotations

from typing import TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .errors import InputError

AXES = ("heads", "tokens")

T = TypeVar("T")

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
    """x (batch, tokens, channels) with its tokens spread over the axis "tokens"."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(
        x, NamedSharding(mesh, P(None, "tokens", None))
    )
