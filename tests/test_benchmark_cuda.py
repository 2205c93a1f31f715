"""`python -m benchmarks cuda`, on the CPU and with stand-ins for other packages."""

import json
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import zyfa_jax
from benchmarks import cuda, cuda_peers, quantize, timing
from benchmarks.__main__ import main

QUICK = ["cuda", "--quick"]
PEERS = [str(x) for x in cuda_peers.IMPLEMENTATIONS if not x.ours]
MODEL = cuda.Model("small", (2, 1), (128, 128))


@pytest.fixture
def alone(monkeypatch):
    for name in ("torch", "flash_attn3_jax"):
        monkeypatch.setitem(sys.modules, name, None)


def test_a_quick_run_reports(alone, tmp_path, capsys):
    file, picture = tmp_path / "report.json", tmp_path / "picture.svg"
    file_options = ["--json", str(file), "--picture", str(picture)]
    assert main([*QUICK, *file_options]) == 0
    printed = capsys.readouterr().out
    for text in ("timed_by: the host's clock", "192/128, causal, gauss", "of peak"):
        assert text in printed
    report = json.loads(file.read_text())
    assert report["command"] == "benchmarks cuda"
    assert report["jax"] == jax.__version__
    ours = [x for x in report["results"] if x["implementation"].startswith("zyfa_jax")]
    assert len(ours) == 6
    for result in ours:
        assert result["seconds"] > 0
        flops = 2 * 2 * 256**2 * sum(result["head_dims"]) / 2
        assert result["tflops"] == pytest.approx(flops / result["seconds"] / 1e12)
        peak = report["peaks"][result["dtype"]]
        assert result["share_of_peak"] == pytest.approx(result["tflops"] / peak)
        bounds = {"float8_e4m3fn": 0.03, "int8": 0.05, "bfloat16": 0.005}
        assert 0 < result["error"] < bounds[result["dtype"]]
    for errors in report["errors"].values():
        exact = errors["gauss"]["exact exponentials, FP8"]
        assert errors["gauss"]["zyfa_jax FP8"] == pytest.approx(exact, rel=0.2)
        assert errors["gauss"]["zyfa_jax BF16"] < 0.003
    assert "<!-- zyfa_jax FP8 -->" in picture.read_text()


def test_peers_that_are_missing_are_named(alone, capsys):
    assert main(QUICK) == 0
    printed = capsys.readouterr().out
    for name in PEERS:
        if name != "XLA BF16":
            assert f"{name}, 256 tokens: not here: " in printed


def test_quantize_is_reported(tmp_path, capsys):
    file = tmp_path / "report.json"
    assert main([*QUICK, "--quantize", "--json", str(file)]) == 0
    assert "block, rotated" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["copy_gb_per_second"] > 0
    results = {x["options"]: x for x in report["results"]}
    assert set(results) == set(quantize.ROWS)
    for name, passes in (("head", 5), ("block", 3)):
        x = results[name]
        moved = passes * 256 * 2 * 128
        assert x["gb_per_second"] == pytest.approx(moved / x["kernel"] / 1e9)
        assert x["plain"] > 0


def test_quantize_draws_no_picture(tmp_path):
    with pytest.raises(SystemExit, match="--quantize draws no picture"):
        main([*QUICK, "--quantize", "--picture", str(tmp_path / "x.svg")])


def test_without_a_gpu_it_says_so(capsys):
    assert main(["cuda"]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().out


def cudnn_attention(q, k, v, *, scale, mask_type, use_fp8=False, fp8_params=()):
    """As cuDNN's: FP8 outputs are scaled."""
    options = {}
    if use_fp8:
        fp8_params = dict(fp8_params)
        options = {f"{n}_descale": fp8_params[f"descale_{n}"][0, 0] for n in "qkv"}
    out = zyfa_jax.attention(
        q, k, v, scale=scale, causal=mask_type == "causal", out_dtype=jnp.float32,
        **options,
    )  # fmt: skip
    if not use_fp8:
        return out.astype(q.dtype)
    scale_o = dict(fp8_params)["scale_o"][0, 0, 0, 0]
    return (out * scale_o).astype(q.dtype), None, None


@pytest.fixture
def peers(monkeypatch):
    """All that are in JAX, or are called from it."""
    monkeypatch.setattr(cuda_peers, "_refuse_cpu", lambda what: None)
    attend = zyfa_jax.attention
    keys = ("descale_q", "descale_k", "descale_v", "scale_s", "descale_s", "scale_o")
    cudnn = types.SimpleNamespace(
        dot_product_attention=cudnn_attention,
        MaskType=types.SimpleNamespace(CAUSAL="causal", NO_MASK="none"),
        fp8_params_keys=keys,
    )
    pallas = types.SimpleNamespace(
        TuningConfig=types.SimpleNamespace,
        attention=lambda q, k, v, config: attend(
            q, k, v, scale=1.0, causal=config.causal
        ),
    )
    flash = types.SimpleNamespace(
        flash_mha=lambda q, k, v, is_causal: attend(q, k, v, causal=is_causal)
    )
    monkeypatch.setattr(cuda_peers, "_cudnn_attention", lambda: cudnn)
    for name, module in (
        ("jax.experimental.pallas.ops.gpu.attention_mgpu", pallas),
        ("flash_attn3_jax", flash),
        ("torch", None),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    jax_nn = jax.nn.dot_product_attention

    def dot_product_attention(q, k, v, *, is_causal, implementation):
        if implementation == "cudnn":
            return attend(q, k, v, causal=is_causal)
        return jax_nn(q, k, v, is_causal=is_causal, implementation=implementation)

    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128)])
def test_every_peer_gets_the_same_call(peers, dims):
    model = cuda.Model("small", (2, 1), dims)
    given = cuda.make_inputs(model, "gauss", 130)
    results = cuda.measure(model, "gauss", given, 1, timing.wall_seconds)
    names = {str(x.implementation) for x in results if not x.trouble}
    taken = {"zyfa_jax FP8", "zyfa_jax INT8", "zyfa_jax BF16", "cuDNN BF16"}
    if dims == (128, 128):
        taken = {str(x) for x in cuda_peers.IMPLEMENTATIONS} - {"torch cuDNN BF16"}
    assert names == taken
    for x in results:
        if not x.trouble:
            assert x.error is not None
            assert x.error < (0.005 if x.implementation.dtype == cuda.BF16 else 0.05)


def test_an_error_shows(peers, monkeypatch):
    attend = zyfa_jax.attention
    monkeypatch.setattr(
        zyfa_jax, "attention", lambda *x, **o: attend(*x, **o) * jnp.bfloat16(2)
    )
    given = cuda.make_inputs(MODEL, "gauss", 96)
    ours, *_ = cuda.measure(MODEL, "gauss", given, 1, timing.wall_seconds)
    assert ours.error is not None
    assert ours.error > 0.9


def test_our_own_trouble_is_told_and_fails(alone, monkeypatch, capsys):
    def broken(*x, **options):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(zyfa_jax, "attention", broken)
    assert main(QUICK) == 1
    assert "zyfa_jax FP8, 256 tokens: no such kernel" in capsys.readouterr().out


def result(name, dtype, tokens, seconds, model=MODEL):
    return cuda.Result(
        model,
        "gauss",
        cuda_peers.Implementation(name, dtype, cuda_peers._zyfa),
        tokens,
        seconds,
    )


def test_ratios_are_to_the_best_peer():
    results = [
        result("zyfa_jax", cuda.BF16, 16384, 2.0),
        result("cuDNN", cuda.BF16, 16384, 4.0),
        result("Pallas", cuda.BF16, 16384, 3.0),
        result("XLA", cuda.BF16, 16384, 1.0),
        result("zyfa_jax", cuda.FP8, 8192, 1.0),
        result("cuDNN", cuda.FP8, 8192, 1.0),
    ]
    assert list(cuda.ratios(results)) == [
        ("128/128", "gauss", "16384", "zyfa_jax BF16", "Pallas BF16", "1.50", "1.03")
    ]


def test_kernels_are_timed_by_cupti():
    """Durations of all kernels of the calls, in milliseconds."""
    calls = []

    class Cupti:
        def _cupti_init(self):
            calls.append("init")

        def _cupti_get_timings(self, finalize):
            assert not finalize
            return [("prepare", 1.0), ("attention", 5.0)] * (len(calls) - 1)

    seconds = timing.kernel_seconds(Cupti(), lambda: calls.append("call"), 3)
    assert seconds == pytest.approx(0.006)
    assert calls == ["init", "call", "call", "call"]


def test_calls_take_turns():
    order = []
    seconds = timing.interleaved_medians(
        {name: lambda name=name: order.append(name) for name in "ab"},
        3,
        lambda call, times: (call(), float(len(order)))[1],
        lambda: order.append("|"),
    )
    assert "".join(order).endswith("ab|ab|ab|")
    assert seconds["b"] - seconds["a"] == 1
