"""The stand-in for CUDA as tests see it: what was launched, and what then runs.

Plain attention in NumPy runs the launches. It reads q, k and v by the launches' tensor
maps, and so shows that these, too, are right.
"""

from __future__ import annotations

import ctypes
import pathlib
import threading
from typing import Any, ClassVar

import bridge
import numpy as np

from tools.gfx950 import calls

ERRORS = {
    "invalid value": 1,
    "out of memory": 2,
    "no binary": 209,
    "not found": 500,
    "launch failure": 719,
}
QUERY_BLOCK = KEY_BLOCK = 128
COUNTER_BYTES = 128
MAP_DTYPES = {0: np.dtype(np.uint8), 6: calls.DTYPES["f16"], 9: calls.DTYPES["bf16"]}


class AttentionArgs(ctypes.Structure):
    """`zyfa::cuda::AttentionArgs` of csrc/cuda/attention_args.h."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in (
                *("q", "k", "v", "q_scale", "k_scale", "v_scale"),
                *("q_offset", "q_lengths", "kv_lengths", "out", "lse", "workspace"),
            )
        ),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("batch", "kv_batch", "q_len", "kv_len", "heads", "kv_heads"),
                *("window_left", "window_right", "q_block", "q_scales"),
                *("kv_block", "k_scales", "v_channels", "out_type"),
                *("section_heads", "padding"),
            )
        ),
    )


class TensorMap(ctypes.Structure):
    """What the stand-in for cuTensorMapEncodeTiled writes."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("sizes", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint32 * 5),
        ("type", ctypes.c_uint8),
        ("swizzle", ctypes.c_uint8),
        ("unused", ctypes.c_uint8 * 22),
    )

    def array(self) -> np.ndarray:
        """All that a kernel can read by it, outermost dimension first."""
        dtype = MAP_DTYPES[self.type]
        shape = tuple(self.sizes)[::-1]
        strides = (*tuple(self.strides)[::-1], dtype.itemsize)
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        memory = (ctypes.c_uint8 * (last + dtype.itemsize)).from_address(self.base)
        start = np.ctypeslib.as_array(memory)[: dtype.itemsize].view(dtype)
        return np.lib.stride_tricks.as_strided(start, shape, strides)


class Parameters(ctypes.Structure):
    """All that an attention kernel takes."""

    _fields_ = (
        ("args", AttentionArgs),
        ("q", TensorMap),
        ("k", TensorMap),
        ("v", TensorMap),
    )


class StandIn(bridge.StandIn):
    """The stand-in library."""

    ERRORS: ClassVar = ERRORS
    ARCH: ClassVar = "sm_90"

    def contexts(self) -> int:
        """Contexts that this thread has pushed and not popped."""
        return self._library.standin_contexts()


def is_attention(launch: bridge.Launch) -> bool:
    return launch.kernel.startswith("zyfa_attention_")


def parameters(launch: bridge.Launch) -> Parameters:
    assert len(launch.kernarg) == ctypes.sizeof(Parameters) == 544
    return Parameters.from_buffer_copy(launch.kernarg)


def model(launch: bridge.Launch) -> None:
    """Runs what the launch asks for."""
    if is_attention(launch):
        _attend(launch)
        return
    assert launch.block == (256, 1, 1)
    assert launch.shared_bytes == 0
    assert len(launch.kernarg) == ctypes.sizeof(AttentionArgs)
    args = AttentionArgs.from_buffer_copy(launch.kernarg)
    _bytes(args.workspace, COUNTER_BYTES)[:] = 0
    if launch.kernel == "zyfa_prepare":
        assert launch.grid == (1, 1, 1)
        return
    _transpose(launch, args)
    if launch.kernel != "zyfa_prepare_int8":
        _measure(args, int(launch.kernel.removeprefix("zyfa_prepare_fp8_")))


def _tiles(args: AttentionArgs) -> int:
    return max(1, -(-args.kv_len // KEY_BLOCK))


def _measure(args: AttentionArgs, head_dim: int) -> None:
    """The largest norm of each tile's keys, behind the transposed values."""
    heads, tiles = args.kv_batch * args.kv_heads, _tiles(args)
    values = heads * 128 * tiles * KEY_BLOCK
    norms = _bytes(args.workspace + COUNTER_BYTES + values, 4 * heads * tiles)
    norms = norms.view(np.float32).reshape(args.kv_batch, args.kv_heads, tiles)
    norms[...] = 0
    if args.kv_len:
        keys = _bytes(args.k, heads * args.kv_len * head_dim).view(calls.DTYPES["fp8"])
        keys = keys.reshape(args.kv_batch, args.kv_len, args.kv_heads, head_dim)
        of_keys = np.linalg.norm(keys.astype(np.float32), axis=3).transpose(0, 2, 1)
        for tile in range(tiles):
            of_tile = of_keys[..., KEY_BLOCK * tile : KEY_BLOCK * (tile + 1)]
            norms[..., tile] = of_tile.max(axis=2)


def _transpose(launch: bridge.Launch, args: AttentionArgs) -> None:
    heads, tiles = args.kv_batch * args.kv_heads, _tiles(args)
    assert launch.grid == (heads * tiles, 1, 1)
    size = heads * 128 * tiles * KEY_BLOCK
    to = _bytes(args.workspace + COUNTER_BYTES, size)
    to = to.reshape(args.kv_batch, args.kv_heads, 128, tiles * KEY_BLOCK)
    to[...] = 0
    if args.kv_len:
        values = _bytes(args.v, heads * args.kv_len * 128)
        values = values.reshape(args.kv_batch, args.kv_len, args.kv_heads, 128)
        to[..., : args.kv_len] = values.transpose(0, 2, 3, 1)


def _attend(launch: bridge.Launch) -> None:
    p = parameters(launch)
    args: Any = p.args
    shape = calls.Shape.of(launch.kernel)
    assert launch.block == (384, 1, 1)
    counter = _bytes(args.workspace, COUNTER_BYTES)
    assert not counter.any()
    counter[0] = 1
    transposed = shape.dtype.itemsize == 1
    arrays = {
        "q": _tokens(p.q, shape.dtype),
        "k": _tokens(p.k, shape.dtype),
        "v": _transposed(p.v, shape.value_dtype)
        if transposed
        else _tokens(p.v, shape.dtype),
    }
    for name, (dims, dtype) in calls.array_shapes(launch.kernel, args).items():
        if name in arrays:
            tokens = args.q_len if name == "q" else args.kv_len
            arrays[name] = arrays[name][:, :tokens]
            assert arrays[name].shape == dims
        else:
            size = int(np.prod(dims)) * dtype.itemsize
            memory = _bytes(getattr(args, name), size)
            arrays[name] = memory.view(dtype).reshape(dims)
    for b in range(args.batch):
        for h in range(args.heads):
            bridge.model_head(args, arrays, b, h)


def _tokens(tensor_map: TensorMap, dtype: np.dtype) -> np.ndarray:
    """(batch, tokens, heads, dim) by a map of (batch, head, chunk, token, dim)."""
    array = tensor_map.array()
    batch, heads, chunks, tokens, dim = array.shape
    assert tuple(tensor_map.box)[::-1][:3] == (1, 1, chunks)
    assert dim * array.itemsize == {2: 64, 3: 128}[tensor_map.swizzle]
    array = array.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, heads, chunks * dim)
    return array.view(dtype)


def _transposed(tensor_map: TensorMap, dtype: np.dtype) -> np.ndarray:
    """(batch, tokens, heads, dim) by a map of (batch, head, 1, dim, token)."""
    array = tensor_map.array()
    assert tuple(tensor_map.box) == (KEY_BLOCK, 128, 1, 1, 1)
    return array[:, :, 0].transpose(0, 3, 1, 2).copy().view(dtype)


def _bytes(address: int, size: int) -> np.ndarray:
    if size == 0:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class HostKernels:
    """The quantisation kernels' source, compiled for the host: runs their launches."""

    def __init__(self, path: pathlib.Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.quantize_on_host.restype = ctypes.c_bool
        self._one_at_a_time = threading.Lock()

    def __call__(self, launch: bridge.Launch) -> None:
        assert launch.shared_bytes == 0
        with self._one_at_a_time:
            assert self._library.quantize_on_host(
                launch.kernel.encode(),
                launch.grid[0],
                launch.block[0],
                launch.kernarg,
            )
