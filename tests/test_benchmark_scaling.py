"""`python -m benchmarks scaling`, on CPU devices."""

import argparse
import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from benchmarks import scaling
from benchmarks.__main__ import main
from benchmarks.scaling import WAYS, Problem, Result, Spread
from benchmarks.shapes import BF16, FP8, Model

QUICK = ["scaling", "--quick", "--models", "Mistral-7B"]
RING, GATHER = WAYS[-2:]
PROBLEM = Problem(Model("small", (2, 2), (16, 16)), BF16, 1, 64)
FINE = Result(
    RING, PROBLEM, 2, seconds=1.0, one_device=1.8, one_share=0.45,
    without_collectives=0.9, difference=0.001, devices_used=2,
    collectives={"collective-permute": 2},
)  # fmt: skip


@pytest.fixture(autouse=True)
def all_devices():
    """JAX has them, so that no test sets another number for those that follow."""
    assert len(jax.devices()) == 8


def test_everything_is_reported(tmp_path, capsys):
    file, picture = tmp_path / "report.json", tmp_path / "picture.svg"
    command = [*QUICK, "--devices", "2", "--json", str(file), "--picture", str(picture)]
    assert main(command) == 0
    report = json.loads(file.read_text())
    assert report["command"] == "benchmarks scaling"
    assert report["devices"] == 2
    assert len(report["peak_bytes"]) == 2
    results = report["results"]
    assert len(results) == len(WAYS) * 2  # dtypes
    for x in results:
        assert x["wrong"] == ""
        assert x["speed_up"] == pytest.approx(x["one_device_seconds"] / x["seconds"])
        assert x["predicted_speed_up"] == 1
        assert x["device_bytes"] > 0
        if x["way"] == RING.name:
            assert x["collectives"] == {"collective-permute": 2}
        elif x["way"] == GATHER.name:
            assert x["collectives"] == {"all-gather": 2}
        else:
            assert x["collectives"] == {}
            assert x["difference"] == 0
    printed = capsys.readouterr().out
    for text in ("float8_e4m3fn", "pmap, batch", "no bit", "2 collective-permute"):
        assert text in printed
    drawn = picture.read_text()
    for text in ("ring, tokens", "speed-up", "devices", "2 x cpu"):
        assert f"<!-- {text} -->" in drawn


def test_devices_that_are_not_there_are_told(capsys):
    assert main([*QUICK, "--devices", "9"]) == 2
    assert "--devices 9, but JAX sees 8" in capsys.readouterr().out


def test_tokens_that_devices_cannot_share_are_told(capsys):
    assert main(["scaling", "--devices", "3", "--tokens", "1024"]) == 2
    said = "on 3 devices it takes multiples of 12, such as 1032"
    assert f"--tokens 1024, but {said}" in capsys.readouterr().out


def test_a_number_of_devices_that_is_no_power_of_two():
    args = scaling_arguments("--devices", "3")
    [model] = [model for model, _ in scaling._kinds(args, 3)][:1]
    groups = list(scaling._groups(args, model, BF16, jax.devices()[:3]))
    assert {problem.tokens for _, problem, _ in groups} == {1032}
    # Eight key/value heads are for two of them alone.
    over = [(ways[0].over, len(some)) for ways, _, some in groups]
    assert over == [
        ("batch", 2), ("heads", 2), ("tokens", 2), ("batch", 3), ("tokens", 3),
    ]  # fmt: skip


def scaling_arguments(*arguments):
    parser = argparse.ArgumentParser()
    scaling.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"trouble": "no memory"}, "no memory"),
        ({"collectives": {"all-gather": 1}}, "unexpected all-gather"),
        ({"way": WAYS[0], "difference": 0.0}, "unexpected collective-permute"),
        ({"devices_used": 1}, "results on 1 devices"),
        ({"difference": 0.1}, "differs from one device by 0.1"),
        ({"difference": float("nan")}, "differs from one device by nan"),
        ({"way": WAYS[0], "collectives": {}}, "differs from one device by 0.001"),
    ],
)
def test_what_is_wrong_is_told(change, message):
    wrong = dataclasses.replace(FINE, **change)
    assert wrong.wrong == message
    assert list(scaling._wrongs([wrong])) == (
        [f"{wrong.way.name}, 2 devices, 64 tokens: {message}"] if message else []
    )


def test_what_figures_mean():
    assert FINE.speed_up == 1.8
    assert FINE.weak == 0.9  # two devices have twice the work each of a share alone
    assert FINE.exposed == pytest.approx(0.1)
    rows = dataclasses.replace(FINE, way=WAYS[0], one_share=0.9)
    assert rows.weak == 0.9
    long = dataclasses.replace(PROBLEM, tokens=scaling.LONG)
    assert scaling._bar(dataclasses.replace(FINE, problem=long)) == "0.900 < 0.95"
    assert scaling._bar(FINE) == ""
    assert scaling._bar(dataclasses.replace(rows, one_device=1.97)) == "0.985 >= 0.98"


@pytest.mark.parametrize("way", [RING, GATHER])
def test_collectives_are_left_out_alone(way):
    """The program without them has the same kernels, and another result."""
    mesh = Mesh(np.array(jax.devices()[:4]), (scaling.AXIS,), (AxisType.Auto,))
    spread = Spread.of(way, PROBLEM.inputs(), mesh)
    assert spread.without is not None
    without = spread.without_program.as_text()
    assert scaling.collectives(spread.program.as_text()).keys() == {way.collectives}
    assert scaling.collectives(without) == {}
    for text in (spread.program.as_text(), without):
        kernels = text.count('custom_call_target="zyfa_attention"')
        assert kernels == (4 if way is RING else 2)
    assert (np.asarray(spread.call()) != np.asarray(spread.without())).any()


def test_another_result_is_seen():
    mesh = Mesh(np.array(jax.devices()[:2]), (scaling.AXIS,), (AxisType.Auto,))
    inputs = PROBLEM.inputs()
    for way in WAYS:
        if way.over == "batch":
            continue
        spread = Spread.of(way, inputs, mesh)
        empty = Result(way, PROBLEM, 2)
        one = jax.jit(scaling.zyfa_jax.attention)(*inputs)
        assert spread.checked(empty, one).wrong == ""
        worse = one.at[0, 5].multiply(1.5)
        assert "differs" in spread.checked(empty, worse).wrong


def test_collectives_are_counted():
    text = """
      %x = (f32[2]{0}, f32[4]{0}) all-gather-start(f32[2]{0} %a), channel_id=1
      %y = f32[4]{0} all-gather-done((f32[2]{0}, f32[4]{0}) %x)
      %z = f32[4]{0} all-reduce(f32[4]{0} %y), to_apply=%sum
      %w = f32[4]{0} add(f32[4]{0} %all-reduce.1, f32[4]{0} %z)
    """
    assert scaling.collectives(text) == {"all-gather": 1, "all-reduce": 1}


def test_shares():
    problem = Problem(Model("", (8, 4), (16, 16)), FP8, 4, 64)
    assert problem.share("batch", 4).batch == 1
    assert problem.share("heads", 4).model.heads == (2, 1)
    assert problem.share("tokens", 4).tokens == 16
    assert scaling._counts(8) == [2, 4, 8]
    assert scaling._counts(6) == [2, 4, 6]
    assert scaling._counts(1) == [1]
