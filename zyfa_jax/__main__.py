"""A real prefill on this machine, checked and timed: `python -m zyfa_jax`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import zyfa_jax

from . import reference
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
    parser = argparse.ArgumentParser(prog="python -m zyfa_jax", description=__doc__)
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
