"""The stand-in for HIP, once for the process."""

import os
import pathlib

import bridge
import pytest

from zyfa_jax import _ffi

EXTENSION = _ffi.load()


def pytest_collection_modifyitems(items):
    if EXTENSION is not None and EXTENSION.rocm_archs():
        return
    skip = pytest.mark.skip(reason="no code object for AMD GPUs was built")
    for item in items:
        if item.path.parent == pathlib.Path(__file__).parent:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The path of the stand-in library."""
    path = tmp_path_factory.mktemp("hip") / "libamdhip64.so"
    return bridge.build("standin_hip.cc", path)


@pytest.fixture(scope="session")
def stand_in(library):
    """The stand-in library, loaded where the extension will look for HIP."""
    os.environ["ZYFA_JAX_HIP_LIBRARY"] = str(library)
    return bridge.StandIn(library)


@pytest.fixture(scope="session")
def xla(tmp_path_factory):
    """XLA's side of the handlers."""
    path = tmp_path_factory.mktemp("xla") / "xla_side.so"
    return bridge.XlaSide(bridge.build("xla_side.cc", path))


@pytest.fixture
def hip(stand_in):
    """The stand-in, and implementation="rocm" taken on the CPU."""
    with _ffi.stand_in():
        yield stand_in
    stand_in.set_devices()
