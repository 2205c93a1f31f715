"""Speed of causal prefill on a Hopper GPU beside cuDNN, FlashAttention-3, Pallas, XLA.

Batch 1, the heads of Mistral-7B and Qwen3-8B (32 query and 8 key/value heads, head dim
128) and of DeepSeek-V2-Lite (16 heads, 192/128). FP8 and bfloat16 kernels take turns,
call by call, since the card throttles by power: only what is measured in one process
compares. Times are the sum of the durations of a call's kernels, as CUPTI gives them;
medians. TFLOP/s count half of the score square. FP8 inputs have one descale for a
tensor; int8's are rounded from bfloat16 by `quantize_qkv` before the clock starts.
Errors are relative, against float64 on the inputs that an implementation is given, of
the last queries of the first head: int8's has in it what rounding leaves.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import zyfa_jax
from zyfa_jax import _check, reference

from . import families, plot, quantize, report
from .calls import Call, Case, Given, platform_of, text_of
from .cuda_peers import FP8_MAX, IMPLEMENTATIONS, Implementation, options_of
from .shapes import (
    BF16,
    DEEPSEEK_V2_LITE,
    FP8,
    INT8,
    MISTRAL_7B,
    QWEN3_8B,
    SHORT,
    Model,
)  # fmt: skip
from .timing import Timer, device_timer, interleaved_medians, wall_seconds

if TYPE_CHECKING:
    from jaxtyping import Float64

TOKENS = (2048, 4096, 8192, 16384, 32768)
INPUTS = ("gauss", "sink")
ERROR_TOKENS = 8192
# Dense TFLOP/s of an H100 or H200 (SXM) by their data sheets; int8's are as many.
PEAKS = {FP8: 1978.9, INT8: 1978.9, BF16: 989.4}
PACKAGES = (
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "torch",
    "flash-attn3-jax",
)
SPEED_QUERIES, ERROR_QUERIES = 64, 512
"""Whose errors are taken: float64 is slow."""


# One line of results for two models of one shape.
MODELS = (
    dataclasses.replace(MISTRAL_7B, name=f"{MISTRAL_7B.name}, {QWEN3_8B.name}"),
    DEEPSEEK_V2_LITE,
)


@dataclasses.dataclass(frozen=True)
class Result:
    """One implementation on one shape; `trouble` says why there are no numbers."""

    model: Model
    inputs: str
    implementation: Implementation
    tokens: int
    seconds: float | None = None
    error: float | None = None
    trouble: str = ""

    @property
    def case(self) -> Case:
        return _case(self.model, self.implementation.dtype, self.tokens)

    @property
    def tflops(self) -> float | None:
        return None if self.seconds is None else self.case.flops / self.seconds / 1e12

    @property
    def share(self) -> float | None:
        peak = PEAKS[self.implementation.dtype]
        return None if self.tflops is None else self.tflops / peak

    def as_json(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self.case),
            "model": self.model.name,
            "inputs": self.inputs,
            "implementation": str(self.implementation),
            "seconds": self.seconds,
            "tflops": self.tflops,
            "share_of_peak": self.share,
            "error": self.error,
            "trouble": self.trouble,
        }


@dataclasses.dataclass(frozen=True)
class Bar:
    """How many times as fast as the best of some peers an own kernel should be."""

    head_dims: tuple[tuple[int, int], ...]
    dtype: str
    tokens: tuple[int, ...]
    peers: tuple[str, ...]
    ratio: float


D128, MLA = MODELS[0].head_dims, MODELS[1].head_dims
BARS = (
    Bar((D128,), FP8, (4096, 16384, 32768), ("cuDNN FP8",), 1.3),
    Bar((MLA,), FP8, (16384,), ("cuDNN BF16",), 2.1),
    Bar((D128, MLA), INT8, (4096, 16384, 32768), ("zyfa_jax FP8",), 0.97),
    Bar(
        (D128, MLA),
        BF16,
        (16384, 32768),
        ("cuDNN BF16", "torch cuDNN BF16", "FlashAttention-3 BF16", "Pallas BF16"),
        1.03,
    ),
    Bar((D128,), BF16, (4096,), ("FlashAttention-3 BF16",), 1.0),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=report.positive, nargs="+", default=TOKENS)
    parser.add_argument(
        "--inputs", nargs="+", choices=families.NAMES, default=INPUTS, metavar="FAMILY"
    )
    parser.add_argument("--repeats", type=report.positive, default=15)
    parser.add_argument(
        "--error-tokens",
        type=int,
        default=ERROR_TOKENS,
        help="length at which errors of all families are taken; 0: none",
    )
    report.add_arguments(parser)
    parser.add_argument(
        "--quantize",
        action="store_true",
        help="in place of attention: quantize beside plain JAX and the memory's speed",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="256 tokens of two heads, one repeat: only shows it runs, anywhere",
    )


def run(args: argparse.Namespace) -> int:
    report.check(args)
    if args.quantize and args.picture is not None:
        raise SystemExit("--quantize draws no picture: --json gives its numbers")
    # Torch takes its memory from the same card.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    [device, *_] = jax.devices()
    platform = platform_of(device)
    if platform != "cuda" and not args.quick:
        print(f"this needs an NVIDIA GPU that JAX sees, got {device.device_kind}")
        return 2
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    timer, timed_by = device_timer(platform)
    environment = {**_environment(), "timed_by": timed_by}
    for name, value in (_check.environment(device) | environment).items():
        console.print(f"{name}: {value}", highlight=False)
    [backend] = (x for x in zyfa_jax.backends() if x.platform == platform)
    console.print(f"zyfa_jax {zyfa_jax.__version__}: {backend.detail}", highlight=False)

    if args.quantize:
        return _run_quantize(args, device, environment, timer, console)
    results = []
    for model, inputs in _kinds(args):
        measured = _measure_kind(model, inputs, args, timer, console)
        console.print(_heading(model, inputs), style="bold", highlight=False)
        console.print(_speed_table(measured))
        for line in _missing(measured):
            console.print(line, highlight=False, markup=False)
        results += measured
    if not args.quick:
        console.print(_bars_table(results))
    errors = _all_errors(args, console)
    for model, of_model in errors.items():
        console.print(_error_table(model, of_model))

    report.write(
        "cuda",
        args,
        device,
        **environment,
        backend=dataclasses.asdict(backend),
        peaks=PEAKS,
        results=[result.as_json() for result in results],
        errors=errors,
    )
    if args.picture is not None:
        plot.save(args.picture, device.device_kind, _panels(results))
    return 1 if any(x.implementation.ours and x.trouble for x in results) else 0


def _run_quantize(
    args: argparse.Namespace,
    device: Any,
    environment: dict[str, Any],
    timer: Timer,
    console: Console,
) -> int:
    cases, repeats, copied = quantize.CASES, args.repeats, 1 << 30
    if args.quick:
        cases, repeats, copied = (quantize.Case(256, 2, 128),), 1, 1 << 16
    copy = quantize.copy_gb_per_second(wall_seconds, copied)
    results = []
    for case in cases:
        for name in quantize.ROWS:
            calls = quantize.prepare(case, name)
            seconds = interleaved_medians(calls, repeats, timer, lambda: None)
            results.append(quantize.Result(case, name, **seconds))
    console.print(quantize.table(results, copy))
    report.write(
        "cuda --quantize",
        args,
        device,
        **environment,
        copy_gb_per_second=copy,
        results=[result.as_json() for result in results],
    )
    return 0


def _kinds(args: argparse.Namespace) -> Iterator[tuple[Model, str]]:
    for model in MODELS:
        if args.quick:
            model = dataclasses.replace(model, heads=(2, 1))
        for inputs in ("gauss",) if args.quick else args.inputs:
            yield model, inputs


def _environment() -> dict[str, Any]:
    """Versions of what is compared, and of the driver."""
    environment: dict[str, Any] = {}
    for name in PACKAGES:
        try:
            environment[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    wanted = "driver_version,power.limit,clocks.max.sm"
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return environment
    values = said.splitlines()[0].split(", ")
    return environment | dict(zip(wanted.split(","), values, strict=True))


# ---- Shapes


def _case(model: Model, dtype: str, tokens: int) -> Case:
    return Case(dtype, model.head_dims, True, tokens, 1, model.heads)


def _measure_kind(
    model: Model, inputs: str, args: argparse.Namespace, timer: Timer, console: Console
) -> list[Result]:
    tokens, repeats = ([256], 1) if args.quick else (args.tokens, args.repeats)
    longest = make_inputs(model, inputs, max(tokens))
    results = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(
            f"{model.name}, {inputs}", total=len(tokens) * (repeats + 1)
        )
        advance = functools.partial(progress.advance, task)
        for n in tokens:
            given = {dtype: _first(x, n) for dtype, x in longest.items()}
            results += measure(model, inputs, given, repeats, timer, advance)
            advance()
    return results


def make_inputs(model: Model, family: str, tokens: int) -> dict[str, Given]:
    """Of a batch of one, by dtype; the beginning of it serves for fewer tokens."""
    heads, kv_heads = model.heads
    qk, v = model.head_dims
    arrays = families.make(
        family, tokens, q_heads=heads, kv_heads=kv_heads, qk_dim=qk, v_dim=v
    )
    arrays = [x[None] for x in arrays]
    descales = tuple(float(np.float32(np.abs(x).max() / FP8_MAX)) for x in arrays)
    scaled = (x / np.float32(d) for x, d in zip(arrays, descales, strict=True))
    return {
        FP8: Given(tuple(_rounded(x, FP8) for x in scaled), descales),
        BF16: Given(tuple(_rounded(x, BF16) for x in arrays), (1.0,) * 3),
    }


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """On JAX's device, which is quicker."""
    return np.array(jnp.asarray(x).astype(dtype))


def _first(given: Given, tokens: int) -> Given:
    return Given(tuple(x[:, :tokens] for x in given.arrays), given.descales)


def measure(
    model: Model,
    inputs: str,
    given: Mapping[str, Given],
    repeats: int,
    timer: Timer,
    after_round: Call = lambda: None,
) -> list[Result]:
    """Every implementation on one shape."""
    tokens = given[BF16].arrays[0].shape[1]
    calls, errors, troubles = {}, {}, {}
    for dtype, of_dtype in given.items():
        case = _case(model, dtype, tokens)
        exact = _exact(case, of_dtype, SPEED_QUERIES)
        for x in IMPLEMENTATIONS:
            if x.given_dtype == dtype:
                try:
                    calls[x], errors[x] = _prepared(x, case, of_dtype, exact)
                except Exception as error:  # of whatever kind another package raises
                    troubles[x] = text_of(error)
    seconds = interleaved_medians(calls, repeats, timer, after_round)
    return [
        Result(model, inputs, x, tokens, seconds[x], errors[x])
        if x in seconds
        else Result(model, inputs, x, tokens, trouble=troubles[x])
        for x in IMPLEMENTATIONS
    ]


def _prepared(
    implementation: Implementation, case: Case, given: Given, exact: np.ndarray
) -> tuple[Call, float]:
    """The call, and its error."""
    prepared = implementation.prepare(case, given)
    return prepared.call, _error(prepared.call(), prepared.out_scale, exact)


def _exact(case: Case, given: Given, queries: int) -> Float64[np.ndarray, "b t h d"]:
    """Attention of the last queries of the first head in float64."""
    out, _ = reference.attention(*_checked(given, queries), **options_of(case, given))
    return out


def _checked(given: Given, queries: int) -> tuple[np.ndarray, ...]:
    q, k, v = given.arrays
    return q[:1, -queries:, :1], k[:1, :, :1], v[:1, :, :1]


def _error(out: Any, scale: float, exact: np.ndarray) -> float:
    checked = out[:1, -exact.shape[1] :, :1]
    if isinstance(checked, jax.Array):
        checked = np.asarray(checked)
    else:  # a tensor of torch's
        checked = checked.float().cpu().numpy()
    return _relative(checked.astype(np.float64) * scale, exact)


def _relative(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


# ---- Errors of every family

Errors = dict[str, dict[str, dict[str, float]]]
"""By model, family and method."""


def _all_errors(args: argparse.Namespace, console: Console) -> Errors:
    tokens = 256 if args.quick else args.error_tokens
    if not tokens:
        return {}
    names = families.NAMES[:1] if args.quick else families.NAMES
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("errors", total=len(MODELS) * len(names))
        errors: Errors = {}
        for model in MODELS:
            small = dataclasses.replace(model, heads=(2, 1))
            of_model = errors.setdefault(model.name, {})
            for family in names:
                of_model[family] = family_errors(small, family, tokens)
                progress.advance(task)
    return errors


def family_errors(model: Model, family: str, tokens: int) -> dict[str, float]:
    """Of what takes the shape, and of FP8 probabilities by exact exponentials."""
    queries = min(ERROR_QUERIES, tokens)
    errors = {}
    for dtype, given in make_inputs(model, family, tokens).items():
        case = _case(model, dtype, tokens)
        exact = _exact(case, given, queries)
        for x in IMPLEMENTATIONS:
            if x.given_dtype == dtype:
                try:
                    _, errors[str(x)] = _prepared(x, case, given, exact)
                except Exception:  # told with the speeds
                    continue
        if dtype == FP8:
            rounded, _ = reference.fp8_attention(
                *_checked(given, queries),
                probabilities="exact row",
                **options_of(case, given),
            )
            errors["exact exponentials, FP8"] = _relative(rounded, exact)
    return errors


# ---- What is shown


def _heading(model: Model, inputs: str) -> str:
    heads, kv_heads = model.heads
    qk, v = model.head_dims
    return (
        f"\n{model.name}: {heads} query and {kv_heads} key/value heads, {qk}/{v}, "
        f"causal, {inputs}"
    )


def _speed_table(results: Sequence[Result]) -> Table:
    table = Table()
    table.add_column("tokens")
    table.add_column("implementation")
    for column in ("ms", "TFLOP/s", "of peak", "error"):
        table.add_column(column, justify="right")
    tokens = 0
    for x in results:
        if x.tokens != tokens and tokens:
            table.add_section()
        tokens = x.tokens
        if x.seconds is not None:
            speed = x.tflops or 0.0
            digits = 0 if speed >= 100 else 3
            numbers = f"{x.seconds * 1e3:.3f}", f"{speed:.{digits}f}", f"{x.share:.0%}"
            table.add_row(
                str(x.tokens), str(x.implementation), *numbers, f"{x.error:.5f}"
            )
    return table


def _missing(results: Sequence[Result]) -> Iterator[str]:
    """A line for each implementation and reason why there are no numbers."""
    reasons: dict[tuple[str, str], list[int]] = {}
    for x in results:
        if x.trouble:
            reasons.setdefault((str(x.implementation), x.trouble), []).append(x.tokens)
    for (name, trouble), tokens in reasons.items():
        yield f"{name}, {', '.join(map(str, tokens))} tokens: {trouble}"


def _bars_table(results: Sequence[Result]) -> Table:
    table = Table(title="Ratios of speed, and their bars", title_justify="left")
    for column in ("heads", "inputs", "tokens", "speed of", "over"):
        table.add_column(column)
    table.add_column("ratio", justify="right")
    table.add_column("bar", justify="right")
    for row in ratios(results):
        table.add_row(*row)
    return table


def ratios(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    """The rows of the bars: heads, inputs, tokens, what, over what, ratio, bar."""
    speeds: dict[tuple[Model, str, int], dict[str, float]] = {}
    for x in results:
        if x.tflops is not None:
            of_shape = speeds.setdefault((x.model, x.inputs, x.tokens), {})
            of_shape[str(x.implementation)] = x.tflops
    for bar in BARS:
        ours = f"zyfa_jax {SHORT[bar.dtype]}"
        for (model, inputs, tokens), of_shape in speeds.items():
            if model.head_dims not in bar.head_dims or tokens not in bar.tokens:
                continue
            peers = [x for x in bar.peers if x in of_shape]
            if ours not in of_shape or not peers:
                continue
            best = max(peers, key=of_shape.__getitem__)
            ratio = of_shape[ours] / of_shape[best]
            qk, v = model.head_dims
            yield (
                f"{qk}/{v}", inputs, str(tokens), ours, best,
                f"{ratio:.2f}", f"{bar.ratio:.2f}",
            )  # fmt: skip


def _error_table(model: str, errors: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(title=f"Relative error, {model}", title_justify="left")
    table.add_column("method")
    for family in errors:
        table.add_column(family, justify="right")
    for method in dict.fromkeys(x for of_family in errors.values() for x in of_family):
        values = (of_family.get(method) for of_family in errors.values())
        table.add_row(method, *("" if x is None else f"{x:.5f}" for x in values))
    return table


def _panels(results: Sequence[Result]) -> list[plot.Panel]:
    panels: dict[str, list[Result]] = {}
    for x in results:
        qk, v = x.model.head_dims
        panels.setdefault(f"{x.model.name} ({qk}/{v}), {x.inputs}", []).append(x)
    return [plot.Lines(title, "TFLOP/s", _lines(x)) for title, x in panels.items()]


def _lines(results: Sequence[Result]) -> list[plot.Line]:
    lines = []
    for implementation in dict.fromkeys(x.implementation for x in results):
        points = [
            (x.tokens, x.tflops)
            for x in results
            if x.implementation == implementation and x.tflops is not None
        ]
        if points:
            peer = not implementation.ours
            lines.append(plot.Line(str(implementation), points, peer=peer))
    return lines
