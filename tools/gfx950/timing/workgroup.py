"""One workgroup of the package's own attention kernels: what its waves execute."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ..calls import QUERY_BLOCK, Shape, attend
from ..decode import Kernel
from .from_code import Recorder
from .trace import Trace

LARGEST = 127  # of what int8 holds


def keys_of_tile(shape: Shape) -> int:
    return 128 if shape.dtype.itemsize == 1 else 64


def record(
    kernel: Kernel, kv_tokens: int, *, causal: bool = True, rescales: bool = False
) -> list[Trace]:
    """The waves of the workgroup that has the last 256 queries before `kv_tokens`.

    With `rescales`, every tile holds larger logits than the one before.
    """
    shape = Shape.of(kernel.name)

    def zeros(tokens: int, dim: int, dtype: np.dtype) -> np.ndarray:
        return np.zeros((1, tokens, 1, dim), dtype)

    q = zeros(QUERY_BLOCK, shape.head_dim, shape.dtype)
    k = zeros(kv_tokens, shape.head_dim, shape.dtype)
    v = zeros(kv_tokens, shape.value_dim, shape.value_dtype)
    if rescales:
        tile = np.arange(kv_tokens) // keys_of_tile(shape)
        q[...] = 4
        k[...] = np.minimum(tile, LARGEST)[:, None, None].astype(shape.dtype)
    recorder = Recorder()
    attend(
        kernel,
        *(q, k, v),
        window=(-1, 0 if causal else -1),
        out_dtype=ml_dtypes.bfloat16,
        on_instruction=recorder,
    )
    return [recorder.traces[wave] for wave in sorted(recorder.traces)]
