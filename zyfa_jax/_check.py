"""Every kernel of one platform against float64: `python -m zyfa_jax check`."""

from __future__ import annotations

import dataclasses
import functools
import math
import platform as machine
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

import jax
import ml_dtypes
import numpy as np

from . import _spec, reference
from ._attention import attention
from ._ffi import Backend
from ._quantize import Quantized, quantize, quantize_qkv

FORMAT = 1
"""Of the report: goes up where a reader of it would have to change."""

BF16, F16, F32 = (np.dtype(x) for x in (ml_dtypes.bfloat16, np.float16, np.float32))
FP8, INT8 = _spec.FLOAT8, _spec.INT8

# The bars of the tests, which say where they come from (tests/_oracle.py): of the
# largest error of an output, relative to the same weighted mean of the values'
# magnitudes, and of the largest error of the log-sum-exp.
LARGEST_BARS = {
    F32: (4e-5, 1e-5),
    F16: (3e-3, 1e-4),
    BF16: (1.2e-2, 1e-3),
    FP8: (0.2, 0.11),
    INT8: (0.2, 0.11),
}
FP8_SMALLEST = 2.0**-15

# Bars of norm(out - exact) / norm(exact). For FP8, as after int8 logits, it is a
# multiple of the error of exact exponentials that are rounded to FP8 with a running
# maximum.
NORM_BARS = {F32: 2e-5, F16: 5e-4, BF16: 3e-3}
FP8_NORM_BAR = 1.2
FEWEST_WEIGHTS = 2**14
"""These bars are ones of means: with fewer weights chance decides."""

HEAD_DIMS = ((128, 128), (192, 128), (64, 64))
"""Checked where a kernel takes any."""


SIZES = ("window", "q_offset", "q_lengths", "kv_lengths")
"""Options that count tokens."""


@dataclasses.dataclass(frozen=True)
class Situation:
    """One kind of call, its sizes in terms of the number of tokens.

    Attributes:
      name: what it shows.
      q_share: queries, as a share of the tokens; 0 means one.
      batch: rows.
      heads: query heads and key/value heads.
      options: of `attention`; those in `SIZES` as shares of the tokens.
    """

    name: str
    q_share: float = 1.0
    batch: int = 1
    heads: tuple[int, int] = (2, 2)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def q_tokens(self, tokens: int) -> int:
        return max(1, int(self.q_share * tokens))

    def sized(self, tokens: int) -> dict[str, Any]:
        """The options for so many tokens."""

        def size(x: Any) -> Any:
            if isinstance(x, tuple):
                return np.array([size(y) for y in x], np.int32)
            return int(x * tokens)

        return {
            name: size(x) if name in SIZES else x for name, x in self.options.items()
        }


SITUATIONS = (
    Situation("causal"),
    Situation("grouped heads", heads=(8, 2)),
    Situation("one key/value head", heads=(4, 1)),
    Situation("no mask", options={"causal": False}),
    Situation("window", options={"window": 0.3}),
    Situation(
        "lengths",
        batch=3,
        options={"q_lengths": (1.0, 0.4, 0.0), "kv_lengths": (1.0, 0.7, 0.5)},
    ),
    Situation("chunk of a prefill", q_share=0.3, options={"q_offset": (0.5,)}),
    Situation("last queries", q_share=0.1, heads=(4, 2)),
    Situation("one query", q_share=0.0, heads=(4, 2)),
    Situation("sharp", options={"scale": 0.25}),
    Situation("float32 output", options={"out_dtype": F32}),
)


QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "by head": {},
    "by tensor": {"granularity": "tensor"},
    "by block": {"granularity": "block"},
    "centred": {"center": True},
    "rotated": {"rotate": True},
}

# Of the values that quantization gives, norm(device - CPU) / norm(CPU), and of a
# descale, relatively: rotation adds in another order, and a sum next to the middle of
# two FP8 numbers then goes to the other one.
QUANTIZED_BARS = 1e-3, 1e-6


@dataclasses.dataclass(frozen=True)
class Result:
    """One kernel in one situation. Where an error has no bar it is told alone.

    Attributes:
      kernel: what it computes, the dtype of its inputs, and head dims.
      situation: its name.
      error: norm(out - exact) / norm(exact).
      error_bar: the most that it may be.
      largest: largest error of an output relative to the mean of magnitudes.
      largest_bar: the most that it may be.
      lse: largest error of the log-sum-exp.
      lse_bar: the most that it may be.
      same_bits: whether each run gave the same bits.
      trouble: why there are no errors: what the call raised.
    """

    kernel: str
    situation: str
    error: float | None = None
    error_bar: float | None = None
    largest: float | None = None
    largest_bar: float | None = None
    lse: float | None = None
    lse_bar: float | None = None
    same_bits: bool = False
    trouble: str = ""

    @property
    def missed(self) -> list[str]:
        """What is not as it should be."""
        if self.trouble:
            return [self.trouble]
        found = [
            f"{words} over {bar:.2g}"
            for words, error, bar in (
                ("error", self.error, self.error_bar),
                ("largest error", self.largest, self.largest_bar),
                ("error of the log-sum-exp", self.lse, self.lse_bar),
            )
            if bar is not None and (error is None or not error <= bar)
        ]
        return found if self.same_bits else [*found, "runs differ"]


def run(backend: Backend, *, tokens: int, runs: int, seed: int = 0) -> Iterator[Result]:
    """Checks every kernel of a platform, or the blockwise path where it has none.

    Attention is compared with float64, and quantization with the CPU's.
    """
    limits = _spec.KERNELS.get(backend.platform, _spec.KernelLimits())
    [device, *_] = jax.devices(backend.platform)
    asked = backend.platform if backend.kernel else None
    for dtype in limits.dtypes:
        for dims in limits.head_dims or HEAD_DIMS:
            kernel = f"attention {dtype.name} {dims[0]}/{dims[1]}"
            for situation in SITUATIONS:
                options = situation.sized(tokens)
                inputs = _inputs(situation, tokens, dims, dtype, seed)
                inputs = _spoiled(inputs, options.get("kv_lengths"))
                call = functools.partial(
                    attention, implementation=asked, return_lse=True, **options
                )
                yield _guarded(
                    Result(kernel, situation.name),
                    functools.partial(_run, call, inputs, device, runs),
                    functools.partial(_compare, dtype, inputs, options),
                )
    if backend.platform == "cpu":
        return
    for dtype in NORM_BARS:
        for dim in sorted({d for d, _ in limits.head_dims or HEAD_DIMS}):
            x = np.random.default_rng(seed).standard_normal((2, tokens, 2, dim))
            for name, options in QUANTIZATIONS.items():
                call = functools.partial(_quantized, **options)
                yield _guarded(
                    Result(f"quantize {dtype.name} {dim}", name),
                    functools.partial(_run, call, (x.astype(dtype),), device, runs),
                    functools.partial(_compare_quantized, call, x.astype(dtype)),
                )


def _guarded(blank: Result, run: Any, compare: Any) -> Result:
    try:
        outputs = run()
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        trouble = (str(error).splitlines() or [type(error).__name__])[0]
        return dataclasses.replace(blank, trouble=trouble)
    same_bits = all(
        a.tobytes() == b.tobytes()
        for run in outputs
        for a, b in zip(run, outputs[0], strict=True)
    )
    return dataclasses.replace(blank, same_bits=same_bits, **compare(outputs[0]))


def report(backend: Backend, results: Sequence[Result], **options: Any) -> Any:
    """What an owner of the hardware can send: JSON's types alone."""
    from . import __version__

    [device, *_] = jax.devices(backend.platform)
    return {
        "format": FORMAT,
        "command": "check",
        "options": options,
        **environment(device),
        "zyfa_jax": __version__,
        "backend": dataclasses.asdict(backend),
        "ok": not any(result.missed for result in results),
        "results": [
            dataclasses.asdict(result) | {"missed": result.missed} for result in results
        ],
    }


def environment(device: Any) -> dict[str, Any]:
    """Versions and the device, as JSON's types."""
    return {
        "python": sys.version.split()[0],
        "machine": f"{machine.system()} {machine.machine()}",
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "device": device.device_kind,
        "architecture": str(getattr(device, "compute_capability", "")),
        "platform_version": device.client.platform_version,
    }


def _inputs(
    situation: Situation, tokens: int, dims: tuple[int, int], dtype: np.dtype, seed: int
) -> tuple[Any, ...]:
    """(q, k, v), standard normal; FP8 with a descale for each batch row and head, int8
    as `quantize_qkv` gives it, but for the mean that it took off k.

    They are made on the CPU, so that a device's other kernels have no part in it.
    """
    rng = np.random.default_rng(seed)
    heads, kv_heads = situation.heads
    shapes = (
        (situation.batch, situation.q_tokens(tokens), heads, dims[0]),
        (situation.batch, tokens, kv_heads, dims[0]),
        (situation.batch, tokens, kv_heads, dims[1]),
    )
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    if dtype not in _spec.QUANTIZED_DTYPES:
        return tuple(x.astype(dtype) for x in arrays)
    with jax.default_device(jax.devices("cpu")[0]):
        rounded = map(quantize, arrays) if dtype == FP8 else quantize_qkv(*arrays)
        rounded = (dataclasses.replace(x.detach(), center=None) for x in rounded)
        return tuple(jax.tree.map(np.asarray, x) for x in rounded)


def _spoiled(inputs: tuple[Any, ...], kv_lengths: np.ndarray | None) -> tuple[Any, ...]:
    """With NaN for the keys and values that must not be seen; int8 has none."""
    if kv_lengths is None:
        return inputs
    q, *keys_and_values = inputs

    def spoil(x: Any) -> Any:
        if isinstance(x, Quantized):
            return dataclasses.replace(x, values=spoil(x.values))
        x = x.copy()
        for row, length in zip(x, kv_lengths, strict=True):
            row[length:] = 127 if x.dtype == INT8 else np.nan
        return x

    return q, *map(spoil, keys_and_values)


def _run(
    call: Any, inputs: tuple[Any, ...], device: Any, runs: int
) -> list[tuple[np.ndarray, ...]]:
    """The results of each run."""
    jitted = jax.jit(call)
    placed = jax.device_put(inputs, device)
    return [jax.device_get(jitted(*placed)) for _ in range(runs)]


def _compare(
    dtype: np.dtype,
    inputs: tuple[Any, ...],
    options: dict[str, Any],
    output: tuple[np.ndarray, np.ndarray],
) -> dict[str, Any]:
    options = {name: x for name, x in options.items() if name != "out_dtype"}
    if isinstance(inputs[0], Quantized):
        for name, x in zip("qkv", inputs, strict=True):
            options[f"{name}_descale"] = x.descale
        options["q_block"], options["kv_block"] = (x.block for x in inputs[:2])
        options["v_channels"] = inputs[2].channels
        inputs = tuple(x.values for x in inputs)
    q, k, v = inputs
    out, lse = output
    exact, exact_lse = reference.attention(q, k, v, **options)
    magnitude = np.abs(v.astype(np.float64))
    size, _ = reference.attention(q, k, magnitude, **options)
    difference = np.abs(out.astype(np.float64) - exact)
    norm = float(np.linalg.norm(exact)) or 1.0
    error_bar = None
    weights = math.prod(lse.shape) * k.shape[1]
    if dtype in _spec.QUANTIZED_DTYPES:
        largest = np.max(options["v_descale"]) * np.nanmax(magnitude, initial=0)
        size = size + FP8_SMALLEST * k.shape[-3] * largest
    if weights < FEWEST_WEIGHTS:
        pass
    elif dtype in _spec.QUANTIZED_DTYPES:
        rounded, _ = reference.fp8_attention(
            q, k, v, probabilities="exact row", **options
        )
        error_bar = FP8_NORM_BAR * float(np.linalg.norm(rounded - exact)) / norm
        error_bar = float(np.hypot(error_bar, _rounding(out.dtype) / 4))
    else:
        error_bar = NORM_BARS[dtype]
    largest_bar, lse_bar = LARGEST_BARS[dtype]
    return {
        "error": float(np.linalg.norm(difference)) / norm,
        "error_bar": error_bar,
        "largest": float(np.max(difference / (size + 1e-7), initial=0)),
        "largest_bar": max(largest_bar, 4 * _rounding(out.dtype)),
        "lse": _lse_error(lse, exact_lse),
        "lse_bar": lse_bar,
    }


def _lse_error(lse: np.ndarray, exact: np.ndarray) -> float:
    """The largest, relative to 1 + its magnitude; infinite where infinities differ."""
    if not np.array_equal(np.isneginf(lse), np.isneginf(exact)):
        return float("inf")
    seen = np.isfinite(exact)
    difference = np.abs(lse[seen].astype(np.float64) - exact[seen])
    return float(np.max(difference / (1 + np.abs(exact[seen])), initial=0))


def _quantized(x: Any, **options: Any) -> tuple[Any, ...]:
    """FP8 values, their descales, and both together."""
    z = quantize(x, **options)
    return z.values, z.descale, z.dequantize()


def _compare_quantized(
    call: Any, x: np.ndarray, output: tuple[np.ndarray, ...]
) -> dict[str, Any]:
    [(_, want_descale, want)] = _run(call, (x,), jax.devices("cpu")[0], 1)
    _, descale, got = output
    error_bar, largest_bar = QUANTIZED_BARS
    return {
        "error": float(np.linalg.norm(got - want) / np.linalg.norm(want)),
        "error_bar": error_bar,
        "largest": float(np.max(np.abs(descale / want_descale - 1))),
        "largest_bar": largest_bar,
    }


def _rounding(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).eps)
