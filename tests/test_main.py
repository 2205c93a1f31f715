"""The command that the README begins with, and the check of every kernel."""

import itertools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _oracle import F32, FP8, FP8_TOLERANCES, TOLERANCES

import zyfa_jax
from benchmarks.shapes import MISTRAL_7B
from zyfa_jax import __main__ as command
from zyfa_jax import _check
from zyfa_jax.__main__ import main

SMALL = ["prefill", "--tokens", "192", "--repeats", "1"]


def test_prefill_prints_errors_and_times(capsys):
    assert main(SMALL) == 0
    printed = capsys.readouterr().out
    for expected in (
        "backend: cpu (cpu): kernel (",
        "192 tokens, 32 query and 8 key/value heads, head dim 128",
        "BF16",
        "FP8 kernel",
        "FP8 end to end",
        "jax.nn.dot_product_attention",
    ):
        assert expected in printed
    assert "OVER ITS BAR" not in printed


@pytest.mark.parametrize("fault", [0.99, jnp.nan])
def test_prefill_fails_on_a_wrong_output(monkeypatch, capsys, fault):
    attention = zyfa_jax.attention

    def wrong(q, k, v):
        out = attention(q, k, v)
        return out * jnp.asarray(fault, out.dtype)

    monkeypatch.setattr(zyfa_jax, "attention", wrong)
    assert main(SMALL) == 1
    assert "OVER ITS BAR" in capsys.readouterr().out


def test_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "zyfa_jax", *SMALL],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "backend: " in done.stdout


@pytest.mark.parametrize("argv", [["chekc"], ["prefill", "--tokens", "0"]])
def test_wrong_arguments_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err


CHECK = ["check", "--platform", "cpu", "--tokens", "80", "--runs", "2"]


@pytest.fixture
def few(monkeypatch):
    """Fewer head dims and situations."""
    kept = ("grouped heads", "lengths", "chunk of a prefill", "float32 output")
    situations = tuple(x for x in _check.SITUATIONS if x.name in kept)
    assert len(situations) == len(kept)
    monkeypatch.setattr(_check, "HEAD_DIMS", ((32, 64),))
    monkeypatch.setattr(_check, "SITUATIONS", situations)


def test_check_passes_and_reports(few, tmp_path, capsys):
    file = tmp_path / "report.json"
    assert main([*CHECK, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "all 20 within their bars" in printed
    assert "attention float8_e4m3fn 32/64" in printed
    report = json.loads(file.read_text())
    assert report["ok"]
    assert report["options"] == {"tokens": 80, "runs": 2, "seed": 0}
    assert report["backend"]["platform"] == "cpu"
    assert report["jax"] == jax.__version__
    assert len(report["results"]) == 20
    for result in report["results"]:
        assert result["missed"] == []
        assert 0 < result["error"] < 0.03
    with_bar = {x["kernel"] for x in report["results"] if x["error_bar"] is not None}
    assert len(with_bar) == 5


def check_with(monkeypatch, capsys, wrong):
    """What a check prints, whose results `wrong` changes."""
    attention = _check.attention
    monkeypatch.setattr(_check, "attention", lambda *x, **o: wrong(*attention(*x, **o)))
    assert main(CHECK) == 1
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda out, lse: (out * jnp.asarray(0.9, out.dtype), lse), "error over "),
        (lambda out, lse: (out.at[..., 0].set(jnp.nan), lse), "largest error over "),
        (lambda out, lse: (out, lse + 1), "error of the log-sum-exp over "),
        (
            lambda out, lse: (out, jnp.where(lse == -jnp.inf, 0, lse)),
            "log-sum-exp over",
        ),
    ],
)
def test_check_fails_on_a_wrong_result(few, monkeypatch, capsys, wrong, words):
    printed = check_with(monkeypatch, capsys, wrong)
    assert "of 20 FAILED" in printed
    assert words in printed


def test_check_fails_where_runs_differ(few, monkeypatch, capsys):
    noise = itertools.count()

    def wrong(out, lse):
        def change(x):
            return x * np.float32(1 + 1e-7 * next(noise))

        shape = jax.ShapeDtypeStruct(lse.shape, lse.dtype)
        return out, jax.pure_callback(change, shape, lse)

    assert "runs differ" in check_with(monkeypatch, capsys, wrong)


def test_check_tells_what_a_call_raises(few, monkeypatch, capsys):
    def wrong(out, lse):
        raise ValueError("no such kernel")

    printed = check_with(monkeypatch, capsys, wrong)
    assert "20 of 20 FAILED" in printed
    assert "FAILED: no such kernel" in printed


def test_check_of_a_platform_that_is_not_here(capsys):
    assert main(["check", "--platform", "cuda"]) == 1
    assert "no cuda device" in capsys.readouterr().out


def test_the_prefill_has_a_models_heads():
    assert MISTRAL_7B.heads == (command.Q_HEADS, command.KV_HEADS)
    assert MISTRAL_7B.head_dims == (command.HEAD_DIM,) * 2


def test_checks_bars_are_the_tests_own():
    fp8 = dict.fromkeys((FP8, np.dtype(np.int8)), FP8_TOLERANCES)
    assert {**TOLERANCES, **fp8} == _check.LARGEST_BARS
    assert set(_check.NORM_BARS) == set(TOLERANCES)
    assert F32 in _check.NORM_BARS
