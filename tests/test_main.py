"""The command that the README begins with."""

import subprocess
import sys

import jax.numpy as jnp
import pytest

import zyfa_jax
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
