"""Lowering for other platforms, jax.export, and the compilation cache."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zyfa_jax
from zyfa_jax import attention, quantize

CUSTOM_CALL = "custom_call @zyfa_attention"


def inputs(tokens=20, kv_tokens=20, batch=8, dim=16, dtype=jnp.float32):
    return tuple(
        jax.random.normal(jax.random.key(i), (batch, t, heads, dim), dtype)
        for i, (t, heads) in enumerate(((tokens, 4), (kv_tokens, 2), (kv_tokens, 2)))
    )


def taken_by_all(**options):
    """What the kernels of every platform take."""
    return inputs(dim=128, dtype=jnp.bfloat16, **options)


def call(q, k, v):
    return attention(q, k, v, return_lse=True)


def fp8_call(q, k, v):
    return attention(*(quantize(x) for x in (q, k, v)))


def export(function, *arrays, **options):
    exported = jax.export.export(
        jax.jit(function),
        disabled_checks=zyfa_jax.export_safety_checks(),
        **options,
    )(*arrays)
    return jax.export.deserialize(exported.serialize(vjp_order=0))


@pytest.mark.parametrize("platform", ["cpu", "rocm", "cuda"])
@pytest.mark.parametrize("function", [call, fp8_call])
def test_lowering_for_a_platform(platform, function):
    traced = jax.jit(function).trace(*taken_by_all())
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert (CUSTOM_CALL in text) == (platform != "cpu" or has_cpu_kernel())


def has_cpu_kernel():
    return zyfa_jax.backends()[0].kernel


def test_platform_without_a_kernel_takes_the_blockwise_path():
    traced = jax.jit(call).trace(*inputs())
    assert CUSTOM_CALL not in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_other_head_dims_take_the_blockwise_path():
    traced = jax.jit(call).trace(*(x[..., :12] for x in inputs()))
    for platform in ("rocm", "cuda"):
        assert CUSTOM_CALL not in traced.lower(lowering_platforms=(platform,)).as_text()


def test_export_for_rocm_and_back():
    exported = export(call, *taken_by_all(), platforms=["rocm"])
    assert exported.platforms == ("rocm",)
    assert CUSTOM_CALL in exported.mlir_module()


@pytest.mark.parametrize("function", [call, fp8_call])
def test_export_for_several_platforms(function):
    arrays = taken_by_all()
    exported = export(function, *arrays, platforms=["cpu", "rocm", "cuda"])
    got, want = exported.call(*arrays), jax.jit(function)(*arrays)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_export_needs_the_published_checks():
    with pytest.raises(ValueError, match="zyfa_attention"):
        jax.export.export(jax.jit(call), platforms=["rocm"])(*taken_by_all())


def loss_gradient(q, k, v):
    return jax.grad(lambda *x: jnp.sum(jnp.square(attention(*x))), (0, 1, 2))(q, k, v)


@pytest.mark.parametrize("function", [call, fp8_call, loss_gradient])
@pytest.mark.parametrize("dims", ["b,t,t", "b,t,s"])
def test_symbolic_shapes(function, dims):
    b, t, s = jax.export.symbolic_shape(dims)
    shapes = [
        jax.ShapeDtypeStruct((b, n, heads, 16), jnp.float32)
        for n, heads in ((t, 4), (s, 2), (s, 2))
    ]
    exported = export(function, *shapes)
    arrays = inputs(20, 20 if dims == "b,t,t" else 140, batch=3)
    got, want = exported.call(*arrays), jax.jit(function)(*arrays)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), atol=1e-5
        )


@pytest.mark.parametrize("platform", ["rocm", "cuda"])
@pytest.mark.parametrize("function", [call, fp8_call])
def test_symbolic_shapes_for_a_gpu(function, platform):
    b, t, s = jax.export.symbolic_shape("b,t,s")
    shapes = [
        jax.ShapeDtypeStruct((b, n, heads, 128), jnp.bfloat16)
        for n, heads in ((t, 4), (s, 2), (s, 2))
    ]
    exported = export(function, *shapes, platforms=[platform])
    assert CUSTOM_CALL in exported.mlir_module()


def test_export_of_shard_map():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    split = jax.shard_map(attention, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    arrays = taken_by_all()
    exported = export(split, *arrays)
    sharded = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in arrays]
    np.testing.assert_array_equal(exported.call(*sharded), attention(*arrays))
    for platform in ("rocm", "cuda"):
        exported = export(split, *arrays, platforms=[platform])
        assert CUSTOM_CALL in exported.mlir_module()


def test_export_with_sharded_inputs_names_shard_map():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x"))
    arrays = [jax.device_put(x, sharding) for x in inputs()]
    with pytest.raises(NotImplementedError, match="shard_map"):
        export(attention, *arrays)


@pytest.mark.parametrize("change", [{"causal": False}, {"window": 3}])
def test_sharded_programs_differ_beside_the_callback(change):
    """A compilation cache may leave the callback's address out of its keys."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    arrays = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in inputs()]

    def program(**options):
        function = jax.jit(lambda *x: attention(*x, **options))
        return re.sub(r'backend_config = "\d+"', "", function.lower(*arrays).as_text())

    assert "CustomSPMDPartitioning" in program()
    assert program() == program()
    assert program() != program(**change)


SECOND_PROCESS = """
import jax, jax.numpy as jnp
from jax._src import monitoring
import zyfa_jax
hits = []
monitoring.register_event_listener(lambda name, **_: hits.append(name))
q = jnp.ones((8, 64, 4, 16), jnp.bfloat16)
if {sharded}:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    q = jax.device_put(q, jax.NamedSharding(mesh, jax.P("x")))
jax.jit(lambda q: zyfa_jax.attention(q, q, q))(q).block_until_ready()
print(hits.count("/jax/compilation_cache/cache_hits"),
      hits.count("/jax/compilation_cache/cache_misses"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_persistent_cache_hits_in_a_second_process(tmp_path, sharded):
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "1",
    }

    def run():
        program = SECOND_PROCESS.format(sharded=sharded)
        result = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return [int(x) for x in result.stdout.split()]

    hits, misses = run()
    assert hits == 0
    assert misses > 0
    assert run() == [misses, 0]
