"""Error of FP8 and INT8 attention against float64, on made-up and on saved inputs.

Errors are norm(out - reference) / norm(reference), the mean over seeds, causal, with
float32 output. Kernel errors compare with float64 attention over the same FP8 inputs,
quantized per tensor; end-to-end errors with float64 attention over the inputs before
quantization. Exits with 1 if the kernel that `attention` takes misses its bar.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import zyfa_jax
from zyfa_jax import _gradient, reference
from zyfa_jax._attention import canonical
from zyfa_jax.flax import _fold

from . import families, plot, report
from .shapes import DEEPSEEK_V2_LITE, MISTRAL_7B

HEAD_DIMS = (MISTRAL_7B.head_dims, DEEPSEEK_V2_LITE.head_dims)
ROWS = {"all rows": slice(None), "last 64 rows": slice(-64, None)}

MODELS: dict[reference.Probabilities, str] = {
    "unit": "P in [0, 1]",
    "exact row": "exact exp2, 2^8, running maximum",
    "exact block": "exact exp2, block scale",
    "linear": "exp-free, linear",
    "quadratic": "exp-free, quadratic",
    "gfx950": "exp-free, linear and two chords (gfx950)",
    "sm90": "exp-free, linear, a block's own maximum (sm_90)",
}
AITER = "P in [0, 1], bfloat16 out (AITER)"
BASELINE = MODELS["exact row"]
# None is what `attention` takes on this platform.
KERNELS = {"kernel, linear": False, "kernel, quadratic": True, "kernel": None}

# In pictures, where more bars cannot be told apart; each kernel is near its model.
PICTURED = ("kernel", AITER, *(x for key, x in MODELS.items() if key != "unit"))

BAR = "bar for the kernel"
BAR_FACTOR = 1.2
# The sink's few rows at the end are what a long context shows; (head dim, bar).
SINK_BAR = (128, 0.0015)
SINK_TOKENS = 8192
"""Fewer tokens have no bar on `sink`: all keys but one are then coded by e4m3's least
numbers, whose rounding is all that is left of the error."""

NOTE = (
    "norm(out - float64) / norm(float64), the mean over seeds. "
    "kernel: what `attention` takes here; line: its bar."
)

Options = dict[str, Any]
# (name, options for q, for k, for v)
OPTIONS: tuple[tuple[str, Options, Options, Options], ...] = (
    (
        "tensor",
        {"granularity": "tensor"},
        {"granularity": "tensor"},
        {"granularity": "tensor"},
    ),
    ("head", {}, {}, {}),
    (
        "block of 128 tokens",
        {"granularity": "block"},
        {"granularity": "block"},
        {"granularity": "block"},
    ),
    ("head, k centred", {}, {"center": True}, {}),
    ("head, rotated", {"rotate": True}, {"rotate": True}, {}),
    ("head, centred, rotated", {"rotate": True}, {"center": True, "rotate": True}, {}),
    (
        "block, k centred",
        {"granularity": "block"},
        {"granularity": "block", "center": True},
        {"granularity": "block"},
    ),
    (
        "block, centred, rotated",
        {"granularity": "block", "rotate": True},
        {"granularity": "block", "center": True, "rotate": True},
        {"granularity": "block"},
    ),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One input before quantization: q (S, H, D), k (S, K, D), v (S, K, Dv)."""

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float | None = None
    window: int | None = None

    @property
    def options(self) -> Options:
        return {"scale": self.scale, "window": self.window}


BFLOAT16 = "bfloat16, not quantized"
TOGETHER: dict[Any, str] = {"fp8": "quantize_qkv, FP8", "int8": "quantize_qkv, INT8"}
"""Its precisions -> their names."""
FOLDED = {
    "INT8, rotated by weights": False,
    "INT8, rotated and balanced by weights": True,
}
"""As `quantize_qkv` does on layers that `fold_rotation` changed, if nothing lay between
projections and attention. Whether channels are balanced, by a case's first tokens."""
SAMPLE = 4
"""Of how many tokens one is among those."""
PICTURED_OPTIONS = (
    *TOGETHER.values(),
    *FOLDED,
    "tensor",
    "head, k centred",
    "head, centred, rotated",
    "block, k centred",
)

Errors = dict[str, np.ndarray]
"""A row of the table -> its error in each of ROWS."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=report.positive, default=8192)
    parser.add_argument(
        "--seeds", type=report.positive, default=3, help="inputs of each family"
    )
    parser.add_argument(
        "--families",
        nargs="+",
        choices=families.NAMES,
        default=families.NAMES,
        metavar="NAME",
        help=f"of {', '.join(families.NAMES)}; all by default",
    )
    parser.add_argument(
        "--cases",
        type=Path,
        metavar="PATH",
        help="in place of the families, an .npz with q_<layer>, k_<layer>, v_<layer> "
        "of shape (tokens, heads, dim), and scale_<layer>, window_<layer> where a "
        "layer has its own",
    )
    report.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    report.check(args)
    if args.cases is not None and not args.cases.is_file():
        raise SystemExit(f"there is no file {args.cases}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    kernels: dict[str, dict[str, Errors]] = {}
    failures = []
    if args.cases is not None:
        cases = list(load_cases(args.cases))
        title = args.cases.name
        kernels[title] = _measure(console, {case.name: [case] for case in cases})
        _print_kernel_errors(console, title, kernels[title])
    else:
        for dims in HEAD_DIMS:
            title = f"{args.tokens} tokens, head dim {dims[0]}/{dims[1]}"
            groups = {
                name: [_family(name, args.tokens, dims, s) for s in range(args.seeds)]
                for name in args.families
            }
            kernels[title] = errors = _measure(console, groups)
            add_bar(errors, dims[0], args.tokens)
            _print_kernel_errors(console, title, errors)
            failures += [f"{title}: {failure}" for failure in missed(errors)]
        cases = [_family(name, args.tokens, HEAD_DIMS[0], 0) for name in args.families]
        title = f"{args.tokens} tokens, head dim 128"
    options = _measure_options(console, cases)
    _print_option_errors(console, title, options)
    for failure in failures:
        console.print(failure, style="red")
    report.write(
        "accuracy",
        args,
        jax.devices()[0],
        kernel_errors=_as_json(kernels),
        option_errors={title: options},
        missed=failures,
    )
    if args.picture is not None:
        panels = _panels(kernels, title, options)
        device = jax.devices()[0].device_kind
        plot.save(
            args.picture, f"Error of FP8 and INT8 attention, {device}", panels, NOTE
        )
    return 1 if failures else 0


def kernel_errors(case: Case) -> Errors:
    quantized = [
        zyfa_jax.quantize(x, granularity="tensor").detach()
        for x in (case.q, case.k, case.v)
    ]
    q, k, v = (np.asarray(x.values) for x in quantized)
    options = dict(case.options)
    for name, x in zip("qkv", quantized, strict=True):
        options[f"{name}_descale"] = np.asarray(x.descale)
    exact, _ = reference.attention(q, k, v, **options)
    errors = {}
    for model, label in MODELS.items():
        out, _ = reference.fp8_attention(q, k, v, probabilities=model, **options)
        errors[label] = _errors(out, exact)
        if model == "unit":
            errors[AITER] = _errors(out.astype(jnp.bfloat16), exact)
    for label, quadratic in KERNELS.items():
        out = _fp8_kernel(*quantized, quadratic=quadratic, **case.options)
        errors[label] = _errors(out, exact)
    return errors


def option_errors(case: Case) -> dict[str, float]:
    """{quantize options: end-to-end error over all rows}, bfloat16's first."""
    exact, _ = reference.attention(case.q, case.k, case.v, **case.options)
    inputs: Any = (case.q, case.k, case.v)
    quantized: dict[str, Any] = {
        name: [zyfa_jax.quantize(x, **o) for x, o in zip(inputs, options, strict=True)]
        for name, *options in OPTIONS
    }
    for precision, name in TOGETHER.items():
        quantized[name] = zyfa_jax.quantize_qkv(*inputs, precision=precision)
    for name, balanced in FOLDED.items():
        q, k = _folded(case.q, case.k, balanced)
        quantized[name] = zyfa_jax.quantize_qkv(q, k, case.v, rotated=True)
    out = _bfloat16_kernel(*inputs, **case.options)
    errors = {BFLOAT16: float(_errors(out, exact)[0])}
    for name, rounded in quantized.items():
        rounded = (x.detach() for x in rounded)
        out = _fp8_kernel(*rounded, quadratic=None, **case.options)
        errors[name] = float(_errors(out, exact)[0])
    return errors


def _folded(q: Any, k: Any, balanced: bool) -> tuple[jax.Array, jax.Array]:
    sample = slice(-(-len(q) // SAMPLE))
    of_q, of_k = _fold.exponents(q[sample], k[sample], None)
    if not balanced:
        of_q = of_k = None
    return _fold.fold(q, None, of_q), _fold.fold(k, None, of_k)


def add_bar(errors: dict[str, Errors], qk_dim: int, tokens: int) -> None:
    """Adds the row BAR to the errors of each family that is judged at this length."""
    for name, rows in errors.items():
        if name == "sink" and tokens < SINK_TOKENS:
            continue
        bar = BAR_FACTOR * rows[BASELINE]
        if name == "sink" and qk_dim == SINK_BAR[0]:
            bar[-1] = min(bar[-1], SINK_BAR[1])
        rows[BAR] = bar


def missed(errors: dict[str, Errors]) -> Iterator[str]:
    """A sentence for each error of the kernel that is above its bar, or NaN."""
    for name, rows in errors.items():
        if BAR not in rows:
            continue
        for where, error, bar in zip(ROWS, rows["kernel"], rows[BAR], strict=True):
            if not error <= bar:
                yield f"{name}, {where}: the kernel's {error:.5f} is above {bar:.5f}"


def load_cases(path: Path) -> Iterator[Case]:
    with np.load(path) as saved:
        layers = [name.removeprefix("q_") for name in saved if name.startswith("q_")]
        if not layers:
            raise ValueError(f"{path} has no array named q_<layer>, only {list(saved)}")
        for layer in sorted(layers, key=_natural):
            q, k, v = (saved[f"{x}_{layer}"].astype(np.float32) for x in "qkv")
            scale, window = (
                saved[name].item() if (name := f"{x}_{layer}") in saved else None
                for x in ("scale", "window")
            )
            yield Case(f"layer {layer}", q, k, v, scale, window)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(n or 0), text) for n, text in re.findall(r"(\d*)(\D*)", name)]


def _family(name: str, tokens: int, dims: tuple[int, int], seed: int) -> Case:
    qk_dim, v_dim = dims
    return Case(
        name, *families.make(name, tokens, qk_dim=qk_dim, v_dim=v_dim, seed=seed)
    )


@functools.partial(jax.jit, static_argnames="window")
def _bfloat16_kernel(q, k, v, **options):
    inputs = (x.astype(jnp.bfloat16) for x in (q, k, v))
    return zyfa_jax.attention(*inputs, out_dtype=jnp.float32, **options)


@functools.partial(jax.jit, static_argnames=("quadratic", "window"))
def _fp8_kernel(q, k, v, *, quadratic, scale, window):
    spec, operands = canonical(
        q, k, v, scale=scale, window=window, out_dtype=jnp.float32
    )
    spec = dataclasses.replace(spec, quadratic=quadratic)
    out_and_lse: Any = _gradient.attention(spec, operands)
    return out_and_lse[0][0]


def _errors(out: Any, exact: np.ndarray) -> np.ndarray:
    out = np.asarray(out).astype(np.float64)
    return np.array(
        [
            np.linalg.norm(out[rows] - exact[rows]) / np.linalg.norm(exact[rows])
            for rows in ROWS.values()
        ]
    )


def _measure(
    console: Console, groups: Mapping[str, Sequence[Case]]
) -> dict[str, Errors]:
    """{group: the mean errors of its cases}."""
    means = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("kernel errors", total=sum(map(len, groups.values())))
        for name, cases in groups.items():
            samples = []
            for case in cases:
                samples.append(kernel_errors(case))
                progress.advance(task)
            means[name] = {
                row: np.mean([sample[row] for sample in samples], axis=0)
                for row in samples[0]
            }
    return means


def _print_kernel_errors(
    console: Console, title: str, errors: dict[str, Errors]
) -> None:
    rows = dict.fromkeys(row for columns in errors.values() for row in columns)
    for i, where in enumerate(ROWS):
        table = _table(f"Kernel error, {title}, {where}", errors)
        for row in rows:
            cells = (
                f"{columns[row][i]:.4f}" if row in columns else "-"
                for columns in errors.values()
            )
            table.add_row(row, *cells)
        if BAR in rows and BAR not in errors.get("sink", rows):
            table.caption = f"sink is held to its bar from {SINK_TOKENS} tokens on"
            table.caption_justify = "left"
        for label, base in (("AITER", AITER), ("running maximum", BASELINE)):
            ratios = [c["kernel"][i] / c[base][i] for c in errors.values()]
            table.add_row(f"kernel / {label}", *(f"{ratio:.3f}" for ratio in ratios))
        console.print(table)


def _measure_options(
    console: Console, cases: Sequence[Case]
) -> dict[str, dict[str, float]]:
    """{case: {quantize options: end-to-end error}}."""
    with Progress(console=console, transient=True) as progress:
        tracked = progress.track(cases, description="options of quantize")
        return {case.name: option_errors(case) for case in tracked}


def _print_option_errors(
    console: Console, title: str, errors: dict[str, dict[str, float]]
) -> None:
    table = _table(f"End-to-end error by options of quantize, {title}", errors)
    names = dict.fromkeys(name for columns in errors.values() for name in columns)
    for name in names:
        table.add_row(name, *(f"{columns[name]:.4f}" for columns in errors.values()))
    console.print(table)


def _as_json(kernels: dict[str, dict[str, Errors]]) -> Any:
    return {
        title: {
            name: {
                row: dict(zip(ROWS, x.tolist(), strict=True)) for row, x in e.items()
            }
            for name, e in errors.items()
        }
        for title, errors in kernels.items()
    }


def _panels(
    kernels: dict[str, dict[str, Errors]],
    title: str,
    options: dict[str, dict[str, float]],
) -> list[plot.Panel]:
    panels: list[plot.Panel] = [
        plot.Groups(
            f"{inputs}, {where}",
            "kernel error",
            {
                name: {row: float(errors[row][i]) for row in PICTURED}
                for name, errors in groups.items()
            },
            {
                name: float(errors[BAR][i])
                for name, errors in groups.items()
                if BAR in errors
            },
            log=True,
        )
        for inputs, groups in kernels.items()
        for i, where in enumerate(ROWS)
    ]
    by_options = f"By options of quantize, {title}"
    pictured = {
        name: {row: errors[row] for row in PICTURED_OPTIONS}
        for name, errors in options.items()
    }
    return [*panels, plot.Groups(by_options, "end-to-end error", pictured)]


def _table(title: str, columns) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table
