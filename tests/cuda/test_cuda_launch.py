"""The way of a call: JAX, handler, launcher, driver, and what a kernel is handed.

A stand-in takes CUDA's place, and plain attention in NumPy the kernels'.
"""

import pathlib
import subprocess
import sys
from typing import Any

import cuda_bridge
import jax
import numpy as np
import pytest
from _oracle import BF16, F16, F32, FP8, INT8, as_int8, assert_near_oracle, make, normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from zyfa_jax import _ffi, attention, quantize

EXTENSION: Any = _ffi.load()
# Never loaded on, so that each failure of loading can be provoked there.
UNLOADED = 7
MULTIPROCESSORS = 2
ONES = {f"{name}_descale": 1.0 for name in "qkv"}

# JAX raises the one or the other, by the thread on which the call ran.
ERRORS = (jax.errors.JaxRuntimeError, ValueError)


def forced(*inputs, **options):
    return attention(*inputs, implementation="cuda", return_lse=True, **options)


def run(cuda, *inputs, **options):
    """(results, launch that prepares, launch) of a call that the model runs."""
    with cuda.running(cuda_bridge.model) as launches:
        results = jax.block_until_ready(forced(*inputs, **options))
    prepare, launch = launches
    assert not cuda_bridge.is_attention(prepare)
    assert prepare.device == launch.device
    return results, prepare, launch


def args_of(launch) -> Any:
    return cuda_bridge.parameters(launch).args


def small(dtype=BF16, dims=(128, 128), tokens=(5, 7), heads=(2, 1), batch=(1,)):
    return make(tokens=tokens, heads=heads, dims=dims, batch=batch, dtype=dtype)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128)])
@pytest.mark.parametrize("dtype", [BF16, F16, FP8, INT8], ids=str)
def test_a_call_comes_back(cuda, dtype, dims):
    options = {}
    if dtype == FP8:
        options = {"q_descale": 0.5, "k_descale": 0.75, "v_descale": np.float32(2)}
    inputs = make(tokens=(20, 133), dims=dims, dtype=F32 if dtype == INT8 else dtype)
    if dtype == INT8:
        inputs = as_int8(*inputs)
    results, prepare, launch = run(cuda, *inputs, **options)
    assert_near_oracle(results, inputs, **options)
    kind = {BF16: "bf16", F16: "f16", FP8: "fp8", INT8: "int8"}[dtype]
    assert launch.kernel == f"zyfa_attention_{kind}_{dims[0]}x{dims[1]}"
    prepares = {FP8: f"_fp8_{dims[0]}", INT8: "_int8"}
    assert prepare.kernel == "zyfa_prepare" + prepares.get(dtype, "")
    assert launch.code == EXTENSION.cuda_code_object("sm_90")
    assert launch.stream is None
    assert launch.grid == (MULTIPROCESSORS, 1, 1)
    assert 48 << 10 < launch.shared_bytes <= 227 << 10


@pytest.mark.parametrize("out_dtype", [F32, BF16, F16], ids=str)
def test_every_output_dtype(cuda, out_dtype):
    inputs = small()
    results, *_ = run(cuda, *inputs, out_dtype=out_dtype)
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
@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_every_option_reaches_the_kernel(cuda, options, dtype):
    inputs = make(tokens=(20, 33), heads=(6, 3), dims=(128, 128), dtype=dtype)
    if dtype == FP8:
        options = options | ONES
    results, *_ = run(cuda, *inputs, **options)
    assert_near_oracle(results, inputs, **options)


def test_descales_of_queries_by_blocks(cuda):
    q, k, v = make(tokens=(300, 40), dims=(128, 128), dtype=F32)
    inputs = quantize(q, granularity="block"), quantize(k), quantize(v)
    results, _, launch = run(cuda, *inputs)
    assert_near_oracle(results, inputs)
    assert (args_of(launch).q_block, args_of(launch).q_scales) == (128, 3)


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 256])
def test_the_workspace_holds_the_transposed_values(cuda, tokens):
    inputs = small(dtype=FP8, tokens=(3, tokens), heads=(6, 3), batch=(2,))
    results, prepare, _ = run(cuda, *inputs, **ONES)
    assert_near_oracle(results, inputs, **ONES)
    assert prepare.grid == (2 * 3 * -(-tokens // 128), 1, 1)


def test_vmap_shares_keys(cuda):
    q = normal(3, 2, 5, 4, 128, dtype=BF16)
    _, k, v = make(tokens=(5, 7), dims=(128, 128), dtype=BF16)
    with cuda.running(cuda_bridge.model) as launches:
        out, lse = jax.block_until_ready(jax.vmap(forced, (0, None, None))(q, k, v))
    for i in range(3):
        assert_near_oracle((out[i], lse[i]), (q[i], k, v))
    _, launch = launches
    assert (args_of(launch).batch, args_of(launch).kv_batch) == (6, 2)


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (None, (-1, -1)),
        ((2**31 - 1, 2**31 - 1), (2**31 - 1, 2**31 - 1)),
        ((2**62, 1), (-1, 1)),
    ],
)
def test_windows_fit_int32(cuda, window, expected):
    inputs = small()
    results, _, launch = run(cuda, *inputs, window=window, causal=False)
    args = args_of(launch)
    assert (args.window_left, args.window_right) == expected
    assert_near_oracle(results, inputs, window=window, causal=False)


@pytest.mark.parametrize(
    ("queries", "heads", "groups"), [(1, 1, 1), (128, 1, 1), (129, 1, 2), (1, 3, 2)]
)
def test_a_group_for_each_multiprocessor_at_most(cuda, queries, heads, groups):
    inputs = small(tokens=(queries, 3), heads=(heads, 1))
    results, _, launch = run(cuda, *inputs)
    assert_near_oracle(results, inputs)
    assert launch.grid == (groups, 1, 1)


@pytest.mark.parametrize("shape", [(0, 5, 2), (1, 0, 2)], ids=str)
def test_without_queries_nothing_is_launched(cuda, shape):
    batch, tokens, heads = shape
    inputs = small(tokens=(tokens, 7), heads=(heads, 1), batch=(batch,))
    with cuda.running(cuda_bridge.model) as launches:
        out, lse = jax.block_until_ready(forced(*inputs))
    assert out.shape == (batch, tokens, heads, 128)
    assert lse.shape == (batch, heads, tokens)
    assert not launches


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_without_keys_the_kernel_writes_zeros(cuda, dtype):
    options = ONES if dtype == FP8 else {}
    inputs = small(dtype=dtype, tokens=(5, 0))
    results, *_ = run(cuda, *inputs, **options)
    assert_near_oracle(results, inputs, **options)


def test_shard_map_launches_on_every_device(cuda):
    inputs = make(dims=(128, 128), batch=(4,), dtype=BF16)
    mesh = jax.make_mesh(
        (4,), ("x",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,)
    )
    split = jax.shard_map(forced, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    with cuda.running(cuda_bridge.model) as launches:
        results = jax.block_until_ready(jax.jit(split)(*inputs))
    assert_near_oracle(results, inputs)
    assert sorted(x.device for x in launches) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_sharded_inputs_stay_where_they_are(cuda):
    inputs = make(dims=(128, 128), batch=(4,), dtype=BF16)
    mesh = jax.make_mesh(
        (4,), ("x",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,)
    )
    sharded = jax.device_put(inputs, jax.NamedSharding(mesh, P("x")))
    with cuda.running(cuda_bridge.model) as launches:
        results = jax.block_until_ready(jax.jit(forced)(*sharded))
    assert_near_oracle(results, inputs)
    assert {args_of(x).batch for x in launches if cuda_bridge.is_attention(x)} == {1}


def test_eight_devices_load_once_each(cuda):
    """In a process where no device has loaded yet."""
    program = """
for _ in range(2):
    for device in jax.devices():
        inputs = jax.device_put(make(dims=(128, 128), dtype=BF16), device)
        with cuda.running(cuda_bridge.model) as launches:
            results = jax.block_until_ready(call(*inputs))
        assert_near_oracle(results, jax.device_get(inputs))
        print(launches[0].device, cuda.loads(device.id))
"""
    assert in_a_process(cuda, program).split("\n") == [f"{i} 1" for i in range(8)] * 2


def test_many_threads_at_once(cuda):
    """Of several devices, all of which load at that moment."""
    program = """
import concurrent.futures
def work(i):
    inputs = make(dims=(128, 128), dtype=BF16, seed=i)
    results = call(*jax.device_put(inputs, jax.devices()[i % 4]))
    assert_near_oracle(results, inputs)
with cuda.running(cuda_bridge.model) as launches:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(64)))
print(len(launches), *(cuda.loads(i) for i in range(8)))
"""
    assert in_a_process(cuda, program) == "128 1 1 1 1 0 0 0 0"


def fails(cuda, device, code, message):
    """Asserts that a call on a device ends in an error of JAX's."""
    inputs = jax.device_put(small(), jax.devices()[device])
    with (
        cuda.running(cuda_bridge.model) as launches,
        pytest.raises(ERRORS, match=f"(?s){code}.*{message}"),
    ):
        jax.block_until_ready(forced(*inputs))
    assert not launches


@pytest.mark.parametrize(
    ("call", "error", "code", "message"),
    [
        ("cuModuleLoadData", "out of memory", "RESOURCE_EXHAUSTED", "out of memory"),
        ("cuModuleLoadData", "no binary", "INTERNAL", "no kernel image is available"),
        ("cuInit", "invalid value", "INTERNAL", "invalid argument"),
        ("cuDeviceGetAttribute", "invalid value", "INTERNAL", "invalid argument"),
        ("cuCtxPushCurrent_v2", "invalid value", "INTERNAL", "invalid argument"),
    ],
)
def test_a_failure_to_load_carries_cudas_words(cuda, call, error, code, message):
    with cuda.failing(call, error):
        name = call.removesuffix("_v2")
        fails(cuda, UNLOADED, code, f"zyfa_attention: {name}.*: {message}.*CUDA_ERROR")


def test_a_context_that_is_not_given_carries_cudas_words(cuda):
    with cuda.failing("cuDevicePrimaryCtxRetain", "invalid value"):
        message = "cuDevicePrimaryCtxRetain: invalid argument.*on device 5"
        fails(cuda, 5, "INTERNAL", message)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ("cuModuleGetFunction", "not found", "of zyfa_.*: named symbol not found"),
        ("cuFuncSetAttribute", "invalid value", "of zyfa_.*: invalid argument"),
        ("cuTensorMapEncodeTiled", "invalid value", ": invalid argument"),
    ],
)
def test_a_failure_before_the_launch_carries_cudas_words(cuda, call, error, message):
    with cuda.failing(call, error):
        fails(cuda, 6, "INTERNAL", f"zyfa_attention: {call}.*{message}.*CUDA_ERROR")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ("launch failure", "INTERNAL", "unspecified launch failure .*719"),
        ("out of memory", "RESOURCE_EXHAUSTED", "out of memory .*OUT_OF_MEMORY"),
    ],
)
def test_a_failed_launch_carries_cudas_words_and_passes(cuda, error, code, message):
    with cuda.failing("cuLaunchKernel", error):
        fails(cuda, 1, code, f"cuLaunchKernel of zyfa_.*: {message}.*device 1")
    inputs = small()
    results, *_ = run(cuda, *jax.device_put(inputs, jax.devices()[1]))
    assert_near_oracle(results, inputs)


def test_loading_is_tried_again_after_a_failure(cuda):
    program = """
try:
    with cuda.failing("cuModuleLoadData", "out of memory"):
        jax.block_until_ready(call(*make(dims=(128, 128), dtype=BF16)))
except (jax.errors.JaxRuntimeError, ValueError) as error:
    print("RESOURCE_EXHAUSTED" in str(error), cuda.loads(0))
with cuda.running(cuda_bridge.model):
    jax.block_until_ready(call(*make(dims=(128, 128), dtype=BF16)))
print(cuda.loads(0))
"""
    assert in_a_process(cuda, program).split() == ["True", "0", "1"]


def test_no_device_names_the_remedy(cuda):
    cuda.set_devices(count=0)
    fails(cuda, UNLOADED, "FAILED_PRECONDITION", "no CUDA-capable device.*nvidia-smi")


def test_a_device_that_cuda_does_not_have(cuda):
    cuda.set_devices(count=7)
    fails(cuda, UNLOADED, "INTERNAL", "invalid device ordinal .* on device 7")


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_another_architecture_names_what_is_built_and_the_remedy(cuda, arch):
    cuda.set_devices(arch=arch)
    message = f"device 7 is {arch}, .*kernels for sm_90.*implementation='reference'"
    fails(cuda, UNLOADED, "FAILED_PRECONDITION", message)


def test_without_the_library_the_error_names_the_remedy(cuda):
    done = in_a_process(cuda, FAILING, library="/nowhere/libcuda.so.1")
    assert "FAILED_PRECONDITION" in done
    assert "libcuda is not here" in done
    assert "/nowhere/libcuda.so.1" in done
    assert "ZYFA_JAX_CUDA_LIBRARY" in done


def test_a_library_that_lacks_a_function_is_named(cuda, tmp_path):
    library = tmp_path / "libcuda.so.1"
    compile_c = ["g++", "-shared", "-x", "c", "/dev/null", "-o", str(library)]
    subprocess.run(compile_c, check=True)
    done = in_a_process(cuda, FAILING, library=str(library))
    assert "FAILED_PRECONDITION" in done
    assert "lacks cuGetErrorName" in done
    assert "cuTensorMapEncodeTiled" in done


FAILING = """
try:
    jax.block_until_ready(call(*make(dims=(128, 128), dtype=BF16)))
except (jax.errors.JaxRuntimeError, ValueError) as error:
    print(error)
"""

PREAMBLE = """
import contextlib, itertools, os, pathlib, sys
sys.path[:0] = {paths}
os.environ["ZYFA_JAX_CUDA_LIBRARY"] = {library!r}
import jax
jax.config.update("jax_num_cpu_devices", 8)
import bridge, cuda_bridge
import numpy as np
from _oracle import BF16, F16, F32, FP8, assert_near_oracle, make
from zyfa_jax import _ffi, attention
from zyfa_jax._quantize import quantize_by
def call(*inputs, **options):
    return attention(*inputs, implementation="cuda", return_lse=True, **options)
stack = contextlib.ExitStack()
stack.enter_context(_ffi.stand_in("cuda"))
"""


def in_a_process(cuda, program, library=None):
    """What a program prints in a process of its own, where nothing is loaded yet."""
    here = pathlib.Path(__file__).parent
    paths = [str(here), str(here.parent), *sys.path]
    preamble = PREAMBLE.format(paths=paths, library=library or str(cuda.path))
    if library is None:
        preamble += f"cuda = cuda_bridge.StandIn({str(cuda.path)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", preamble + program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def call_handler(shapes=None, dtypes=None, workspace=(1, 128), **attributes):
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
        "workspace": (workspace, np.uint8),
    }
    structs = [
        jax.ShapeDtypeStruct(
            (shapes or {}).get(name, shape), (dtypes or {}).get(name, dtype)
        )
        for name, (shape, dtype) in operands.items()
    ]
    numbers = {"window_left": -1, "window_right": 0, "q_block": 0, "kv_block": 0}
    numbers = {name: np.int64(x) for name, x in (numbers | attributes).items()}
    call = jax.ffi.ffi_call(_ffi.target("cpu", "cuda"), structs[9:])
    arrays = [np.zeros(x.shape, x.dtype) for x in structs[:9]]
    return jax.block_until_ready(call(*arrays, quadratic=np.bool_(False), **numbers))


def test_a_direct_call_that_is_right(cuda):
    with cuda.running(cuda_bridge.model) as launches:
        call_handler()
    assert len(launches) == 2


FP8_INPUTS = dict.fromkeys("qkv", FP8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"shapes": {"q": (1, 5, 2, 64), "k": (1, 7, 1, 64)}},
            "head dims .*, got bfloat16 with 64 and 128",
        ),
        (
            {"shapes": {"v": (1, 7, 1, 192), "out": (1, 5, 2, 192)}},
            "head dims .*, got bfloat16 with 128 and 192",
        ),
        ({"dtypes": dict.fromkeys("qkv", F32)}, "got float32 with 128 and 128"),
        ({"shapes": {"k": (1, 7, 1, 120)}}, "k takes shape"),
        ({"kv_block": 128}, "one descale for all keys, got kv_block 128"),
        ({"window_left": 2**31}, "windows of up to 2147483647 tokens .*2147483648"),
        ({"workspace": (0,)}, "the workspace takes 128 bytes, got 0"),
        ({"workspace": (127,)}, "the workspace takes 128 bytes, got 127"),
        ({"dtypes": FP8_INPUTS}, "the workspace takes 16516 bytes, got 128"),
    ],
    ids=str,
)
def test_the_handler_refuses_what_the_kernel_does_not_take(cuda, arguments, message):
    with (
        cuda.running(cuda_bridge.model) as launches,
        pytest.raises(
            ERRORS,
            match=f"(?s)INVALID_ARGUMENT.*zyfa_attention: .*{message}",
        ),
    ):
        call_handler(**arguments)
    assert not launches


def test_the_lowering_hides_the_workspace(cuda):
    lowered = jax.jit(forced).lower(*small(dtype=FP8), **ONES)
    assert "@zyfa_attention_cuda(" in lowered.as_text()
    assert "tensor<130x128xui8>" in lowered.as_text()
    assert len(lowered.out_info) == 2


def test_the_stand_in_ends_with_its_context():
    with pytest.raises(NotImplementedError, match=r"'cuda'.*lowered for cpu"):
        jax.jit(forced).lower(*small(tokens=(5, 9)))


def test_xla_learns_that_the_handler_may_be_captured(xla):
    handlers = EXTENSION.registrations()["CUDA"]
    assert set(handlers) == {"initialize", "execute"}
    assert xla.traits(handlers["execute"]) == 1
    assert xla.traits(EXTENSION.handlers_on_host()["cuda"]["zyfa_attention"]) == 0


def test_the_handler_of_cuda_launches_on_xlas_stream(cuda, xla):
    handler = EXTENSION.registrations()["CUDA"]["execute"]
    stream = cuda.stream(3)
    inputs = small()
    ones, ints = np.ones((1, 2, 1), F32), np.array([5], np.int32)
    results = np.empty((1, 5, 2, 128), BF16), np.empty((1, 2, 5), F32)
    arrays = [*inputs, ones, ones[:, :1], ones[:, :1], 0 * ints + 2, ints, ints + 2]
    # As XLA's buffers are aligned.
    memory = np.empty(256, np.uint8)
    start = -memory.ctypes.data % 128
    workspace = memory[start : start + 128]
    with cuda.running(cuda_bridge.model) as launches:
        assert not xla.execute(handler, stream, [*arrays, *results, workspace])
    assert [(x.device, x.stream) for x in launches] == [(3, stream)] * 2
    assert_near_oracle(results, inputs, scale=1.0)
    assert cuda.contexts() == 0
    with cuda.failing("cuStreamGetCtx", "invalid value"):
        error = xla.execute(handler, stream, [*arrays, *results, workspace])
    assert error.startswith("13: zyfa_attention: cuStreamGetCtx: invalid argument")
    with cuda.failing("cuLaunchKernel", "launch failure"):
        assert xla.execute(handler, stream, [*arrays, *results, workspace])
    assert cuda.contexts() == 0


def test_the_handler_of_cuda_loads_ahead(cuda, xla):
    """A stream that is being captured may take launches and nothing else."""
    program = """
xla = bridge.XlaSide(pathlib.Path(XLA_SIDE))
initialize = _ffi.load().registrations()["CUDA"]["initialize"]
stream = cuda.stream(5)
with cuda.failing("cuModuleLoadData", "out of memory"):
    print(xla.initialize(initialize, stream))
for _ in range(2):
    assert not xla.initialize(initialize, stream)
print(*(cuda.loads(i) for i in range(8)), len(cuda.launches))
"""
    program = program.replace("XLA_SIDE", repr(str(xla.path)))
    error, loads = in_a_process(cuda, program).split("\n")
    assert error.startswith("8: zyfa_attention: cuModuleLoadData: out of memory")
    assert loads == "0 0 0 0 0 1 0 0 0"


def test_a_captured_stream_gets_launches_alone(cuda, xla):
    """Every kernel is found ahead: CUDA may load a kernel when it is asked for."""
    program = """
xla = bridge.XlaSide(pathlib.Path(XLA_SIDE))
initialize = _ffi.load().registrations()["CUDA"]["initialize"]
assert not xla.initialize(initialize, cuda.stream(0))
with contextlib.ExitStack() as broken:
    for name in ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"):
        broken.enter_context(cuda.failing(name, "invalid value"))
    with cuda.running(cuda_bridge.model) as launches:
        for dims in ((128, 128), (192, 128)):
            for dtype in (BF16, F16, FP8):
                inputs = make(dims=dims, dtype=dtype)
                ones = {f"{x}_descale": 1.0 for x in "qkv"} if dtype == FP8 else {}
                jax.block_until_ready(call(*inputs, **ones))
    quantized = set()
    with cuda.running(lambda launch: quantized.add(launch.kernel)):
        for dtype, dim, rotate in itertools.product(
            (BF16, F16, F32), (64, 128, 192, 256), (False, True)
        ):
            x = np.zeros((1, 5, 1, dim), dtype)
            jax.block_until_ready(
                quantize_by("cuda", x, center=True, rotate=rotate)
            )
print(len(launches), len(quantized))
"""
    program = program.replace("XLA_SIDE", repr(str(xla.path)))
    assert in_a_process(cuda, program) == "12 24"
