"""JAX's ROCm plugin in this process, on devices of gfx950 that are not there.

`start` loads the stand-in for HIP and stubs for the rest of ROCm, and tells JAX that
there are GPUs. What the plugin then launches, XLA's kernels as well as ours, runs in
the emulator.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import io
import os
import pathlib
import subprocess
import traceback
from collections.abc import Iterator
from typing import Any

import bridge
import msgpack
import numpy as np
import plugin_stubs
from elftools.elf.elffile import ELFFile

from tools import gfx950

HERE = pathlib.Path(__file__).parent
DEVICES = 2
# Allocations are then XLA's buffers, and an access beside one is seen.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
# Tuning would run every candidate in the emulator.
XLA_FLAGS = ("--xla_gpu_autotune_level=0",)


def plugin_library() -> pathlib.Path | None:
    """The installed plugin, or None."""
    for package in ("jax_plugins.xla_rocm7", "jax_plugins.xla_rocm10"):
        with contextlib.suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec(package)
            if spec is not None and spec.origin is not None:
                return pathlib.Path(spec.origin).with_name("xla_rocm_plugin.so")
    return None


class _Layout(ctypes.Structure):
    """`Layout` of standin_plugin_hip.cc."""

    _fields_ = (
        ("kernarg_size", ctypes.c_uint),
        ("lds_bytes", ctypes.c_uint),
        ("registers", ctypes.c_uint),
        ("arguments", ctypes.c_uint),
        ("offsets", ctypes.c_uint * 256),
        ("sizes", ctypes.c_uint * 256),
    )


_DESCRIBE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_char_p,
    ctypes.POINTER(_Layout),
)
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_uint,
    ctypes.c_int,
)


class Runtime:
    """The stand-in, and what was launched on it.

    Attributes:
      launches: since `recording` was entered last.
      graphed: kernels of those launches that came of a graph.
      raised: what went wrong in them.
    """

    def __init__(self, library: pathlib.Path) -> None:
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._library.standin_allocations.restype = ctypes.c_size_t
        self._callbacks = _DESCRIBE(self._describe), _LAUNCH(self._launched)
        self.launches: list[bridge.Launch] = []
        self.graphed: list[str] = []
        self.raised: list[BaseException] = []
        self._library.standin_set_callbacks(DEVICES, *self._callbacks)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[bridge.Launch]]:
        """Yields the list of launches from here on; raises what failed at the end."""
        self.launches, self.graphed, self.raised = [], [], []
        yield self.launches
        if self.raised:
            raise self.raised[0]

    def allocations(self) -> list[tuple[int, int]]:
        """Address and size of all memory that was handed out."""
        count = self._library.standin_allocations(None, None, 0)
        addresses, sizes = (ctypes.c_uint64 * (count + 16) for _ in range(2))
        filled = addresses(), sizes()
        count = self._library.standin_allocations(*filled, ctypes.c_size_t(count + 16))
        return list(zip(*(x[:count] for x in filled), strict=True))

    def _describe(self, code, size, name, layout) -> int:
        try:
            data = ctypes.string_at(code, size)
            (kernel,) = (x for x in _metadata(data) if x[".name"] == name.decode())
            taken = [
                x for x in kernel[".args"] if not x[".value_kind"].startswith("hidden")
            ]
            layout = layout.contents
            layout.kernarg_size = max(
                (x[".offset"] + x[".size"] for x in taken), default=0
            )
            layout.lds_bytes = kernel[".group_segment_fixed_size"]
            layout.registers = kernel[".vgpr_count"]
            layout.arguments = len(taken)
            for i, x in enumerate(taken):
                layout.offsets[i], layout.sizes[i] = x[".offset"], x[".size"]
        except BaseException as error:  # none may pass through C++
            traceback.print_exc()
            self.raised.append(error)
            return 1
        return 0

    def _launched(self, *received) -> int:
        *received, dynamic_lds, from_graph = received
        try:
            launch = bridge.Launch.received(*received)
            self.launches.append(launch)
            if from_graph:
                self.graphed.append(launch.kernel)
            with bridge.floats_as_numpy_expects():
                if launch.kernel.startswith("zyfa_"):
                    bridge.emulate(launch)
                else:
                    self._emulate(launch, dynamic_lds)
        except BaseException as error:  # none may pass through C++
            traceback.print_exc()
            self.raised.append(error)
            return bridge.HIP_ERRORS["launch failure"]
        return 0

    def _emulate(self, launch: bridge.Launch, dynamic_lds: int) -> None:
        """Runs a kernel whose arguments are not known to be arrays."""
        memory = gfx950.Memory()
        for address, size in self.allocations():
            array = (ctypes.c_uint8 * size).from_address(address)
            memory.add(address, np.ctypeslib.as_array(array), True, f"{address:#x}")
        kernel = bridge.decoded(launch.code).kernels[launch.kernel]
        kernarg = launch.kernarg
        if not kernel.hidden_arguments:
            # LLVM widens loads of arguments past the last, within their alignment.
            kernarg = kernarg.ljust(-(-len(kernarg) // 64) * 64, b"\0")
        gfx950.launch(
            kernel,
            grid=launch.grid,
            block=launch.block,
            kernarg=kernarg,
            memory=memory,
            dynamic_lds=dynamic_lds,
            checks=False,  # Triton's waves write equal values to one address
        )


@functools.cache
def _metadata(code: bytes) -> list[dict[str, Any]]:
    """The kernels of a code object, as its note tells of them."""
    elf: Any = ELFFile(io.BytesIO(code))
    for section in elf.iter_sections("SHT_NOTE"):
        for note in section.iter_notes():
            if note["n_name"] == "AMDGPU":
                notes = msgpack.unpackb(note["n_descdata"], strict_map_key=False)
                return notes["amdhsa.kernels"]
    raise ValueError("a code object without a note of AMD's")


def start(folder: pathlib.Path, plugin: pathlib.Path) -> Runtime:
    """Makes the plugin's libraries in an empty folder and loads them.

    To be called before JAX's first use of a device.
    """
    hip = folder / "libamdhip64.so.7"
    subprocess.run(
        [
            *("g++", "-std=c++17", "-O1", "-Wall", "-shared", "-fPIC"),
            *("-fvisibility=hidden", f"-Wl,-soname,{hip.name}"),
            *("-o", str(hip), str(HERE / "standin_plugin_hip.cc")),
        ],
        check=True,
    )
    runtime = Runtime(hip)
    for library in plugin_stubs.build(plugin, hip, folder):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ.update(ENVIRONMENT)
    flags = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join([*XLA_FLAGS, *flags])
    hardware: Any = importlib.import_module("jax._src.hardware_utils")
    hardware.num_available_amd_gpus = lambda stop_at=None: DEVICES
    return runtime
