"""The stand-in for CUDA, once for the process."""

import os
import pathlib

import bridge
import cuda_bridge
import jax
import pytest

from zyfa_jax import _ffi

EXTENSION = _ffi.load()
HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items):
    if EXTENSION is not None and EXTENSION.cuda_archs():
        return
    skip = pytest.mark.skip(reason="no kernel for NVIDIA GPUs was built")
    for item in items:
        on_gpu = item.get_closest_marker("cuda") is not None
        if item.path.parent == HERE and not on_gpu:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory):
    """The stand-in library, loaded where the extension will look for CUDA."""
    library = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    bridge.build(str(HERE / "standin_cuda.cc"), library)
    os.environ["ZYFA_JAX_CUDA_LIBRARY"] = str(library)
    return cuda_bridge.StandIn(library)


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory):
    """What runs the launches of quantisation kernels."""
    library = tmp_path_factory.mktemp("kernels") / "quantize_on_host.so"
    bridge.build(str(HERE / "quantize_on_host.cc"), library)
    return cuda_bridge.HostKernels(library)


@pytest.fixture(scope="session")
def xla(tmp_path_factory):
    """XLA's side of the handlers."""
    path = tmp_path_factory.mktemp("xla") / "xla_side.so"
    return bridge.XlaSide(bridge.build("xla_side.cc", path))


@pytest.fixture(scope="session")
def gpu():
    """The first GPU. Who asks by the marker for what is not here gets a failure."""
    try:
        device, *_ = jax.devices("cuda")
    except RuntimeError as error:
        pytest.fail(f"JAX sees no NVIDIA GPU: {error}")
    if not _ffi.has_kernel("cuda"):
        pytest.fail(_ffi.detail("cuda"))
    return device


@pytest.fixture
def cuda(stand_in):
    """The stand-in, and implementation="cuda" taken on the CPU."""
    with _ffi.stand_in("cuda"):
        yield stand_in
    stand_in.set_devices()
