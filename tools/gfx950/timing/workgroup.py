"""One workgroup of the package's own attention kernels: what its waves execute."""

from __future__ import annotations

import math

import numpy as np

from ..calls import DTYPES, QUERY_BLOCK, THREADS, AttentionArgs, Shape
from ..decode import Kernel
from ..machine import launch
from ..memory import Memory
from .from_code import Recorder
from .trace import Trace


def keys_of_tile(shape: Shape) -> int:
    return 128 if shape.dtype == DTYPES["fp8"] else 64


def record(
    kernel: Kernel, kv_tokens: int, *, causal: bool = True, rescales: bool = False
) -> list[Trace]:
    """The waves of the workgroup that has the last 256 queries before `kv_tokens`.

    With `rescales`, every tile holds larger logits than the one before.
    """
    shape = Shape.of(kernel.name)
    tokens = QUERY_BLOCK
    q = np.zeros((tokens, shape.head_dim), shape.dtype)
    k = np.zeros((kv_tokens, shape.head_dim), shape.dtype)
    if rescales:
        tile = np.arange(kv_tokens) // keys_of_tile(shape)
        q[:, :] = 4.0
        k[:] = np.minimum(tile, 448)[:, None].astype(shape.dtype)
    arrays = {
        "q": q,
        "k": k,
        "v": np.zeros((kv_tokens, shape.value_dim), shape.dtype),
        **{f"{x}_scale": np.ones(1, np.float32) for x in "qkv"},
        "q_offset": np.array([kv_tokens - tokens], np.int32),
        "q_lengths": np.array([tokens], np.int32),
        "kv_lengths": np.array([kv_tokens], np.int32),
        "out": np.zeros((tokens, shape.value_dim), np.float32),
        "lse": np.zeros(tokens, np.float32),
    }
    args = AttentionArgs(
        batch=1, kv_batch=1, q_len=tokens, kv_len=kv_tokens, heads=1, kv_heads=1,
        window_left=-1, window_right=0 if causal else -1, q_scales=1, out_type=1,
    )  # fmt: skip
    args.set_geometry()
    memory = Memory()
    address = 1 << 32
    for name, array in arrays.items():
        setattr(args, name, address)
        data = array.reshape(-1).view(np.uint8)
        memory.add(address, data, name in ("out", "lse"), name)
        address += math.ceil((array.nbytes + 1) / 4096) * 4096
    recorder = Recorder()
    launch(
        kernel,
        grid=(1, 1, 1),
        block=(THREADS, 1, 1),
        kernarg=bytes(args),
        memory=memory,
        on_instruction=recorder,
    )
    return [recorder.traces[wave] for wave in sorted(recorder.traces)]
