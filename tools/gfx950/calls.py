"""Calls of the package's own attention kernels, without a driver."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

from .decode import Kernel
from .machine import Report, launch
from .memory import Memory

THREADS = 512
QUERY_BLOCK = 256
DTYPES = {
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
}
OUT_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
RESULTS = ("out", "lse")


class Divisor(ctypes.Structure):
    """`zyfa::rocm::Divisor` of csrc/rocm/attention_args.h."""

    _fields_ = (("multiplier", ctypes.c_uint32), ("shift", ctypes.c_uint32))

    @classmethod
    def of(cls, divisor: int) -> Divisor:
        shift = 31 + (divisor - 1).bit_length()
        return cls(-(-(1 << shift) // divisor), shift)


class AttentionArgs(ctypes.Structure):
    """`zyfa::rocm::AttentionArgs` of csrc/rocm/attention_args.h."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in (
                *("q", "k", "v", "q_scale", "k_scale", "v_scale"),
                *("q_offset", "q_lengths", "kv_lengths", *RESULTS),
            )
        ),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("batch", "kv_batch", "q_len", "kv_len", "heads", "kv_heads"),
                *("window_left", "window_right", "q_block", "q_scales"),
                *("out_type", "blocks_per_group", "groups_per_head"),
            )
        ),
        ("by_groups_per_head", Divisor),
        ("by_heads", Divisor),
        ("by_kv_group", Divisor),
        ("by_batch_group", Divisor),
        ("unused", ctypes.c_int32),
    )

    def set_geometry(self, blocks_per_group: int = 1) -> None:
        """Fills in what follows from the lengths."""
        blocks = math.ceil(self.q_len / QUERY_BLOCK)
        self.blocks_per_group = blocks_per_group
        self.groups_per_head = math.ceil(blocks / blocks_per_group)
        self.by_groups_per_head = Divisor.of(self.groups_per_head)
        self.by_heads = Divisor.of(self.heads)
        self.by_kv_group = Divisor.of(self.heads // self.kv_heads)
        self.by_batch_group = Divisor.of(self.batch // self.kv_batch)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the name of an attention kernel says: element type and head dims."""

    dtype: np.dtype
    head_dim: int
    value_dim: int

    @classmethod
    def of(cls, kernel: str) -> Shape:
        _, _, kind, dims = kernel.split("_")
        head_dim, value_dim = map(int, dims.split("x"))
        return cls(DTYPES[kind], head_dim, value_dim)


def array_shapes(
    kernel: str, args: AttentionArgs
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of every array that a launch's argument points to."""
    shape, a = Shape.of(kernel), args
    f32, i32 = np.dtype(np.float32), np.dtype(np.int32)
    return {
        "q": ((a.batch, a.q_len, a.heads, shape.head_dim), shape.dtype),
        "k": ((a.kv_batch, a.kv_len, a.kv_heads, shape.head_dim), shape.dtype),
        "v": ((a.kv_batch, a.kv_len, a.kv_heads, shape.value_dim), shape.dtype),
        "q_scale": ((a.batch, a.heads, a.q_scales), f32),
        "k_scale": ((a.kv_batch, a.kv_heads), f32),
        "v_scale": ((a.kv_batch, a.kv_heads), f32),
        "q_offset": ((a.batch,), i32),
        "q_lengths": ((a.batch,), i32),
        "kv_lengths": ((a.batch,), i32),
        "out": ((a.batch, a.q_len, a.heads, shape.value_dim), OUT_DTYPES[a.out_type]),
        "lse": ((a.batch, a.heads, a.q_len), f32),
    }


def attend(
    kernel: Kernel, q: Any, k: Any, v: Any, *, window=(-1, 0), q_offset=None, **options
) -> tuple[np.ndarray, np.ndarray, Report]:
    """Runs a kernel on arrays (batch, tokens, heads, dim), with float32 output.

    The last query stands at the last key unless `q_offset` says where the first does.

    Returns:
      Output, log-sum-exp, and what was executed.
    """
    (batch, q_len, heads, _), (kv_batch, kv_len, kv_heads, _) = q.shape, k.shape
    args = AttentionArgs(
        batch=batch, kv_batch=kv_batch, q_len=q_len, kv_len=kv_len, heads=heads,
        kv_heads=kv_heads, window_left=window[0], window_right=window[1], q_scales=1,
    )  # fmt: skip
    args.set_geometry()
    fills = {
        "q_scale": 1 / math.sqrt(q.shape[-1]),
        "k_scale": 1,
        "v_scale": 1,
        "q_offset": kv_len - q_len if q_offset is None else q_offset,
        "q_lengths": q_len,
        "kv_lengths": kv_len,
    }
    arrays = {"q": q, "k": k, "v": v}
    memory = Memory()
    address = 1 << 32
    for name, (shape, dtype) in array_shapes(kernel.name, args).items():
        if name not in arrays:
            arrays[name] = np.full(shape, fills.get(name, 0), dtype)
        array = arrays[name]
        assert (array.shape, array.dtype) == (shape, dtype), name
        setattr(args, name, address)
        memory.add(address, array.reshape(-1).view(np.uint8), name in RESULTS, name)
        address += array.nbytes + 4096 - array.nbytes % 4096
    report = launch(
        kernel,
        grid=(batch * heads * math.ceil(q_len / QUERY_BLOCK), 1, 1),
        block=(THREADS, 1, 1),
        kernarg=bytes(args),
        memory=memory,
        **options,
    )
    return arrays["out"], arrays["lse"], report
