"""The way of a call: JAX, handler, launcher, driver, and what a kernel is handed.

A stand-in takes HIP's place, and plain attention in NumPy the kernels'.
"""

import dataclasses
import pathlib
import subprocess
import sys
from typing import Any

import bridge
import jax
import numpy as np
import pytest
from _oracle import BF16, F16, F32, FP8, assert_near_oracle, make, normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from zyfa_jax import Quantized, _ffi, attention, quantize, quantize_qkv

EXTENSION: Any = _ffi.load()
# Never loaded on, so that each failure of loading can be provoked there.
UNLOADED = 7


# JAX raises the one or the other, by the thread on which the call ran.
ERRORS = (jax.errors.JaxRuntimeError, ValueError)


def rocm(*inputs, **options):
    return attention(*inputs, implementation="rocm", return_lse=True, **options)


def run(hip, *inputs, **options):
    """(results, launches) of a call that the model runs."""
    with hip.running(bridge.model) as launches:
        results = jax.block_until_ready(rocm(*inputs, **options))
    return results, launches


def small(dtype=BF16, dims=(128, 128), tokens=(5, 7), heads=(2, 1), batch=(1,)):
    return make(tokens=tokens, heads=heads, dims=dims, batch=batch, dtype=dtype)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128)])
@pytest.mark.parametrize("dtype", [BF16, F16, FP8], ids=str)
def test_a_call_comes_back(hip, dtype, dims):
    options = {}
    if dtype == FP8:
        options = {"q_descale": 0.5, "k_descale": 0.75, "v_descale": np.float32(2)}
    inputs = make(tokens=(20, 33), dims=dims, dtype=dtype)
    results, launches = run(hip, *inputs, **options)
    assert_near_oracle(results, inputs, **options)
    (launch,) = launches
    kind = {BF16: "bf16", F16: "f16", FP8: "fp8"}[dtype]
    assert launch.kernel == f"zyfa_attention_{kind}_{dims[0]}x{dims[1]}"
    assert launch.code == EXTENSION.rocm_code_object("gfx950")
    assert launch.stream is None
    assert launch.block == (512, 1, 1)
    assert launch.grid == (2 * 4, 1, 1)


@pytest.mark.parametrize("out_dtype", [F32, BF16, F16], ids=str)
def test_every_output_dtype(hip, out_dtype):
    inputs = small()
    results, _ = run(hip, *inputs, out_dtype=out_dtype)
    assert results[0].dtype == out_dtype
    assert_near_oracle(results, inputs)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"window": 4},
        {"window": (3, 2), "causal": False},
        {"window": (None, 5), "causal": False},
        {"window": (0, None), "causal": False},
        {"q_offset": np.array([3, -2])},
        {"q_lengths": np.array([5, 0]), "kv_lengths": np.array([33, 2])},
        {"scale": 0.3},
    ],
    ids=str,
)
def test_every_option_reaches_the_kernel(hip, options):
    inputs = make(tokens=(20, 33), heads=(6, 3), dims=(128, 128), dtype=BF16)
    results, _ = run(hip, *inputs, **options)
    assert_near_oracle(results, inputs, **options)


def test_descales_of_queries_by_blocks(hip):
    q, k, v = make(tokens=(300, 40), dims=(128, 128), dtype=F32)
    inputs = quantize(q, granularity="block"), quantize(k), quantize(v)
    results, (launch,) = run(hip, *inputs)
    assert_near_oracle(results, inputs)
    assert (launch.args.q_block, launch.args.q_scales) == (128, 3)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128)])
def test_int8_with_the_descales_of_quantize_qkv(hip, dims):
    q, k, v = quantize_qkv(*make(tokens=(20, 300), dims=dims, dtype=F32))
    inputs = q, dataclasses.replace(k, center=None), v
    results, (launch,) = run(hip, *inputs)
    assert_near_oracle(results, inputs)
    assert launch.kernel == f"zyfa_attention_int8_{dims[0]}x{dims[1]}"
    a = launch.args
    assert (a.q_block, a.q_scales, a.kv_block, a.k_scales) == (1, 20, 128, 3)
    assert a.v_channels == 1


def test_int8_with_one_descale_of_a_head(hip):
    q, k = (
        Quantized(rng_int8(1, n, h, 128, seed=n), np.full((1, h), 2e-2, F32))
        for n, h in ((20, 4), (300, 2))
    )
    v = quantize(normal(1, 300, 2, 128))
    results, (launch,) = run(hip, q, k, v)
    assert_near_oracle(results, (q, k, v))
    a = launch.args
    assert (a.q_block, a.kv_block, a.k_scales, a.v_channels) == (0, 0, 1, 0)


def rng_int8(*shape, seed):
    return np.random.default_rng(seed).integers(-128, 128, shape, np.int8)


def test_vmap_shares_keys(hip):
    q = normal(3, 2, 5, 4, 128, dtype=BF16)
    _, k, v = make(tokens=(5, 7), dims=(128, 128), dtype=BF16)
    with hip.running(bridge.model) as launches:
        out, lse = jax.block_until_ready(jax.vmap(rocm, (0, None, None))(q, k, v))
    for i in range(3):
        assert_near_oracle((out[i], lse[i]), (q[i], k, v))
    (launch,) = launches
    assert (launch.args.batch, launch.args.kv_batch) == (6, 2)


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (None, (-1, -1)),
        ((0, 0), (0, 0)),
        ((2**31 - 1, 2**31 - 1), (2**31 - 1, 2**31 - 1)),
        ((2**32, 2**32 + 5), (-1, -1)),
        ((2**62, 1), (-1, 1)),
    ],
)
def test_windows_fit_int32(hip, window, expected):
    inputs = small()
    results, (launch,) = run(hip, *inputs, window=window, causal=False)
    assert (launch.args.window_left, launch.args.window_right) == expected
    assert_near_oracle(results, inputs, window=window, causal=False)


@pytest.mark.parametrize(
    ("heads", "tokens", "options", "pairs"),
    [
        (4, 257, {}, True),
        (3, 257, {}, False),
        (4, 256, {}, False),
        (2, 769, {}, True),
        (4, 513, {"causal": False}, False),
        (4, 513, {"window": 100}, False),
        (4, 513, {"window": (None, 3), "causal": False}, True),
    ],
)
def test_blocks_are_paired_where_that_fills_the_device(
    hip, heads, tokens, options, pairs
):
    """The stand-in has two compute units."""
    inputs = small(tokens=(tokens, 3), heads=(heads, 1))
    with hip.running(lambda launch: None) as launches:
        jax.block_until_ready(rocm(*inputs, **options))
    (launch,) = launches
    blocks = -(-tokens // 256)
    assert launch.args.blocks_per_group == 1 + pairs
    assert launch.grid == (heads * (-(-blocks // 2) if pairs else blocks), 1, 1)


@pytest.mark.parametrize("shape", [(0, 5, 2), (1, 0, 2)], ids=str)
def test_without_queries_nothing_is_launched(hip, shape):
    batch, tokens, heads = shape
    inputs = small(tokens=(tokens, 7), heads=(heads, 1), batch=(batch,))
    (out, lse), launches = run(hip, *inputs)
    assert out.shape == (batch, tokens, heads, 128)
    assert lse.shape == (batch, heads, tokens)
    assert not launches


def test_without_keys_the_kernel_writes_zeros(hip):
    inputs = small(tokens=(5, 0))
    results, launches = run(hip, *inputs)
    assert len(launches) == 1
    assert_near_oracle(results, inputs)


def test_eight_devices_load_once_each(hip):
    """In a process where no device has loaded yet."""
    program = """
for _ in range(2):
    for device in jax.devices():
        inputs = jax.device_put(make(dims=(128, 128), dtype=BF16), device)
        with hip.running(bridge.model) as launches:
            results = jax.block_until_ready(call(*inputs))
        assert_near_oracle(results, jax.device_get(inputs))
        print(launches[0].device, hip.loads(device.id))
"""
    assert in_a_process(hip, program).split("\n") == [f"{i} 1" for i in range(8)] * 2


def test_shard_map_launches_on_every_device(hip):
    inputs = make(dims=(128, 128), batch=(4,), dtype=BF16)
    mesh = jax.make_mesh(
        (4,), ("x",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,)
    )
    split = jax.shard_map(rocm, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    with hip.running(bridge.model) as launches:
        results = jax.block_until_ready(jax.jit(split)(*inputs))
    assert_near_oracle(results, inputs)
    assert sorted(x.device for x in launches) == [0, 1, 2, 3]


def test_many_threads_at_once(hip):
    """Of several devices, all of which load at that moment."""
    program = """
import concurrent.futures
def work(i):
    inputs = make(dims=(128, 128), dtype=BF16, seed=i)
    results = call(*jax.device_put(inputs, jax.devices()[i % 4]))
    assert_near_oracle(results, inputs)
with hip.running(bridge.model) as launches:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(64)))
print(len(launches), *(hip.loads(i) for i in range(8)))
"""
    assert in_a_process(hip, program) == "64 1 1 1 1 0 0 0 0"


def fails(hip, device, code, message):
    """Asserts that a call on a device ends in an error of JAX's."""
    inputs = jax.device_put(small(), jax.devices()[device])
    with (
        hip.running(bridge.model) as launches,
        pytest.raises(ERRORS, match=f"(?s){code}.*{message}"),
    ):
        jax.block_until_ready(rocm(*inputs))
    assert not launches


@pytest.mark.parametrize(
    ("call", "error", "code", "message"),
    [
        ("hipModuleLoadData", "out of memory", "RESOURCE_EXHAUSTED", "out of memory"),
        ("hipModuleLoadData", "no binary", "INTERNAL", "no kernel image is available"),
        ("hipGetDevicePropertiesR0600", "invalid value", "INTERNAL", "invalid argum"),
        ("hipGetDeviceCount", "invalid value", "INTERNAL", "invalid argument"),
        ("hipGetDevice", "invalid value", "INTERNAL", "invalid argument"),
        ("hipSetDevice", "invalid value", "INTERNAL", "invalid argument"),
    ],
)
def test_a_failure_to_load_carries_hips_words(hip, call, error, code, message):
    with hip.failing(call, error):
        name = call.removesuffix("R0600")
        fails(hip, UNLOADED, code, f"zyfa_attention: {name}.*: {message}.*hipError")


def test_a_missing_kernel_carries_hips_words(hip):
    with hip.failing("hipModuleGetFunction", "not found"):
        message = r"hipModuleGetFunction of zyfa_.*: named symbol not found.*device 6"
        fails(hip, 6, "INTERNAL", message)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ("launch failure", "INTERNAL", "unspecified launch failure .*719"),
        ("out of memory", "RESOURCE_EXHAUSTED", "out of memory .*hipErrorOutOfMemory"),
    ],
)
def test_a_failed_launch_carries_hips_words_and_passes(hip, error, code, message):
    with hip.failing("hipModuleLaunchKernel", error):
        fails(hip, 1, code, f"hipModuleLaunchKernel of zyfa_.*: {message}.*device 1")
    inputs = small()
    results, _ = run(hip, *jax.device_put(inputs, jax.devices()[1]))
    assert_near_oracle(results, inputs)


def test_loading_is_tried_again_after_a_failure(hip):
    program = """
try:
    with hip.failing("hipModuleLoadData", "out of memory"):
        jax.block_until_ready(call(*make(dims=(128, 128), dtype=BF16)))
except (jax.errors.JaxRuntimeError, ValueError) as error:
    print("RESOURCE_EXHAUSTED" in str(error), hip.loads(0))
with hip.running(bridge.model):
    jax.block_until_ready(call(*make(dims=(128, 128), dtype=BF16)))
print(hip.loads(0))
"""
    assert in_a_process(hip, program).split() == ["True", "0", "1"]


def test_no_device_names_the_remedy(hip):
    hip.set_devices(count=0)
    fails(hip, UNLOADED, "FAILED_PRECONDITION", "no ROCm-capable device.*rocminfo")


def test_a_device_that_hip_does_not_have(hip):
    hip.set_devices(count=7)
    fails(hip, UNLOADED, "INTERNAL", "invalid device ordinal .* on device 7")


@pytest.mark.parametrize("arch", ["gfx942:sramecc+:xnack-", "gfx9500", "gfx95", ""])
def test_another_architecture_names_what_is_built_and_the_remedy(hip, arch):
    hip.set_devices(arch=arch)
    name = arch.split(":")[0]
    fails(
        hip,
        UNLOADED,
        "FAILED_PRECONDITION",
        f"device 7 is {name}, .*kernels for gfx950.*ZYFA_ROCM_ARCHS",
    )


def test_without_the_library_the_error_names_the_remedy(hip):
    done = in_a_process(hip, FAILING, library="/nowhere/libamdhip64.so")
    assert "FAILED_PRECONDITION" in done
    assert "libamdhip64 is not here" in done
    assert "/nowhere/libamdhip64.so" in done
    assert "ZYFA_JAX_HIP_LIBRARY" in done


def test_a_library_that_lacks_a_function_is_named(hip, tmp_path):
    library = tmp_path / "libamdhip64.so"
    compile_c = ["g++", "-shared", "-x", "c", "/dev/null", "-o", str(library)]
    subprocess.run(compile_c, check=True)
    done = in_a_process(hip, FAILING, library=str(library))
    assert "FAILED_PRECONDITION" in done
    assert "lacks hipGetErrorName" in done
    assert "hipModuleLaunchKernel" in done


def test_a_library_that_the_process_has_loaded_is_found(hip):
    program = """
del os.environ["ZYFA_JAX_HIP_LIBRARY"]
with hip.running(bridge.model) as launches:
    jax.block_until_ready(call(*make(dims=(128, 128), dtype=BF16)))
print(len(launches))
"""
    assert in_a_process(hip, program) == "1"


FAILING = """
try:
    jax.block_until_ready(call(*make(dims=(128, 128), dtype=BF16)))
except (jax.errors.JaxRuntimeError, ValueError) as error:
    print(error)
"""

PREAMBLE = """
import contextlib, os, pathlib, sys
sys.path[:0] = {paths}
os.environ["ZYFA_JAX_HIP_LIBRARY"] = {library!r}
import jax
jax.config.update("jax_num_cpu_devices", 8)
import bridge
from _oracle import BF16, assert_near_oracle, make
from zyfa_jax import _ffi, attention
def call(*inputs):
    return attention(*inputs, implementation="rocm", return_lse=True)
stack = contextlib.ExitStack()
stack.enter_context(_ffi.stand_in())
"""


def in_a_process(hip, program, library=None):
    """What a program prints in a process of its own, where nothing is loaded yet."""
    here = pathlib.Path(__file__).parent
    paths = [str(here), str(here.parent), *sys.path]
    preamble = PREAMBLE.format(paths=paths, library=library or str(hip.path))
    if library is None:
        preamble += f"hip = bridge.StandIn({str(hip.path)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", preamble + program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def call_handler(shapes=None, dtypes=None, **attributes):
    """A direct FFI call of the handler, right but for what is given."""
    operands = {
        "q": ((1, 5, 2, 128), BF16),
        "k": ((1, 7, 1, 128), BF16),
        "v": ((1, 7, 1, 128), BF16),
        "q_scale": ((1, 2, 1), F32),
        "k_scale": ((1, 1, 1), F32),
        "v_scale": ((1, 1, 1), F32),
        "q_offset": ((1,), np.int32),
        "q_lengths": ((1,), np.int32),
        "kv_lengths": ((1,), np.int32),
        "out": ((1, 5, 2, 128), BF16),
        "lse": ((1, 2, 5), F32),
    }
    structs = [
        jax.ShapeDtypeStruct(
            (shapes or {}).get(name, shape), (dtypes or {}).get(name, dtype)
        )
        for name, (shape, dtype) in operands.items()
    ]
    numbers = {"window_left": -1, "window_right": 0, "q_block": 0, "kv_block": 0}
    numbers = {name: np.int64(x) for name, x in (numbers | attributes).items()}
    call = jax.ffi.ffi_call(_ffi.target("cpu", "rocm"), structs[9:])
    arrays = [np.zeros(x.shape, x.dtype) for x in structs[:9]]
    return jax.block_until_ready(call(*arrays, quadratic=np.bool_(False), **numbers))


def test_a_direct_call_that_is_right(hip):
    with hip.running(bridge.model) as launches:
        call_handler()
    assert len(launches) == 1


I8 = {"q": np.int8, "k": np.int8, "v": FP8}
DIMS_64 = {"q": (1, 5, 2, 64), "k": (1, 7, 1, 64)}
HEADS_2_16 = {
    "q": (1, 1, 2**16, 128),
    "q_scale": (1, 2**16, 1),
    "out": (1, 1, 2**16, 128),
    "lse": (1, 2**16, 1),
}
BATCH_2_16 = {
    "q": (2**16, 1, 128, 128),
    "q_scale": (2**16, 128, 1),
    "out": (2**16, 1, 128, 128),
    "lse": (2**16, 128, 1),
    **dict.fromkeys(("q_offset", "q_lengths", "kv_lengths"), (2**16,)),
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shapes": DIMS_64}, "head dims .*, got bfloat16 with 64 and 128"),
        ({"dtypes": dict.fromkeys("qkv", F32)}, "got float32 with 128 and 128"),
        ({"dtypes": {"k": F16}}, "k takes dtype"),
        ({"dtypes": {"out": FP8}}, "out takes dtype"),
        ({"dtypes": {"q_offset": np.float32}}, "q_offset takes dtype"),
        ({"shapes": {"q": (5, 2, 128)}}, "q takes 4 dimensions"),
        ({"shapes": {"k": (1, 7, 1, 120)}}, "k takes shape"),
        ({"shapes": {"v": (1, 6, 1, 128)}}, "v takes shape"),
        ({"shapes": {"q_scale": (1, 2, 2)}}, "q_scale takes shape"),
        ({"shapes": {"kv_lengths": (2,)}}, "kv_lengths takes shape"),
        ({"shapes": {"lse": (1, 5, 2)}}, "lse takes shape"),
        ({"shapes": {"out": (1, 5, 2, 127)}}, "out takes shape"),
        ({"kv_block": 128}, "one descale for all keys, .*, got kv_block 128"),
        ({"dtypes": I8, "kv_block": 128}, "one descale for all keys, .* kv_block 128"),
        ({"shapes": {"v_scale": (1, 1, 1, 128)}}, "for all channels of v, got one for"),
        ({"kv_block": 100}, "kv_block is a multiple of 128"),
        ({"q_block": -1}, "q_block is 0 or more"),
        ({"window_left": -2}, "window bounds are -1 or more"),
        ({"window_left": 2**31}, "windows of up to 2147483647 tokens .*2147483648"),
        ({"window_right": 2**32 - 1}, "windows of up to .* -1 and 4294967295"),
        ({"shapes": HEADS_2_16}, "16777215 bytes .*, got 65536 heads of 256 bytes"),
        ({"shapes": BATCH_2_16}, "8388607 blocks .*, got 65536 rows of 128 heads of 1"),
    ],
    ids=str,
)
def test_the_handler_refuses_what_the_kernel_does_not_take(hip, arguments, message):
    with (
        hip.running(bridge.model) as launches,
        pytest.raises(
            ERRORS,
            match=f"(?s)INVALID_ARGUMENT.*zyfa_attention: .*{message}",
        ),
    ):
        call_handler(**arguments)
    assert not launches


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": F32}, "bfloat16, float16, float8_e4m3fn, int8, not float32"),
        ({"dims": (64, 64)}, "head dims 128 and 128 or 192 and 128, not 64 and 64"),
        ({"dims": (128, 192)}, "head dims 128 and .* or .*, not 128 and 192"),
    ],
)
def test_the_kernels_own_limits_hold(hip, options, message):
    with pytest.raises(NotImplementedError, match=f"'rocm'.*takes {message}"):
        rocm(*small(**options))


def test_descales_of_keys_by_blocks_are_not_the_kernels(hip):
    inputs = [quantize(x, granularity="block") for x in small(F32)]
    with pytest.raises(NotImplementedError, match=r"one descale for all keys.*128"):
        rocm(*inputs)


def test_probabilities_are_linear(hip):
    text = jax.jit(rocm).lower(*small()).as_text()
    assert "@zyfa_attention_rocm(" in text
    assert "quadratic = false" in text


def test_other_calls_on_the_cpu_keep_their_kernel(hip):
    text = jax.jit(attention).lower(*small()).as_text()
    assert "@zyfa_attention(" in text


def test_the_stand_in_ends_with_its_context():
    with pytest.raises(NotImplementedError, match=r"'rocm'.*lowered for cpu"):
        jax.jit(rocm).lower(*small(tokens=(5, 9)))


def test_xla_learns_that_the_handler_may_be_captured(xla):
    handlers = EXTENSION.registrations()["ROCM"]
    assert set(handlers) == {"initialize", "execute"}
    assert xla.traits(handlers["execute"]) == 1
    assert xla.traits(EXTENSION.handlers_on_host()["rocm"]["zyfa_attention"]) == 0


def test_the_handler_of_rocm_launches_on_xlas_stream(hip, xla):
    handler = EXTENSION.registrations()["ROCM"]["execute"]
    stream = hip.stream(3)
    inputs = small()
    ones, ints = np.ones((1, 2, 1), F32), np.array([5], np.int32)
    results = np.empty((1, 5, 2, 128), BF16), np.empty((1, 2, 5), F32)
    arrays = [*inputs, ones, ones[:, :1], ones[:, :1], 0 * ints + 2, ints, ints + 2]
    with hip.running(bridge.model) as launches:
        assert not xla.execute(handler, stream, [*arrays, *results])
    assert [(x.device, x.stream) for x in launches] == [(3, stream)]
    assert_near_oracle(results, inputs, scale=1.0)
    with hip.failing("hipStreamGetDevice", "invalid value"):
        error = xla.execute(handler, stream, [*arrays, *results])
    assert error.startswith("13: zyfa_attention: hipStreamGetDevice: invalid argument")


def test_the_handler_of_rocm_loads_ahead(hip, xla):
    """A stream that is being captured may take launches and nothing else."""
    program = """
xla = bridge.XlaSide(pathlib.Path(XLA_SIDE))
initialize = _ffi.load().registrations()["ROCM"]["initialize"]
stream = hip.stream(5)
with hip.failing("hipModuleLoadData", "out of memory"):
    print(xla.initialize(initialize, stream))
for _ in range(2):
    assert not xla.initialize(initialize, stream)
print(*(hip.loads(i) for i in range(8)), len(hip.launches))
"""
    program = program.replace("XLA_SIDE", repr(str(xla.path)))
    error, loads = in_a_process(hip, program).split("\n")
    assert error.startswith("8: zyfa_attention: hipModuleLoadData: out of memory")
    assert loads == "0 0 0 0 0 1 0 0 0"
