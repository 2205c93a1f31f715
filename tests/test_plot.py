"""Pictures of the benchmarks."""

import sys

import pytest

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
    plot.Stacks("cycles", "%", {"a tile": {"matrix": 70.0, "vector": 30.0}}),
    plot.Groups("errors", "relative", {"gauss": {"ours": 0.1}, "sink": {"theirs": 1}}),
]


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_the_same_results_give_the_same_file(tmp_path, suffix):
    files = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for file in files:
        plot.save(file, "all", PANELS)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_size > 5000


def test_everything_is_named(tmp_path):
    file = tmp_path / "picture.svg"
    plot.save(file, "all", PANELS)
    drawn = file.read_text()
    for text in (
        *("all", "speed", "TFLOP/s", "ours", "theirs", "tokens", "1k", "2k", "512"),
        *("cycles", "a tile", "matrix", "vector", "errors", "gauss", "sink"),
    ):
        assert f"<!-- {text} -->" in drawn, text


def test_an_unknown_suffix_is_told(tmp_path):
    with pytest.raises(SystemExit, match=r"\.png, \.svg or \.pdf, got x\.json"):
        plot.check(tmp_path / "x.json")


def test_the_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="pip install"):
        plot.check(tmp_path / "x.png")
