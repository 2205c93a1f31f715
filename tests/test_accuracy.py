"""The kernel's error on each family, and the accuracy benchmark's own parts."""

import argparse
import json

import numpy as np
import pytest

from benchmarks import accuracy, families


def arguments(*words):
    parser = argparse.ArgumentParser()
    accuracy.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("dims", accuracy.HEAD_DIMS, ids=str)
@pytest.mark.parametrize("name", families.NAMES)
def test_the_kernel_is_as_good_as_its_model(name, dims):
    case = accuracy.Case(name, *families.make(name, 500, qk_dim=dims[0], v_dim=dims[1]))
    errors = accuracy.kernel_errors(case)
    for code in ("linear", "quadratic"):
        kernel, model = errors[f"kernel, {code}"], errors[f"exp-free, {code}"]
        np.testing.assert_allclose(kernel, model, rtol=0.01)
    assert (errors["kernel, quadratic"] < errors[accuracy.AITER]).all()
    # Beside a sink the other keys of few tokens are e4m3's least numbers.
    if name == "sink":
        assert (errors["kernel"] < errors[accuracy.AITER] / 5).all()
    else:
        assert (errors["kernel"] <= 1.2 * errors[accuracy.BASELINE]).all()


def test_a_missed_bar_is_told():
    errors = {
        "gauss": {accuracy.BASELINE: np.array([0.02, 0.02])},
        "sink": {accuracy.BASELINE: np.array([0.002, 0.002])},
    }
    accuracy.add_bar(errors, 128, 8192)
    np.testing.assert_allclose(errors["gauss"][accuracy.BAR], 0.024)
    np.testing.assert_allclose(errors["sink"][accuracy.BAR], [0.0024, 0.0015])
    errors["gauss"]["kernel"] = np.array([0.023, np.nan])
    errors["sink"]["kernel"] = np.array([0.0023, 0.0016])
    assert [line.partition(":")[0] for line in accuracy.missed(errors)] == [
        "gauss, last 64 rows",
        "sink, last 64 rows",
    ]


def test_sink_has_a_bar_at_long_contexts_only(capsys):
    words = ("--tokens", "128", "--seeds", "1", "--families")
    assert accuracy.run(arguments(*words, "sink", "gauss")) == 0
    printed = capsys.readouterr().out
    [*_, bar] = (line for line in printed.splitlines() if accuracy.BAR in line)
    sink, gauss = (cell.strip() for cell in bar.split("│")[2:4])
    assert sink == "-"
    assert 0 < float(gauss) < 0.1
    assert "sink is held to its bar from 8192 tokens on" in printed
    assert accuracy.run(arguments(*words, "gauss")) == 0
    assert "from 8192 tokens" not in capsys.readouterr().out


def test_the_command_prints_draws_and_reports(tmp_path, capsys):
    file, picture = tmp_path / "report.json", tmp_path / "picture.svg"
    status = accuracy.run(
        arguments(
            *("--tokens", "128", "--seeds", "1", "--families", "gauss", "local"),
            *("--json", str(file), "--picture", str(picture)),
        )
    )
    printed = capsys.readouterr().out
    assert status == 0
    options = [accuracy.BFLOAT16, *(name for name, *_ in accuracy.OPTIONS)]
    options += [*accuracy.TOGETHER.values(), *accuracy.FOLDED]
    for row in (*accuracy.KERNELS, accuracy.AITER, *options):
        assert row in printed
    report = json.loads(file.read_text())
    assert report["options"]["tokens"] == 128
    assert len(report["kernel_errors"]) == len(accuracy.HEAD_DIMS)
    errors = report["kernel_errors"]["128 tokens, head dim 192/128"]["local"]
    assert set(errors) >= {*accuracy.KERNELS, *accuracy.MODELS.values(), accuracy.BAR}
    assert list(errors["kernel"]) == list(accuracy.ROWS)
    assert 0 < errors["kernel"]["all rows"] < errors[accuracy.BAR]["all rows"]
    [by_options] = report["option_errors"].values()
    assert list(by_options["gauss"]) == options
    drawn = picture.read_text()
    pictured = *accuracy.PICTURED, *accuracy.PICTURED_OPTIONS
    for text in (*pictured, "gauss", "end-to-end error"):
        assert f"<!-- {text} -->" in drawn


def test_saved_cases(tmp_path, capsys):
    saved = {}
    for layer, seed in (("2", 0), ("10", 1)):
        made = families.make("gauss", 96, q_heads=2, qk_dim=64, v_dim=64, seed=seed)
        saved |= {f"{x}_{layer}": y for x, y in zip("qkv", made, strict=True)}
    saved |= {"scale_10": np.float32(0.25), "window_10": np.int64(63)}
    path = tmp_path / "cases.npz"
    np.savez(path, **saved)

    first, second = accuracy.load_cases(path)
    assert (first.name, first.scale, first.window) == ("layer 2", None, None)
    assert (second.name, second.scale, second.window) == ("layer 10", 0.25, 63)
    np.testing.assert_array_equal(second.k, saved["k_10"])

    picture = tmp_path / "picture.svg"
    assert accuracy.run(arguments("--cases", str(path), "--picture", str(picture))) == 0
    assert "layer 10" in capsys.readouterr().out
    assert "<!-- cases.npz, last 64 rows -->" in picture.read_text()


def test_a_file_without_cases_is_refused(tmp_path):
    path = tmp_path / "other.npz"
    np.savez(path, weights=np.zeros(3))
    with pytest.raises(
        ValueError, match=r"no array named q_<layer>, only \['weights'\]"
    ):
        list(accuracy.load_cases(path))
