"""Predicted speed of the kernels for gfx950, by the cycle model of tools/gfx950/timing.

No time of a gfx950 was measured: docs/gfx950_timing.md says what the model knows, what
it was calibrated on, and what it leaves out. `python -m benchmarks.gfx950_speed
--sensitivity` shows what each unresolved constant alone would change; `--samples 100`,
the range over constants under which public kernels come out as published.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from . import plot

if TYPE_CHECKING:
    from tools.gfx950 import Kernel
    from tools.gfx950.timing import whole

Track = Callable[[Sequence[Callable[[], "Share"]]], Iterable[Callable[[], "Share"]]]

HEADS = 64
LENGTHS = (2048, 4096, 16384, 32768)
KERNELS = (
    *("fp8_128x128", "fp8_192x128"),
    *("int8_128x128", "int8_192x128"),
    *("bf16_128x128", "bf16_192x128"),
)
PREFIX = "zyfa_attention_"
BAR = 20
# Constants are believed that put public kernels where they were published: with a
# factor that can be a clock, or what the model leaves out, and none far off.
FACTORS = (0.8, 1.0)
MOST_OFF = 0.12
NOTE = (
    f"One batch entry, {HEADS} heads. zyfa_jax: standard normal logits; bands: all "
    "unresolved constants favourable to all unfavourable, each calibrated anew."
)


@dataclasses.dataclass(frozen=True)
class Share:
    """Of the dense peak measured, at some lengths.

    Attributes:
      kernel: of the package, or a public one.
      peak: whose: "FP8" or "BF16".
      logits: whether a tile moves a maximum: "stays", "random"; "" for public ones.
      causal: half of the square counts.
      values: (tokens, nominal, lowest, highest).
    """

    kernel: str
    peak: str
    logits: str
    causal: bool
    values: tuple[tuple[int, float, float, float], ...]

    def line(self) -> plot.Line:
        """In %, with its range if it is the package's."""
        return plot.Line(
            label(self.kernel),
            [(n, 100 * value) for n, value, _, _ in self.values],
            [(n, 100 * a, 100 * b) for n, _, a, b in self.values if self.logits],
            peer=not self.logits,
        )


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Everything that the cycle model says of the kernels.

    Attributes:
      factors: by which published speeds exceed the model's, for each set of constants.
      calibration: (public kernel, published TFLOP/s, the model's with each factor).
      shares: of kernels of the package and of public ones.
      parts: where the cycles of a full tile go, by kernel; and how many there are.
    """

    factors: dict[str, float]
    calibration: list[tuple[str, tuple[float, float], list[float]]]
    shares: list[Share]
    parts: dict[str, tuple[float, dict[str, float]]]

    @classmethod
    def of(cls, found: dict[str, Kernel], track: Track = iter) -> Prediction:
        """Of the kernels found; `track` is handed the list of what takes long."""
        from tools.gfx950.timing import whole

        sets = constant_sets()
        calibrated = {name: whole.calibrate(c) for name, c in sets.items()}
        calibration = [
            (
                x.kernel.name,
                x.kernel.published,
                [f * kernels[i].modelled for f, kernels in calibrated.values()],
            )
            for i, x in enumerate(calibrated["nominal"][1])
        ]
        kernels = traced(found)
        pending: list[Callable[[], Share]] = []
        for causal in (True, False):
            for public in whole.PUBLIC:
                at = functools.partial(public_share, public)
                pending.append(
                    functools.partial(_share, public.name, public.fp8, "", causal, at)
                )
            for name, kernel in kernels.items():
                for logits in ("stays", "random"):
                    at = functools.partial(
                        share, kernel, random_logits=logits == "random"
                    )
                    pending.append(
                        functools.partial(_share, name, kernel.fp8, logits, causal, at)
                    )
        shares = [step() for step in track(pending)]
        costs = {x.kernel.name: x.cost for x in calibrated["nominal"][1]}
        costs |= {
            name: kernel.cost(sets["nominal"]) for name, kernel in kernels.items()
        }
        return cls(
            {name: factor for name, (factor, _) in calibrated.items()},
            calibration,
            shares,
            {
                name: (cost.tile, {k: v / cost.tile for k, v in cost.parts.items()})
                for name, cost in costs.items()
            },
        )

    def show(self, console: Console) -> None:
        console.print(self._calibration())
        for causal in (True, False):
            console.print(self._shares(causal))
        console.print(self._parts())

    def picture(self) -> list[plot.Panel]:
        """Shares of each peak, causal and not, over where a tile's cycles go."""
        panels: list[plot.Panel] = []
        for peak, causal in itertools.product(("FP8", "BF16"), (True, False)):
            lines = [
                x.line()
                for x in self.shares
                if (x.peak, x.causal) == (peak, causal) and x.logits != "stays"
            ]
            lines.sort(key=lambda line: line.peer)
            title = f"{peak}, {'causal' if causal else 'no mask'}"
            panels.append(plot.Lines(title, f"% of dense {peak} peak", lines))
        cycles = {
            label(name): {kind: 100 * x for kind, x in parts.items()}
            for name, (_, parts) in sorted(
                self.parts.items(), key=lambda item: item[0] not in KERNELS
            )
        }
        title = "Where the cycles of a full tile go, two waves a SIMD"
        panels.append(plot.Stacks(title, "% of the tile's cycles", cycles))
        return panels

    def _calibration(self) -> Table:
        table = Table(title="Calibration: TFLOP/s, model x factor")
        table.add_column("public kernel", no_wrap=True)
        table.add_column("published", justify="right")
        for name, factor in self.factors.items():
            table.add_column(f"{name} (x {factor:.2f})", justify="right")
        for name, (low, high), values in self.calibration:
            middle = math.sqrt(low * high)
            published = f"{low:.0f}" if low == high else f"{low:.0f}-{high:.0f}"
            cells = (f"{x:.0f} ({x / middle - 1:+.0%})" for x in values)
            table.add_row(name, published, *cells)
        return table

    def _shares(self, causal: bool) -> Table:
        mask = "causal" if causal else "no mask"
        title = f"% of peak, {mask}, {HEADS} heads: model x factor (and its range)"
        table = Table(title=title)
        table.add_column("kernel", no_wrap=True)
        table.add_column("maximum", no_wrap=True)
        for tokens in LENGTHS:
            table.add_column(f"{tokens // 1024}k", justify="right")
        for x in self.shares:
            if x.causal == causal:
                cells = (
                    f"{100 * value:.0f} ({100 * low:.0f}-{100 * high:.0f})"
                    for _, value, low, high in x.values
                )
                table.add_row(x.kernel, x.logits, *cells)
        return table

    def _parts(self) -> Table:
        names = ", ".join(next(iter(self.parts.values()))[1])
        table = Table(title=f"Cycles of a full tile, two waves; % in {names}")
        table.add_column("kernel", no_wrap=True)
        for name in ("cycles", "%"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for name, (cycles, parts) in self.parts.items():
            percents = " ".join(f"{100 * x:2.0f}" for x in parts.values())
            table.add_row(name, f"{cycles:.0f}", percents, bar(list(parts.values())))
        return table


def constant_sets() -> dict[str, whole.Constants]:
    from tools.gfx950.timing import constants

    return {
        "nominal": constants.nominal(),
        "favourable": constants.favourable(),
        "unfavourable": constants.unfavourable(),
    }


def traced(found: dict[str, Kernel]) -> dict[str, whole.Traced]:
    from tools.gfx950.timing import whole

    return {
        name: whole.Traced(found[PREFIX + name])
        for name in KERNELS
        if PREFIX + name in found
    }


def label(kernel: str) -> str:
    """What a picture calls a kernel of the package, fp8_192x128, or a public one."""
    if kernel not in KERNELS:
        return kernel
    kind, dims = kernel.split("_")
    return f"zyfa_jax {kind.upper()} {dims.replace('x', '/')}"


def _share(
    kernel: str, fp8: bool, logits: str, causal: bool, at: Callable[..., float]
) -> Share:
    values = []
    for tokens in LENGTHS:
        x = [at(c=c, tokens=tokens, causal=causal) for c in constant_sets().values()]
        values.append((tokens, x[0], min(x), max(x)))
    peak = "FP8" if fp8 else "BF16"
    return Share(kernel, peak, logits, causal, tuple(values))


def share(
    kernel: whole.Traced,
    c: whole.Constants,
    tokens: int,
    random_logits: bool = False,
    causal: bool = True,
) -> float:
    """Of the dense peak measured, for one batch entry of `HEADS` heads."""
    work = kernel.work(tokens, HEADS, causal)
    return speed(kernel, c, work, random_logits) / kernel.peak(c)


def public_share(
    public: whole.Public, c: whole.Constants, tokens: int, causal: bool = True
) -> float:
    """The same of a public kernel."""
    peak = c.dense_fp8_tflops if public.fp8 else c.dense_bf16_tflops
    return public_speed(public, c, tokens, HEADS, causal) / peak


def speed(
    kernel: whole.Traced,
    c: whole.Constants,
    work: whole.Work,
    random_logits: bool = False,
) -> float:
    """TFLOP/s, the calibration's factor included."""
    from tools.gfx950.timing import whole

    factor, _ = whole.calibrate(c)
    rescaling = kernel.rescaling(c, work) if random_logits else None
    cost = kernel.cost(c, causal=work.causal)
    return factor * whole.tflops(cost, work, c, rescaling)


def public_speed(
    public: whole.Public, c: whole.Constants, tokens: int, heads: int, causal: bool
) -> float:
    """The same of a public kernel."""
    from tools.gfx950.timing import whole

    factor, found = whole.calibrate(c)
    [cost] = (x.cost for x in found if x.kernel == public)
    work = whole.Work(tokens, heads, public.head_dim, public.keys, causal)
    return factor * whole.tflops(cost, work, c)


def bar(parts: list[float]) -> str:
    """One letter for each of the parts: matrix, vector, LDS, memory, barrier, issue."""
    text = "".join(
        letter * round(BAR * part) for letter, part in zip("#vlmb.", parts, strict=True)
    )
    return text[:BAR].ljust(BAR)


def sensitivity(found: dict[str, Kernel]) -> Table:
    """What each unresolved constant alone does to the share of peak at 16k."""
    from tools.gfx950.timing import constants, whole

    kernels = {
        name: kernel
        for name, kernel in traced(found).items()
        if kernel.shape.head_dim == kernel.shape.value_dim
    }
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


def admitted(found: dict[str, Kernel], samples: int) -> Table:
    """Shares over sets of constants, drawn at random from their ranges, under which
    the public kernels come out as published."""
    from tools.gfx950.timing import constants, whole

    rng = random.Random(0)
    kernels = traced(found)
    shares: dict[tuple[str, int], list[float]] = {}
    sets = 0
    for _ in range(samples):
        nominal = constants.nominal()
        c = dataclasses.replace(
            nominal,
            **{
                name: rng.choice([low, getattr(nominal, name), high])
                for name, (low, high) in constants.RANGES.items()
            },
        )
        factor, public = whole.calibrate(c)
        off = [abs(factor * x.modelled / x.published - 1) for x in public]
        if not FACTORS[0] <= factor <= FACTORS[1] or max(off) > MOST_OFF:
            continue
        sets += 1
        for name, kernel in kernels.items():
            for tokens in LENGTHS[-2:]:
                x = share(kernel, c, tokens, random_logits=True)
                shares.setdefault((name, tokens), []).append(x)
    title = (
        f"{sets} of {samples} sets: factor {FACTORS[0]} to {FACTORS[1]}, "
        f"public kernels within {MOST_OFF:.0%}"
    )
    table = Table("kernel", "tokens", title=title, caption="% of peak, random logits")
    for column in ("lowest", "median", "highest"):
        table.add_column(column, justify="right")
    for (name, tokens), values in shares.items():
        x = (min(values), statistics.median(values), max(values))
        table.add_row(name, f"{tokens // 1024}k", *(f"{100 * y:.0f}" for y in x))
    return table


def main() -> None:
    from . import gfx950

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sensitivity", action="store_true", help="each constant")
    parser.add_argument(
        "--samples", type=int, help="so many sets of constants, where published fits"
    )
    parser.add_argument("--code-object", help="a file, instead of the extension's")
    args = parser.parse_args()
    if args.code_object:
        from pathlib import Path

        from tools.gfx950 import CodeObject

        found = CodeObject(Path(args.code_object).read_bytes()).kernels
    else:
        found = gfx950.kernels()
    console = Console()
    if args.samples:
        console.print(admitted(found, args.samples))
    elif args.sensitivity:
        console.print(sensitivity(found))
    else:
        Prediction.of(found).show(console)


if __name__ == "__main__":
    main()
