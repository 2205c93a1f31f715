"""Calls of the package's own kernels: their argument and the arrays it points to."""

from __future__ import annotations

import ctypes
import dataclasses
import math

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


class AttentionArgs(ctypes.Structure):
    """`zyfa::rocm::AttentionArgs` of csrc/rocm/attention_args.h."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in (
                *("q", "k", "v", "q_scale", "k_scale", "v_scale"),
                *("q_offset", "q_lengths", "kv_lengths", "out", "lse"),
            )
        ),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("batch", "kv_batch", "q_len", "kv_len", "heads", "kv_heads"),
                *("window_left", "window_right", "q_block", "q_scales"),
                *("out_type", "blocks_per_group"),
            )
        ),
    )


@dataclasses.dataclass(frozen=True)
class Shape:
    """An attention kernel by its name: element type and head dims."""

    dtype: np.dtype
    head_dim: int
    value_dim: int

    @classmethod
    def of(cls, kernel: str) -> Shape:
        _, _, kind, dims = kernel.split("_")
        head_dim, value_dim = map(int, dims.split("x"))
        return cls(DTYPES[kind], head_dim, value_dim)


def run_zeros(kernel: Kernel, *, tokens: int, kv_tokens: int) -> Report:
    """Runs one head of non-causal attention over zeros, with float32 output.

    All logits are alike, so that no tile moves the maximum.
    """
    shape = Shape.of(kernel.name)
    ints = {"q_offset": 0, "q_lengths": tokens, "kv_lengths": kv_tokens}
    arrays = {
        "q": np.zeros((tokens, shape.head_dim), shape.dtype),
        "k": np.zeros((kv_tokens, shape.head_dim), shape.dtype),
        "v": np.zeros((kv_tokens, shape.value_dim), shape.dtype),
        **{f"{x}_scale": np.ones(1, np.float32) for x in "qkv"},
        **{name: np.array([x], np.int32) for name, x in ints.items()},
        "out": np.zeros((tokens, shape.value_dim), np.float32),
        "lse": np.zeros(tokens, np.float32),
    }
    args = AttentionArgs(
        batch=1, kv_batch=1, q_len=tokens, kv_len=kv_tokens, heads=1, kv_heads=1,
        window_left=-1, window_right=-1, q_scales=1, blocks_per_group=1,
    )  # fmt: skip
    memory = Memory()
    address = 1 << 32
    for name, array in arrays.items():
        setattr(args, name, address)
        memory.add(
            address, array.reshape(-1).view(np.uint8), name in ("out", "lse"), name
        )
        address += array.nbytes + 4096 - array.nbytes % 4096
    return launch(
        kernel,
        grid=(math.ceil(tokens / QUERY_BLOCK), 1, 1),
        block=(THREADS, 1, 1),
        kernarg=bytes(args),
        memory=memory,
    )
