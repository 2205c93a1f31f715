"""`import zyfa_jax` is free: no device, no extension, no package that JAX lacks."""

import importlib.metadata
import subprocess
import sys

import zyfa_jax


def run_python(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False
    )


# JAX refuses this option once a backend exists, so it tells whether one does.
SET_DEVICE_COUNT = 'jax.config.update("jax_num_cpu_devices", 3)'


def test_import_touches_no_device():
    done = run_python(f"import jax, zyfa_jax; {SET_DEVICE_COUNT}; print(jax.devices())")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("CpuDevice") == 3


def test_the_device_check_sees_a_device():
    done = run_python(f"import jax; jax.devices(); {SET_DEVICE_COUNT}")
    assert "before backends are initialized" in done.stderr


def test_import_loads_only_jax_and_own_python_modules():
    done = run_python(
        "import sys, jax, jax.numpy; before = set(sys.modules); import zyfa_jax; "
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "zyfa_jax" in loaded
    foreign = {
        name
        for name in loaded
        if name.split(".")[0] not in {"zyfa_jax", "jax", "jaxlib", "ml_dtypes"}
        and name.split(".")[0] not in sys.stdlib_module_names
    }
    assert not foreign
    assert "zyfa_jax._ext" not in loaded
    assert not any(name.startswith("zyfa_jax.flax") for name in loaded)


def test_public_names():
    names = {name for name in vars(zyfa_jax) if not name.startswith("_")}
    modules = {name for name in names if f"zyfa_jax.{name}" in sys.modules}
    assert names - modules == {
        "CHECKPOINT_NAMES",
        "Backend",
        "Quantized",
        "attention",
        "backends",
        "export_safety_checks",
        "quantize",
        "quantize_qkv",
    }


def test_version_is_that_of_the_distribution():
    assert zyfa_jax.__version__ == importlib.metadata.version("zyfa-jax")
