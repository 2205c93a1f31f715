"""The arithmetic of attention over devices on paper."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks import scaling_model as model
from benchmarks.scaling_model import H200, MI355X
from benchmarks.shapes import BF16, DEEPSEEK_V2_LITE, FP8, MISTRAL_7B
from zyfa_jax import _parallel_ring

EVERY = pytest.mark.parametrize(
    ("machine", "heads", "dtype"),
    [
        (machine, heads, dtype)
        for machine in model.MACHINES
        for heads in (MISTRAL_7B, DEEPSEEK_V2_LITE)
        for dtype in (BF16, FP8)
    ],
)


def test_a_step_by_hand():
    x = model.step(H200, MISTRAL_7B, BF16, 16384)
    k = jnp.empty((16384, 8, 128), jnp.bfloat16)
    assert x.sent_bytes == 2 * k.nbytes
    assert x.transfer == pytest.approx(67.1e6 / 360e9, rel=1e-3)
    # Half of the square, two products of 128, two FLOP each.
    assert x.compute == pytest.approx(16384**2 / 2 * 32 * 256 * 2 / 752e12)
    assert model.step(H200, MISTRAL_7B, FP8, 16384).sent_bytes == k.nbytes
    slow = model.step(H200, MISTRAL_7B, BF16, 16384, across_nodes=True)
    assert slow.transfer == pytest.approx(9 * x.transfer)


def test_rates_of_the_h200_are_those_of_its_report():
    file = Path(model.__file__).parent / "results/h200.json"
    measured = {
        (x["dtype"], x["head_dims"][0]): x["tflops"]
        for x in json.loads(file.read_text())["results"]
        if (x["tokens"], x["inputs"]) == (16384, "gauss")
        and x["implementation"].startswith("zyfa_jax")
    }
    assert {key: round(rate) for key, rate in measured.items()} == H200.tflops


@EVERY
@pytest.mark.parametrize("across_nodes", [False, True])
def test_steps_hide_from_the_crossing_on(machine, heads, dtype, across_nodes):
    tokens = model.crossing(machine, heads, dtype, across_nodes)
    args = machine, heads, dtype
    assert model.step(*args, int(tokens) + 1, across_nodes).hidden
    assert not model.step(*args, int(tokens) - 1, across_nodes).hidden


@EVERY
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_speed_up(machine, heads, dtype, method):
    args = machine, heads, dtype
    for devices in (2, 8):
        gains = [
            model.speed_up(*args, tokens, devices, method)
            for tokens in (2**14, 2**17, 2**20, 2**24)
        ]
        assert gains == sorted(gains)
        assert 0.99 * devices < gains[-1] < devices
    assert model.speed_up(*args, 2**14, 1, method) == 1
    one = model.speed_up(*args, 2**17, 8, method)
    faster = dataclasses.replace(machine, link=10 * machine.link)
    assert model.speed_up(faster, heads, dtype, 2**17, 8, method) >= one


def test_merging_counts_what_the_ring_does():
    assert model.MERGED_AT_ONCE == _parallel_ring._MERGED_AT_ONCE
    numbers = 64 * 32 * 128
    assert model.merged_bytes(MISTRAL_7B, 64, 1) == 0
    # Read two, write one.
    assert model.merged_bytes(MISTRAL_7B, 64, 2) == numbers * (2 + 2 + 2)
    # Three to one in float32, which with two more gives the last.
    assert model.merged_bytes(MISTRAL_7B, 64, 5) == numbers * (
        3 * 2 + 4 + 4 + 2 * 2 + 2
    )


def test_machines_are_found_by_their_names():
    assert model.machine_of("NVIDIA H200") is H200
    assert model.machine_of("AMD Instinct MI355X") is MI355X
    assert model.machine_of("cpu") is None


def test_the_tables_are_printed(capsys, tmp_path):
    picture = tmp_path / "picture.svg"
    model.main(["--picture", str(picture)])
    for text in ("MI355X, BF16", "DeepSeek-V2-Lite, all-gather", "speed-up"):
        assert f"<!-- {text} -->" in picture.read_text()
    printed = capsys.readouterr().out
    assert " 1044 " in printed  # tokens from which Mistral-7B hides on H200s, BF16
    assert "Speed-up on 8 GPUs" in printed
