"""One of several processes of test_several_hosts.py: `_host.py PROCESS PORT`.

It compares its own share of the results with those of one device, and fails if they
differ.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from _oracle import make
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zyfa_jax
from zyfa_jax import parallel

PROCESSES, DEVICES_EACH = 2, 4
DEVICES = PROCESSES * DEVICES_EACH


def call(q, k, v, attention=zyfa_jax.attention, fp8=False, **options):
    if fp8:
        q, k, v = (zyfa_jax.quantize(x) for x in (q, k, v))
    return attention(q, k, v, out_dtype=jnp.float32, **options)


def gradients(call):
    def total(*inputs):
        return jnp.sum(jnp.sin(call(*inputs)))

    return jax.jit(jax.grad(total, (0, 1, 2)))


def main(process: int, port: int) -> None:
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_num_cpu_devices", DEVICES_EACH)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, process)
    assert jax.device_count() == DEVICES
    assert jax.local_device_count() == DEVICES_EACH
    mesh = jax.make_mesh((DEVICES,), ("t",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, "t"))
    inputs = make(tokens=(64, 64))
    shuffled = [parallel.zigzag(x, DEVICES) for x in inputs]
    spread = [
        jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for x in shuffled
    ]
    for method in ("ring", "all_gather"):
        for fp8, tolerance in ((False, 1e-5), (True, 0.1)):
            here = functools.partial(
                call, attention=parallel.attention, mesh=mesh, axis_name="t",
                order="zigzag", method=method, fp8=fp8,
            )  # fmt: skip
            one = functools.partial(call, fp8=fp8)
            got, want = [jax.jit(here)(*spread)], [jax.jit(one)(*inputs)]
            if method == "ring":  # both have one backward pass
                got += gradients(here)(*spread)
                want += gradients(one)(*inputs)
            for x, y in zip(got, want, strict=True):
                y = parallel.zigzag(np.asarray(y), DEVICES)
                for shard in x.addressable_shards:
                    np.testing.assert_allclose(
                        shard.data, y[shard.index], atol=tolerance, rtol=tolerance
                    )
    multihost_utils.sync_global_devices("done")
    print("equal on", jax.local_device_count(), "of", jax.device_count(), "devices")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
