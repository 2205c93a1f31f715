"""What is static about one attention call, and the rules that a call must keep.

Pure functions of shapes, dtypes and Python numbers: nothing here traces or runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from jax.core import Tracer

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
INT8 = np.dtype(np.int8)
QUANTIZED_DTYPES = (FLOAT8, INT8)
IMPLEMENTATIONS = ("rocm", "cuda", "cpu", "reference")
KEY_BLOCK = 128
"""Keys per block of the FP8 numerics, and the unit of per-block descales."""

_INPUT_DTYPES = (
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(np.float16),
    np.dtype(np.float32),
    FLOAT8,
)
_QK_DTYPES = (*_INPUT_DTYPES, INT8)
_OUTPUT_DTYPES = _INPUT_DTYPES[:3]
_INT8_CALL = (INT8, INT8, FLOAT8)
_INT32 = np.iinfo(np.int32)
_FLOAT32_MAX = np.finfo(np.float32).max
_FARTHEST = 2**33  # beyond any distance from a key to a position


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Everything static of one canonical call.

    Attributes:
      window: keys visible to the left and to the right of a query's position, None
        where unbounded. Causal attention has a right bound of at most 0.
      out_dtype: dtype of the output.
      q_block: queries per descale; 0 means one descale for all of them.
      kv_block: keys per descale; 0 means one descale for all of them.
      v_channels: whether v has a descale for each channel, which all of its tokens
        share, whatever `kv_block` is.
      q_offset: the position of the first query where it is known when tracing; lets
        the blockwise path skip blocks that no query sees.
      quadratic: whether FP8 probabilities take the quadratic term; None leaves it to
        the platform.
      implementation: the implementation asked for; None leaves it to the platform.
    """

    window: tuple[int | None, int | None]
    out_dtype: np.dtype
    q_block: int = 0
    kv_block: int = 0
    v_channels: bool = False
    q_offset: int | None = None
    quadratic: bool | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        asked = self.implementation
        if asked is not None and (
            not isinstance(asked, str) or asked not in IMPLEMENTATIONS
        ):
            raise ValueError(
                f"attention takes implementation=None or one of {IMPLEMENTATIONS}, "
                f"not {static(self.implementation)}"
            )
        if self.out_dtype not in _OUTPUT_DTYPES:
            raise ValueError(
                f"attention takes out_dtype {_names(_OUTPUT_DTYPES)}, "
                f"not {self.out_dtype}"
            )


def check_operands(
    shapes: Sequence[tuple[Any, ...]], dtypes: Sequence[np.dtype]
) -> None:
    """Raises ValueError unless (q, k, v) have shapes and dtypes that go together."""
    q, k, v = shapes
    got = f"got q {_shape(q)}, k {_shape(k)}, v {_shape(v)}"
    for name, dtype in zip("qkv", dtypes, strict=True):
        _check_dtype(name, dtype)
    if tuple(dtypes) != _INT8_CALL and (len(set(dtypes)) != 1 or INT8 in dtypes):
        raise ValueError(
            "attention takes q, k and v of one dtype, or int8 q and k with "
            f"float8_e4m3fn v, got {_names(dtypes)}"
        )
    if not len(q) == len(k) == len(v) or len(q) not in (3, 4):
        raise ValueError(
            "attention takes q, k and v of one rank: (batch, tokens, heads, head dim) "
            f"or (tokens, heads, head dim); {got}"
        )
    if len(q) == 4 and not q[0] == k[0] == v[0]:
        raise ValueError(f"attention takes q, k and v of one batch size; {got}")
    if k[-3] != v[-3]:
        raise ValueError(f"attention takes k and v with as many tokens; {got}")
    if k[-2] != v[-2]:
        raise ValueError(f"attention takes k and v with as many heads; {got}")
    if k[-2] == 0 or q[-2] % k[-2] != 0:
        raise ValueError(
            "attention takes query heads that are a multiple of the key/value heads, "
            f"not {q[-2]} query and {k[-2]} key/value heads; {got}"
        )
    if q[-1] != k[-1]:
        raise ValueError(
            f"attention takes q and k of one head dim, not {q[-1]} and {k[-1]}; {got}"
        )
    if q[-1] == 0 or v[-1] == 0:
        raise ValueError(f"attention takes head dims of at least 1; {got}")


def canonical_window(
    window: int | tuple[int | None, int | None] | None, causal: bool
) -> tuple[int | None, int | None]:
    """(left, right) reach of a query, None where unbounded; causal caps the right."""
    if not isinstance(causal, bool | np.bool_):
        raise ValueError(f"attention takes causal=True or False, not {static(causal)}")
    if window is None:
        left, right = None, None
    elif isinstance(window, int | np.integer) and not isinstance(window, bool):
        left = right = _reach(window, window)
    elif isinstance(window, tuple | list) and len(window) == 2:
        left, right = (_reach(side, window) for side in window)
    else:
        raise ValueError(_window_error(window))
    if causal:
        right = 0
    return left, right


def check_lengths(name: str, value: np.ndarray, limit: Any) -> None:
    """Raises ValueError unless every known length lies in [0, limit]."""
    if value.size and (value.min() < 0 or bool(value.max() > limit)):
        raise ValueError(
            f"attention takes {name} from 0 to {limit} tokens, got "
            f"{value.min()} to {value.max()}"
        )


def check_integer(name: str, value: np.ndarray) -> None:
    """Raises ValueError unless every known integer fits int32."""
    if value.size and (value.min() < _INT32.min or value.max() > _INT32.max):
        raise ValueError(
            f"attention takes {name} that fits int32, got {value.min()} to "
            f"{value.max()}"
        )


def check_scale(value: np.ndarray) -> None:
    """Raises ValueError unless a known scale is a finite float32 number."""
    if not np.abs(value) <= _FLOAT32_MAX:
        raise ValueError(f"attention takes a scale that float32 holds, not {value}")


def check_descale(name: str, value: np.ndarray) -> None:
    """Raises ValueError unless every known descale is a float32 number >= 0."""
    if not np.all(np.abs(value) <= _FLOAT32_MAX) or np.any(value < 0):
        raise ValueError(
            f"attention takes {name} of finite numbers >= 0 (a value is its FP8 or "
            f"int8 number times its descale), got {value.min()} to {value.max()}"
        )


@dataclasses.dataclass(frozen=True)
class KernelLimits:
    """What one platform's kernel takes; the blockwise path takes the rest.

    Attributes:
      dtypes: of q and k.
      head_dims: pairs of query/key and value head dim; None for any multiples of 8 up
        to 256.
      key_blocks: dtypes of keys of which a head may have several descales.
      value_blocks: whether its values may then, too.
      value_channels: dtypes of keys with which each channel of v may have its own.
      int32: whether it counts tokens, bytes of a token and blocks of queries in 32
        bits.
    """

    dtypes: tuple[np.dtype, ...] = _QK_DTYPES
    head_dims: tuple[tuple[int, int], ...] | None = None
    key_blocks: tuple[np.dtype, ...] = _QK_DTYPES
    value_blocks: bool = True
    value_channels: tuple[np.dtype, ...] = _QK_DTYPES
    int32: bool = False

    def __str__(self) -> str:
        text = self.dims_text()
        if self.dtypes != _QK_DTYPES:
            text += f" in {_names(self.dtypes)}"
        if self.key_blocks != _QK_DTYPES:
            text += " with one descale for all keys of a head"
            if self.key_blocks:
                text += f", but in {_names(self.key_blocks)}"
        return text

    def dims_text(self) -> str:
        if self.head_dims is None:
            return "head dims that are multiples of 8 up to 256"
        pairs = " or ".join(f"{d} and {e}" for d, e in self.head_dims)
        return f"head dims {pairs}"

    def takes_dims(self, dims: tuple[Any, Any]) -> bool:
        if self.head_dims is None:
            return all(dim % 8 == 0 and 8 <= dim <= 256 for dim in dims)
        return dims in self.head_dims


_GPU = KernelLimits(
    dtypes=(*_INPUT_DTYPES[:2], *QUANTIZED_DTYPES),
    head_dims=((128, 128), (192, 128)),
    key_blocks=(INT8,),
    value_blocks=False,
    value_channels=(INT8,),
    int32=True,
)
KERNELS = {"cpu": KernelLimits(), "rocm": _GPU, "cuda": _GPU}


def kernel_refusal(
    kernel: str,
    shapes: Sequence[tuple[Any, ...]],
    dtype: np.dtype,
    spec: AttentionSpec,
) -> str | None:
    """What a platform's kernel takes that the call is not, None where it takes it.

    Args:
      kernel: the platform.
      shapes: of q, k and v; sizes that are not known are taken.
      dtype: of q and k.
      spec: the rest of the call.
    """
    limits = KERNELS[kernel]
    q, _, v = shapes
    dims = q[-1], v[-1]
    if not limits.takes_dims(dims):
        return f"{limits.dims_text()}, not {dims[0]} and {dims[1]}"
    if dtype not in limits.dtypes:
        return f"{_names(limits.dtypes)}, not {dtype.name}"
    if spec.kv_block and dtype not in limits.key_blocks:
        return f"one descale for all keys of a head, not one per {spec.kv_block} keys"
    if spec.kv_block and not spec.v_channels and not limits.value_blocks:
        return f"one descale for a channel of v, not one per {spec.kv_block} keys"
    if spec.v_channels and dtype not in limits.value_channels:
        return "one descale for all channels of v, not one per channel"
    return _too_large(shapes, dtype, spec) if limits.int32 else None


def _too_large(
    shapes: Sequence[tuple[Any, ...]], dtype: np.dtype, spec: AttentionSpec
) -> str | None:
    """The 32-bit limits of csrc/ffi/gpu_limits.cc."""
    (batch, q_tokens, heads, head_dim), (_, kv_tokens, *_), (*_, value_dim) = shapes
    for tokens in (q_tokens, kv_tokens):
        if isinstance(tokens, int) and tokens >= 2**30 - 2**8:
            return f"fewer than {2**30 - 2**8} tokens, not {tokens}"
    head_bytes = max(head_dim * dtype.itemsize, value_dim * spec.out_dtype.itemsize)
    if isinstance(heads, int) and heads * head_bytes >= 2**24:
        return f"fewer than {2**24} bytes of a token, not {heads} x {head_bytes}"
    if all(isinstance(x, int) for x in (batch, heads, q_tokens)):
        blocks = batch * heads * -(-q_tokens // 256)
        if blocks >= 2**23:
            return f"fewer than {2**23} blocks of 256 queries, not {blocks}"
    for side in spec.window:
        if side is not None and 2**31 <= side < 2**32:
            return f"windows of fewer than {2**31} tokens, not {side}"
    return None


def default_scale(head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim)


def default_out_dtype(dtype: np.dtype) -> np.dtype:
    quantized = dtype in QUANTIZED_DTYPES
    return np.dtype(ml_dtypes.bfloat16) if quantized else dtype


def _check_dtype(name: str, dtype: np.dtype) -> None:
    if dtype in (_INPUT_DTYPES if name == "v" else _QK_DTYPES):
        return
    hint = ""
    if dtype.name == "float8_e4m3fnuz":
        hint = (
            ": the same bits mean half as much there; convert with "
            ".astype(float8_e4m3fn) and adjust the descale"
        )
    elif dtype == INT8:
        hint = ", which q and k can be"
    elif not dtype.isnative:
        hint = f" in foreign byte order ({dtype.str})"
    raise ValueError(
        f"attention takes {_names(_INPUT_DTYPES)}, but {name} is {dtype.name}{hint}"
    )


def _reach(side: Any, window: Any) -> int | None:
    if side is None:
        return None
    if isinstance(side, bool) or not isinstance(side, int | np.integer) or side < -1:
        raise ValueError(_window_error(window))
    return None if side == -1 or side >= _FARTHEST else int(side)


def _window_error(window: Any) -> str:
    return (
        "attention takes window=None, a number of tokens, or (left, right) with None "
        f"or -1 for an unbounded side, not {static(window)}"
    )


def static(value: Any) -> str:
    """What came for an argument that must be known when tracing, for an error."""
    parts = value if isinstance(value, tuple | list) else (value,)
    if any(isinstance(part, Tracer) for part in parts):
        return f"{value!r}: it is static, name it in static_argnames of jax.jit"
    return repr(value)


def _names(dtypes: Sequence[np.dtype]) -> str:
    return ", ".join(dtype.name for dtype in dtypes)


def _shape(shape: tuple[Any, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"
