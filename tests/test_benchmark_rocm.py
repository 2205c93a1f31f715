"""`python -m benchmarks rocm`, on the CPU and with stand-ins for other packages."""

import dataclasses
import json
import sys
import types

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

import zyfa_jax
from benchmarks import report, rocm
from benchmarks.__main__ import main
from tools.gfx950.timing import schedules

QUICK = ["rocm", "--quick"]
PREDICTOR = rocm.predictor


class Tensor:
    """What the benchmark asks of a tensor of torch's."""

    is_cuda = True

    def __init__(self, array):
        self.array = array

    def view(self, dtype):
        return Tensor(self.array.view(dtype))

    def to(self, device):
        assert device == "cuda"
        return self

    def transpose(self, a, b):
        return Tensor(self.array.swapaxes(a, b))

    def contiguous(self):
        return Tensor(np.ascontiguousarray(self.array))

    def float(self):
        return Tensor(self.array.astype(np.float32))

    def cpu(self):
        return self

    def numpy(self):
        return self.array

    def __getitem__(self, index):
        return Tensor(self.array[index])


def attend(q, k, v, causal, descales=({}, {}, {})):
    names = ("q_descale", "k_descale", "v_descale")
    given = {n: x.array[0] for n, x in zip(names, descales, strict=True) if x}
    out = zyfa_jax.attention(q.array, k.array, v.array, causal=causal, **given)
    return Tensor(np.asarray(out))


@pytest.fixture
def others(monkeypatch):
    """torch, aiter and jax_aiter; yields how often torch was waited for."""
    waits = []

    def sdpa(q, k, v, *, is_causal, enable_gqa):
        assert enable_gqa
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attend(q, k, v, is_causal).transpose(1, 2)

    def fp8(q, k, v, *descales, causal):
        return attend(q, k, v, causal, descales)

    torch = types.SimpleNamespace(
        bfloat16=ml_dtypes.bfloat16,
        float8_e4m3fn=ml_dtypes.float8_e4m3fn,
        float32=np.float32,
        from_numpy=Tensor,
        tensor=lambda x, dtype, device: Tensor(np.array(x, dtype)),
        cuda=types.SimpleNamespace(
            is_available=lambda: True, synchronize=lambda: waits.append(1)
        ),
        nn=types.SimpleNamespace(
            functional=types.SimpleNamespace(scaled_dot_product_attention=sdpa)
        ),
    )
    aiter = types.SimpleNamespace(
        flash_attn_func=lambda q, k, v, *, causal: (attend(q, k, v, causal), None),
        flash_attn_fp8_pertensor_func=fp8,
    )
    mha = types.SimpleNamespace(
        flash_attn_func=lambda q, k, v, *, causal: zyfa_jax.attention(
            q, k, v, causal=causal
        )
    )
    for name, module in (
        ("torch", torch),
        ("aiter", aiter),
        ("jax_aiter", types.SimpleNamespace(mha=mha)),
        ("jax_aiter.mha", mha),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    return waits


@pytest.fixture
def alone(monkeypatch):
    for name in ("torch", "aiter", "jax_aiter", "jax_aiter.mha"):
        monkeypatch.setitem(sys.modules, name, None)


def test_reports_every_kind(alone, tmp_path, capsys):
    file = tmp_path / "report.json"
    assert main([*QUICK, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    for text in ("float8_e4m3fn 192/128, causal", "bfloat16 128/128", "zyfa_jax"):
        assert text in printed
    report = json.loads(file.read_text())
    assert report["command"] == "benchmarks rocm"
    ours = [x for x in report["results"] if x["implementation"] == "zyfa_jax"]
    assert len(ours) == 4
    for result in ours:
        assert result["seconds"] > 0
        flops = 2 * 2 * 160**2 * sum(result["head_dims"]) / 2
        assert result["tflops"] == pytest.approx(flops / result["seconds"] / 1e12)
        assert 0 < result["error"] < (0.03 if "float8" in result["dtype"] else 0.005)
    named = {x["implementation"] for x in report["results"]}
    assert named == {"zyfa_jax", "jax.nn"}
    assert set(report["missing"]) == set(rocm.PEERS)
    for name in rocm.PEERS:
        assert f"{name} takes no part: " in printed


def test_takes_what_else_is_installed(others, tmp_path):
    file = tmp_path / "report.json"
    assert main([*QUICK, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    results = report["results"]
    assert report["missing"] == {}
    assert {x["implementation"] for x in results if x["trouble"]} == {"jax.nn"}
    errors = {}
    for x in results:
        errors.setdefault((x["dtype"], *x["head_dims"]), {})[x["implementation"]] = x[
            "error"
        ]
    assert set(errors["bfloat16", 192, 128]) == set(rocm.IMPLEMENTATIONS)
    assert set(errors["float8_e4m3fn", 128, 128]) == {"zyfa_jax", "aiter"}
    for kind in errors.values():
        known = [x for x in kind.values() if x is not None]
        assert max(known) < 1.6 * min(known)
    assert others  # torch's results were waited for


def test_calls_are_repeated_and_divided(alone, monkeypatch):
    monkeypatch.setattr(rocm, "LEAST_SECONDS", 1.0)
    case = rocm.Case("bfloat16", (128, 128), False, 64, 2, (2, 1))
    ours, jax_nn = rocm.measure(case, repeats=1)
    assert ours.seconds is not None
    assert jax_nn.seconds is not None
    assert ours.seconds < 0.1
    assert case.flops == 2 * 2 * 2 * 64**2 * 256


def test_troubles_are_told(alone, monkeypatch, capsys):
    monkeypatch.setattr(rocm, "MOST_LOGIT_BYTES", 1)
    attention = zyfa_jax.attention

    def wrong(*x, **options):
        if x[0].shape[-1] == 192:
            raise RuntimeError("no such kernel")
        return attention(*x, **options)

    monkeypatch.setattr(zyfa_jax, "attention", wrong)
    assert main(QUICK) == 1
    printed = capsys.readouterr().out
    assert "no such kernel" in printed
    assert "jax.nn would hold 0 GiB" in printed


def test_an_error_shows_in_the_report(alone, monkeypatch):
    attention = zyfa_jax.attention
    monkeypatch.setattr(
        zyfa_jax,
        "attention",
        lambda *x, **o: attention(*x, **o) * jnp.asarray(2, jnp.bfloat16),
    )
    case = rocm.Case("bfloat16", (128, 128), True, 96, 1, (2, 1))
    ours, *_ = rocm.measure(case, repeats=1, quick=True)
    assert ours.error is not None
    assert ours.error > 0.9


@pytest.fixture
def predicted(monkeypatch):
    """As on a machine with the hardware, where the model says 2 (1 to 4) TFLOP/s."""
    backends = zyfa_jax.backends

    def on_gfx950():
        return [
            dataclasses.replace(x, targets=("gfx950",)) if x.platform == "cpu" else x
            for x in backends()
        ]

    def predict(implementation, case):
        known = implementation == "zyfa_jax"
        return rocm.Prediction("a kernel", 2.0, 1.0, 4.0) if known else None

    monkeypatch.setattr(zyfa_jax, "backends", on_gfx950)
    monkeypatch.setattr(rocm, "predictor", lambda: predict)


def test_the_cycle_model_stands_beside(alone, predicted, tmp_path, capsys):
    file, picture = tmp_path / "report.json", tmp_path / "picture.svg"
    assert main([*QUICK, "--json", str(file), "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "Measured / cycle model" in printed
    assert "2 (1-4)" in printed
    report = json.loads(file.read_text())
    means = report["measured_over_predicted"]["zyfa_jax"]
    for x in report["results"]:
        if x["implementation"] != "zyfa_jax":
            assert x["predicted"] is None
            continue
        values = {"tflops": 2.0, "lowest": 1.0, "highest": 4.0}
        assert x["predicted"] == {"kernel": "a kernel", **values}
        ratio = x["measured_over_predicted"]
        assert ratio == x["tflops"] / 2
        qk, v = x["head_dims"]
        assert means[f"{x['dtype']} {qk}/{v}, causal"] == pytest.approx(ratio)
    drawn = picture.read_text()
    for text in (
        *("cycle model", "zyfa_jax", "bfloat16 192/128, causal", "TFLOP/s"),
        "measured / cycle model",
    ):
        assert f"<!-- {text} -->" in drawn


def test_differences_by_kernel_and_length():
    def result(tokens, tflops, causal=True, implementation="zyfa_jax"):
        case = rocm.Case("bfloat16", (128, 128), causal, tokens, 1, (2, 1))
        seconds = case.flops / tflops / 1e12
        prediction = rocm.Prediction("x", 100.0, 90.0, 120.0)
        return rocm.Result(case, implementation, seconds, 0.0, prediction=prediction)

    results = [
        result(2048, 50.0),
        result(4096, 110.0),
        result(4096, 120.01, causal=False),
        result(4096, 90.1, implementation="aiter"),
        dataclasses.replace(result(2048, 1.0, implementation="torch"), prediction=None),
    ]
    causal, no_mask = "bfloat16 128/128, causal", "bfloat16 128/128, no mask"
    assert rocm._mean_differences(results) == {
        "zyfa_jax": {
            causal: pytest.approx((0.5 * 1.1) ** 0.5),
            no_mask: pytest.approx(1.2001),
        },
        "aiter": {causal: pytest.approx(0.901)},
    }
    columns = [list(x.cells) for x in rocm._differences(results).columns]
    assert columns == [
        ["zyfa_jax", "zyfa_jax", "aiter"],
        [causal, no_mask, causal],
        ["0.50*", "", ""],
        ["1.10 ", "1.20*", "0.90 "],
        ["0.74", "1.20", "0.90"],
    ]


def test_a_report_of_what_was_done_outlives_a_failure(alone, monkeypatch, tmp_path):
    file = tmp_path / "report.json"
    table = rocm._table

    def fail_second(results, targets):
        if results[0].case.head_dims == (192, 128):
            raise KeyboardInterrupt
        return table(results, targets)

    monkeypatch.setattr(rocm, "_table", fail_second)
    with pytest.raises(KeyboardInterrupt):
        main([*QUICK, "--json", str(file)])
    [ours] = json.loads(file.read_text())["results"]
    assert ours["head_dims"] == [128, 128]


def test_without_a_checkout_nothing_is_predicted(alone, predicted, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tools.gfx950.timing", None)
    monkeypatch.setattr(rocm, "predictor", PREDICTOR)
    assert main(QUICK) == 0
    printed = capsys.readouterr().out
    assert "predictions need a checkout" in printed
    assert "easured / " not in printed


@pytest.mark.slow
def test_the_cycle_model_predicts_these_shapes():
    predict = rocm.predictor()
    assert predict is not None
    case = rocm.Case("bfloat16", (128, 128), True, 4096, 8, (32, 8))
    for dtype, peak in rocm.PEAKS.items():
        for causal in (True, False):
            same = dataclasses.replace(case, dtype=dtype, causal=causal)
            ours, aiters = predict("zyfa_jax", same), predict("aiter", same)
            assert ours is not None
            assert aiters is not None
            assert 0.3 * peak < ours.lowest <= ours.tflops <= ours.highest < peak
            assert aiters.kernel.startswith("AITER")
            assert aiters.tflops < ours.tflops
    assert predict("torch", case) is None
    assert predict("zyfa_jax", dataclasses.replace(case, tokens=160)) is None
    assert predict("zyfa_jax", dataclasses.replace(case, head_dims=(64, 64))) is None


def test_the_models_kernels_of_aiters_are_there():
    assert set(rocm.AITER_KERNELS.values()) <= {x.name for x in schedules.PUBLIC}


def test_a_peer_that_fails_to_start_takes_no_part(monkeypatch):
    def fail(name):
        raise RuntimeError("no [such] driver\nmore")

    monkeypatch.setattr(report.importlib, "import_module", fail)
    console = Console(record=True, width=80)
    assert report.missing({"aiter": "aiter"}, console) == {"aiter": "no [such] driver"}
    assert "aiter takes no part: no [such] driver" in console.export_text()
