"""What `python -m benchmarks gfx950` prints, draws and reports, of made-up figures."""

import json

import pytest

from benchmarks import gfx950, gfx950_speed, report
from benchmarks.__main__ import main


def shares(kernel, peak, logits, scale):
    return [
        gfx950_speed.Share(
            kernel,
            peak,
            logits,
            causal,
            tuple((n, scale, 0.5 * scale, 1.5 * scale) for n in gfx950_speed.LENGTHS),
        )
        for causal in (True, False)
    ]


@pytest.fixture
def made_up(monkeypatch):
    prediction = gfx950_speed.Prediction(
        {"nominal": 0.9, "favourable": 0.7},
        [("another FP8", (2000.0, 2000.0), [1900.0, 2100.0])],
        [
            *shares("another FP8", "FP8", "", 0.4),
            *shares("fp8_128x128", "FP8", "stays", 0.7),
            *shares("fp8_128x128", "FP8", "random", 0.6),
            *shares("bf16_192x128", "BF16", "random", 0.5),
        ],
        {
            name: (3000.0, dict.fromkeys(("matrix", "vector", *"abcd"), 1 / 6))
            for name in ("another FP8", "fp8_128x128")
        },
    )
    monkeypatch.setattr(gfx950, "kernels", dict)
    monkeypatch.setattr(gfx950_speed.Prediction, "of", lambda *_: prediction)
    return prediction


def test_everything_is_reported(made_up, tmp_path, capsys):
    file, picture = tmp_path / "report.json", tmp_path / "picture.svg"
    assert main(["gfx950", "--json", str(file), "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    for text in ("another FP8", "1900 (-5%)", "no mask", "60 (30-90)"):
        assert text in printed
    found = json.loads(file.read_text())
    assert found["format"] == report.FORMAT
    assert found["command"] == "benchmarks gfx950"
    assert {"options", "jax", "device", "zyfa_jax", "resources"} <= set(found)
    assert found["tiles"][gfx950.AITER]["instructions"]["matrix"] == 16
    assert found["prediction"]["shares"][-1]["values"][0] == [2048, 0.5, 0.25, 0.75]
    drawn = picture.read_text()
    for text in (
        *("FP8, causal", "FP8, no mask", "BF16, causal", "% of dense BF16 peak"),
        *("zyfa_jax FP8 128/128", "zyfa_jax BF16 192/128", "another FP8", "17"),
    ):
        assert f"<!-- {text} -->" in drawn, text


def test_the_packages_own_come_first_and_have_ranges(made_up):
    causal, no_mask, bf16, _, cycles = made_up.picture()
    ours, other = causal.lines
    assert (ours.name, ours.peer) == ("zyfa_jax FP8 128/128", False)
    assert ours.points[0] == (2048, 60)
    assert ours.band[0] == (2048, 30, pytest.approx(90))
    assert (other.name, other.peer, other.band) == ("another FP8", True, [])
    assert no_mask.unit == causal.unit != bf16.unit
    assert list(cycles.parts) == ["zyfa_jax FP8 128/128", "another FP8"]


def test_what_cannot_be_written_is_told_at_once(made_up, tmp_path, monkeypatch):
    monkeypatch.setattr(gfx950, "kernels", pytest.fail)
    missing = tmp_path / "missing" / "report.json"
    with pytest.raises(SystemExit, match=r"no folder .*missing for report\.json"):
        main(["gfx950", "--json", str(missing)])
    with pytest.raises(SystemExit, match=r"got picture\.txt"):
        main(["gfx950", "--picture", str(tmp_path / "picture.txt")])
