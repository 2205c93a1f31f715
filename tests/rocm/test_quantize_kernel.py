"""The machine code that rounds to FP8, through the whole path, against jnp."""

import collections
import functools
import itertools
from typing import Any

import bridge
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _oracle import BF16, F16, F32
from _quantized import (
    EVERYTHING,
    OPTIONS,
    assert_finite,
    assert_same,
    assert_same_beside_nan,
    assert_same_together,
    bits,
    extremes,
    normal,
    unbalanced,
)
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from zyfa_jax import _ffi, attention, quantize
from zyfa_jax._quantize import quantize_by, quantize_qkv_by

EXTENSION: Any = _ffi.load()
by_kernel = functools.partial(quantize_by, "rocm")
together = functools.partial(quantize_qkv_by, "rocm")


def run(hip, x, **options):
    """(the kernels' result, launches)."""
    with hip.running(bridge.emulate) as launches:
        z = jax.block_until_ready(by_kernel(x, **options))
    return z, launches


def run_together(hip, inputs, **options):
    with hip.running(bridge.emulate) as launches:
        z = jax.block_until_ready(together(*inputs, **options))
    return z, launches


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_every_option(hip, dim, options):
    x = normal(2, 131, 2, dim)
    z, launches = run(hip, x, **options)
    assert_same(z, x, **options)
    assert all(x.kernel.startswith("zyfa_quantize_bf16_") for x in launches)
    steps = [("given" in x.buffers(), "values" in x.buffers()) for x in launches]
    measured = [(False, False)] * options["center"]
    once = [(False, True)]
    found = [(False, False)] * (not (options["center"] and not options["rotate"]))
    block = options["granularity"] == "block"
    assert steps == measured + (once if block else [*found, (True, True)])


@pytest.mark.parametrize("options", [OPTIONS[8], OPTIONS[3], EVERYTHING], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_every_dtype(hip, dtype, dim, options):
    x = normal(1, 131, 2, dim, dtype=dtype)
    z, _ = run(hip, x, **options)
    assert_same(z, x, **options)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_together(hip, dtype, precision):
    inputs = unbalanced(dtype=dtype)
    z, launches = run_together(hip, inputs, precision=precision)
    assert_same_together(z, inputs, precision)
    steps = [launch.kernel.split("_")[4:5] for launch in launches]
    if precision == "int8":
        expected = ["blocks", "channels", "measure", "measure", "measure", "tokens"]
        assert sorted(x for [x] in steps) == expected
    else:
        assert len(steps) == 8


@pytest.mark.parametrize("dim", [8, 40, 64, 96, 192, 256])
def test_together_at_other_head_dims(hip, dim):
    inputs = unbalanced(dim=dim, v_dim=dim, heads=(3, 3))
    z, _ = run_together(hip, inputs)
    assert_same_together(z, inputs)


@pytest.mark.parametrize("tokens", [1, 128, 300])
def test_together_at_other_lengths(hip, tokens):
    inputs = unbalanced(tokens=tokens, dim=64)
    z, _ = run_together(hip, inputs)
    assert_same_together(z, inputs)


@pytest.mark.parametrize("dim", [64, 128])
def test_nan_and_infinity_together(hip, dim):
    inputs = unbalanced(tokens=260, dim=dim)
    for x in inputs:
        x[0, 3, 0, 2] = np.nan
        x[0, 130, 0, 7] = -np.inf
        x[0, 131, 1, [0, 9]] = np.inf
        x[0, 259, 1] = np.nan
    z, _ = run_together(hip, inputs)
    assert_same_together(z, inputs)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_extremes_together(hip, dtype):
    for inputs in extremes(dtype=dtype, heads=(2, 2)):
        assert_finite(run_together(hip, inputs)[0])


def test_a_mean_far_from_zero(hip):
    """Squares about the mean are not lost under its own."""
    inputs = unbalanced(dtype=F32, tokens=300)
    inputs[1] += np.float32(300)
    z, _ = run_together(hip, inputs)
    # The mean's last bit is what differs.
    assert_same_together(z, inputs, rtol=1e-4)


def test_together_mapped(hip):
    inputs = [np.stack([x, x * 2]) for x in unbalanced(dim=64, heads=(2, 1))]
    with hip.running(bridge.emulate):
        z = jax.block_until_ready(jax.vmap(together)(*inputs))
    for i in range(2):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], z)
        assert_same_together(own, [x[i] for x in inputs])


def test_instructions_of_an_element_together(hip):
    """At the memory's speed there is time for some 15 where three bytes move."""
    inputs = unbalanced(tokens=256, heads=(2, 2), v_dim=128)
    vector: dict[str, float] = {}

    def count(launch):
        opcodes = bridge.emulate(launch).opcodes
        total = sum(n for name, n in opcodes.items() if name.startswith("v_"))
        vector[launch.kernel.split("_")[4]] = total * 64 / inputs[0].size

    with hip.running(count):
        jax.block_until_ready(together(*inputs))
    most = {"measure": 9.0, "tokens": 14.0, "blocks": 14.5, "channels": 9.0}
    assert vector.keys() == most.keys()
    assert all(vector[step] <= most[step] for step in most), vector


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("dim", [8, 16, 24, 32, 40, 72, 96, 160, 224, 248])
def test_every_head_dim(hip, dim, rotate):
    options = {"granularity": "block", "center": True, "rotate": rotate}
    x = normal(1, 130, 3, dim)
    z, (_, launch) = run(hip, x, **options)
    assert_same(z, x, **options)
    assert launch.kernel.split("_")[3] == str(-(-dim // 64) * 64)


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 385])
@pytest.mark.parametrize(
    "options",
    [{}, {"granularity": "block"}, {"granularity": "block", "block": 256}],
    ids=str,
)
def test_every_length(hip, tokens, options):
    x = normal(tokens, 3, 64)
    z, launches = run(hip, x, **options)
    assert_same(z, x, **options)
    assert launches[0].grid == (3 * -(-tokens // 128), 1, 1)


@pytest.mark.parametrize("options", OPTIONS[::3], ids=str)
def test_zeros(hip, options):
    x = np.zeros((1, 131, 2, 128), BF16)
    x[:, 128:, 1] = 3
    z, _ = run(hip, x, **options)
    assert_same(z, x, **options)


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_extremes(hip, dtype, options):
    """Of one sign each, so that rotated rows have the largest sums there are."""
    info = ml_dtypes.finfo(dtype)
    for extreme in (info.max, -info.max, info.smallest_normal):
        x = normal(1, 131, 2, 128, dtype=dtype)
        x[:, ::2] = extreme
        z, _ = run(hip, x, **options)
        assert np.isfinite(np.asarray(z.values, np.float32)).all()
        assert_same(z, x, **options)


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=str)
@pytest.mark.parametrize("scale", [2.0**-60, 2.0**-80, 2.0**-100, 2.0**63, 2.0**115])
def test_any_scale(hip, scale, options):
    x = (normal(1, 131, 1, 64, dtype=F32) * np.float32(scale)).astype(BF16)
    z, _ = run(hip, x, **options)
    assert_same(z, x, **options)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_mean_far_above_most_tokens(hip, dtype):
    x = normal(1, 131, 1, 128, dtype=dtype)
    x[:, :40] = ml_dtypes.finfo(dtype).max
    z, _ = run(hip, x, **EVERYTHING)
    assert np.isfinite(np.asarray(z.values, np.float32)).all()
    assert_same(z, x, **EVERYTHING)


def test_subnormals(hip):
    """XLA's CPU code may flush them; the kernels do not."""
    tiny = ml_dtypes.finfo(BF16).smallest_subnormal
    x = np.full((1, 4, 1, 64), tiny, BF16)
    z, _ = run(hip, x)
    assert float(z.descale[0, 0]) == np.finfo(np.float32).smallest_normal
    got = np.asarray(z.values, np.float64) * float(z.descale[0, 0])
    np.testing.assert_array_equal(got, float(tiny))


@pytest.mark.parametrize(
    ("options", "reads", "most"),
    [
        ({"granularity": "block"}, 1, 8.0),
        ({"granularity": "block", "rotate": True}, 1, 14.0),
        ({}, 2, 12.5),
        ({"rotate": True}, 2, 25.0),
    ],
    ids=str,
)
def test_the_input_is_read_once_or_twice(hip, options, reads, most):
    """And the values are written once; `most` vector instructions an element."""
    x = normal(1, 256, 2, 128)
    count: collections.Counter[str] = collections.Counter()
    with hip.running(lambda launch: count.update(bridge.emulate(launch).opcodes)):
        jax.block_until_ready(by_kernel(x, **options))
    assert count["buffer_load_dwordx4"] * 64 * 16 == reads * x.nbytes
    assert count["buffer_store_dwordx2"] * 64 * 8 == x.size
    vector = sum(n for opcode, n in count.items() if opcode.startswith("v_"))
    assert vector * 64 / x.size <= most


def test_zeros_keep_their_sign(hip):
    x = normal(1, 5, 1, 64)
    x[0, 2] = -0.0
    x[0, 3] = 0.0
    z, _ = run(hip, x)
    assert_same(z, x)
    assert (bits(z.values)[0, 2] == 0x80).all()


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        *((BF16, options) for options in OPTIONS[:8]),
        *itertools.product((BF16, F16, F32), (OPTIONS[8], EVERYTHING)),
    ],
    ids=str,
)
def test_nan_and_infinity(hip, dtype, options):
    x = normal(1, 260, 2, 64, dtype=dtype)
    x[0, 3, 1, 2] = np.nan
    x[0, 130, 0, 7] = -np.inf
    x[0, 131, 0, 0] = np.inf
    x[0, 259, 1] = np.inf
    z, _ = run(hip, x, **options)
    assert_same_beside_nan(z, x, **options)


def test_nan_of_every_kind(hip):
    x = normal(1, 5, 1, 64)
    for i, code in enumerate((0x7FC0, 0xFFC0, 0x7F81, 0xFF81, 0x7FFF)):
        x.view(np.uint16)[0, i, 0, i] = code
    z, _ = run(hip, x)
    values = np.asarray(z.values, np.float32)
    np.testing.assert_array_equal(np.isnan(values), np.isnan(x.astype(np.float32)))
    np.testing.assert_array_equal(z.descale, quantize(x).descale)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[5], EVERYTHING], ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1])
def test_vmap(hip, axis, options):
    """Each member has a tensor, and a guard, of its own."""
    x = normal(3, 2, 130, 1, 64)
    x[1] *= np.array(2.0**100, BF16)
    mapped = jax.vmap(lambda y: by_kernel(y, **options), axis)
    with hip.running(bridge.emulate) as launches:
        z = jax.block_until_ready(mapped(np.moveaxis(x, 0, axis)))
    assert all(launch.args.tokens == 130 for launch in launches)
    passes = 1 if options["granularity"] == "block" else 2
    assert len(launches) == passes + options["center"]
    for i in range(3):
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], z), x[i], **options)


def test_vmap_twice_of_three_dimensions(hip):
    x = normal(2, 3, 20, 1, 64)
    options = {"granularity": "tensor", "center": True}
    call = functools.partial(by_kernel, **options)
    with hip.running(bridge.emulate):
        z = jax.block_until_ready(jax.vmap(jax.vmap(call))(x))
    for i, j in itertools.product(range(2), range(3)):
        one = jax.tree.map(lambda leaf, i=i, j=j: leaf[i, j], z)
        assert_same(one, x[i, j], **options)


def mesh(**axes: int):
    count = int(np.prod(list(axes.values())))
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        devices=jax.devices()[:count],
        axis_types=(AxisType.Auto,) * len(axes),
    )


@pytest.mark.parametrize(
    "options", [OPTIONS[0], OPTIONS[5], OPTIONS[8], EVERYTHING], ids=str
)
@pytest.mark.parametrize(
    "axes",
    [P("x", None, "y"), P("y"), P(("x", "y")), P(None, "x"), P("y", "x")],
    ids=str,
)
def test_sharded_inputs_stay_where_they_are(hip, axes, options):
    x = normal(4, 256, 2, 64)
    sharded = jax.device_put(x, NamedSharding(mesh(x=2, y=2), axes))
    call = jax.jit(lambda x: by_kernel(x, **options).detach())
    assert "all-gather" not in str(call.lower(sharded).compile().as_text())
    with hip.running(bridge.emulate) as launches:
        z = jax.block_until_ready(call(sharded))
    assert_same(z, x, **options)
    assert z.values.sharding.is_equivalent_to(sharded.sharding, 4)
    parts = 4 if len([a for a in axes if a]) == 2 or axes == P(("x", "y")) else 2
    first = launches[0]
    assert first.grid[0] == 4 * 2 * 2 // parts
    assert len({launch.device for launch in launches}) == 4


def test_split_programs_differ_for_a_compilation_cache(hip):
    sharded = jax.device_put(normal(2, 5, 1, 64), NamedSharding(mesh(x=2), P("x")))
    for options, text in (
        ({"granularity": "block"}, "both, rotate=False"),
        ({"granularity": "block", "rotate": True}, "both, rotate=True"),
        ({}, "find, rotate=False"),
    ):
        call = jax.jit(lambda x, options=options: by_kernel(x, **options).detach())
        assert f'zyfa_quantize = "{text}"' in call.lower(sharded).as_text()


def test_tokens_that_split_a_tile_are_gathered(hip):
    x = normal(1, 192, 1, 64)
    sharded = jax.device_put(x, NamedSharding(mesh(x=2), P(None, "x")))
    call = jax.jit(lambda x: by_kernel(x).detach())
    with hip.running(bridge.emulate):
        z = jax.block_until_ready(call(sharded))
    assert_same(z, x)


@pytest.mark.parametrize("options", [OPTIONS[0], EVERYTHING], ids=str)
def test_shard_map(hip, options):
    x = normal(4, 130, 1, 64)
    split = jax.shard_map(
        lambda x: by_kernel(x, **options),
        mesh=mesh(x=4),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    with hip.running(bridge.emulate) as launches:
        z = jax.block_until_ready(jax.jit(split)(x))
    assert_same(z, x, **options)
    assert {launch.device for launch in launches} == {0, 1, 2, 3}


def test_explicit_sharding(hip):
    x = normal(2, 256, 2, 64)
    grid = jax.make_mesh(
        (2, 2),
        ("x", "y"),
        devices=jax.devices()[:4],
        axis_types=(AxisType.Explicit,) * 2,
    )
    options = {"granularity": "block"}
    with jax.set_mesh(grid), hip.running(bridge.emulate):
        sharded = jax.device_put(x, NamedSharding(grid, P("x", "y")))
        z = jax.jit(lambda x: by_kernel(x, **options))(sharded)
        jax.block_until_ready(z)
    assert jax.typeof(z.descale).sharding.spec == P("x", None, "y")
    assert_same(z, x, **options)


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_the_gradient_is_that_of_jnp(hip, options):
    x = jnp.asarray(normal(1, 20, 2, 64, dtype=F32))
    weight = jnp.asarray(normal(1, 20, 2, 64, dtype=F32, seed=1))

    def loss(x, call):
        z = call(x, **options)
        return (z.source * weight).sum() + z.dequantize().sum()

    with hip.running(bridge.emulate):
        got = jax.block_until_ready(
            jax.jit(jax.grad(loss), static_argnums=1)(x, by_kernel)
        )
    np.testing.assert_array_equal(got, jax.grad(loss)(x, quantize))


def test_the_same_bits_every_time(hip):
    x = normal(2, 200, 2, 128)
    (first, _), (second, _) = (run(hip, x, **EVERYTHING) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize(
    "shape", [(0, 5, 2, 64), (2, 0, 2, 64), (2, 5, 0, 64)], ids=str
)
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[5], EVERYTHING], ids=str)
def test_nothing_to_do_launches_nothing(hip, shape, options):
    z, launches = run(hip, np.zeros(shape, BF16), **options)
    assert not launches
    assert z.descale.shape == quantize(np.zeros(shape, BF16), **options).descale.shape
    assert (np.asarray(z.descale) == 1).all()


@pytest.mark.parametrize("dim", [4, 12, 264])
def test_other_head_dims_take_jnp(hip, dim):
    x = normal(1, 5, 1, dim)
    z, launches = run(hip, x)
    assert not launches
    assert_same(z, x)


@pytest.mark.parametrize("options", [OPTIONS[0], EVERYTHING], ids=str)
def test_exports_for_rocm_with_symbolic_shapes(options):
    def leaves(x):
        return jax.tree.leaves(quantize(x, **options))

    batch, tokens = export.symbolic_shape("b, s")
    shape = jax.ShapeDtypeStruct((batch, tokens, 2, 64), BF16)
    check = export.DisabledSafetyCheck.custom_call(_ffi.QUANTIZE_TARGET)
    exported = export.export(
        jax.jit(leaves), platforms=["cpu", "rocm"], disabled_checks=[check]
    )(shape)
    assert "custom_call @zyfa_quantize" in exported.mlir_module()
    again = export.deserialize(exported.serialize())
    x = normal(2, 200, 2, 64)
    for a, b in zip(again.call(x), leaves(x), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0.13, atol=1e-2)


def test_attention_takes_what_the_kernels_made(hip):
    q, k, v = (normal(1, 40, 2, 128, seed=i) for i in range(3))

    def both(call):
        z = call(q), call(k, center=True), call(v, granularity="tensor")
        return attention(*z, implementation="rocm" if call is by_kernel else None)

    with hip.running(bridge.emulate) as launches:
        out = jax.block_until_ready(jax.jit(lambda: both(by_kernel))())
    names = [launch.kernel.split("_")[1] for launch in launches]
    assert sorted(names) == ["attention", *["quantize"] * 6]
    expected = np.asarray(both(quantize), np.float32)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.15)


def test_failures_carry_hips_words(hip):
    with (
        hip.failing("hipModuleLaunchKernel", "out of memory"),
        hip.running(bridge.emulate),
        pytest.raises(
            (jax.errors.JaxRuntimeError, ValueError),
            match=r"(?s)RESOURCE_EXHAUSTED.*zyfa_quantize: hipModuleLaunchKernel of "
            r"zyfa_quantize_bf16_64: out of memory",
        ),
    ):
        jax.block_until_ready(by_kernel(normal(1, 5, 1, 64)))


X = jax.ShapeDtypeStruct((1, 130, 2, 64), BF16)
VALUES = jax.ShapeDtypeStruct(X.shape, ml_dtypes.float8_e4m3fn)
FOUND = jax.ShapeDtypeStruct((1, 2, 2), F32)
MEAN = jax.ShapeDtypeStruct((1, 2, 64), F32)


def other(struct, **changes):
    return jax.ShapeDtypeStruct(
        **{"shape": struct.shape, "dtype": struct.dtype} | changes
    )


@pytest.mark.parametrize(
    ("operands", "results", "step", "message"),
    [
        (
            [X],
            [VALUES, FOUND],
            "neither",
            "step must be one of find, .*measure, got neither",
        ),
        ([X], [VALUES], "both", "wrong number of operands or results"),
        ([X], [VALUES], "round", "wrong number of operands or results"),
        ([X, MEAN, MEAN], [FOUND], "find", "wrong number of operands or results"),
        ([other(X, dtype=np.int32)], [FOUND], "find", "x must be bfloat16, float16 or"),
        ([other(X, shape=(130, 2, 64))], [FOUND], "find", r"got \(130, 2, 64\)"),
        ([other(X, shape=(1, 130, 2, 60))], [FOUND], "find", "multiples of 8.*got 60"),
        ([other(X, shape=(0, 1, 2**17, 64))], [FOUND], "find", "65535 heads, got"),
        (
            [X, FOUND],
            [FOUND],
            "find",
            r"mean must have shape \(1, 2, 64\).*\(1, 2, 2\)",
        ),
        ([X, MEAN], [VALUES], "round", r"given must have shape \(1, 2, 2\)"),
        ([X], [other(FOUND, shape=(1, 2, 1))], "find", "found must have shape"),
        ([X], [other(VALUES, dtype=np.uint8), FOUND], "both", "values must have shape"),
    ],
)
def test_the_handler_checks_what_it_is_given(hip, operands, results, step, message):
    target: Any = _ffi.target("cpu", "rocm", _ffi.QUANTIZE_TARGET)
    call = jax.ffi.ffi_call(target, results)
    arrays = [np.zeros(x.shape, x.dtype) for x in operands]
    flags = dict.fromkeys(("center", "weigh", "rotate"), np.bool_(False))
    flags["center"] = np.bool_(len(operands) > (2 if step == "round" else 1))
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError),
        match=f"(?s)INVALID_ARGUMENT.*zyfa_quantize: .*{message}",
    ):
        jax.block_until_ready(call(*arrays, step=step, **flags))


def test_the_handler_may_be_captured_in_a_command_buffer(xla):
    handlers = EXTENSION.quantize_registrations()["ROCM"]
    assert xla.traits(handlers["execute"]) == 1
    assert xla.traits(EXTENSION.handlers_on_host()["rocm"]["zyfa_quantize"]) == 0


def test_the_kernels_use_neither_scratch_nor_spills():
    code = bridge.decoded(EXTENSION.rocm_code_object("gfx950"))
    kernels = {
        name: kernel
        for name, kernel in code.kernels.items()
        if name.startswith("zyfa_quantize_")
    }
    assert len(kernels) == 90
    for name, kernel in kernels.items():
        assert kernel.scratch_bytes == 0, name
        assert kernel.vgpr_spills == kernel.sgpr_spills == 0, name
        # Of usual head dims several workgroups fit on a compute unit.
        usual = "_64" in name or "_128" in name
        most = 72 if name.endswith("rotated") else 96
        assert kernel.vgprs <= (most if usual else 192), (name, kernel.vgprs)
