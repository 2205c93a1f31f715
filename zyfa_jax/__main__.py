"""A real prefill on this machine, checked and timed: `python -m zyfa_jax`.

`python -m zyfa_jax check` checks every kernel of the device instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import zyfa_jax

from . import _check, reference
from ._timing import interleaved_medians

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""The attention of Mistral-7B."""

CHECKED_HEADS = slice(None, None, Q_HEADS // KV_HEADS)
"""One query head of each key/value head: float64 takes seconds for each."""

BF16_BAR = 2.5e-3
FP8_BAR_OVER_EXACT = 1.2


@dataclasses.dataclass(frozen=True)
class Check:
    """One relative error ||out - ref|| / ||ref||, and the most it may be."""

    name: str
    error: float
    bar: float | None
    note: str

    @property
    def held(self) -> bool:
        return self.bar is None or self.error <= self.bar

    def __str__(self) -> str:
        verdict = "" if self.bar is None else "ok" if self.held else "OVER ITS BAR"
        bar = "" if self.bar is None else f"bar {self.bar:.5f}"
        return f"  {self.name:<18} {self.error:.5f}  {bar:<12} {verdict:<3} {self.note}"


def main(argv: Sequence[str] | None = None) -> int:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m zyfa_jax", description=summary)
    commands = parser.add_subparsers(metavar="COMMAND")
    command = commands.add_parser(
        "prefill",
        help="one causal prefill in BF16 and FP8 (what runs without a COMMAND)",
        description="Exits with 1 if an error is over its bar.",
    )
    command.add_argument("--tokens", type=_positive, default=2048)
    command.add_argument("--repeats", type=_positive, default=5)
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(run=prefill)
    command = commands.add_parser(
        "check",
        help="every kernel of the device against float64",
        description="Runs each kernel (dtype and head dims) in each situation and "
        "compares with attention in float64. Exits with 1 if one misses its bars.",
    )
    command.add_argument("--tokens", type=_positive, default=700)
    command.add_argument(
        "--runs", type=_positive, default=3, help="of each call, whose bits must agree"
    )
    command.add_argument("--platform", choices=("cpu", "rocm", "cuda"))
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--json", metavar="FILE", help="where to write a report")
    command.set_defaults(run=check)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv or ["prefill"])
    return args.run(args)


def prefill(args: argparse.Namespace) -> int:
    """Runs, checks and times the prefill; returns the exit code."""
    backend = _best_backend()
    [device, *_] = jax.devices(backend.platform)
    print(f"zyfa_jax {zyfa_jax.__version__}, jax {jax.__version__}")
    print(f"backend: {backend.platform} ({device.device_kind}): {backend.detail}")
    for other in zyfa_jax.backends():
        if other.present and other != backend:
            print(f"not used: {other.platform}: {other.detail}")
    print(
        f"causal prefill: batch 1, {args.tokens} tokens, {Q_HEADS} query and "
        f"{KV_HEADS} key/value heads, head dim {HEAD_DIM}, standard normal inputs"
    )
    with jax.default_device(device):
        q, k, v = _inputs(args.tokens, args.seed)
        fp8 = tuple(zyfa_jax.quantize(x).detach() for x in (q, k, v))
        attention = jax.jit(zyfa_jax.attention)
        checks = _checks((q, k, v), fp8, attention(q, k, v), attention(*fp8))
        jax_nn = jax.jit(_jax_nn)
        medians = interleaved_medians(
            {
                "zyfa_jax BF16": lambda: attention(q, k, v),
                "zyfa_jax FP8": lambda: attention(*fp8),
                "jax.nn.dot_product_attention BF16": lambda: jax_nn(q, k, v),
            },
            args.repeats,
        )
    print("relative error, one query head of each key/value head against float64:")
    print(*checks, sep="\n")
    print(f"time, median of {args.repeats}:")
    slowest = medians["jax.nn.dot_product_attention BF16"]
    for name, seconds in medians.items():
        print(f"  {name:<34} {seconds * 1e3:9.2f} ms  {slowest / seconds:6.2f} x")
    return 0 if all(check.held for check in checks) else 1


def check(args: argparse.Namespace) -> int:
    """Checks every kernel; returns the exit code."""
    backend = _best_backend()
    if args.platform is not None:
        [backend] = (x for x in zyfa_jax.backends() if x.platform == args.platform)
        if not backend.present:
            print(f"JAX has no {args.platform} device here")
            return 1
    [device, *_] = jax.devices(backend.platform)
    for name, value in _check.environment(device).items():
        print(f"{name}: {value}")
    print(f"zyfa_jax: {zyfa_jax.__version__}; {backend.platform}: {backend.detail}")
    print(f"{args.tokens} tokens, {args.runs} runs")
    print(
        "norm: norm(out - exact) / norm(exact); "
        "largest: of one output, relative to the mean of the values' magnitudes"
    )
    if backend.platform != "cpu":
        print("for quantize: of values against the CPU's; of descales, relatively")
    results = []
    kernel = None
    for result in _check.run(
        backend, tokens=args.tokens, runs=args.runs, seed=args.seed
    ):
        if kernel != (kernel := result.kernel):
            print(
                f"{kernel:<32}"
                f"{'norm':>8}{'bar':>9}{'largest':>10}{'bar':>9}{'lse':>10}{'bar':>9}"
            )
        print(_row(result), flush=True)
        results.append(result)
    failed = [result for result in results if result.missed]
    if args.json:
        options = {"tokens": args.tokens, "runs": args.runs, "seed": args.seed}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(_check.report(backend, results, **options), file, indent=1)
    print(
        f"{len(failed)} of {len(results)} FAILED"
        if failed
        else f"all {len(results)} within their bars"
    )
    return 1 if failed else 0


def _row(result: _check.Result) -> str:
    row = f"  {result.situation:<29}"
    if not result.trouble:
        for x, width in (
            (result.error, 9),
            (result.error_bar, 9),
            (result.largest, 10),
            (result.largest_bar, 9),
            (result.lse, 10),
            (result.lse_bar, 9),
        ):
            row += f"{'-' if x is None else f'{x:.2g}':>{width}}"
    missed = ", ".join(result.missed)
    return f"{row}  {f'FAILED: {missed}' if missed else 'ok'}"


def _jax_nn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):  # it promotes implicitly
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"takes a number of at least 1, not {value}")
    return value


def _best_backend() -> zyfa_jax.Backend:
    """The first accelerator with a kernel; without one, the CPU."""
    *accelerators, cpu = sorted(
        zyfa_jax.backends(), key=lambda backend: backend.platform == "cpu"
    )
    ready = (backend for backend in accelerators if backend.kernel and backend.present)
    return next(ready, cpu)


def _inputs(tokens: int, seed: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    return tuple(
        jnp.asarray(
            rng.standard_normal((1, tokens, heads, HEAD_DIM), dtype=np.float32),
            jnp.bfloat16,
        )
        for heads in (Q_HEADS, KV_HEADS, KV_HEADS)
    )


def _checks(
    inputs: Sequence[jax.Array],
    fp8: Sequence[zyfa_jax.Quantized],
    bf16_out: jax.Array,
    fp8_out: jax.Array,
) -> list[Check]:
    """The errors of both outputs, on the checked heads."""
    q, k, v = (np.asarray(x) for x in inputs)
    oracle, _ = reference.attention(q[:, :, CHECKED_HEADS], k, v)
    q8, k8, v8 = (np.asarray(x.values) for x in fp8)
    q_descale, k_descale, v_descale = (np.asarray(x.descale) for x in fp8)
    same_inputs: tuple[Any, ...] = (q8[:, :, CHECKED_HEADS], k8, v8)
    descales = {
        "q_descale": q_descale[:, CHECKED_HEADS],
        "k_descale": k_descale,
        "v_descale": v_descale,
    }
    fp8_oracle, _ = reference.attention(*same_inputs, **descales)
    exact, _ = reference.fp8_attention(
        *same_inputs, probabilities="exact row", **descales
    )
    floor = _error(fp8_oracle.astype(ml_dtypes.bfloat16), fp8_oracle)
    of_bf16, of_fp8 = (np.asarray(x)[:, :, CHECKED_HEADS] for x in (bf16_out, fp8_out))
    return [
        Check("BF16", _error(of_bf16, oracle), BF16_BAR, ""),
        Check(
            "FP8 kernel",
            _error(of_fp8, fp8_oracle),
            FP8_BAR_OVER_EXACT * _error(exact, fp8_oracle),
            "on the same FP8 inputs; bar: "
            f"{FP8_BAR_OVER_EXACT} times that of exact exponentials rounded to FP8; "
            f"rounding the output to BF16 alone: {floor:.5f}",
        ),
        Check("FP8 end to end", _error(of_fp8, oracle), None, "on the BF16 inputs"),
    ]


def _error(out: np.ndarray, expected: np.ndarray) -> float:
    difference = np.linalg.norm(out.astype(np.float64) - expected)
    return float(difference / np.linalg.norm(expected))


if __name__ == "__main__":
    sys.exit(main())
