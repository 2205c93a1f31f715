"""`attention`: turns what users pass into one canonical call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from . import _gradient, _spec
from ._blockwise import per_token
from ._compat import match_varying
from ._quantize import Quantized
from ._spec import KEY_BLOCK, QUANTIZED_DTYPES, AttentionSpec

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Int8
    from numpy.typing import ArrayLike, DTypeLike

    Input = (
        Float[Array, "*b t h d"]
        | Float[np.ndarray, "*b t h d"]
        | Int8[Array, "*b t h d"]
        | Int8[np.ndarray, "*b t h d"]
        | Quantized
    )
    Output = Float[Array, "*b t h e"]
    LogSumExp = Float[Array, "*b h t"]

Implementation = Literal["rocm", "cuda", "cpu", "reference"]


class Options(TypedDict, total=False):
    """The keyword arguments of `attention` that do not change what it returns."""

    causal: bool
    scale: ArrayLike | None
    window: int | tuple[int | None, int | None] | None
    q_descale: ArrayLike | None
    k_descale: ArrayLike | None
    v_descale: ArrayLike | None
    q_offset: ArrayLike | None
    q_lengths: ArrayLike | None
    kv_lengths: ArrayLike | None
    out_dtype: DTypeLike | None
    implementation: Implementation | None


@overload
def attention(
    q: Input,
    k: Input,
    v: Input,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Output: ...


@overload
def attention(
    q: Input,
    k: Input,
    v: Input,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Output, LogSumExp]: ...


def attention(
    q: Input,
    k: Input,
    v: Input,
    *,
    causal: bool = True,
    scale: ArrayLike | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    q_descale: ArrayLike | None = None,
    k_descale: ArrayLike | None = None,
    v_descale: ArrayLike | None = None,
    q_offset: ArrayLike | None = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    return_lse: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> Output | tuple[Output, LogSumExp]:
    """Softmax attention: softmax(scale * q @ k^T + mask) @ v for each head.

    The call is one primitive, with kernels per platform; it works under every JAX
    transformation but forward-mode differentiation. Gradients are blockwise, in memory
    linear in the sequence. `jax.checkpoint` policies can save its results by
    `zyfa_jax.CHECKPOINT_NAMES`.

    It differs from `jax.nn.dot_product_attention` in these ways: it is causal unless
    told otherwise, and with T queries and S keys query i sees the keys up to
    S - T + i (bottom-right alignment, as FlashAttention does), where `jax.nn` lets it
    see the keys up to i; a query that sees no key gives zeros, not the mean of v; the
    value head dim may differ; a log-sum-exp is float32 of shape (B, H, T).

    FP8 inputs take FP8 probabilities made without an exponential (docs/numerics.md);
    they resolve logits up to `2**20` in magnitude. So does int8, whose q and k come
    with FP8 values: their products are exact, and the rest is the same.

    Args:
      q: queries, (B, T, H, D) or (T, H, D); bfloat16, float16, float32,
        float8_e4m3fn or int8 with descales, or the `Quantized` of `zyfa_jax.quantize`
        or `zyfa_jax.quantize_qkv`.
      k: keys, (B, S, K, D) or (S, K, D), of q's dtype. H is a multiple of K: query
        head h reads key/value head h // (H / K).
      v: values, (B, S, K, E) or (S, K, E), of q's dtype, and float8_e4m3fn where that
        is int8. The CPU kernel takes D and E that are multiples of 8 up to 256, the
        ROCm kernels D 128 or 192 and E 128; others take a slower path (`backends` says
        more), as does int8 on GPUs.
      causal: whether a query sees no key past its own position.
      scale: what logits are multiplied by; a number or a traced scalar. By default
        1 / sqrt(D).
      window: how many keys a query sees on the (left, right) of its position, beside
        the key at it; None or -1 for an unbounded side. A number w means (w, w), and
        (w, 0) with causal.
      q_descale: what the FP8 or int8 numbers of q are multiplied by to give its values;
        a number or an array that broadcasts to (B, H), or (H,) for (T, H, D) inputs.
        Needed for float8_e4m3fn and int8 inputs, and taken only for them.
      k_descale: likewise for k, broadcasting to (B, K).
      v_descale: likewise for v, broadcasting to (B, K). A traced descale that turns out
        negative gives NaN.
      q_offset: position of the first query among the keys, an integer or (B,), for
        prefill in chunks. By default the last query stands at the last key: the
        number of keys less the number of queries, by `kv_lengths` and `q_lengths`
        where given.
      q_lengths: number of queries in each batch row, an integer or (B,); later ones
        give zeros. Traced lengths are clamped to 0..T.
      kv_lengths: number of keys in each batch row, an integer or (B,); later ones are
        not seen. Traced lengths are clamped to 0..S.
      return_lse: whether to return the log-sum-exp of each query's logits as well.
      out_dtype: bfloat16, float16 or float32; by default q's dtype, and bfloat16 for
        FP8 and int8 inputs.
      implementation: None for the platform's best; "rocm", "cuda" or "cpu" for that
        platform's kernel alone; "reference" for the blockwise path in plain JAX.

    Returns:
      The output, (B, T, H, E) or (T, H, E). With `return_lse`, a pair of it and the
      float32 log-sum-exp, natural logarithm, (B, H, T) or (H, T), -inf for a query that
      sees no key.

    Raises:
      ValueError: for operands or arguments that do not go together.
      NotImplementedError: for an implementation that is not offered where the call
        runs.
    """
    if not isinstance(return_lse, bool):
        raise ValueError(
            f"attention takes return_lse=True or False, not {_spec.static(return_lse)}"
        )
    spec, operands = canonical(
        q,
        k,
        v,
        causal=causal,
        scale=scale,
        window=window,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        q_offset=q_offset,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        out_dtype=out_dtype,
        implementation=implementation,
    )
    results: Any = _gradient.attention(spec, operands)
    out, lse = results
    if isinstance(k, Quantized) and k.center is not None:
        lse = lse + center_logits(spec, operands, k.center)
    if q.ndim == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def canonical(
    q: Input,
    k: Input,
    v: Input,
    *,
    causal: bool = True,
    scale: ArrayLike | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    q_descale: ArrayLike | None = None,
    k_descale: ArrayLike | None = None,
    v_descale: ArrayLike | None = None,
    q_offset: ArrayLike | None = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
    devices: int = 1,
) -> tuple[AttentionSpec, _gradient.Operands]:
    """The canonical call that arguments of `attention` mean, checked.

    Where q, k and v are one of several devices' share of the tokens, lengths and
    offsets count the tokens of all of them.
    """
    inputs = [_input(name, x) for name, x in zip("qkv", (q, k, v), strict=True)]
    numbers = [x.values if isinstance(x, Quantized) else x for x in inputs]
    dtypes = [x.dtype for x in numbers]
    _spec.check_operands([x.shape for x in numbers], dtypes)
    _check_quantized(inputs)

    batched = numbers[0].ndim == 4
    arrays = [jnp.asarray(x if batched else x[None]) for x in numbers]
    batch, q_tokens, heads, head_dim = arrays[0].shape
    kv_tokens, kv_heads = arrays[1].shape[1:3]
    q_tokens, kv_tokens = q_tokens * devices, kv_tokens * devices
    blocks = [x.block if isinstance(x, Quantized) else 0 for x in inputs]

    q_rows = _lengths("q_lengths", q_lengths, q_tokens, batch, batched)
    kv_rows = _lengths("kv_lengths", kv_lengths, kv_tokens, batch, batched)
    known_offset = None
    if q_offset is not None:
        offset = _integers("q_offset", q_offset, batch, batched)
        if isinstance(q_offset, int | np.integer):
            known_offset = int(q_offset)
    else:
        offset = kv_rows - q_rows
        if q_lengths is None and kv_lengths is None:
            known_offset = kv_tokens - q_tokens

    spec = AttentionSpec(
        window=_spec.canonical_window(window, causal),
        out_dtype=_out_dtype(out_dtype, dtypes[0]),
        q_block=blocks[0],
        kv_block=blocks[1],
        v_channels=isinstance(v, Quantized) and v.channels,
        q_offset=known_offset if isinstance(known_offset, int) else None,
        implementation=implementation,
    )
    given = (q_descale, k_descale, v_descale)
    descales = [
        _descale(f"{name}_descale", x, descale, (batch, rows), batched)
        for name, x, descale, rows in zip(
            "qkv", inputs, given, (heads, kv_heads, kv_heads), strict=True
        )
    ]
    operands = _gradient.Operands._make(
        [
            *arrays,
            *descales,
            _scale(scale, head_dim),
            offset,
            q_rows,
            kv_rows,
            *(_source(x, batched) for x in inputs),
        ]
    )
    leaves, structure = jax.tree.flatten(operands)
    return spec, jax.tree.unflatten(structure, match_varying(leaves))


def _input(name: str, x: Any) -> Any:
    numbers = x.values if isinstance(x, Quantized) else x
    if isinstance(numbers, jax.Array | np.ndarray):
        if isinstance(numbers.dtype, np.dtype):
            return x
        kind = f"of dtype {numbers.dtype}"
    else:
        kind = type(numbers).__name__
    raise ValueError(
        f"attention takes JAX or NumPy arrays or zyfa_jax.Quantized, but {name} is "
        f"{kind}"
    )


def _check_quantized(inputs: list[Any]) -> None:
    quantized = [isinstance(x, Quantized) for x in inputs]
    if not any(quantized):
        return
    if not all(quantized):
        kinds = ", ".join(type(x).__name__ for x in inputs)
        raise ValueError(
            f"attention takes q, k and v all Quantized or none, got {kinds}"
        )
    for name, x in zip("qkv", inputs, strict=True):
        _check_parts(name, x)
    q, k, v = inputs
    if q.rotated != k.rotated:
        raise ValueError(
            "attention takes q and k both rotated or neither, got "
            f"rotated={q.rotated} and rotated={k.rotated}"
        )
    if q.balanced != k.balanced:
        raise ValueError(
            "attention takes q and k of one call of quantize_qkv, got "
            f"balanced={q.balanced} and balanced={k.balanced}"
        )
    if v.rotated or v.balanced:
        raise ValueError(
            "attention takes v that is neither rotated nor balanced, got "
            f"rotated={v.rotated} and balanced={v.balanced}"
        )
    for name, x in (("q", q), ("v", v)):
        if x.center is not None:
            raise ValueError(
                f"attention takes only k centred over tokens, but {name} is: its mean "
                "changes the result"
            )
    if k.block != v.block and not v.channels:
        raise ValueError(
            "attention takes k and v with one descale block, got "
            f"{k.block} and {v.block} tokens (0: one descale for all)"
        )


def _check_parts(name: str, x: Quantized) -> None:
    """Raises ValueError unless the parts of a Quantized go together."""
    if x.values.dtype not in QUANTIZED_DTYPES:
        raise ValueError(
            f"attention takes a Quantized of float8_e4m3fn or int8, but {name} holds "
            f"{x.values.dtype}"
        )
    of_token = name == "q" and x.block == 1
    if (
        not isinstance(x.block, int)
        or x.block < 0
        or (x.block % KEY_BLOCK and not of_token)
    ):
        raise ValueError(
            "attention takes a Quantized whose block is a multiple of "
            f"{KEY_BLOCK} tokens or 0, or for q 1, but {name} has {x.block!r}"
        )
    if x.channels and (name != "v" or x.block):
        raise ValueError(
            "attention takes descales for channels of v alone, and then none for "
            f"blocks, but {name} has channels={x.channels} and block={x.block}"
        )
    *batch, tokens, heads, dim = x.values.shape
    blocks = (dim,) if x.channels else (-(-tokens // x.block),) if x.block else ()
    parts = (
        ("descale", x.descale, (*batch, heads, *blocks)),
        ("center", x.center, (*batch, heads, dim)),
        ("source", x.source, tuple(x.values.shape)),
    )
    for part, array, shape in parts:
        if array is None and part != "descale":
            continue
        if not isinstance(array, jax.Array | np.ndarray) or (
            tuple(array.shape) != shape or not _is_floating(array)
        ):
            got = getattr(array, "shape", type(array).__name__)
            raise ValueError(
                f"attention takes a Quantized whose {part} is real, of shape {shape}, "
                f"but {name} has {got} of {getattr(array, 'dtype', None)}"
            )


def _scale(scale: Any, head_dim: int) -> Float[Array, ""]:
    if scale is None:
        return jnp.float32(_spec.default_scale(head_dim))
    value = _real_array(scale)
    if value is None or value.shape != ():
        raise ValueError(
            f"attention takes scale as one real number, not {_describe(scale)}"
        )
    if isinstance(value, np.ndarray):
        _spec.check_scale(value)
    return jnp.asarray(value.astype(np.float32))


def _out_dtype(out_dtype: Any, dtype: np.dtype) -> np.dtype:
    if out_dtype is None:
        return _spec.default_out_dtype(dtype)
    try:
        if not isinstance(out_dtype, jax.Array | np.ndarray | np.generic):
            return np.dtype(out_dtype)
    # NumPy warns of old names, which is an error where warnings are.
    except (TypeError, ValueError, DeprecationWarning):
        pass
    raise ValueError(
        "attention takes out_dtype bfloat16, float16 or float32, not "
        f"{_spec.static(out_dtype)}"
    )


def _descale(
    name: str,
    x: Any,
    descale: Any,
    shape: tuple[Any, int],
    batched: bool,
) -> Float[Array, "B H n"]:
    """The descales of one operand: its own, or what was given, or ones."""
    if isinstance(x, Quantized):
        if descale is not None:
            raise ValueError(
                f"attention takes {name} for plain float8_e4m3fn or int8 arrays; a "
                f"Quantized has its own, got {_describe(descale)}"
            )
        value = jnp.asarray(x.descale).astype(jnp.float32)
        value = value if batched else value[None]
        value = value if x.block or x.channels else value[..., None]
    elif x.dtype not in QUANTIZED_DTYPES:
        if descale is not None:
            raise ValueError(
                f"attention takes {name} for float8_e4m3fn and int8 inputs, not for "
                f"{x.dtype}"
            )
        return jnp.ones((*shape, 1), jnp.float32)
    else:
        value = _broadcast_descale(name, descale, shape if batched else shape[1:])
        value = value.reshape(*shape, 1)
    return jnp.where(value >= 0, value, np.float32(np.nan))


def _broadcast_descale(
    name: str, descale: Any, shape: tuple[Any, ...]
) -> Float[Array, "*b H"]:
    if descale is None:
        raise ValueError(
            "attention takes float8_e4m3fn and int8 inputs with descales, but "
            f"{name} is None: a value is its number times its descale (or pass what "
            "zyfa_jax.quantize returns)"
        )
    value = _real_array(descale)
    if value is None:
        raise ValueError(
            f"attention takes {name} as real numbers, not {_describe(descale)}"
        )
    if isinstance(value, np.ndarray):
        _spec.check_descale(name, value)
    try:
        return jnp.broadcast_to(value.astype(np.float32), shape)
    except ValueError:
        axes = "(batch, heads)" if len(shape) == 2 else "(heads,)"
        raise ValueError(
            f"attention takes {name} that broadcasts to {axes} = {shape}, not "
            f"{_describe(descale)}"
        ) from None


def _integers(name: str, value: Any, batch: Any, batched: bool) -> Int[Array, " B"]:
    """An integer or one per batch row, as int32 per batch row."""
    array = _array(value)
    if array is None or not jnp.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"attention takes {name} as an integer or an integer array, not "
            f"{_describe(value)}"
        )
    if array.shape not in (((), (batch,)) if batched else ((),)):
        raise ValueError(
            f"attention takes {name} as an integer"
            f"{f' or an array of shape ({batch},)' if batched else ''}, not "
            f"{_describe(value)}"
        )
    if isinstance(array, np.ndarray):
        _spec.check_integer(name, array)
    own, target = jnp.iinfo(array.dtype), jnp.iinfo(np.int32)
    array = jnp.clip(
        array,
        array.dtype.type(max(own.min, target.min)),
        array.dtype.type(min(own.max, target.max)),
    )
    return jnp.broadcast_to(array.astype(np.int32), (batch,))


def _lengths(
    name: str, value: Any, tokens: Any, batch: Any, batched: bool
) -> Int[Array, " B"]:
    limit = jnp.asarray(tokens).astype(jnp.int32)
    if value is None:
        return jnp.broadcast_to(limit, (batch,))
    lengths = _integers(name, value, batch, batched)
    if not isinstance(value, jax.Array) and isinstance(tokens, int):
        _spec.check_lengths(name, np.asarray(value), tokens)
    return jnp.clip(lengths, np.int32(0), limit)


def _source(x: Any, batched: bool) -> Array | None:
    if not isinstance(x, Quantized) or x.source is None:
        return None
    return x.source if batched else x.source[None]


def center_logits(
    spec: AttentionSpec, operands: _gradient.Operands, center: Float[Array, "*b K D"]
) -> Float[Array, "B H T"]:
    """What removing the keys' mean took from every logit of a query."""
    batch, tokens, heads, dim = operands.q.shape
    center = center.reshape(batch, operands.k.shape[2], 1, dim)
    center = jnp.broadcast_to(
        center, (batch, center.shape[1], heads // center.shape[1], dim)
    ).reshape(batch, heads, dim)
    descale = per_token(operands.q_descale, spec.q_block, tokens)
    q = operands.q.astype(jnp.float32) * jnp.moveaxis(descale, 1, 2)[..., None]
    if operands.q_source is not None:  # which gradients go straight to
        source = operands.q_source.astype(jnp.float32)
        q = source + jax.lax.stop_gradient(q - source)
    dots = jnp.einsum("bthd,bhd->bht", q, center, precision=jax.lax.Precision.HIGHEST)
    return dots * operands.scale


def _array(x: Any) -> Any:
    """A number or array as a NumPy or JAX array; None for anything else."""
    if isinstance(x, jax.Array | np.ndarray):
        return x if isinstance(x.dtype, np.dtype) else None
    if isinstance(x, bool) or not isinstance(x, int | float | np.generic):
        return None
    array = np.asarray(x)
    return None if array.dtype == object else array


def _real_array(x: Any) -> Any:
    array = _array(x)
    if array is None:
        return None
    is_integer = jnp.issubdtype(array.dtype, np.integer)
    return array if is_integer or _is_floating(array) else None


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, np.floating)


def _describe(x: Any) -> str:
    """What was passed, for an error: a number itself, or an array's shape and dtype."""
    if isinstance(x, jax.Array | np.ndarray):
        return f"shape {x.shape} of {x.dtype}"
    return f"{type(x).__name__} {x!r}"
