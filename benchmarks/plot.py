"""Pictures of results, drawn by matplotlib: PNG, SVG or PDF by the file's suffix.

A picture is a row of panels: `Lines` over a length, or `Stacks` of shares. The same
results give the same file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which colour-blind readers tell apart; the package's own
# results come first, in the darkest.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
)  # fmt: skip
MARKERS = "osD^vPX"
PANEL_INCHES = 5.2, 3.9


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
    """A panel of lines over a length in tokens."""

    title: str
    unit: str
    lines: Sequence[Line]

    def draw(self, axes: Any) -> None:
        for i, line in enumerate(self.lines):
            colour = COLOURS[i % len(COLOURS)]
            axes.plot(
                *zip(*line.points, strict=True),
                color=colour,
                marker=MARKERS[i % len(MARKERS)],
                markersize=4,
                linestyle="--" if line.peer else "-",
                label=line.name,
            )
            if line.band:
                axes.fill_between(
                    *zip(*line.band, strict=True), color=colour, alpha=0.15, lw=0
                )
        lengths = sorted({x for line in self.lines for x, _ in line.points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [_tokens(x) for x in lengths])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens")
        axes.set_ylabel(self.unit)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize="small")


@dataclasses.dataclass(frozen=True)
class Stacks:
    """A panel of bars, one for each name, made up of parts."""

    title: str
    unit: str
    parts: Mapping[str, Mapping[str, float]]

    def draw(self, axes: Any) -> None:
        names = list(self.parts)[::-1]
        kinds = dict.fromkeys(kind for parts in self.parts.values() for kind in parts)
        left = [0.0] * len(names)
        for i, kind in enumerate(kinds):
            widths = [self.parts[name].get(kind, 0.0) for name in names]
            axes.barh(names, widths, left=left, color=COLOURS[i], label=kind)
            left = [x + w for x, w in zip(left, widths, strict=True)]
        axes.set_xlabel(self.unit)
        axes.legend(fontsize="small", ncols=3, loc="lower center",
                    bbox_to_anchor=(0.5, 1.0))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Groups:
    """A panel of bars side by side: for each group, one for each method."""

    title: str
    unit: str
    groups: Mapping[str, Mapping[str, float]]

    def draw(self, axes: Any) -> None:
        methods = list(dict.fromkeys(m for bars in self.groups.values() for m in bars))
        width = 0.8 / len(methods)
        for i, method in enumerate(methods):
            at = [n + (i - (len(methods) - 1) / 2) * width
                  for n in range(len(self.groups))]  # fmt: skip
            heights = [bars.get(method, float("nan")) for bars in self.groups.values()]
            axes.bar(at, heights, width, color=COLOURS[i % len(COLOURS)], label=method)
        axes.set_xticks(range(len(self.groups)), self.groups)
        axes.set_ylabel(self.unit)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.legend(fontsize="small")


Panel = Lines | Stacks | Groups


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


def save(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Draws the panels beside each other."""
    import matplotlib
    from matplotlib.figure import Figure

    check(path)
    width, height = PANEL_INCHES
    with matplotlib.rc_context({"svg.hashsalt": "zyfa", "axes.spines.top": False,
                                "axes.spines.right": False}):  # fmt: skip
        figure = Figure((width * len(panels), height), layout="constrained")
        figure.suptitle(title)
        for axes, panel in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            panel.draw(axes)
            axes.set_title(panel.title, fontsize="medium",
                           pad=34 if isinstance(panel, Stacks) else 6)  # fmt: skip
        dated = {".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix.lower())
        figure.savefig(path, dpi=150, metadata={dated: None} if dated else None)


def _tokens(x: float) -> str:
    return f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"
