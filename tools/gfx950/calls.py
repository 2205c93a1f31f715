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
SCALED_KEYS = 128
DTYPES = {
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8": np.dtype(np.int8),
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
        *((name, ctypes.c_int32) for name in ("kv_block", "k_scales", "v_channels")),
        ("by_q_block", Divisor),
        ("by_scaled_tiles", Divisor),
    )

    def set_geometry(self, blocks_per_group: int = 1) -> None:
        """Fills in what follows from the lengths."""
        blocks = math.ceil(self.q_len / QUERY_BLOCK)
        self.q_scales = _blocks(self.q_len, self.q_block)
        self.k_scales = _blocks(self.kv_len, self.kv_block)
        self.blocks_per_group = blocks_per_group
        self.groups_per_head = math.ceil(blocks / blocks_per_group)
        self.by_groups_per_head = Divisor.of(self.groups_per_head)
        self.by_heads = Divisor.of(self.heads)
        self.by_kv_group = Divisor.of(self.heads // self.kv_heads)
        self.by_batch_group = Divisor.of(self.batch // self.kv_batch)
        self.by_q_block = Divisor.of(self.q_block or 2**31 - 1)
        self.by_scaled_tiles = Divisor.of(self.kv_block // SCALED_KEYS or 2**31 - 1)


def _blocks(tokens: int, block: int) -> int:
    return math.ceil(tokens / block) if block else 1


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the name of an attention kernel says: element type and head dims.

    Attributes:
      dtype: of queries and keys.
      value_dtype: of values.
      head_dim: of queries and keys.
      value_dim: of values.
    """

    dtype: np.dtype
    value_dtype: np.dtype
    head_dim: int
    value_dim: int

    @classmethod
    def of(cls, kernel: str) -> Shape:
        _, _, kind, dims = kernel.split("_")
        head_dim, value_dim = map(int, dims.split("x"))
        value_dtype = DTYPES["fp8" if kind == "int8" else kind]
        return cls(DTYPES[kind], value_dtype, head_dim, value_dim)

    @property
    def scaling(self) -> dict[str, int]:
        """The arguments that say how many tokens or channels share a descale, as
        `quantize_qkv` and `quantize` give them by default."""
        if self.dtype == DTYPES["int8"]:
            return {"q_block": 1, "kv_block": SCALED_KEYS, "v_channels": 1}
        return {}


def array_shapes(
    kernel: str, args: AttentionArgs
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of every array that a launch's argument points to."""
    shape, a = Shape.of(kernel), args
    f32, i32 = np.dtype(np.float32), np.dtype(np.int32)
    channels = (shape.value_dim,) if a.v_channels else ()
    return {
        "q": ((a.batch, a.q_len, a.heads, shape.head_dim), shape.dtype),
        "k": ((a.kv_batch, a.kv_len, a.kv_heads, shape.head_dim), shape.dtype),
        "v": ((a.kv_batch, a.kv_len, a.kv_heads, shape.value_dim), shape.value_dtype),
        "q_scale": ((a.batch, a.heads, a.q_scales), f32),
        "k_scale": ((a.kv_batch, a.kv_heads, a.k_scales), f32),
        "v_scale": ((a.kv_batch, a.kv_heads, *channels), f32),
        "q_offset": ((a.batch,), i32),
        "q_lengths": ((a.batch,), i32),
        "kv_lengths": ((a.batch,), i32),
        "out": ((a.batch, a.q_len, a.heads, shape.value_dim), OUT_DTYPES[a.out_type]),
        "lse": ((a.batch, a.heads, a.q_len), f32),
    }


def attend(
    kernel: Kernel,
    q: Any,
    k: Any,
    v: Any,
    *,
    window=(-1, 0),
    q_offset=None,
    scale: float | None = None,
    out_dtype: Any = np.float32,
    **options,
) -> tuple[np.ndarray, np.ndarray, Report]:
    """Runs a kernel on arrays (batch, tokens, heads, dim), with descales of 1.

    The last query stands at the last key unless `q_offset` says where the first does.

    Returns:
      Output, log-sum-exp, and what was executed.
    """
    (batch, q_len, heads, _), (kv_batch, kv_len, kv_heads, _) = q.shape, k.shape
    args = AttentionArgs(
        batch=batch, kv_batch=kv_batch, q_len=q_len, kv_len=kv_len, heads=heads,
        kv_heads=kv_heads, window_left=window[0], window_right=window[1],
        out_type=OUT_DTYPES.index(np.dtype(out_dtype)),
        **Shape.of(kernel.name).scaling,
    )  # fmt: skip
    args.set_geometry()
    fills = {
        "q_scale": 1 / math.sqrt(q.shape[-1]) if scale is None else scale,
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
