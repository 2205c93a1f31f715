"""Pictures of results, drawn by matplotlib: PNG, SVG or PDF by the file's suffix.

A picture is made of panels: `Lines` over a length, `Curves` over any number, `Groups`
of bars, `Stacks` of parts. Neighbours of one kind and unit share a scale in each row, a
legend, and what a name looks like. The same results give the same file.

    plot.check(path)  # before anything is measured
    ours = plot.Line("zyfa_jax", [(2048, 610.0), (4096, 790.0)])
    other = plot.Line("another", [(2048, 580.0), (4096, 640.0)], peer=True)
    plot.save(path, "the device", [plot.Lines("causal", "TFLOP/s", [ours, other])])
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure
    from numpy.typing import ArrayLike

# Okabe and Ito's colours, which colour-blind readers tell apart. A name's place in its
# legend decides its colour: what the package itself does goes first.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
    "#999999",
)  # fmt: skip
MARKERS = "osD^vPX"
COLUMNS = 2
PANEL_INCHES = 4.9, 3.1
BAR_INCHES = 0.27
LEGEND_INCHES = 0.25  # a row
LEGEND_LETTERS = 13  # for each inch
SMALLEST_LABEL = 5.0  # %
RC = {
    "svg.hashsalt": "zyfa",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": "medium",
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.06,
    "savefig.dpi": 150,
}


@dataclasses.dataclass(frozen=True)
class Look:
    """What a name looks like in its legend and its panels."""

    colour: str
    marker: str

    @classmethod
    def of(cls, i: int) -> Look:
        n = len(COLOURS)
        return cls(COLOURS[i % n], MARKERS[(i + i // n) % len(MARKERS)])

    @property
    def dark(self) -> bool:
        red, green, blue = (int(self.colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.3 * red + 0.59 * green + 0.11 * blue < 128


@dataclasses.dataclass(frozen=True)
class Line:
    """One method over a length.

    Attributes:
      name: in the legend.
      points: (length, value).
      band: (length, lowest, highest); nothing where the value is known.
      peer: drawn dashed: what the package is compared with.
    """

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    peer: bool = False


@dataclasses.dataclass(frozen=True)
class Lines:
    """A panel of lines over a length in tokens, or a number, one for each method.

    Attributes:
      title: above it, such as "bfloat16 128/128, causal".
      unit: of the values, such as "TFLOP/s".
      lines: in the legend's order.
      level: a value to be compared with: a thin line across.
      from_zero: whether the scale starts there; ratios are seen better otherwise.
      over: what the lines are over.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    level: float | None = None
    from_zero: bool = True
    over: str = "tokens"

    @property
    def names(self) -> list[str]:
        return [line.name for line in self.lines]

    def draw(self, axes: Axes, looks: Mapping[str, Look]) -> None:
        for line in self.lines:
            look = looks[line.name]
            x, y = zip(*line.points, strict=True) if line.points else ((), ())
            axes.plot(
                x,
                y,
                color=look.colour,
                marker=look.marker,
                markersize=4,
                markerfacecolor="white" if line.peer else look.colour,
                linestyle="--" if line.peer else "-",
                linewidth=1.2 if line.peer else 2,
                label=line.name,
            )
            if line.band:
                x, low, high = zip(*line.band, strict=True)
                axes.fill_between(x, low, high, color=look.colour, alpha=0.15, lw=0)
        if self.level is not None:
            axes.axhline(self.level, color="black", linewidth=0.8)
        lengths = sorted({x for line in self.lines for x, _ in line.points})
        if lengths:  # matplotlib has no logarithms of nothing
            axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [_tokens(x) for x in lengths])
        axes.set_xlabel(self.over)
        axes.grid(axis="y")


@dataclasses.dataclass(frozen=True)
class Curves:
    """A panel of functions, close points joined.

    Attributes:
      title: above it.
      unit: of the values.
      over: what they are a function of.
      curves: name -> (x, y).
      log: a logarithmic scale of the values.
    """

    title: str
    unit: str
    over: str
    curves: Mapping[str, tuple[ArrayLike, ArrayLike]]
    log: bool = False

    @property
    def names(self) -> list[str]:
        return list(self.curves)

    def draw(self, axes: Axes, looks: Mapping[str, Look]) -> None:
        for name, (x, y) in self.curves.items():
            axes.plot(x, y, color=looks[name].colour, linewidth=1.5, label=name)
        if self.log:
            axes.set_yscale("log")
        axes.set_xlabel(self.over)
        axes.margins(x=0)
        axes.grid()


@dataclasses.dataclass(frozen=True)
class Groups:
    """A panel of bars side by side: for each group, one for each method.

    Attributes:
      title: above it.
      unit: of the values, such as "relative error".
      groups: group -> method -> value.
      limits: group -> the most that a value should be: a tick across its bars.
      log: a logarithmic scale.
    """

    title: str
    unit: str
    groups: Mapping[str, Mapping[str, float]]
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    log: bool = False

    @property
    def names(self) -> list[str]:
        return [name for bars in self.groups.values() for name in bars]

    def draw(self, axes: Axes, looks: Mapping[str, Look]) -> None:
        methods = [name for name in looks if name in self.names]
        width = 0.84 / max(len(methods), 1)
        for i, method in enumerate(methods):
            at = [n - 0.42 + (i + 0.5) * width for n in range(len(self.groups))]
            heights = [bars.get(method, math.nan) for bars in self.groups.values()]
            colour = looks[method].colour
            axes.bar(at, heights, 0.9 * width, color=colour, label=method)
        for n, group in enumerate(self.groups):
            if group in self.limits:
                limit = self.limits[group]
                axes.hlines(limit, n - 0.45, n + 0.45, color="black", linewidth=1.2)
        axes.set_xticks(range(len(self.groups)), list(self.groups))
        axes.tick_params(axis="x", length=0)
        if self.log and methods:
            from matplotlib import ticker

            axes.set_yscale("log")
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(ticker.NullLocator())
            axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(axis="y")


@dataclasses.dataclass(frozen=True)
class Stacks:
    """A panel of horizontal bars, one for each name, made up of parts.

    Attributes:
      title: above it.
      unit: of the parts, such as "% of the cycles".
      parts: name -> part -> value.
    """

    title: str
    unit: str
    parts: Mapping[str, Mapping[str, float]]

    @property
    def names(self) -> list[str]:
        return [part for parts in self.parts.values() for part in parts]

    def draw(self, axes: Axes, looks: Mapping[str, Look]) -> None:
        rows = list(self.parts)
        left = [0.0] * len(rows)
        longest = max((sum(x.values()) for x in self.parts.values()), default=0.0)
        for part, look in looks.items():
            if part not in self.names:
                continue
            widths = [self.parts[row].get(part, 0.0) for row in rows]
            bars = axes.barh(
                rows, widths, 0.75, left, color=look.colour, label=part, lw=0
            )
            labels = [
                f"{w:.0f}" if 100 * w >= SMALLEST_LABEL * longest else ""
                for w in widths
            ]
            axes.bar_label(
                bars,
                labels,
                label_type="center",
                fontsize="small",
                color="white" if look.dark else "black",
            )
            left = [x + w for x, w in zip(left, widths, strict=True)]
        axes.set_xlim(0, longest or None)
        axes.set_ylim(len(rows) - 0.4, -0.6)  # the first on top
        axes.tick_params(axis="y", length=0)


Panel = Lines | Curves | Groups | Stacks


def check(path: Path) -> None:
    """Says before anything is measured that there can be no picture.

    Raises:
      SystemExit: matplotlib is missing, or does not write such files.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit('a picture needs matplotlib: pip install ".[bench]"') from None
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise SystemExit(
            f"pictures are files named .png, .svg or .pdf, got {path.name}"
        )


def save(path: Path, title: str, panels: Sequence[Panel], note: str = "") -> None:
    """Draws the panels in rows of two, from the left and downwards.

    Args:
      path: its suffix says what kind of file.
      title: above all.
      panels: those beside each other with the same unit share a legend.
      note: in small type below all: what bands and marks mean.

    Raises:
      SystemExit: as `check`.
    """
    check(path)
    from matplotlib import style
    from matplotlib.figure import Figure

    sections = [
        _Section(list(group))
        for _, group in itertools.groupby(panels, lambda x: (type(x), x.unit))
    ]
    width = max((x.width for x in sections), default=PANEL_INCHES[0])
    heights = [x.height(width) for x in sections]
    with style.context(["default", RC]):
        figure = Figure((width, sum(heights) + 0.6), layout="constrained")
        figure.suptitle(title)
        if note:
            figure.supxlabel(note, fontsize="small", color="#555555")
        parts = figure.subfigures(len(sections), squeeze=False, height_ratios=heights)
        for section, part in zip(sections, parts[:, 0], strict=True):
            section.draw(part, width)
        dated = {".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix.lower())
        figure.savefig(path, metadata={dated: None} if dated else None)


@dataclasses.dataclass(frozen=True)
class _Section:
    """Panels of one kind and unit."""

    panels: list[Panel]

    @property
    def columns(self) -> int:
        return min(COLUMNS, len(self.panels))

    @property
    def width(self) -> float:
        return PANEL_INCHES[0] * max(self.columns, 1.3)

    @property
    def looks(self) -> dict[str, Look]:
        names = dict.fromkeys(name for panel in self.panels for name in panel.names)
        return {name: Look.of(i) for i, name in enumerate(names)}

    def height(self, width: float) -> float:
        rows = (
            BAR_INCHES * max(len(x.parts) for x in row if isinstance(x, Stacks)) + 0.8
            if isinstance(row[0], Stacks)
            else PANEL_INCHES[1]
            for row in self._rows()
        )
        names = math.ceil(len(self.looks) / self._legend_columns(width))
        return sum(rows) + LEGEND_INCHES * names

    def draw(self, figure: SubFigure, width: float) -> None:
        looks, rows = self.looks, list(self._rows())
        stacks = isinstance(self.panels[0], Stacks)
        grid: Any = figure.subplots(
            len(rows), self.columns, squeeze=False, sharey=False if stacks else "row"
        )
        handles = {}
        for row, of_row in zip(rows, grid, strict=True):
            for axes in of_row[len(row) :]:
                axes.remove()
            for panel, axes in zip(row, of_row, strict=False):
                panel.draw(axes, looks)
                axes.set_title(panel.title)
                if stacks:
                    axes.set_xlabel(panel.unit)
                elif panel is row[0]:
                    axes.set_ylabel(panel.unit)
                drawn, names = axes.get_legend_handles_labels()
                handles = dict(zip(names, drawn, strict=True)) | handles
            if any(isinstance(x, Lines) and x.from_zero for x in row):
                of_row[0].set_ylim(bottom=0)  # now that the row's values are known
        names = [name for name in looks if name in handles]
        if names:
            figure.legend(
                [handles[name] for name in names],
                names,
                loc="outside lower center",
                ncols=self._legend_columns(width),
            )

    def _rows(self) -> Iterator[list[Panel]]:
        for i in range(0, len(self.panels), self.columns):
            yield self.panels[i : i + self.columns]

    def _legend_columns(self, width: float) -> int:
        names = self.looks
        longest = max(map(len, names), default=0) + 6
        return max(1, min(len(names), int(LEGEND_LETTERS * width // longest)))


def _tokens(x: float) -> str:
    return f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"
