"""Pictures of the benchmarks."""

import sys
from typing import Any

import matplotlib
import pytest
from matplotlib.figure import Figure

from benchmarks import plot

PANELS = [
    plot.Lines(
        "speed",
        "TFLOP/s",
        [
            plot.Line("ours", [(1024, 1.0), (2048, 2.0)], [(1024, 0.5, 1.5)]),
            plot.Line("theirs", [(1024, 1.5), (512, 0.5)], peer=True),
        ],
    ),
    plot.Lines("no time", "TFLOP/s", [plot.Line("theirs", [], peer=True)], level=1),
    plot.Lines("nothing", "TFLOP/s", []),
    plot.Curves("function", "value", "a number", {"square": ([0, 1, 2], [0, 1, 4])}),
    plot.Stacks("cycles", "%", {"a tile": {"matrix": 70.0, "vector": 30.0}}),
    plot.Groups(
        "errors",
        "relative",
        {"gauss": {"mine": 0.1, "other": 0.2}, "sink": {"other": 1}},
        {"gauss": 0.15},
        log=True,
    ),
]


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_the_same_results_give_the_same_file(tmp_path, suffix):
    files = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for file in files:
        plot.save(file, "all", PANELS[:1])
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_size > 5000


def test_everything_is_named(tmp_path):
    file = tmp_path / "picture.svg"
    plot.save(file, "all", PANELS, "in brackets")
    drawn = file.read_text()
    for text in (
        *("all", "speed", "no time", "ours", "theirs", "tokens", "1k", "2k", "512"),
        *("cycles", "a tile", "matrix", "vector", "70", "30", "gauss", "sink", "0.5"),
        *("mine", "other", "in brackets", "function", "square", "a number", "value"),
    ):
        assert f"<!-- {text} -->" in drawn, text
    # Panels of one unit share a legend and the name of their scale.
    assert drawn.count("<!-- theirs -->") == 1
    assert drawn.count("<!-- TFLOP/s -->") == 2  # once for each of two rows


def test_a_name_keeps_its_colour():
    lines = [plot.Line(name, [(1, 1.0)]) for name in "abc"]
    section = plot._Section(
        [plot.Lines("", "", lines[:2]), plot.Lines("", "", lines[::-1])]
    )
    assert list(section.looks) == ["a", "b", "c"]
    many = [plot.Look.of(i) for i in range(50)]
    assert len(set(many)) == len(many)
    figure = Figure()
    for panel, axes in zip(section.panels, figure.subplots(1, 2), strict=True):
        panel.draw(axes, section.looks)
        for line in axes.get_lines():
            assert line.get_color() == section.looks[str(line.get_label())].colour


@pytest.mark.parametrize("from_zero", [True, False])
def test_a_row_has_one_scale_that_holds_all_of_it(from_zero):
    low, high = (
        plot.Lines("", "", [plot.Line("a", [(1, x), (2, x + 1)])], from_zero=from_zero)
        for x in (1.0, 9.0)
    )
    figure: Any = Figure()
    plot._Section([low, high]).draw(figure.subfigures(), 10)
    first, second = (axes.get_ylim() for axes in figure.get_axes())
    assert first == second
    assert first[1] >= 10
    assert first[0] == 0 if from_zero else 0 < first[0] <= 1


def test_bars_stand_at_their_groups():
    axes: Any = Figure().subplots()
    panel = PANELS[-1]
    panel.draw(axes, {name: plot.Look.of(i) for i, name in enumerate(panel.names)})
    at = {(round(x.get_x() + x.get_width() / 2), x.get_height()) for x in axes.patches}
    assert {(0, 0.1), (0, 0.2), (1, 1)} <= at
    assert not {x for _, x in at} & {0.0}  # none where there is no value


def test_the_readers_own_style_changes_nothing(tmp_path):
    plain, styled = tmp_path / "plain.svg", tmp_path / "styled.svg"
    plot.save(plain, "all", PANELS)
    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 9}):
        plot.save(styled, "all", PANELS)
    assert styled.read_bytes() == plain.read_bytes()


def test_an_unknown_suffix_is_told(tmp_path):
    with pytest.raises(SystemExit, match=r"\.png, \.svg or \.pdf, got x\.json"):
        plot.check(tmp_path / "x.json")


def test_the_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="pip install"):
        plot.check(tmp_path / "x.png")
