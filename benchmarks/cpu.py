"""Speed of causal prefill on the CPU beside jax.nn and, where installed, torch.

Batch 1, a quarter of Mistral-7B's heads: 8 query and 2 key/value, head dim 128. Medians
in one process, the implementations taking turns. GFLOP/s count half of the score
square, and no rounding: what is timed "with" it begins with bfloat16.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import zyfa_jax
from zyfa_jax._timing import interleaved_medians

from . import plot, report
from .shapes import MISTRAL_7B

Q_HEADS, KV_HEADS = MISTRAL_7B.share(4).heads
HEAD_DIM, _ = MISTRAL_7B.head_dims

PEERS = {"torch": "torch"}
"""Peers that may not be installed -> their modules."""

# (implementation, baseline, the least ratio of their speeds or None).
BARS: tuple[tuple[str, str, float | None], ...] = (
    ("zyfa bfloat16", "jax.nn bfloat16", 20.0),
    ("zyfa bfloat16", "torch bfloat16", 1.2),
    ("zyfa float8", "zyfa bfloat16", 0.8),
    ("zyfa int8", "zyfa bfloat16", 1.0),
    ("zyfa float8 with quantize", "zyfa bfloat16", None),
    ("zyfa float8 with quantize_qkv", "zyfa bfloat16", None),
    ("zyfa int8 with quantize_qkv", "zyfa bfloat16", None),
    ("zyfa int8 with quantize_qkv, rotated", "zyfa bfloat16", None),
    ("zyfa float32", "torch float32", 1.0),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", type=report.positive, nargs="+", default=[1024, 4096]
    )
    parser.add_argument("--repeats", type=report.positive, default=7)
    parser.add_argument(
        "--cores", type=report.positive, default=2, help="cores to run on"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="256 tokens, one repeat: only shows it runs",
    )
    report.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    report.check(args)
    lengths, repeats = ([256], 1) if args.quick else (args.tokens, args.repeats)
    cores = _keep_to_cores(args.cores)
    jax.config.update("jax_platforms", "cpu")
    console = Console()
    machine = _machine(cores)
    console.print(machine)
    missing = report.missing(PEERS, console)
    results: dict[int, dict[str, float]] = {}
    for tokens in lengths:
        calls = _zyfa_and_jax_calls(tokens)
        if "torch" not in missing:
            calls |= _torch_calls(tokens, cores)
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(f"{tokens} tokens", total=repeats + 1)
            seconds = interleaved_medians(
                calls, repeats, after_round=functools.partial(progress.advance, task)
            )
        results[tokens] = seconds
        _print_tables(console, tokens, seconds)
    report.write(
        "cpu",
        args,
        jax.devices()[0],
        cpu=machine,
        missing=missing,
        results=[
            {
                "tokens": tokens,
                "implementation": name,
                "seconds": median,
                "gflops": _gflops(tokens, median),
            }
            for tokens, seconds in results.items()
            for name, median in seconds.items()
        ],
    )
    if args.picture is not None:
        model, *_ = machine.partition(", ")
        note = f"{cores} cores, {Q_HEADS} query and {KV_HEADS} key/value heads."
        plot.save(args.picture, model, [_panel(results)], note)
    return 0


def _panel(results: dict[int, dict[str, float]]) -> plot.Panel:
    names = dict.fromkeys(name for seconds in results.values() for name in seconds)
    names = [name for name in names if " with " not in name]
    lines = [
        plot.Line(
            name,
            [(n, _gflops(n, x[name])) for n, x in results.items() if name in x],
            peer=not name.startswith("zyfa"),
        )
        for name in names
    ]
    return plot.Lines(f"causal, head dim {HEAD_DIM}", "GFLOP/s", lines)


def _keep_to_cores(cores: int) -> int:
    """Keeps the process to so many cores, before XLA counts them for its threads."""
    if not hasattr(os, "sched_setaffinity"):
        return os.cpu_count() or 1
    mine = sorted(os.sched_getaffinity(0))[:cores]
    os.sched_setaffinity(0, mine)
    return len(mine)


def _machine(cores: int) -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    [cpu] = (backend for backend in zyfa_jax.backends() if backend.platform == "cpu")
    return f"{model}, {cores} cores, jax {jax.__version__}; zyfa: {cpu.detail}"


def _inputs(tokens: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal((1, tokens, heads, HEAD_DIM), dtype=np.float32)
        for heads in (Q_HEADS, KV_HEADS, KV_HEADS)
    ]


def _zyfa_and_jax_calls(tokens: int) -> dict[str, Callable[[], object]]:
    attention = jax.jit(zyfa_jax.attention)
    jax_nn = jax.jit(
        functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation="xla"
        )
    )
    f32 = [jnp.asarray(x) for x in _inputs(tokens)]
    bf16 = [x.astype(jnp.bfloat16) for x in f32]
    int8 = [x.detach() for x in zyfa_jax.quantize_qkv(*bf16)]
    fp8 = [zyfa_jax.quantize(x).detach() for x in bf16]

    def rounded(quantize: Callable[..., Any]) -> Callable[[], object]:
        call = jax.jit(lambda *x: zyfa_jax.attention(*quantize(*x)))
        return functools.partial(call, *bf16)

    return {
        "zyfa bfloat16": functools.partial(attention, *bf16),
        "zyfa float8": functools.partial(attention, *fp8),
        "zyfa int8": functools.partial(attention, *int8),
        "zyfa float8 with quantize": rounded(_centred_fp8),
        "zyfa float8 with quantize_qkv": rounded(
            functools.partial(zyfa_jax.quantize_qkv, precision="fp8")
        ),
        "zyfa int8 with quantize_qkv": rounded(zyfa_jax.quantize_qkv),
        "zyfa int8 with quantize_qkv, rotated": rounded(
            functools.partial(zyfa_jax.quantize_qkv, rotated=True)
        ),
        "zyfa float32": functools.partial(attention, *f32),
        "jax.nn bfloat16": functools.partial(jax_nn, *bf16),
    }


def _centred_fp8(q: jax.Array, k: jax.Array, v: jax.Array) -> list[Any]:
    """As precision="fp8" of the Flax modules rounds."""
    quantize = zyfa_jax.quantize
    return [quantize(q), quantize(k, center=True), quantize(v)]


def _torch_calls(tokens: int, cores: int) -> dict[str, Callable[[], object]]:
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(cores)
    f32 = [torch.from_numpy(x).transpose(1, 2).contiguous() for x in _inputs(tokens)]

    def attention(dtype: Any) -> Callable[[], object]:
        return functools.partial(
            torch.nn.functional.scaled_dot_product_attention,
            *(x.to(dtype) for x in f32),
            is_causal=True,
            enable_gqa=True,
        )

    return {
        "torch bfloat16": attention(torch.bfloat16),
        "torch float32": attention(torch.float32),
    }


def _gflops(tokens: int, seconds: float) -> float:
    return 4 * Q_HEADS * HEAD_DIM * tokens**2 / 2 / seconds / 1e9


def _print_tables(console: Console, tokens: int, seconds: dict[str, float]) -> None:
    speeds = Table("implementation", "median ms", "GFLOP/s", title=f"{tokens} tokens")
    for name, median in seconds.items():
        gflops = _gflops(tokens, median)
        speeds.add_row(name, f"{median * 1e3:.2f}", f"{gflops:.0f}")
    console.print(speeds)
    ratios = Table("speed of", "over", "ratio", "bar at 4096 tokens")
    for name, other, bar in BARS:
        if other in seconds:
            ratio = seconds[other] / seconds[name]
            least = "-" if bar is None else f"{bar:.1f}"
            ratios.add_row(name, other, f"{ratio:.2f}", least)
    console.print(ratios)
