"""`quantize` by the kernels for Hopper, on a stand-in for CUDA: launches, arguments.

What the kernels compute is in test_hopper_quantize.py.
"""

import functools
import io
import re
from typing import Any

import cuda_bridge
import jax
import numpy as np
import pytest
from _oracle import BF16, F16, F32
from _quantized import (
    EVERYTHING,
    OPTIONS,
    assert_same,
    assert_same_together,
    normal,
    unbalanced,
)
from elftools.elf.elffile import ELFFile
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from zyfa_jax import _ffi, attention, quantize
from zyfa_jax._quantize import quantize_by, quantize_qkv_by

EXTENSION: Any = _ffi.load()
NEITHER = dict.fromkeys(("center", "weigh", "rotate"), np.bool_(False))
ERRORS = (jax.errors.JaxRuntimeError, ValueError)
NAMES = {BF16: "bf16", F16: "f16", F32: "f32"}

by_kernel = functools.partial(quantize_by, "cuda")
together = functools.partial(quantize_qkv_by, "cuda")


@pytest.fixture
def run(cuda, host_kernels):
    """Gives (the result, launches) of a call."""

    def call(x, **options):
        with cuda.running(host_kernels) as launches:
            z = jax.block_until_ready(by_kernel(x, **options))
        return z, launches

    return call


def recorded(cuda, x, **options):
    """The launches of a call that nothing runs."""
    with cuda.running(lambda launch: None) as launches:
        jax.block_until_ready(by_kernel(x, **options))
    return launches


@pytest.mark.parametrize("options", [x for x in OPTIONS if not x["rotate"]], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_a_call_comes_back(run, dtype, options):
    x = normal(2, 131, 3, 64, dtype=dtype)
    z, launches = run(x, **options)
    assert_same(z, x, **options)
    steps = [(launch.kernel, set(launch.buffers())) for launch in launches]
    kernel = f"zyfa_quantize_{NAMES[dtype]}_128"
    mean = {"mean"} if options["center"] else set()
    first = (kernel + "_measure" if options["center"] else kernel, {"x", "found"})
    if options["granularity"] != "block":
        expected = [first, (kernel, {"x", "given", "values"} | mean)]
    else:
        both = (kernel, {"x", "values", "found"} | mean)
        expected = [first, both] if options["center"] else [both]
    assert steps == expected
    for launch in launches:
        assert launch.grid == (2 * 3 * 2, 1, 1)
        assert launch.code == EXTENSION.cuda_code_object("sm_90")


@pytest.mark.parametrize(
    ("precision", "kernels"),
    [
        ("int8", ["measure"] * 3 + ["tokens_matrix", "blocks_matrix", "channels"]),
        ("fp8", ["measure"] * 2 + ["rotated_matrix"] * 4 + [""] * 2),
    ],
)
def test_three_come_back_together(cuda, host_kernels, precision, kernels):
    inputs = unbalanced(dtype=F16)
    with cuda.running(host_kernels) as launches:
        z = jax.block_until_ready(together(*inputs, precision=precision))
    assert_same_together(z, inputs, precision)
    prefix = "zyfa_quantize_f16_128"
    names = [
        launch.kernel.removeprefix(prefix).removeprefix("_") for launch in launches
    ]
    assert sorted(names) == sorted(kernels)
    for launch, name in zip(launches, names, strict=True):
        rotates = name.endswith("matrix")
        assert ("weight" in launch.buffers()) == rotates
        assert launch.args.heads in (4, 2)
        if "mean" in launch.buffers():
            assert (launch.args.heads, rotates) == (2, True)


@pytest.mark.parametrize("axes", [P(None, None, "y"), P(None, "x", "y")], ids=str)
def test_sharded_inputs_of_three_stay_where_they_are(cuda, host_kernels, axes):
    mesh = jax.make_mesh(
        (2, 2), ("x", "y"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2
    )
    inputs = unbalanced(tokens=512, dim=64)
    sharded = [jax.device_put(x, NamedSharding(mesh, axes)) for x in inputs]
    call = jax.jit(lambda *x: [y.detach() for y in together(*x)])
    text = str(call.lower(*sharded).compile().as_text())
    # Each device measures its tokens; statistics are gathered, and no array.
    assert "all-gather" not in text or "x" in axes
    assert not re.search(r"(bf16|s8|f8e4m3fn)\S* all-gather", text)
    with cuda.running(host_kernels) as launches:
        z = jax.block_until_ready(call(*sharded))
    assert_same_together(z, inputs)
    assert {launch.device for launch in launches} == {0, 1, 2, 3}


@pytest.mark.parametrize("empty", ["queries", "keys", "batch"])
def test_nothing_together(cuda, host_kernels, empty):
    inputs = unbalanced(dim=64)
    for i, x in enumerate(inputs):
        if empty == "batch":
            inputs[i] = x[:0]
        elif (empty == "queries") == (i == 0):
            inputs[i] = x[:, :0]
    with cuda.running(host_kernels):
        z = jax.block_until_ready(together(*inputs))
    assert_same_together(z, inputs)


@pytest.mark.parametrize(
    ("dim", "kernel", "threads", "hadamard", "parts"),
    [
        (8, "128_rotated", 32, 8, 1),
        (64, "64_rotated_matrix", 256, 64, 1),
        (96, "128_rotated", 384, 32, 12),
        (128, "128_rotated_matrix", 256, 128, 1),
        (136, "256_rotated", 288, 8, 17),
        (192, "192_rotated_matrix", 256, 64, 1),
        (232, "256_rotated", 480, 8, 29),
    ],
)
def test_rotations(cuda, dim, kernel, threads, hadamard, parts):
    for launch in recorded(cuda, normal(2, 1, dim), rotate=True):
        args: Any = launch.args
        assert launch.kernel == f"zyfa_quantize_bf16_{kernel}"
        assert launch.block == (threads, 1, 1)
        assert args.hadamard == hadamard
        rows = np.arange(threads) * args.row_inverse >> 19
        np.testing.assert_array_equal(rows, np.arange(threads) // parts)


def test_the_first_launch_finds_zeros_and_one_alone_writes_ones(cuda):
    x = normal(1, 3, 1, 64)
    zeros = [y.args.zero_descale for y in recorded(cuda, x)]
    [once] = recorded(cuda, x, granularity="block")
    assert (zeros[0], once.args.zero_descale) == (0, 1)


@pytest.mark.parametrize(
    "shape", [(0, 5, 2, 64), (2, 0, 2, 64), (2, 5, 0, 64)], ids=str
)
def test_nothing_to_do_launches_nothing(run, shape):
    z, launches = run(np.zeros(shape, BF16))
    assert not launches
    assert z.shape == shape


@pytest.mark.parametrize("dim", [4, 12, 264])
def test_other_head_dims_take_jnp(run, dim):
    x = normal(1, 5, 1, dim)
    z, launches = run(x)
    assert not launches
    assert_same(z, x)


@pytest.mark.parametrize("options", [{}, {"center": True}, EVERYTHING], ids=str)
@pytest.mark.parametrize("axes", [P("x", None, "y"), P(None, "x")], ids=str)
def test_sharded_inputs_stay_where_they_are(cuda, host_kernels, axes, options):
    mesh = jax.make_mesh(
        (2, 2), ("x", "y"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2
    )
    x = normal(4, 256, 2, 64)
    sharded = jax.device_put(x, NamedSharding(mesh, axes))
    call = jax.jit(lambda x: by_kernel(x, **options).detach())
    assert "all-gather" not in str(call.lower(sharded).compile().as_text())
    with cuda.running(host_kernels) as launches:
        z = jax.block_until_ready(call(sharded))
    assert_same(z, x, **options)
    assert {launch.device for launch in launches} == {0, 1, 2, 3}


def test_attention_takes_what_the_kernels_made(cuda, host_kernels):
    q, k, v = (normal(1, 40, 2, 128, seed=i) for i in range(3))

    def both(quantized, implementation):
        z = quantized(q), quantized(k), quantized(v, granularity="tensor")
        return attention(*z, implementation=implementation)

    def model(launch):
        family = launch.kernel.split("_")[1]
        (host_kernels if family == "quantize" else cuda_bridge.model)(launch)

    with cuda.running(model) as launches:
        out = jax.block_until_ready(jax.jit(lambda: both(by_kernel, "cuda"))())
    names = [launch.kernel.split("_")[1] for launch in launches]
    assert sorted(names) == ["attention", "prepare", *["quantize"] * 6]
    expected = np.asarray(both(quantize, None), np.float32)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.15)


@pytest.mark.parametrize("options", [OPTIONS[0], EVERYTHING], ids=str)
def test_exports_for_cuda(options):
    def leaves(x):
        return jax.tree.leaves(quantize(x, **options))

    (batch,) = export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((batch, 200, 2, 64), BF16)
    check = export.DisabledSafetyCheck.custom_call(_ffi.QUANTIZE_TARGET)
    exported = export.export(
        jax.jit(leaves), platforms=["cpu", "cuda"], disabled_checks=[check]
    )(shape)
    assert "custom_call @zyfa_quantize" in exported.mlir_module()


def test_failures_carry_cudas_words(cuda, run):
    with (
        cuda.failing("cuLaunchKernel", "out of memory"),
        pytest.raises(
            ERRORS,
            match=r"(?s)RESOURCE_EXHAUSTED.*zyfa_quantize: cuLaunchKernel of "
            r"zyfa_quantize_bf16_128: out of memory",
        ),
    ):
        run(normal(1, 5, 1, 64))


@pytest.mark.parametrize(
    ("shape", "step", "message"),
    [
        (
            (1, 130, 2, 64),
            "neither",
            "step must be one of find, .*measure, got neither",
        ),
        ((1, 130, 2, 64), "measure", r"found must have shape \(1, 2, 2, 5, 64\)"),
        ((1, 130, 2, 64), "tokens", "int8 and weigh are for rotate alone"),
        ((130, 2, 64), "find", r"x must be .*got \(130, 2, 64\)"),
        ((1, 130, 2, 60), "find", "the CUDA kernels .* multiples of 8 .*got 60"),
        ((0, 1, 2**17, 64), "find", "the CUDA kernels take up to .* 65535 heads"),
        ((1, 130, 2, 64), "round", "wrong number of operands"),
    ],
)
def test_the_handler_checks_what_it_is_given(cuda, shape, step, message):
    target: Any = _ffi.target("cpu", "cuda", _ffi.QUANTIZE_TARGET)
    call = jax.ffi.ffi_call(target, [jax.ShapeDtypeStruct((1, 2, 2), F32)])
    with pytest.raises(
        ERRORS, match=f"(?s)INVALID_ARGUMENT.*zyfa_quantize: .*{message}"
    ):
        jax.block_until_ready(call(np.zeros(shape, BF16), step=step, **NEITHER))


def test_the_handler_may_be_captured_in_a_command_buffer(xla):
    handlers = EXTENSION.quantize_registrations()["CUDA"]
    assert set(handlers) == {"initialize", "execute"}
    assert xla.traits(handlers["execute"]) == 1
    assert xla.traits(EXTENSION.handlers_on_host()["cuda"]["zyfa_quantize"]) == 0


def frame_bytes(code: bytes) -> dict[str, int]:
    """Bytes of local memory that each kernel of a cubin has for spills and arrays."""
    elf = ELFFile(io.BytesIO(code))
    symbols: Any = elf.get_section_by_name(".symtab")
    section: Any = elf.get_section_by_name(".nv.info")
    # Its entries: format, attribute, size; then symbol and value.
    info = np.frombuffer(section.data(), np.uint32)
    frame_size = 4 | 0x11 << 8 | 8 << 16
    starts = np.flatnonzero(info == frame_size)
    return {symbols.get_symbol(info[i + 1]).name: int(info[i + 2]) for i in starts}


def test_the_kernels_spill_nothing():
    frames = frame_bytes(EXTENSION.cuda_code_object("sm_90"))
    kernels = {x: n for x, n in frames.items() if x.startswith("zyfa_quantize_")}
    assert len(kernels) == 66
    for name, size in kernels.items():
        # A thread holds 64 numbers of 32 bits, half of its registers.
        most = 16 if name.startswith("zyfa_quantize_f32_256") else 0
        assert size <= most, name


def test_the_handler_loads_ahead(cuda, xla):
    initialize = EXTENSION.quantize_registrations()["CUDA"]["initialize"]
    stream = cuda.stream(4)
    assert not xla.initialize(initialize, stream)
    assert cuda.loads(4) == 1
    with cuda.failing("cuStreamGetCtx", "invalid value"):
        error = xla.initialize(initialize, stream)
    assert error.startswith("13: zyfa_quantize: cuStreamGetCtx: invalid argument")
