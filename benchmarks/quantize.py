"""Speed of `quantize` on an NVIDIA GPU beside plain JAX, and of the memory itself.

The kernels read their input once with a descale for each 128 tokens, else twice, and
write FP8 once: these bytes count. `quantize_qkv` reads twice in int8; in FP8 it reads q
and k a third time, since one descale for a head must be known before it rounds. Inputs
below the size of the L2 cache may come from there, as may a part of what is read again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from zyfa_jax import _quantize_numerics as numerics
from zyfa_jax import quantize, quantize_qkv

from .calls import Call

OPTIONS: dict[str, dict[str, Any]] = {
    "head": {},
    "block": {"granularity": "block"},
    "head, centred": {"center": True},
    "head, rotated": {"rotate": True},
    "block, rotated": {"granularity": "block", "rotate": True},
}
TOGETHER: dict[str, Any] = {"q, k, v in int8": "int8", "q, k, v in FP8": "fp8"}
"""Rows of `quantize_qkv`, by its precision."""
ROWS = (*OPTIONS, *TOGETHER)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is quantized: bfloat16 (1, tokens, heads, dim); k and v of fewer heads."""

    tokens: int
    heads: int
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, self.tokens, self.heads, self.dim

    @property
    def kv_shape(self) -> tuple[int, ...]:
        return 1, self.tokens, max(self.heads // 4, 1), self.dim

    def moved_bytes(self, row: str) -> int:
        """What the kernels of a row read and write of x, or of q, k and v."""
        x, kv = math.prod(self.shape), math.prod(self.kv_shape)
        if row in OPTIONS:
            return x * (3 if "block" in row else 5)
        return 5 * (x + 2 * kv) + (2 * (x + kv) if TOGETHER[row] == "fp8" else 0)


CASES = (
    Case(4096, 8, 128),
    Case(16384, 8, 128),
    Case(16384, 32, 128),
    Case(65536, 32, 128),
    Case(16384, 16, 192),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """Seconds of the kernels, of plain JAX, and of XLA's negation of as many bytes."""

    case: Case
    options: str
    kernel: float
    plain: float
    negation: float

    @property
    def gb_per_second(self) -> float:
        return self.case.moved_bytes(self.options) / self.kernel / 1e9

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "gb_per_second": self.gb_per_second}


def prepare(case: Case, row: str) -> dict[str, Call]:
    """The calls to time, on one input."""
    if row in OPTIONS:
        options = OPTIONS[row]
        shapes = [case.shape]
        kernel = jax.jit(lambda x: quantize(x, **options).detach())
        plain = jax.jit(functools.partial(_plainly, **options))
    else:
        precision = TOGETHER[row]
        shapes = [case.shape, case.kv_shape, case.kv_shape]
        kernel = jax.jit(
            lambda *x: [y.detach() for y in quantize_qkv(*x, precision=precision)]
        )
        plain = jax.jit(
            functools.partial(
                numerics.define_together, precision=precision, rotated=False
            )
        )
    inputs = [
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
        for i, shape in enumerate(shapes)
    ]
    y = jnp.ones(case.moved_bytes(row) // 8)
    negation = jax.jit(lambda y: -y)
    return {
        "kernel": lambda: kernel(*inputs),
        "plain": lambda: plain(*inputs),
        "negation": lambda: negation(y),
    }


def copy_gb_per_second(seconds: Callable[[Call, int], float], size: int) -> float:
    """Of a copy on the device, bytes read and bytes written; `seconds` times calls."""
    x = jnp.ones(size // 4)
    copy = functools.partial(jnp.copy, x)
    jax.block_until_ready(copy())
    return 2 * size / min(seconds(copy, 20) for _ in range(3)) / 1e9


def _plainly(
    x: Any, *, granularity: str = "head", center: bool = False, rotate: bool = False
) -> Any:
    """What `quantize` is on platforms without a kernel."""
    block = 128 if granularity == "block" else 0
    rounding = numerics.Rounding(granularity, block, center, rotate)
    return numerics.define(x, rounding)


def table(results: list[Result], copy: float) -> Table:
    """`copy` is the memory's speed in GB/s."""
    table = Table(title=f"quantize, bfloat16; a copy on the device: {copy:.0f} GB/s")
    for name in ("tokens", "heads", "dim", "options"):
        table.add_column(name)
    columns = ("µs", "GB/s", "of the copy's", "negation µs", "plain JAX µs", "faster")
    for name in columns:
        table.add_column(name, justify="right")
    for x in results:
        case = x.case
        table.add_row(
            *map(str, (case.tokens, case.heads, case.dim)), x.options,
            f"{x.kernel * 1e6:.1f}", f"{x.gb_per_second:.0f}",
            f"{x.gb_per_second / copy:.2f}", f"{x.negation * 1e6:.1f}",
            f"{x.plain * 1e6:.1f}", f"{x.plain / x.kernel:.1f}",
        )  # fmt: skip
    return table
