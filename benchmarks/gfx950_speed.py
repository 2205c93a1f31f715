"""Predicted speed of the kernels for gfx950, by the cycle model of tools/gfx950/timing.

No time of a gfx950 was measured: docs/gfx950_timing.md says what the model knows, what
it was calibrated on, and what it leaves out. `python -m benchmarks.gfx950_speed
--sensitivity` shows what each unresolved constant alone would change.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from tools.gfx950 import Kernel
    from tools.gfx950.timing import whole

HEADS = 64
LENGTHS = (2048, 4096, 16384, 32768)
KERNELS = ("fp8_128x128", "fp8_192x128", "bf16_128x128", "bf16_192x128")
PREFIX = "zyfa_attention_"
BAR = 20


def show(console: Console, found: dict[str, Kernel]) -> None:
    from tools.gfx950.timing import constants, whole

    kernels = {
        name: whole.Traced(found[PREFIX + name])
        for name in KERNELS
        if PREFIX + name in found
    }
    sets = {
        "nominal": constants.nominal(),
        "favourable": constants.favourable(),
        "unfavourable": constants.unfavourable(),
    }
    console.print(_calibration(sets))
    console.print(_shares(kernels, sets))
    console.print(_parts(kernels, sets["nominal"]))


def share(
    kernel: whole.Traced,
    c: whole.Constants,
    tokens: int,
    random: bool = False,
    causal: bool = True,
) -> float:
    """Of the dense peak measured, for one batch entry of `HEADS` heads."""
    from tools.gfx950.timing import whole

    factor, _ = whole.calibrate(c)
    work = kernel.work(tokens, HEADS, causal)
    rescaling = kernel.rescaling(c, work) if random else None
    speed = whole.tflops(kernel.cost(c, causal=causal), work, c, rescaling)
    return factor * speed / kernel.peak(c)


def public_share(
    number: int, c: whole.Constants, tokens: int, causal: bool = True
) -> float:
    """The same of a public kernel."""
    from tools.gfx950.timing import whole

    factor, found = whole.calibrate(c)
    kernel, cost = found[number].kernel, found[number].cost
    work = whole.Work(tokens, HEADS, kernel.head_dim, kernel.keys, causal)
    peak = c.dense_fp8_tflops if kernel.fp8 else c.dense_bf16_tflops
    return factor * whole.tflops(cost, work, c) / peak


def _calibration(sets: dict[str, whole.Constants]) -> Table:
    from tools.gfx950.timing import whole

    table = Table(title="Calibration: TFLOP/s, model x factor")
    table.add_column("public kernel", no_wrap=True)
    table.add_column("published", justify="right")
    found = {name: whole.calibrate(c) for name, c in sets.items()}
    for name, (factor, _) in found.items():
        table.add_column(f"{name} (x {factor:.2f})", justify="right")
    for i, one in enumerate(found["nominal"][1]):
        low, high = one.kernel.published
        published = f"{low:.0f}" if low == high else f"{low:.0f}-{high:.0f}"
        cells = []
        for factor, kernels in found.values():
            value = factor * kernels[i].modelled
            cells.append(f"{value:.0f} ({value / one.published - 1:+.0%})")
        table.add_row(one.kernel.name, published, *cells)
    return table


def _shares(
    kernels: dict[str, whole.Traced], sets: dict[str, whole.Constants]
) -> Table:
    from tools.gfx950.timing import whole

    title = f"% of peak, causal, {HEADS} heads: model x factor (and its range)"
    table = Table(title=title)
    table.add_column("kernel", no_wrap=True)
    table.add_column("maximum", no_wrap=True)
    for tokens in LENGTHS:
        table.add_column(f"{tokens // 1024}k", justify="right")
    for i, public in enumerate(whole.PUBLIC):
        cells = []
        for tokens in LENGTHS:
            values = [public_share(i, c, tokens) for c in sets.values()]
            cells.append(_range(values))
        table.add_row(public.name, "", *cells)
    table.add_section()
    for name, kernel in kernels.items():
        for random in (False, True):
            cells = []
            for tokens in LENGTHS:
                values = [share(kernel, c, tokens, random) for c in sets.values()]
                cells.append(_range(values))
            label = "random" if random else "stays"
            table.add_row("" if random else name, label, *cells)
    return table


def _range(values: list[float]) -> str:
    low, high = (f"{100 * x:.0f}" for x in (min(values), max(values)))
    return f"{100 * values[0]:.0f} ({low}-{high})"


def _parts(kernels: dict[str, whole.Traced], c: whole.Constants) -> Table:
    from tools.gfx950.timing import compute_unit, whole

    names = ", ".join(compute_unit.CATEGORIES)
    title = f"Cycles of a full tile, two waves; % in {names}"
    table = Table(title=title)
    table.add_column("kernel", no_wrap=True)
    for name in ("cycles", "%"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    costs = {x.kernel.name: x.cost for x in whole.calibrate(c)[1]}
    costs |= {name: kernel.cost(c) for name, kernel in kernels.items()}
    for name, cost in costs.items():
        parts = [cost.parts[x] / cost.tile for x in compute_unit.CATEGORIES]
        percents = " ".join(f"{100 * x:2.0f}" for x in parts)
        table.add_row(name, f"{cost.tile:.0f}", percents, bar(parts))
    return table


def bar(parts: list[float]) -> str:
    """One letter for each of the parts: matrix, vector, LDS, memory, barrier, issue."""
    text = "".join(
        letter * round(BAR * part) for letter, part in zip("#vlmb.", parts, strict=True)
    )
    return text[:BAR].ljust(BAR)


def sensitivity(found: dict[str, Kernel]) -> Table:
    """What each unresolved constant alone does to the share of peak at 16k."""
    from tools.gfx950.timing import constants, whole

    kernels = {name: whole.Traced(found[PREFIX + name]) for name in KERNELS[::2]}
    table = Table("constant", "value", title="Share of peak at 16k, calibrated anew")
    table.add_column("factor", justify="right")
    table.add_column("worst public kernel", justify="right")
    for name in kernels:
        table.add_column(name, justify="right")
    cases: list[tuple[str, str, whole.Constants]] = [
        ("nominal", "", constants.nominal())
    ]
    for name, ends in constants.RANGES.items():
        for value in dict.fromkeys(ends):
            if value != getattr(constants.nominal(), name):
                c = dataclasses.replace(constants.nominal(), **{name: value})
                cases.append((name, f"{value:g}", c))
    for name, value, c in cases:
        factor, public = whole.calibrate(c)
        off = [factor * x.modelled / x.published - 1 for x in public]
        worst = max(off, key=abs)
        shares = (f"{share(kernel, c, 16384):.1%}" for kernel in kernels.values())
        table.add_row(name, value, f"{factor:.2f}", f"{worst:+.0%}", *shares)
    return table


def main() -> None:
    from . import gfx950

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sensitivity", action="store_true", help="each constant")
    parser.add_argument("--code-object", help="a file, instead of the extension's")
    args = parser.parse_args()
    if args.code_object:
        from pathlib import Path

        from tools.gfx950 import CodeObject

        found = CodeObject(Path(args.code_object).read_bytes()).kernels
    else:
        found = gfx950.kernels()
    console = Console()
    if args.sensitivity:
        console.print(sensitivity(found))
    else:
        show(console, found)


if __name__ == "__main__":
    main()
