"""What `python -m benchmarks cpu` draws and reports, of made-up times."""

import json
import sys

import jax
import pytest

from benchmarks import cpu
from benchmarks.__main__ import main


@pytest.fixture
def milliseconds(monkeypatch):
    """Calls that take so long, in a process that is left as it was."""

    def medians(calls, repeats, *, after_round):
        return {name: 0.05 if "jax" in name else 0.002 for name in calls}

    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(cpu, "interleaved_medians", medians)
    monkeypatch.setattr(cpu, "_keep_to_cores", lambda cores: cores)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)


def test_everything_is_reported(milliseconds, tmp_path, capsys):
    file, picture = tmp_path / "report.json", tmp_path / "picture.svg"
    command = ["cpu", "--tokens", "64", "128"]
    assert main([*command, "--json", str(file), "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert " 25.00 " in printed
    assert "torch takes no part: " in printed
    report = json.loads(file.read_text())
    assert report["command"] == "benchmarks cpu"
    assert report["options"]["tokens"] == [64, 128]
    assert report["device"] == "cpu"
    assert "2 cores" in report["cpu"]
    assert list(report["missing"]) == ["torch"]
    first, *_, last = report["results"]
    assert first == {
        "tokens": 64,
        "implementation": "zyfa bfloat16",
        "seconds": 0.002,
        "gflops": pytest.approx(4 * 8 * 128 * 64**2 / 2 / 0.002 / 1e9),
    }
    assert last["implementation"] == "jax.nn bfloat16"
    assert len(report["results"]) == 2 * 9
    drawn = picture.read_text()
    for text in ("zyfa bfloat16", "jax.nn bfloat16", "GFLOP/s", "128"):
        assert f"<!-- {text} -->" in drawn
    assert "with quantize" in printed
    assert "with quantize" not in drawn
