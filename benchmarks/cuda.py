"""Speed of causal prefill on a Hopper GPU beside cuDNN, FlashAttention-3, Pallas, XLA.

Batch 1, the heads of Mistral-7B and Qwen3-8B (32 query and 8 key/value heads, head dim
128) and of DeepSeek-V2-Lite (16 heads, 192/128). FP8 and bfloat16 kernels take turns,
call by call, since the card throttles by power: only what is measured in one process
compares. Times are the sum of the durations of a call's kernels, as CUPTI gives them;
medians. TFLOP/s count half of the score square. FP8 inputs have one descale for a
tensor. Errors are relative, against float64 on the same inputs, of the last queries of
the first head.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import zyfa_jax
from zyfa_jax import _check, reference

from . import families, plot, quantize, report, rocm
from .rocm import Case, Given
from .shapes import DEEPSEEK_V2_LITE, MISTRAL_7B, QWEN3_8B, Model

if TYPE_CHECKING:
    from jaxtyping import Float64

FP8, BF16 = "float8_e4m3fn", "bfloat16"
TOKENS = (2048, 4096, 8192, 16384, 32768)
INPUTS = ("gauss", "sink")
ERROR_TOKENS = 8192
# Dense TFLOP/s of an H100 or H200 (SXM) by their data sheets.
PEAKS = {FP8: 1978.9, BF16: 989.4}
# XLA's own holds them in float32, more than once.
MOST_LOGIT_BYTES = 12 << 30
PACKAGES = (
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "torch",
    "flash-attn3-jax",
)
LEAST_SECONDS = 0.003
"""Calls are repeated back to back to take that long together."""
FP8_MAX = 448.0
SPEED_QUERIES, ERROR_QUERIES = 64, 512
"""Whose errors are taken: float64 is slow."""


# One line of results for two models of one shape.
MODELS = (
    dataclasses.replace(MISTRAL_7B, name=f"{MISTRAL_7B.name}, {QWEN3_8B.name}"),
    DEEPSEEK_V2_LITE,
)

Call = Callable[[], Any]
Timer = Callable[[Call, int], float]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A call on inputs that lie on the device.

    Attributes:
      call: gives the output, not awaited.
      out_scale: what the output is multiplied with.
    """

    call: Call
    out_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One kernel, or another's.

    Attributes:
      name: of whoever made it.
      dtype: of q, k and v.
      prepare: raises ImportError where there is no such thing here.
    """

    name: str
    dtype: str
    prepare: Callable[[Case, Given], Prepared]

    def __str__(self) -> str:
        return f"{self.name} {'FP8' if self.dtype == FP8 else 'BF16'}"

    @property
    def ours(self) -> bool:
        return self.name == "zyfa_jax"


@dataclasses.dataclass(frozen=True)
class Result:
    """One implementation on one shape; `trouble` says why there are no numbers."""

    model: Model
    inputs: str
    implementation: Implementation
    tokens: int
    seconds: float | None = None
    error: float | None = None
    trouble: str = ""

    @property
    def case(self) -> Case:
        return _case(self.model, self.implementation.dtype, self.tokens)

    @property
    def tflops(self) -> float | None:
        return None if self.seconds is None else self.case.flops / self.seconds / 1e12

    @property
    def share(self) -> float | None:
        peak = PEAKS[self.implementation.dtype]
        return None if self.tflops is None else self.tflops / peak

    def as_json(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self.case),
            "model": self.model.name,
            "inputs": self.inputs,
            "implementation": str(self.implementation),
            "seconds": self.seconds,
            "tflops": self.tflops,
            "share_of_peak": self.share,
            "error": self.error,
            "trouble": self.trouble,
        }


@dataclasses.dataclass(frozen=True)
class Bar:
    """How many times as fast as the best of some peers an own kernel should be."""

    head_dims: tuple[tuple[int, int], ...]
    dtype: str
    tokens: tuple[int, ...]
    peers: tuple[str, ...]
    ratio: float


D128, MLA = MODELS[0].head_dims, MODELS[1].head_dims
BARS = (
    Bar((D128,), FP8, (4096, 16384, 32768), ("cuDNN FP8",), 1.3),
    Bar((MLA,), FP8, (16384,), ("cuDNN BF16",), 2.1),
    Bar(
        (D128, MLA),
        BF16,
        (16384, 32768),
        ("cuDNN BF16", "torch cuDNN BF16", "FlashAttention-3 BF16", "Pallas BF16"),
        1.03,
    ),
    Bar((D128,), BF16, (4096,), ("FlashAttention-3 BF16",), 1.0),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=report.positive, nargs="+", default=TOKENS)
    parser.add_argument(
        "--inputs", nargs="+", choices=families.NAMES, default=INPUTS, metavar="FAMILY"
    )
    parser.add_argument("--repeats", type=report.positive, default=15)
    parser.add_argument(
        "--error-tokens",
        type=int,
        default=ERROR_TOKENS,
        help="length at which errors of all families are taken; 0: none",
    )
    report.add_arguments(parser)
    parser.add_argument(
        "--quantize",
        action="store_true",
        help="in place of attention: quantize beside plain JAX and the memory's speed",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="256 tokens of two heads, one repeat: only shows it runs, anywhere",
    )


def run(args: argparse.Namespace) -> int:
    report.check(args)
    # Torch takes its memory from the same card.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    [device, *_] = jax.devices()
    platform = rocm._platform_of(device)
    if platform != "cuda" and not args.quick:
        print(f"this needs an NVIDIA GPU that JAX sees, got {device.device_kind}")
        return 2
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    timer, timed_by = device_timer(platform)
    environment = {**_environment(), "timed_by": timed_by}
    for name, value in (_check.environment(device) | environment).items():
        console.print(f"{name}: {value}", highlight=False)
    [backend] = (x for x in zyfa_jax.backends() if x.platform == platform)
    console.print(f"zyfa_jax {zyfa_jax.__version__}: {backend.detail}", highlight=False)

    if args.quantize:
        return _run_quantize(args, device, environment, timer, console)
    results = []
    for model, inputs in _kinds(args):
        measured = _measure_kind(model, inputs, args, timer, console)
        console.print(_heading(model, inputs), style="bold", highlight=False)
        console.print(_speed_table(measured))
        for line in _missing(measured):
            console.print(line, highlight=False, markup=False)
        results += measured
    if not args.quick:
        console.print(_bars_table(results))
    errors = _all_errors(args, console)
    for model, of_model in errors.items():
        console.print(_error_table(model, of_model))

    report.write(
        "cuda",
        args,
        device,
        **environment,
        backend=dataclasses.asdict(backend),
        peaks=PEAKS,
        results=[result.as_json() for result in results],
        errors=errors,
    )
    if args.picture is not None:
        plot.save(args.picture, device.device_kind, _panels(results))
    return 1 if any(x.implementation.ours and x.trouble for x in results) else 0


def _run_quantize(
    args: argparse.Namespace,
    device: Any,
    environment: dict[str, Any],
    timer: Timer,
    console: Console,
) -> int:
    cases, repeats, copied = quantize.CASES, args.repeats, 1 << 30
    if args.quick:
        cases, repeats, copied = (quantize.Case(256, 2, 128),), 1, 1 << 16
    copy = quantize.copy_gb_per_second(_wall_seconds, copied)
    results = []
    for case in cases:
        for name, options in quantize.OPTIONS.items():
            calls = quantize.prepare(case, options)
            seconds = interleaved_medians(calls, repeats, timer, lambda: None)
            results.append(quantize.Result(case, name, **seconds))
    console.print(quantize.table(results, copy))
    report.write(
        "cuda --quantize",
        args,
        device,
        **environment,
        copy_gb_per_second=copy,
        results=[result.as_json() for result in results],
    )
    return 0


def _kinds(args: argparse.Namespace) -> Iterator[tuple[Model, str]]:
    for model in MODELS:
        if args.quick:
            model = dataclasses.replace(model, heads=(2, 1))
        for inputs in ("gauss",) if args.quick else args.inputs:
            yield model, inputs


def _environment() -> dict[str, Any]:
    """Versions of what is compared, and of the driver."""
    environment: dict[str, Any] = {}
    for name in PACKAGES:
        try:
            environment[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    wanted = "driver_version,power.limit,clocks.max.sm"
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return environment
    values = said.splitlines()[0].split(", ")
    return environment | dict(zip(wanted.split(","), values, strict=True))


# ---- Time


def device_timer(platform: str) -> tuple[Timer, str]:
    """What takes the seconds of each of several calls back to back, and its name."""
    if platform == "cuda":
        try:
            cupti = importlib.import_module("jax._src.lib.mosaic_gpu")._mosaic_gpu_ext
            timer = functools.partial(_kernel_seconds, cupti)
            x = jnp.ones(1024)
            jax.block_until_ready(x + 1)
            if timer(lambda: x + 1, 2) > 0:
                return timer, "CUPTI, kernels alone"
        except Exception:  # another profiler may hold it
            pass
    return _wall_seconds, "the host's clock"


def _kernel_seconds(cupti: Any, call: Call, times: int) -> float:
    cupti._cupti_init()
    try:
        jax.block_until_ready([call() for _ in range(times)])
    finally:
        kernels = cupti._cupti_get_timings(False)
    return sum(ms for _, ms in kernels) / 1e3 / times


def _wall_seconds(call: Call, times: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready([call() for _ in range(times)])
    return (time.perf_counter() - start) / times


def interleaved_medians(
    calls: Mapping[Any, Call], repeats: int, timer: Timer, after_round: Call
) -> dict[Any, float]:
    """Median seconds of each call; the calls take turns, the first round is untimed."""
    times = {}
    for key, call in calls.items():
        jax.block_until_ready(call())
        once = max(_wall_seconds(call, 1), 1e-6)
        times[key] = min(max(round(LEAST_SECONDS / once), 1), 50)
    seconds: dict[Any, list[float]] = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            seconds[key].append(timer(call, times[key]))
        after_round()
    return {key: statistics.median(x) for key, x in seconds.items()}


# ---- Shapes


def _case(model: Model, dtype: str, tokens: int) -> Case:
    return Case(dtype, model.head_dims, True, tokens, 1, model.heads)


def _measure_kind(
    model: Model, inputs: str, args: argparse.Namespace, timer: Timer, console: Console
) -> list[Result]:
    tokens, repeats = ([256], 1) if args.quick else (args.tokens, args.repeats)
    longest = make_inputs(model, inputs, max(tokens))
    results = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(
            f"{model.name}, {inputs}", total=len(tokens) * (repeats + 1)
        )
        advance = functools.partial(progress.advance, task)
        for n in tokens:
            given = {dtype: _first(x, n) for dtype, x in longest.items()}
            results += measure(model, inputs, given, repeats, timer, advance)
            advance()
    return results


def make_inputs(model: Model, family: str, tokens: int) -> dict[str, Given]:
    """Of a batch of one, by dtype; the beginning of it serves for fewer tokens."""
    heads, kv_heads = model.heads
    qk, v = model.head_dims
    arrays = families.make(
        family, tokens, q_heads=heads, kv_heads=kv_heads, qk_dim=qk, v_dim=v
    )
    arrays = [x[None] for x in arrays]
    descales = tuple(float(np.float32(np.abs(x).max() / FP8_MAX)) for x in arrays)
    scaled = (x / np.float32(d) for x, d in zip(arrays, descales, strict=True))
    return {
        FP8: Given(tuple(_rounded(x, FP8) for x in scaled), descales),
        BF16: Given(tuple(_rounded(x, BF16) for x in arrays), (1.0,) * 3),
    }


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """On JAX's device, which is quicker."""
    return np.array(jnp.asarray(x).astype(dtype))


def _first(given: Given, tokens: int) -> Given:
    return Given(tuple(x[:, :tokens] for x in given.arrays), given.descales)


def measure(
    model: Model,
    inputs: str,
    given: Mapping[str, Given],
    repeats: int,
    timer: Timer,
    after_round: Call = lambda: None,
) -> list[Result]:
    """Every implementation on one shape."""
    tokens = given[BF16].arrays[0].shape[1]
    calls, errors, troubles = {}, {}, {}
    for dtype, of_dtype in given.items():
        case = _case(model, dtype, tokens)
        exact = _exact(case, of_dtype, SPEED_QUERIES)
        for x in IMPLEMENTATIONS:
            if x.dtype == dtype:
                try:
                    calls[x], errors[x] = _prepared(x, case, of_dtype, exact)
                except Exception as error:  # of whatever kind another package raises
                    troubles[x] = _text(error)
    seconds = interleaved_medians(calls, repeats, timer, after_round)
    return [
        Result(model, inputs, x, tokens, seconds[x], errors[x])
        if x in seconds
        else Result(model, inputs, x, tokens, trouble=troubles[x])
        for x in IMPLEMENTATIONS
    ]


def _prepared(
    implementation: Implementation, case: Case, given: Given, exact: np.ndarray
) -> tuple[Call, float]:
    """The call, and its error."""
    prepared = implementation.prepare(case, given)
    return prepared.call, _error(prepared.call(), prepared.out_scale, exact)


def _text(error: Exception) -> str:
    if isinstance(error, ImportError):
        return f"not here: {error}".splitlines()[0]
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _exact(case: Case, given: Given, queries: int) -> Float64[np.ndarray, "b t h d"]:
    """Attention of the last queries of the first head in float64."""
    out, _ = reference.attention(*_checked(given, queries), **_options(case, given))
    return out


def _checked(given: Given, queries: int) -> tuple[np.ndarray, ...]:
    q, k, v = given.arrays
    return q[:1, -queries:, :1], k[:1, :, :1], v[:1, :, :1]


def _options(case: Case, given: Given) -> dict[str, Any]:
    return {"causal": case.causal, **rocm._descales(case, given)}


def _error(out: Any, scale: float, exact: np.ndarray) -> float:
    checked = out[:1, -exact.shape[1] :, :1]
    if isinstance(checked, jax.Array):
        checked = np.asarray(checked)
    else:  # a tensor of torch's
        checked = checked.float().cpu().numpy()
    return _relative(checked.astype(np.float64) * scale, exact)


def _relative(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


# ---- Errors of every family

Errors = dict[str, dict[str, dict[str, float]]]
"""By model, family and method."""


def _all_errors(args: argparse.Namespace, console: Console) -> Errors:
    tokens = 256 if args.quick else args.error_tokens
    if not tokens:
        return {}
    names = families.NAMES[:1] if args.quick else families.NAMES
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("errors", total=len(MODELS) * len(names))
        errors: Errors = {}
        for model in MODELS:
            small = dataclasses.replace(model, heads=(2, 1))
            of_model = errors.setdefault(model.name, {})
            for family in names:
                of_model[family] = family_errors(small, family, tokens)
                progress.advance(task)
    return errors


def family_errors(model: Model, family: str, tokens: int) -> dict[str, float]:
    """Of what takes the shape, and of FP8 probabilities by exact exponentials."""
    queries = min(ERROR_QUERIES, tokens)
    errors = {}
    for dtype, given in make_inputs(model, family, tokens).items():
        case = _case(model, dtype, tokens)
        exact = _exact(case, given, queries)
        for x in IMPLEMENTATIONS:
            if x.dtype == dtype:
                try:
                    _, errors[str(x)] = _prepared(x, case, given, exact)
                except Exception:  # told with the speeds
                    continue
        if dtype == FP8:
            rounded, _ = reference.fp8_attention(
                *_checked(given, queries),
                probabilities="exact row",
                **_options(case, given),
            )
            errors["exact exponentials, FP8"] = _relative(rounded, exact)
    return errors


# ---- Implementations


def _on_device(given: Given) -> tuple[jax.Array, ...]:
    return tuple(map(jnp.asarray, given.arrays))


def _zyfa(case: Case, given: Given) -> Prepared:
    attention = jax.jit(functools.partial(zyfa_jax.attention, **_options(case, given)))
    return Prepared(functools.partial(attention, *_on_device(given)))


def _cudnn_attention() -> Any:
    return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")


def _cudnn(case: Case, given: Given) -> Prepared:
    """By jax.nn, or, for values of another head dim, by what it calls."""
    _refuse_cpu("cuDNN")
    if case.head_dims[0] == case.head_dims[1]:
        attention = functools.partial(
            jax.nn.dot_product_attention, is_causal=case.causal, implementation="cudnn"
        )
    else:
        cudnn = _cudnn_attention()
        attention = functools.partial(
            cudnn.dot_product_attention,
            scale=case.head_dims[0] ** -0.5,
            mask_type=cudnn.MaskType.CAUSAL if case.causal else cudnn.MaskType.NO_MASK,
        )
    return Prepared(functools.partial(jax.jit(attention), *_on_device(given)))


def _cudnn_fp8(case: Case, given: Given) -> Prepared:
    """Its probabilities are in [0, 1], and its output is in FP8."""
    _refuse_cpu("cuDNN")
    if case.head_dims[0] != case.head_dims[1]:
        raise ValueError("cuDNN's FP8 attention takes one head dim for keys and values")
    cudnn = _cudnn_attention()

    def number(x: float) -> jax.Array:
        return jnp.full((1, 1, 1, 1), x, jnp.float32)

    # No output exceeds the largest value.
    out_scale = FP8_MAX / (float(np.abs(given.arrays[2].astype(np.float32)).max())
                         * given.descales[2])  # fmt: skip
    parameters = dict.fromkeys(cudnn.fp8_params_keys, number(1.0)) | {
        "descale_q": number(given.descales[0]),
        "descale_k": number(given.descales[1]),
        "descale_v": number(given.descales[2]),
        "scale_s": number(256.0),
        "descale_s": number(1 / 256.0),
        "scale_o": number(out_scale),
    }

    @jax.jit
    def attention(q: jax.Array, k: jax.Array, v: jax.Array, parameters: Any) -> Any:
        return cudnn.dot_product_attention(
            q, k, v, fp8_params=parameters, scale=case.head_dims[0] ** -0.5,
            mask_type=cudnn.MaskType.CAUSAL, use_fp8=True,
        )[0]  # fmt: skip

    call = functools.partial(attention, *_on_device(given), parameters)
    return Prepared(call, 1 / out_scale)


def _torch(case: Case, given: Given) -> Prepared:
    torch: Any = importlib.import_module("torch")
    backends: Any = importlib.import_module("torch.nn.attention")
    _refuse_cpu("torch's cuDNN")
    q, k, v = (x.transpose(1, 2) for x in rocm._tensors(torch, given))

    def attention() -> Any:
        with backends.sdpa_kernel(backends.SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, enable_gqa=True
            )
        return rocm._Tensor(torch, out.transpose(1, 2))

    return Prepared(attention)


def _flash(case: Case, given: Given) -> Prepared:
    flash: Any = importlib.import_module("flash_attn3_jax")
    _refuse_cpu("FlashAttention-3")
    if case.head_dims != (128, 128):
        raise ValueError("flash-attn3-jax is built for head dim 128 alone")
    attention = jax.jit(functools.partial(flash.flash_mha, is_causal=case.causal))
    return Prepared(functools.partial(attention, *_on_device(given)))


def _pallas(case: Case, given: Given) -> Prepared:
    """In float16, and with queries scaled before: it has no scale of its own."""
    _refuse_cpu("Pallas")
    if case.head_dims[0] != case.head_dims[1]:
        raise ValueError("attention_mgpu takes one head dim for keys and values")
    pallas: Any = importlib.import_module(
        "jax.experimental.pallas.ops.gpu.attention_mgpu"
    )
    config = pallas.TuningConfig(
        block_q=64, block_kv=128, max_concurrent_steps=2, causal=case.causal
    )
    q, k, v = (x.astype(jnp.float32) for x in _on_device(given))
    q = q * case.head_dims[0] ** -0.5
    arrays = [x.astype(jnp.float16) for x in (q, k, v)]

    @jax.jit
    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        out = pallas.attention(q, k, v, config)
        return out[0] if isinstance(out, tuple | list) else out

    return Prepared(functools.partial(attention, *arrays))


def _xla(case: Case, given: Given) -> Prepared:
    if case.logit_bytes > MOST_LOGIT_BYTES:
        raise ValueError(f"it would hold {case.logit_bytes / 2**30:.0f} GiB of logits")
    return Prepared(rocm._jax_nn(case, given))


def _refuse_cpu(what: str) -> None:
    if jax.default_backend() == "cpu":
        raise ImportError(f"{what} needs a GPU")


IMPLEMENTATIONS = (
    Implementation("zyfa_jax", FP8, _zyfa),
    Implementation("cuDNN", FP8, _cudnn_fp8),
    Implementation("zyfa_jax", BF16, _zyfa),
    Implementation("cuDNN", BF16, _cudnn),
    Implementation("torch cuDNN", BF16, _torch),
    Implementation("FlashAttention-3", BF16, _flash),
    Implementation("Pallas", BF16, _pallas),
    Implementation("XLA", BF16, _xla),
)


# ---- What is shown


def _heading(model: Model, inputs: str) -> str:
    heads, kv_heads = model.heads
    qk, v = model.head_dims
    return (
        f"\n{model.name}: {heads} query and {kv_heads} key/value heads, {qk}/{v}, "
        f"causal, {inputs}"
    )


def _speed_table(results: Sequence[Result]) -> Table:
    table = Table()
    table.add_column("tokens")
    table.add_column("implementation")
    for column in ("ms", "TFLOP/s", "of peak", "error"):
        table.add_column(column, justify="right")
    tokens = 0
    for x in results:
        if x.tokens != tokens and tokens:
            table.add_section()
        tokens = x.tokens
        if x.seconds is not None:
            speed = x.tflops or 0.0
            digits = 0 if speed >= 100 else 3
            numbers = f"{x.seconds * 1e3:.3f}", f"{speed:.{digits}f}", f"{x.share:.0%}"
            table.add_row(
                str(x.tokens), str(x.implementation), *numbers, f"{x.error:.5f}"
            )
    return table


def _missing(results: Sequence[Result]) -> Iterator[str]:
    """A line for each implementation and reason why there are no numbers."""
    reasons: dict[tuple[str, str], list[int]] = {}
    for x in results:
        if x.trouble:
            reasons.setdefault((str(x.implementation), x.trouble), []).append(x.tokens)
    for (name, trouble), tokens in reasons.items():
        yield f"{name}, {', '.join(map(str, tokens))} tokens: {trouble}"


def _bars_table(results: Sequence[Result]) -> Table:
    table = Table(title="Ratios of speed, and their bars", title_justify="left")
    for column in ("heads", "inputs", "tokens", "speed of", "over"):
        table.add_column(column)
    table.add_column("ratio", justify="right")
    table.add_column("bar", justify="right")
    for row in ratios(results):
        table.add_row(*row)
    return table


def ratios(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    """The rows of the bars: heads, inputs, tokens, what, over what, ratio, bar."""
    speeds: dict[tuple[Model, str, int], dict[str, float]] = {}
    for x in results:
        if x.tflops is not None:
            of_shape = speeds.setdefault((x.model, x.inputs, x.tokens), {})
            of_shape[str(x.implementation)] = x.tflops
    for bar in BARS:
        ours = f"zyfa_jax {'FP8' if bar.dtype == FP8 else 'BF16'}"
        for (model, inputs, tokens), of_shape in speeds.items():
            if model.head_dims not in bar.head_dims or tokens not in bar.tokens:
                continue
            peers = [x for x in bar.peers if x in of_shape]
            if ours not in of_shape or not peers:
                continue
            best = max(peers, key=of_shape.__getitem__)
            ratio = of_shape[ours] / of_shape[best]
            qk, v = model.head_dims
            yield (
                f"{qk}/{v}", inputs, str(tokens), ours, best,
                f"{ratio:.2f}", f"{bar.ratio:.2f}",
            )  # fmt: skip


def _error_table(model: str, errors: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(title=f"Relative error, {model}", title_justify="left")
    table.add_column("method")
    for family in errors:
        table.add_column(family, justify="right")
    for method in dict.fromkeys(x for of_family in errors.values() for x in of_family):
        values = (of_family.get(method) for of_family in errors.values())
        table.add_row(method, *("" if x is None else f"{x:.5f}" for x in values))
    return table


def _panels(results: Sequence[Result]) -> list[plot.Panel]:
    panels: dict[str, list[Result]] = {}
    for x in results:
        qk, v = x.model.head_dims
        panels.setdefault(f"{x.model.name} ({qk}/{v}), {x.inputs}", []).append(x)
    return [plot.Lines(title, "TFLOP/s", _lines(x)) for title, x in panels.items()]


def _lines(results: Sequence[Result]) -> list[plot.Line]:
    lines = []
    for implementation in dict.fromkeys(x.implementation for x in results):
        points = [
            (x.tokens, x.tflops)
            for x in results
            if x.implementation == implementation and x.tflops is not None
        ]
        if points:
            peer = not implementation.ours
            lines.append(plot.Line(str(implementation), points, peer=peer))
    return lines
