"""The stand-in for HIP as tests see it: what was launched, and what then runs.

A launch is run by the emulator of gfx950 (`emulate`), or by plain attention in NumPy
(`model`), which shows that handler and launcher hand over the right call.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import math
import pathlib
import subprocess
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from tools import gfx950
from tools.gfx950 import calls
from tools.gfx950.calls import QUERY_BLOCK, AttentionArgs

HIP_ERRORS = {
    "invalid value": 1,
    "out of memory": 2,
    "no binary": 209,
    "not found": 500,
    "launch failure": 719,
}
DTYPES = calls.DTYPES | {"f32": np.dtype(np.float32)}
QUANTIZE_TILE = 128


class QuantizeArgs(ctypes.Structure):
    """`zyfa::gpu::QuantizeArgs` of csrc/gpu/quantize_args.h."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in ("x", "mean", "weight", "given", "nan", "values", "found")
        ),
        *(
            (name, ctypes.c_int32)
            for name in ("tokens", "heads", "head_dim", "hadamard")
        ),
        ("zero_descale", ctypes.c_float),
        ("row_inverse", ctypes.c_uint32),
    )


Args = AttentionArgs | QuantizeArgs
# Shape, dtype and whether it is written, of each array by its field's name.
Arrays = dict[str, tuple[tuple[int, ...], np.dtype, bool]]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array that a launch reads or writes.

    Attributes:
      name: of the field of the kernel's arguments.
      address: where it lies.
      shape: of all of it.
      dtype: of its elements.
      writable: whether it is a result.
    """

    name: str
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    writable: bool

    def bytes(self) -> np.ndarray:
        """The memory itself, as bytes."""
        size = math.prod(self.shape) * self.dtype.itemsize
        if size == 0:
            return np.zeros(0, np.uint8)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))

    def array(self) -> np.ndarray:
        """The memory itself, as the array."""
        return self.bytes().view(self.dtype).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Launch:
    """One call of a driver's function that launches.

    Attributes:
      device: number of the device.
      code: the code object, an ELF file.
      kernel: name of the kernel.
      grid: workgroups along x, y and z.
      block: threads of a workgroup along x, y and z.
      kernarg: bytes of the kernel's arguments.
      stream: the stream's address, None for the default stream.
      shared_bytes: of a workgroup, beside what the kernel declares.
    """

    device: int
    code: bytes
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    kernarg: bytes
    stream: int | None
    shared_bytes: int = 0

    @classmethod
    def received(cls, device, code, code_size, kernel, grid, block, args, *rest):
        """From what a stand-in hands to its callback."""
        size, stream, *shared_bytes = rest
        return cls(
            device,
            ctypes.string_at(code, code_size),
            kernel.decode(),
            tuple(grid[:3]),
            tuple(block[:3]),
            ctypes.string_at(args, size),
            stream,
            *shared_bytes,
        )

    @property
    def args(self) -> Args:
        struct, _ = FAMILIES[self._family]
        assert len(self.kernarg) == ctypes.sizeof(struct)
        return struct.from_buffer_copy(self.kernarg)

    def buffers(self) -> dict[str, Buffer]:
        """Every array of the launch, with its exact extent."""
        args = self.args
        _, arrays = FAMILIES[self._family]
        return {
            name: Buffer(name, getattr(args, name), shape, dtype, writable)
            for name, (shape, dtype, writable) in arrays(self).items()
        }

    @property
    def _family(self) -> str:
        return self.kernel.split("_")[1]


def _attention_arrays(launch: Launch) -> Arrays:
    return {
        name: (shape, dtype, name in calls.RESULTS)
        for name, (shape, dtype) in calls.array_shapes(
            launch.kernel, launch.args
        ).items()
    }


def _quantize_arrays(launch: Launch) -> Arrays:
    a = launch.args
    f32 = np.dtype(np.float32)
    tiles = -(-a.tokens // QUANTIZE_TILE)
    batch = launch.grid[0] // (a.heads * tiles)
    shape = batch, a.tokens, a.heads, a.head_dim
    of_channels = batch, a.heads, a.head_dim
    of_tiles, of_tokens = (batch, a.heads, tiles), (batch, a.heads, a.tokens)
    dtype, step = launch.kernel.split("_")[2], launch.kernel.split("_")[4:5]
    found, given, values = of_tiles, of_tiles, DTYPES["fp8"]
    match step:
        case ["tokens"]:
            found, values = of_tokens, np.dtype(np.int8)
        case ["blocks"]:
            values = np.dtype(np.int8)
        case ["channels"]:
            given = of_channels
        case ["measure"]:
            found = (*of_tiles, 5, a.head_dim)
    arrays = {
        "x": (shape, DTYPES[dtype], False),
        "mean": (of_channels, f32, False),
        "weight": (of_channels, f32, False),
        "given": (given, f32, False),
        "nan": (of_tokens, np.dtype(bool), step == ["blocks"]),
        "values": (shape, values, True),
        "found": (found, f32, True),
    }
    return {name: array for name, array in arrays.items() if getattr(a, name)}


# The arguments and the arrays of the kernels named zyfa_<family>_...
FAMILIES: dict[str, tuple[type[Args], Callable[[Launch], Arrays]]] = {
    "attention": (AttentionArgs, _attention_arrays),
    "quantize": (QuantizeArgs, _quantize_arrays),
}


Run = Callable[[Launch], object]

_LIBM = ctypes.CDLL("libm.so.6")

_CALLBACK = ctypes.CFUNCTYPE(
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
)


class StandIn:
    """The stand-in library: devices that are not there, and failures on demand."""

    ERRORS: ClassVar = HIP_ERRORS
    ARCH: ClassVar = "gfx950:sramecc+:xnack-"

    def __init__(self, path: pathlib.Path | str) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.standin_stream.restype = ctypes.c_void_p
        self._callback = _CALLBACK(self._launched)
        self._run: Run | None = None
        self.launches: list[Launch] = []
        self.raised: list[BaseException] = []
        self._library.standin_set_launch(self._callback)
        self.set_devices()

    def set_devices(
        self, count: int = 8, arch: str | None = None, units: int = 2
    ) -> None:
        name = self.ARCH if arch is None else arch
        self._library.standin_set_devices(count, name.encode(), units)

    def stream(self, device: int) -> int:
        """The address of a new stream of a device."""
        return self._library.standin_stream(device)

    def loads(self, device: int) -> int:
        """Modules loaded on a device since the process began."""
        return self._library.standin_loads(device)

    @contextlib.contextmanager
    def failing(self, call: str, error: str) -> Iterator[None]:
        """Makes a function of the driver's return an error of `ERRORS`."""
        self._library.standin_fail(call.encode(), self.ERRORS[error])
        try:
            yield
        finally:
            self._library.standin_fail(call.encode(), 0)

    @contextlib.contextmanager
    def running(self, run: Run) -> Iterator[list[Launch]]:
        """Has `run` run the launches; yields the list of them.

        What `run` raises is raised at the end.
        """
        self._run, self.launches, self.raised = run, [], []
        try:
            yield self.launches
        finally:
            self._run = None
            if self.raised:
                raise self.raised[0]

    def _launched(self, *received) -> int:
        try:
            launch = Launch.received(*received)
            self.launches.append(launch)
            if self._run is None:
                raise RuntimeError("a launch that no test asked for")
            with floats_as_numpy_expects():
                self._run(launch)
        except BaseException as error:  # none may pass through C++
            traceback.print_exc()
            self.raised.append(error)
            return self.ERRORS["launch failure"]
        return 0


@contextlib.contextmanager
def floats_as_numpy_expects() -> Iterator[None]:
    """Subnormal numbers, which XLA's threads flush to zero."""
    saved = ctypes.create_string_buffer(64)
    _LIBM.fegetenv(saved)
    _LIBM.fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV
    try:
        yield
    finally:
        _LIBM.fesetenv(saved)


class XlaSide:
    """XLA's side of the handlers that are registered for a GPU's platform."""

    class _Array(ctypes.Structure):
        _fields_ = (
            ("dtype", ctypes.c_int32),
            ("rank", ctypes.c_int32),
            ("dims", ctypes.c_int64 * 4),
            ("data", ctypes.c_void_p),
        )

    _DTYPES: ClassVar = {"float32": 11, "int32": 4, "bfloat16": 16, "uint8": 6}

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._message = ctypes.create_string_buffer(4096)

    def traits(self, handler: object) -> int:
        """The traits of a capsule's handler, as bits."""
        return self._library.xla_traits(_pointer(handler))

    def initialize(self, handler: object, stream: int) -> str:
        """Calls the handler of that stage; returns its error's text, or nothing."""
        return self._text(
            self._library.xla_initialize(
                *(_pointer(handler), ctypes.c_void_p(stream)), *self._out()
            )
        )

    def execute(
        self, handler: object, stream: int, arrays: Sequence[np.ndarray]
    ) -> str:
        """Calls a causal attention on operands and results; returns as `initialize`."""
        table = (self._Array * len(arrays))(
            *(
                self._Array(
                    self._DTYPES[x.dtype.name],
                    x.ndim,
                    (ctypes.c_int64 * 4)(*x.shape),
                    x.ctypes.data,
                )
                for x in arrays
            )
        )
        q_block, kv_block, left, right = (ctypes.c_int64(x) for x in (0, 0, -1, 0))
        return self._text(
            self._library.xla_execute(
                *(_pointer(handler), ctypes.c_void_p(stream), table, len(arrays)),
                *(kv_block, q_block, ctypes.c_bool(False), left, right),
                *self._out(),
            )
        )

    def _out(self) -> tuple[ctypes.Array, ctypes.c_size_t]:
        return self._message, ctypes.c_size_t(len(self._message))

    def _text(self, code: int) -> str:
        return f"{code}: {self._message.value.decode()}" if code else ""


def _pointer(capsule: object) -> ctypes.c_void_p:
    """What a capsule without a name holds."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(get(capsule, None))


def build(source: str, library: pathlib.Path) -> pathlib.Path:
    """Compiles a library of this folder, or of the path that `source` is."""
    here = pathlib.Path(__file__).parent
    subprocess.run(
        [
            *("g++", "-std=c++17", "-O1", "-Wall", "-shared", "-fPIC"),
            *("-fvisibility=hidden", "-ffp-contract=off", "-Wno-unknown-pragmas"),
            *("-isystem", jax.ffi.include_dir(), f"-I{here}", f"-I{here.parents[1]}"),
            *("-o", str(library), str(here / source)),
        ],
        check=True,
    )
    return library


@functools.cache
def decoded(code: bytes) -> gfx950.CodeObject:
    """A code object, which takes a while to decode."""
    return gfx950.CodeObject(code)


def emulate(launch: Launch) -> gfx950.Report:
    """Runs the launch's machine code in the emulator, on the launched buffers."""
    memory = gfx950.Memory()
    # Inputs that are equal may be one array.
    distinct = {x.address: x for x in launch.buffers().values()}
    for buffer in distinct.values():
        memory.add(buffer.address, buffer.bytes(), buffer.writable, buffer.name)
    return gfx950.launch(
        decoded(launch.code).kernels[launch.kernel],
        grid=launch.grid,
        block=launch.block,
        kernarg=launch.kernarg,
        memory=memory,
    )


def model(launch: Launch) -> None:
    """Runs what the launch asks for by plain attention in float64."""
    args = launch.args
    arrays = {name: x.array() for name, x in launch.buffers().items()}
    blocks = -(-args.q_len // QUERY_BLOCK)
    groups = -(-blocks // args.blocks_per_group)
    assert launch.grid == (args.batch * args.heads * groups, 1, 1)
    assert launch.block == (512, 1, 1)
    for b in range(args.batch):
        for h in range(args.heads):
            model_head(args, arrays, b, h)


def model_head(args: Any, arrays: dict[str, np.ndarray], b: int, h: int) -> None:
    """One query head's plain attention; `args` has the kernel's lengths and window."""
    kv = b // (args.batch // args.kv_batch), h // (args.heads // args.kv_heads)
    q = arrays["q"][b, :, h].astype(np.float64)
    rows, keys = np.arange(args.q_len), np.arange(args.kv_len)
    k_scale = np.atleast_1d(arrays["k_scale"][kv])
    k_scale = k_scale[keys // args.kv_block] if k_scale.size > 1 else k_scale
    k = arrays["k"][kv[0], :, kv[1]].astype(np.float64) * k_scale[:, None]
    v = arrays["v"][kv[0], :, kv[1]].astype(np.float64) * arrays["v_scale"][kv]
    block = args.q_block or max(args.q_len, 1)
    q = q * arrays["q_scale"][b, h, rows // block][:, None]
    position = rows.astype(np.int64) + arrays["q_offset"][b]
    sees = keys < min(max(arrays["kv_lengths"][b], 0), args.kv_len)
    sees = np.broadcast_to(sees, (args.q_len, args.kv_len))
    sees = sees & (rows < arrays["q_lengths"][b])[:, None]
    if args.window_left >= 0:
        sees = sees & (keys >= position[:, None] - args.window_left)
    if args.window_right >= 0:
        sees = sees & (keys <= position[:, None] + args.window_right)
    logits = np.where(sees, q @ k.T, -np.inf)
    top = np.max(logits, axis=1, initial=-np.inf, keepdims=True)
    p = np.where(sees, np.exp(logits - np.where(np.isfinite(top), top, 0)), 0)
    total = p.sum(1, keepdims=True)
    seen = total[:, 0] > 0
    out, lse = np.zeros((args.q_len, v.shape[1])), np.full(args.q_len, -np.inf)
    out[seen] = (p @ v)[seen] / total[seen]
    lse[seen] = (top + np.log(np.where(total > 0, total, 1)))[seen, 0]
    arrays["out"][b, :, h] = out.astype(arrays["out"].dtype)
    arrays["lse"][b, h] = lse
