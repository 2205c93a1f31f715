"""The platform "rocm" itself: JAX's plugin compiles, and XLA's streams carry the calls.

Kernels, XLA's as well as ours, run in the emulator.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _oracle import BF16, F16, F32, FP8, assert_near_oracle, make
from jax.experimental import serialize_executable
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zyfa_jax
from benchmarks import rocm as benchmark
from benchmarks.__main__ import main as benchmarks_main
from zyfa_jax import _check, _ffi, attention, quantize
from zyfa_jax.__main__ import main

pytestmark = pytest.mark.rocm_plugin

EXTENSION: Any = _ffi.load()
KINDS = {BF16: "bf16", F16: "f16", FP8: "fp8"}
# Both round the probabilities, each in its way, and the output.
TOLERANCES = {BF16: 6e-3, F16: 1e-3, FP8: 0.03}


def small(dtype=BF16, dims=(128, 128), tokens=(40, 70), heads=(4, 2), batch=(1,)):
    return make(tokens=tokens, heads=heads, dims=dims, batch=batch, dtype=dtype)


def call(**options):
    return jax.jit(lambda *x: attention(*x, return_lse=True, **options))


def ours(launches):
    return [x for x in launches if x.kernel.startswith("zyfa_")]


def run(rocm, function, inputs, device=None):
    """(results, launches of our kernels) on a device of the stand-in."""
    inputs = jax.device_put(inputs, device or jax.devices()[0])
    with rocm.recording() as launches:
        results = jax.block_until_ready(function(*inputs))
    return jax.device_get(results), ours(launches)


def assert_near_cpu(cpu, results, function, inputs, tolerance):
    expected = jax.device_get(function(*jax.device_put(inputs, cpu)))
    for got, want in zip(results, expected, strict=True):
        got, want = (x.astype(np.float64) for x in (got, want))
        assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


def test_jax_sees_gfx950(rocm):
    assert jax.devices("rocm") == jax.devices()
    assert len(jax.devices()) == 2
    assert {x.compute_capability for x in jax.devices()} == {"gfx950"}
    (backend,) = (x for x in zyfa_jax.backends() if x.platform == "rocm")
    assert backend.present
    assert backend.kernel
    assert backend.detail.startswith("kernel (gfx950) ")


@pytest.mark.parametrize("dims", [(128, 128), (192, 128)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, FP8], ids=str)
def test_attention_equals_the_cpus(rocm, cpu, dtype, dims):
    inputs = small(dtype, dims)
    options = {}
    if dtype == FP8:
        options = {"q_descale": 0.5, "k_descale": 0.75, "v_descale": np.float32(2)}
    function = call(**options)
    results, (launch,) = run(rocm, function, inputs)
    assert_near_oracle(results, inputs, **options)
    assert_near_cpu(cpu, results, function, inputs, TOLERANCES[dtype])
    assert launch.kernel == f"zyfa_attention_{KINDS[dtype]}_{dims[0]}x{dims[1]}"
    assert launch.code == EXTENSION.rocm_code_object("gfx950")
    assert launch.stream is not None
    assert launch.grid == (4, 1, 1)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128)], ids=str)
def test_int8_equals_the_cpus(rocm, cpu, dims):
    arrays = jax.device_put(small(F32, dims, tokens=(40, 300)), cpu)
    inputs = jax.device_get(tuple(x.detach() for x in zyfa_jax.quantize_qkv(*arrays)))
    function = call()
    results, (launch,) = run(rocm, function, inputs)
    assert_near_cpu(cpu, results, function, inputs, TOLERANCES[FP8])
    assert launch.kernel == f"zyfa_attention_int8_{dims[0]}x{dims[1]}"


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"window": 9},
        {"q_offset": np.array([3, -2])},
        {"q_lengths": np.array([5, 40]), "kv_lengths": np.array([33, 2])},
        {"out_dtype": F32},
        {"implementation": "rocm"},
    ],
    ids=str,
)
def test_options(rocm, options):
    inputs = small(batch=(2,))
    results, launches = run(rocm, call(**options), inputs)
    options = {
        k: v for k, v in options.items() if k not in ("implementation", "out_dtype")
    }
    assert_near_oracle(results, inputs, **options)
    assert len(launches) == 1


def test_the_second_device(rocm):
    inputs = small()
    results, (launch,) = run(rocm, call(), inputs, jax.devices()[1])
    assert_near_oracle(results, inputs)
    assert launch.device == 1


def test_blocks_of_queries(rocm):
    inputs = small(tokens=(600, 600), heads=(2, 1))
    results, (launch,) = run(rocm, call(), inputs)
    assert_near_oracle(results, inputs)
    assert launch.grid == (6, 1, 1)


def test_inside_a_larger_program(rocm, cpu):
    """Among kernels of XLA's."""

    def layer(x, w):
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        heads = (1, 32, 2, 128)
        out = attention(q.reshape(heads), k.reshape(heads), v.reshape(heads))
        return (jax.nn.silu(out.reshape(x.shape)) + x,)

    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 32, 256)).astype(BF16)
    w = (rng.standard_normal((256, 768)) / 16).astype(BF16)
    function = jax.jit(layer)
    results, launches = run(rocm, function, (x, w))
    assert len(launches) == 1
    assert_near_cpu(cpu, results, function, (x, w), TOLERANCES[BF16])


def test_quantization_and_attention_in_one_program(rocm, cpu):
    def function(q, k, v):
        x = quantize(q), quantize(k, center=True), quantize(v)
        return attention(*x, return_lse=True)

    inputs = small(tokens=(64, 64))
    results, launches = run(rocm, jax.jit(function), inputs)
    assert launches[-1].kernel == "zyfa_attention_fp8_128x128"
    assert_near_cpu(cpu, results, jax.jit(function), inputs, TOLERANCES[FP8])


def test_gradients(rocm, cpu):
    """Whose backward pass is XLA's."""

    def loss(q, k, v):
        return jnp.sum(attention(q, k, v).astype(F32) ** 2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    inputs = small(tokens=(32, 32), heads=(2, 1))
    results, launches = run(rocm, gradient, inputs)
    assert len(launches) == 1
    assert_near_cpu(cpu, results, gradient, inputs, 0.01)


def test_what_no_kernel_takes_goes_the_blockwise_path(rocm):
    inputs = small(dims=(64, 32), tokens=(16, 16))
    function = call()
    results, launches = run(rocm, function, inputs)
    assert not launches
    assert_near_oracle(results, inputs)


@pytest.mark.parametrize("split", ["shard_map", "jit"])
def test_two_devices_share_a_batch(rocm, split):
    inputs = small(batch=(4,))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    function = call()
    if split == "shard_map":
        function = jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        )
    results, launches = run(rocm, function, inputs, NamedSharding(mesh, P("x")))
    assert_near_oracle(results, inputs)
    assert sorted(x.device for x in launches) == [0, 1]
    assert {x.args.batch for x in launches} == {2}


def test_an_executable_compiled_ahead(rocm):
    inputs = jax.device_put(small(), jax.devices()[0])
    compiled = call().lower(*inputs).compile()
    stored = serialize_executable.serialize(compiled)
    loaded = serialize_executable.deserialize_and_load(
        *stored, execution_devices=jax.devices()[:1]
    )
    for executable in (compiled, loaded):
        results, launches = run(rocm, executable, inputs)
        assert_near_oracle(results, small())
        assert len(launches) == 1


def test_a_program_exported_from_the_cpu(rocm):
    inputs = small()
    exported = jax.export.export(
        call(),
        platforms=["rocm"],
        disabled_checks=zyfa_jax.export_safety_checks(),
    )(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs))
    loaded = jax.export.deserialize(exported.serialize())
    results, launches = run(rocm, loaded.call, inputs)
    assert_near_oracle(results, inputs)
    assert len(launches) == 1


def test_command_buffers(rocm):
    """XLA records the call into a graph, and launches that on other buffers too."""
    function = jax.jit(
        lambda *x: attention(*x, return_lse=True),
        compiler_options={"xla_gpu_graph_min_graph_size": 1},
    )
    graphed = []
    for seed in range(4):
        inputs = make(dims=(128, 128), dtype=BF16, seed=seed)
        results, (launch,) = run(rocm, function, inputs)
        assert_near_oracle(results, inputs)
        graphed.append(launch.kernel in rocm.graphed)
    assert graphed[-1]


def test_the_check_of_the_kernels(rocm, monkeypatch, capsys):
    kept = ("grouped heads", "lengths")
    situations = tuple(x for x in _check.SITUATIONS if x.name in kept)
    monkeypatch.setattr(_check, "SITUATIONS", situations)
    quantizations = {"rotated": _check.QUANTIZATIONS["rotated"]}
    monkeypatch.setattr(_check, "QUANTIZATIONS", quantizations)
    with rocm.recording() as launches:
        assert main(["check", "--tokens", "40", "--runs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "architecture: gfx950" in printed
    assert "all 22 within their bars" in printed
    assert {x.kernel.split("_")[1] for x in ours(launches)} >= {"attention"}


def test_the_benchmark(rocm, monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "HEAD_DIMS", ((192, 128),))
    file, picture = tmp_path / "report.json", tmp_path / "picture.svg"
    files = ["--json", str(file), "--picture", str(picture)]
    with rocm.recording() as launches:
        assert benchmarks_main(["rocm", "--quick", *files]) == 0
    report = json.loads(file.read_text())
    assert report["architecture"] == "gfx950"
    assert report["backend"]["platform"] == "rocm"
    assert {x.kernel.split("_")[2] for x in ours(launches)} == {"fp8", "bf16"}
    for result in report["results"]:
        if result["implementation"] == "zyfa_jax":
            assert not result["trouble"]
    drawn = picture.read_text()
    assert "<!-- bfloat16 192/128, causal -->" in drawn
    assert "stand-in" in drawn
