"""JAX's ROCm plugin on devices that are not there, once for the process."""

import atexit
import functools
import pathlib
import shutil
import tempfile

import jax
import plugin_runtime
import pytest

from zyfa_jax import _ffi


def _why_not():
    """Why these tests cannot run here, or nothing."""
    if plugin_runtime.plugin_library() is None:
        return "JAX's ROCm plugin is not here: pip install '.[rocm-plugin]'"
    extension = _ffi.load()
    if extension is None or "gfx950" not in extension.rocm_archs():
        return "no code object for gfx950 was built"
    return None


def pytest_configure(config):
    """Starts at once where these tests are asked for: others use JAX when imported."""
    if config.getoption("markexpr") == "rocm_plugin" and _why_not() is None:
        _start()


@functools.cache
def _start():
    folder = pathlib.Path(tempfile.mkdtemp(prefix="rocm_plugin"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return plugin_runtime.start(folder, plugin_runtime.plugin_library())


@pytest.fixture
def rocm():
    """The stand-in; the default device is the first of gfx950."""
    why_not = _why_not()
    if why_not is not None:
        pytest.skip(why_not)
    runtime = _start()
    platform = jax.devices()[0].client.platform_version
    assert platform.startswith("rocm"), (
        f"JAX had started on {platform} before: run these tests alone, "
        "pytest -m rocm_plugin"
    )
    # What XLA compiles without optimizations takes the emulator far longer.
    flag = "jax_disable_most_optimizations"
    before = jax.config.read(flag)
    jax.config.update(flag, False)
    yield runtime
    jax.config.update(flag, before)


@pytest.fixture(scope="session")
def cpu():
    return jax.devices("cpu")[0]
