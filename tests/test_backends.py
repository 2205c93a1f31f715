"""Which path a call takes, and how one is told."""

import dataclasses
import functools
import logging
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from _oracle import BF16, F16, F32, FP8, assert_near_oracle, make

import zyfa_jax
from zyfa_jax import _ffi, attention, quantize

EXTENSION = _ffi.load()
needs_kernel = pytest.mark.skipif(
    EXTENSION is None, reason="the compiled extension is not here"
)
TARGETS = [] if EXTENSION is None else EXTENSION.cpu_targets()


def platform(name):
    return next(x for x in zyfa_jax.backends() if x.platform == name)


def lowered(platform, *, tokens=(20, 33), dims=None, dtype=None, **options):
    """The program of a call that the platform's kernel takes, but for what is given."""
    gpu = platform != "cpu"
    dims = dims or ((128, 128) if gpu else (16, 24))
    dtype = dtype or (BF16 if gpu else F32)
    call = jax.jit(functools.partial(attention, **options))
    traced = call.trace(*make(tokens=tokens, dims=dims, dtype=dtype))
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_backends_are_the_three_platforms():
    backends = zyfa_jax.backends()
    assert [x.platform for x in backends] == ["cpu", "rocm", "cuda"]
    for backend in backends:
        assert isinstance(backend, zyfa_jax.Backend)
        assert bool(backend.targets) == backend.kernel
        assert backend.detail
        with pytest.raises(dataclasses.FrozenInstanceError):
            backend.kernel = True  # pyright: ignore[reportAttributeAccessIssue]


def test_quantize_kernels_are_named():
    for backend in zyfa_jax.backends():
        named = "quantize: kernel for head dims that" in backend.detail
        assert named == (backend.kernel and backend.platform != "cpu")


def test_presence_is_what_jax_says():
    for backend in zyfa_jax.backends():
        present = any(x.platform == backend.platform for x in jax.devices())
        if backend.platform == "cpu":
            assert backend.present
        elif jax.default_backend() == "cpu":
            assert backend.present == present


def test_a_platform_without_a_kernel_names_the_remedy():
    for backend in zyfa_jax.backends():
        if not backend.kernel:
            assert backend.detail.startswith("no kernel: ")
            assert any(x in backend.detail for x in ("reinstall", "blockwise path"))


@needs_kernel
def test_the_cpu_kernel_names_its_instruction_sets():
    cpu = platform("cpu")
    assert cpu.kernel
    assert cpu.targets == tuple(TARGETS)
    assert cpu.targets[-1] == "portable"
    assert cpu.targets[0] in cpu.detail


def test_without_the_extension_the_plain_path_is_right_and_said(monkeypatch, caplog):
    load_module = _ffi.importlib.import_module

    def missing(name, *rest):
        if name == "zyfa_jax._ext":
            raise ImportError(f"no module named {name}")
        return load_module(name, *rest)

    monkeypatch.setattr(_ffi, "load", _ffi.load.__wrapped__)
    monkeypatch.setattr(_ffi.importlib, "import_module", missing)
    cpu = platform("cpu")
    assert not cpu.kernel
    assert "reinstall" in cpu.detail
    inputs = make(tokens=(21, 34))
    with caplog.at_level(logging.WARNING, "zyfa_jax"):
        got = jax.jit(functools.partial(attention, return_lse=True))(*inputs)
    assert_near_oracle(got, inputs)
    assert "the compiled extension did not load" in caplog.text
    with pytest.raises(NotImplementedError, match=r"'cpu'.*no kernel.*backends\(\)"):
        lowered("cpu", implementation="cpu")


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"implementation": "reference"}, "blockwise path"),
        ({"dims": (20, 24)}, "blockwise path"),
        ({"dims": (16, 264)}, "blockwise path"),
        pytest.param({}, "kernel", marks=needs_kernel),
        pytest.param({"implementation": "cpu"}, "kernel", marks=needs_kernel),
    ],
)
def test_the_debug_log_names_the_path(options, path, caplog):
    with caplog.at_level(logging.DEBUG, "zyfa_jax"):
        text = lowered("cpu", **options)
    assert f"attention on cpu: {path}" in caplog.text
    other = "kernel," if path == "blockwise path" else "blockwise path"
    assert other not in caplog.text
    assert (_ffi.TARGET in text.replace("jit_zyfa_attention", "")) == (path == "kernel")


@pytest.mark.parametrize("implementation", ["rocm", "cuda", None])
def test_lowering_for_a_platform_that_is_not_here(implementation):
    for name in ("rocm", "cuda"):
        if implementation in (None, name):
            text = lowered(name, implementation=implementation)
            assert f"@{_ffi.TARGET}(" in text
        else:
            with pytest.raises(NotImplementedError, match=f"{implementation}.*{name}"):
                lowered(name, implementation=implementation)


@pytest.mark.parametrize("name", ["rocm", "cuda", "cpu"])
def test_the_custom_call_says_the_window(name):
    if name == "cpu" and EXTENSION is None:
        pytest.skip("the compiled extension is not here")
    text = lowered(name, window=(11, None), causal=False)
    assert "window_left = 11 : i64" in text
    assert "window_right = -1 : i64" in text
    assert "window_right = 0 : i64" in lowered(name)


def test_reference_is_plain_on_every_platform():
    for name in ("cpu", "rocm", "cuda"):
        text = lowered(name, implementation="reference")
        assert f"@{_ffi.TARGET}(" not in text


def test_other_head_dims_are_plain_on_every_platform():
    for name in ("rocm", "cuda"):
        assert f"@{_ffi.TARGET}(" not in lowered(name, dims=(20, 24))
        with pytest.raises(NotImplementedError, match="not 20 and 24"):
            lowered(name, dims=(20, 24), implementation=name)


ONES = {f"{name}_descale": 1.0 for name in "qkv"}


@pytest.mark.parametrize("name", ["rocm", "cuda"])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128)])
@pytest.mark.parametrize("options", [{}, {"dtype": F16}, {"dtype": FP8, **ONES}])
def test_what_the_gpu_kernels_take_is_a_custom_call(name, dims, options):
    for implementation in (name, None):
        text = lowered(name, dims=dims, implementation=implementation, **options)
        assert f"@{_ffi.TARGET}(" in text
        assert "quadratic = false" in text


@pytest.mark.parametrize(
    ("dtype", "options", "shape"),
    [(BF16, {}, "1x128xui8"), (FP8, ONES, "517x128xui8")],
    ids=str,
)
def test_cuda_gets_a_workspace(dtype, options, shape):
    assert f"tensor<{shape}>" in lowered("cuda", dtype=dtype, **options)
    assert "ui8>" not in lowered("rocm", dtype=dtype, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": (128, 64)}, "head dims 128 and 128 or 192 and 128, not 128 and 64"),
        ({"dims": (256, 256)}, "head dims .*, not 256 and 256"),
        ({"dtype": F32}, "bfloat16, float16, float8_e4m3fn.*, not float32"),
    ],
)
@pytest.mark.parametrize("name", ["rocm", "cuda"])
def test_what_the_gpu_kernels_do_not_take_is_plain(name, options, message):
    assert f"@{_ffi.TARGET}(" not in lowered(name, **options)
    with pytest.raises(NotImplementedError, match=f"'{name}'.* takes {message}"):
        lowered(name, implementation=name, **options)


@pytest.mark.parametrize("name", ["rocm", "cuda"])
def test_descales_of_keys_by_blocks_are_plain_on_gpus(name):
    inputs = [quantize(x, granularity="block") for x in make(dims=(128, 128))]

    def text(**options):
        traced = jax.jit(functools.partial(attention, **options)).trace(*inputs)
        return traced.lower(lowering_platforms=(name,)).as_text()

    assert f"@{_ffi.TARGET}(" not in text()
    with pytest.raises(NotImplementedError, match="one descale for all keys"):
        text(implementation=name)


@pytest.mark.parametrize(
    ("name", "arch", "option"),
    [("rocm", "gfx950", "ZYFA_ROCM_ARCHS"), ("cuda", "sm_90", "ZYFA_CUDA_NVCC")],
)
def test_a_gpu_backend_names_what_is_built(name, arch, option):
    backend = platform(name)
    built = [] if EXTENSION is None else getattr(EXTENSION, f"{name}_archs")()
    assert backend.targets == tuple(built)
    assert backend.kernel == bool(built)
    if built:
        assert built == [arch]
        assert arch in backend.detail
        assert "128 and 128 or 192 and 128" in backend.detail
        assert "blockwise path for others" in backend.detail
    else:
        assert option in backend.detail


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A device of JAX's."""

    platform: str
    compute_capability: str


@pytest.mark.parametrize(
    ("name", "built", "archs", "message"),
    [
        ("rocm", "gfx950", ["gfx942"], "gfx942.*ZYFA_ROCM_ARCHS"),
        ("rocm", "gfx950", ["gfx950", "gfx942"], "gfx942.*ZYFA_ROCM_ARCHS"),
        ("cuda", "sm_90", ["8.0"], "sm_80.*Hopper"),
        ("cuda", "sm_90", ["9.0", "10.0"], "sm_100, sm_90.*Hopper"),
    ],
)
def test_an_architecture_without_a_kernel_takes_the_plain_path(
    monkeypatch, name, built, archs, message
):
    devices = jax.devices
    archs = list(archs)
    monkeypatch.setattr(_ffi, "_built", lambda _: (built,))
    monkeypatch.setattr(
        _ffi.jax,
        "devices",
        lambda x=None: [Gpu(name, y) for y in archs] if x == name else devices(x),
    )
    backend = platform(name)
    assert backend.present
    assert re.search(message, backend.detail)
    assert f"@{_ffi.TARGET}(" not in lowered(name)
    with pytest.raises(NotImplementedError, match=rf"{name}.*backends\(\)"):
        lowered(name, implementation=name)
    archs[:] = {"rocm": ["gfx950"], "cuda": ["9.0"]}[name]
    assert f"@{_ffi.TARGET}(" in lowered(name, tokens=(21, 33))


def test_a_platform_unknown_to_us_takes_the_plain_path():
    assert f"@{_ffi.TARGET}(" not in lowered("tpu")
    with pytest.raises(NotImplementedError, match=r"'cpu'.*without a kernel"):
        lowered("tpu", implementation="cpu")


@pytest.fixture
def forced():
    """Forces a CPU target for one test."""
    assert EXTENSION is not None
    yield EXTENSION.force_cpu_target
    EXTENSION.force_cpu_target(None)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8"])
def test_every_instruction_set_is_right(target, dtype, forced):
    forced(target)
    options = {}
    if dtype == "fp8":
        dtype = FP8
        options = {f"{name}_descale": 0.75 for name in "qkv"}
    for tokens, dims in (((140, 261), (40, 24)), ((3, 130), (128, 128))):
        inputs = make(tokens=tokens, dims=dims, dtype=dtype)
        got = attention(*inputs, window=(150, None), return_lse=True, **options)
        assert_near_oracle(got, inputs, window=(150, None), **options)


@needs_kernel
def test_an_unknown_instruction_set_is_refused(forced):
    with pytest.raises(ValueError, match="mmx"):
        forced("mmx")


# The sums' order differs between instruction sets, and so do the last bits.
DIGEST = """
import hashlib
import numpy as np
from zyfa_jax import attention
q, k, v = np.random.default_rng(0).standard_normal((3, 300, 2, 64)).astype(np.float32)
digest = hashlib.sha256(np.asarray(attention(q, k, v)).tobytes()).hexdigest()
"""


def run_with_target(target):
    return subprocess.run(
        [sys.executable, "-c", DIGEST + "print(digest)"],
        env={**os.environ, "ZYFA_JAX_CPU_TARGET": target},
        capture_output=True,
        text=True,
        check=False,
    )


@needs_kernel
def test_the_environment_chooses_the_instruction_set(forced):
    chosen, digests = {}, {}
    for target in TARGETS:
        done = run_with_target(target)
        assert done.returncode == 0, done.stderr
        chosen[target] = done.stdout.strip()
        forced(target)
        scope = {}
        exec(DIGEST, scope)
        digests[target] = scope["digest"]
    assert chosen == digests
    assert len(set(digests.values())) > 1 or len(TARGETS) == 1


@needs_kernel
def test_an_unknown_instruction_set_in_the_environment_is_said():
    done = run_with_target("mmx")
    assert "mmx" in done.stdout + done.stderr


@needs_kernel
def test_the_handler_refuses_what_it_cannot_take():
    """A direct FFI call with wrong shapes is an error of JAX's, not a crash."""
    q, k, v = make(dims=(20, 20))
    ones, ints = np.ones((2, 4, 1), np.float32), np.zeros(2, np.int32)
    results = (
        jax.ShapeDtypeStruct((2, 20, 4, 20), np.float32),
        jax.ShapeDtypeStruct((2, 4, 20), np.float32),
    )
    attributes = {
        name: np.int64(0)
        for name in ("window_left", "window_right", "q_block", "kv_block")
    }
    call = jax.ffi.ffi_call(_ffi.TARGET, results)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*20"):
        jax.block_until_ready(
            call(
                *(q, k, v, ones, ones[:, :2], ones[:, :2], ints, ints, ints),
                quadratic=np.bool_(False),
                **attributes,
            )
        )
