"""Speed of prefill on a GPU beside jax.nn and what is installed of AITER and torch.

Standard normal inputs, calls one after another, the implementations taking turns;
medians. As many batch rows as make 32768 tokens, so that dispatch hides behind work.
TFLOP/s count half of the score square where causal. FP8 inputs have one descale for a
tensor, the same for every implementation. On gfx950, from a checkout, the cycle model's
prediction stands beside what was measured, of this package and of AITER.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import zyfa_jax
from zyfa_jax import _check, reference
from zyfa_jax._timing import interleaved_medians

from . import plot, report
from .calls import (
    Call,
    Case,
    Given,
    Tensor,
    descales_of,
    jax_nn,
    platform_of,
    tensors_of,
    text_of,
    torch_device,
)
from .shapes import DEEPSEEK_V2_LITE, MISTRAL_7B

TOKENS = (2048, 4096, 8192, 16384, 32768)
HEAD_DIMS = (MISTRAL_7B.head_dims, DEEPSEEK_V2_LITE.head_dims)
DTYPES = ("float8_e4m3fn", "bfloat16")
TOKENS_AT_ONCE = 32768
# Dense TFLOP/s of an MI355X by its data sheet.
PEAKS = {"float8_e4m3fn": 5033.0, "bfloat16": 2516.0}
# jax.nn holds all logits of a head in float32.
MOST_LOGIT_BYTES = 32 << 30
LEAST_SECONDS = 0.02
"""Calls are repeated to take that long together."""
CHECKED_QUERIES = 64
"""The last ones of the first row and head: float64 is slow."""

FEWEST_PREDICTED = 2048
"""Tokens; the cycle model leaves out what fewer of them make heavy."""
AITERS = ("aiter", "jax-aiter")
PEERS = {"jax-aiter": "jax_aiter.mha", "aiter": "aiter", "torch": "torch"}
"""Peers that may not be installed -> their modules."""
# The kernels of AITER's that the model knows, by dtype and head dims.
AITER_KERNELS = {
    "fp8_128x128": "AITER FP8 v3",
    "bf16_128x128": "AITER BF16 v3",
    "bf16_192x128": "OPUS BF16 192/128",
}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """TFLOP/s by the cycle model: with its nominal constants, and over their range.

    Attributes:
      kernel: of the package, or a public one.
    """

    kernel: str
    tflops: float
    lowest: float
    highest: float


@dataclasses.dataclass(frozen=True)
class Result:
    """One implementation on one shape; `trouble` says why there are no numbers."""

    case: Case
    implementation: str
    seconds: float | None = None
    error: float | None = None
    trouble: str = ""
    prediction: Prediction | None = None

    @property
    def tflops(self) -> float | None:
        return None if self.seconds is None else self.case.flops / self.seconds / 1e12

    @property
    def over_predicted(self) -> float | None:
        """Measured over predicted."""
        if self.tflops is None or self.prediction is None:
            return None
        return self.tflops / self.prediction.tflops

    @property
    def as_predicted(self) -> bool:
        """Whether it lies within the cycle model's range."""
        p = self.prediction
        if p is None or self.tflops is None:
            return False
        return p.lowest <= self.tflops <= p.highest

    def as_json(self) -> dict[str, Any]:
        tflops = self.tflops
        share = None if tflops is None else tflops / PEAKS[self.case.dtype]
        return {
            **dataclasses.asdict(self.case),
            "implementation": self.implementation,
            "seconds": self.seconds,
            "tflops": tflops,
            "share_of_peak": share,
            "error": self.error,
            "trouble": self.trouble,
            "predicted": self.prediction and dataclasses.asdict(self.prediction),
            "measured_over_predicted": self.over_predicted,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=report.positive, nargs="+", default=TOKENS)
    parser.add_argument(
        "--heads",
        type=report.positive,
        nargs=2,
        default=MISTRAL_7B.heads,
        metavar=("QUERY", "KEY_VALUE"),
        help="32 and 8 by default",
    )
    parser.add_argument(
        "--masks", nargs="+", choices=("causal", "full"), default=("causal", "full")
    )
    parser.add_argument("--repeats", type=report.positive, default=11)
    report.add_arguments(parser)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="160 tokens of two heads, one repeat: only shows it runs",
    )


def run(args: argparse.Namespace) -> int:
    report.check(args)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    [device, *_] = jax.devices()
    environment = _check.environment(device)
    for name, value in environment.items():
        console.print(f"{name}: {value}", highlight=False)
    [backend] = (x for x in zyfa_jax.backends() if x.platform == platform_of(device))
    console.print(f"zyfa_jax {zyfa_jax.__version__}: {backend.detail}", highlight=False)
    predict = predictor() if "gfx950" in backend.targets else None
    if "gfx950" in backend.targets and predict is None:
        console.print("the cycle model's predictions need a checkout and '.[bench]'")
    missing = report.missing(PEERS, console)

    def write_report(results: list[Result]) -> None:
        report.write(
            "rocm",
            args,
            device,
            backend=dataclasses.asdict(backend),
            peaks=PEAKS,
            missing=missing,
            results=[result.as_json() for result in results],
            measured_over_predicted=_mean_differences(results),
        )

    results: list[Result] = []
    for dtype, head_dims, causal in _kinds(args):
        of_kind = []
        cases = list(_cases(args, dtype, head_dims, causal))
        repeats = 1 if args.quick else args.repeats
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(cases[0].kind, total=len(cases) * (repeats + 1))
            advance = functools.partial(progress.advance, task)
            for case in cases:
                measured = measure(case, repeats, args.quick, advance)
                of_kind += [_predicted(x, predict) for x in measured]
        console.print(_table(of_kind, backend.targets))
        results += of_kind
        write_report(results)  # what follows may fail, or never end
    if any(x.over_predicted for x in results):
        console.print(_differences(results))
    if args.picture is not None:
        title = f"{environment['device']}, jax {environment['jax']}"
        plot.save(args.picture, title, _panels(results), _note(results))
    failed = [x for x in results if x.implementation == "zyfa_jax" and x.trouble]
    return 1 if failed else 0


Predict = Callable[[str, Case], Prediction | None]
"""Of an implementation and a shape."""


def predictor() -> Predict | None:
    """The cycle model of gfx950; None where it is not to be had."""
    try:
        from tools.gfx950.timing import whole
    except ImportError:
        return None
    from . import gfx950, gfx950_speed

    kernels = gfx950_speed.traced(gfx950.kernels())
    public = {x.name: x for x in whole.PUBLIC}

    def predict(implementation: str, case: Case) -> Prediction | None:
        if case.tokens < FEWEST_PREDICTED:
            return None
        heads = case.batch * case.heads[0]
        qk, v = case.head_dims
        kind = "fp8" if case.dtype == "float8_e4m3fn" else "bf16"
        name = f"{kind}_{qk}x{v}"
        if implementation == "zyfa_jax" and name in kernels:
            kernel = kernels[name]
            work = kernel.work(case.tokens, heads, case.causal)
            speed = functools.partial(
                gfx950_speed.speed, kernel, work=work, random_logits=True
            )
        elif implementation in AITERS and name in AITER_KERNELS:
            name = AITER_KERNELS[name]
            speed = functools.partial(
                gfx950_speed.public_speed,
                public[name],
                tokens=case.tokens,
                heads=heads,
                causal=case.causal,
            )
        else:
            return None
        nominal, *others = (speed(c=c) for c in gfx950_speed.constant_sets().values())
        return Prediction(name, nominal, min(nominal, *others), max(nominal, *others))

    return predict


def _predicted(result: Result, predict: Predict | None) -> Result:
    if predict is None or result.tflops is None:
        return result
    prediction = predict(result.implementation, result.case)
    return dataclasses.replace(result, prediction=prediction)


def _mean_differences(results: list[Result]) -> dict[str, dict[str, float]]:
    """{implementation: {kind: measured over predicted, geometric mean of lengths}}."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for x in results:
        if x.over_predicted is not None:
            of_kind = ratios.setdefault(x.implementation, {})
            of_kind.setdefault(x.case.kind, []).append(x.over_predicted)
    return {
        implementation: {
            kind: statistics.geometric_mean(x) for kind, x in kinds.items()
        }
        for implementation, kinds in ratios.items()
    }


def _differences(results: list[Result]) -> Table:
    """Measured over predicted by length, and the mean by which a kernel is off."""
    table = Table(
        title="Measured / cycle model (*: out of its range)",
        title_justify="left",
        caption="what each pattern means: docs/rocm_plugin.md",
        caption_justify="left",
    )
    table.add_column("implementation")
    table.add_column("kind")
    lengths = sorted({x.case.tokens for x in results if x.over_predicted})
    for tokens in lengths:
        table.add_column(str(tokens), justify="right")
    table.add_column("mean", justify="right")
    for implementation, kinds in _mean_differences(results).items():
        for kind, mean in kinds.items():
            cells = {
                x.case.tokens: f"{x.over_predicted:.2f}{' ' if x.as_predicted else '*'}"
                for x in results
                if (x.implementation, x.case.kind) == (implementation, kind)
                and x.over_predicted is not None
            }
            row = (cells.get(tokens, "") for tokens in lengths)
            table.add_row(implementation, kind, *row, f"{mean:.2f}")
    return table


def _panels(results: list[Result]) -> list[plot.Panel]:
    kinds: dict[str, list[Result]] = {}
    for x in results:
        kinds.setdefault(x.case.kind, []).append(x)
    panels: list[plot.Panel] = [
        plot.Lines(kind, "TFLOP/s", _lines(of_kind)) for kind, of_kind in kinds.items()
    ]
    for implementation, differences in _mean_differences(results).items():
        lines = [
            plot.Line(
                kind,
                [
                    (x.case.tokens, x.over_predicted)
                    for x in kinds[kind]
                    if x.implementation == implementation and x.over_predicted
                ],
                peer=implementation != "zyfa_jax",
            )
            for kind in differences
        ]
        panels.append(
            plot.Lines(
                implementation, "measured / cycle model", lines, 1.0, from_zero=False
            )
        )
    return panels


def _note(results: list[Result]) -> str:
    heads, kv_heads = results[0].case.heads
    note = f"{heads} query and {kv_heads} key/value heads, standard normal inputs."
    if any(x.prediction for x in results):
        note += " Band: the range of the cycle model of zyfa_jax."
    return note


def _lines(results: list[Result]) -> list[plot.Line]:
    lines = []
    for name in dict.fromkeys(x.implementation for x in results):
        points = [
            (x.case.tokens, x.tflops)
            for x in results
            if x.implementation == name and x.tflops is not None
        ]
        if points:
            lines.append(plot.Line(name, points, peer=name != "zyfa_jax"))
    predicted = [
        (x.case.tokens, x.prediction)
        for x in results
        if x.implementation == "zyfa_jax" and x.prediction is not None
    ]
    if predicted:
        lines.append(
            plot.Line(
                "cycle model",
                [(n, p.tflops) for n, p in predicted],
                [(n, p.lowest, p.highest) for n, p in predicted],
                peer=True,
            )
        )
    return lines


def measure(
    case: Case, repeats: int, quick: bool = False, after_round: Call = lambda: None
) -> list[Result]:
    """Every implementation on one shape."""
    arrays = case.inputs()
    given = _given(case, arrays)
    exact = _exact(case, given)
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    troubles: dict[str, str] = {}
    for name, make in IMPLEMENTATIONS.items():
        try:
            call = make(case, given)
            errors[name] = _error(case, call(), exact)
            calls[name] = call if quick else _repeated(call)
        except ImportError:
            continue
        except Exception as error:  # of whatever kind another package raises
            troubles[name] = text_of(error)
    inner = {name: getattr(call, "times", 1) for name, call in calls.items()}
    seconds = interleaved_medians(calls, repeats, after_round=after_round)
    return [
        Result(case, name, seconds[name] / inner[name], errors[name])
        if name in seconds
        else Result(case, name, trouble=troubles[name])
        for name in IMPLEMENTATIONS
        if name in seconds or name in troubles
    ]


class _Repeated:
    """A call that is made several times over, the last result standing for all."""

    def __init__(self, call: Call, times: int) -> None:
        self.call = call
        self.times = times

    def __call__(self) -> Any:
        for _ in range(self.times - 1):
            self.call()
        return self.call()


def _repeated(call: Call) -> _Repeated:
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    once = max(time.perf_counter() - start, 1e-6)
    return _Repeated(call, min(max(int(LEAST_SECONDS / once), 1), 100))


def _given(case: Case, arrays: tuple[np.ndarray, ...]) -> Given:
    if case.dtype == "bfloat16":
        return Given(tuple(x.astype(ml_dtypes.bfloat16) for x in arrays), (1.0,) * 3)
    dtype = np.dtype(ml_dtypes.float8_e4m3fn)
    largest = float(ml_dtypes.finfo(dtype).max)
    descales = tuple(float(np.float32(np.abs(x).max() / largest)) for x in arrays)
    return Given(
        tuple((x / d).astype(dtype) for x, d in zip(arrays, descales, strict=True)),
        descales,
    )


def _exact(case: Case, given: Given) -> np.ndarray:
    """Attention of the checked queries in float64."""
    q, k, v = given.arrays
    out, _ = reference.attention(
        q[:1, -CHECKED_QUERIES:, :1],
        k[:1, :, :1],
        v[:1, :, :1],
        causal=case.causal,
        **descales_of(case, given),
    )
    return out


def _error(case: Case, out: Any, exact: np.ndarray) -> float:
    checked = out[:1, -CHECKED_QUERIES:, :1]
    if isinstance(checked, jax.Array):
        checked = np.asarray(checked)
    else:  # a tensor of torch's
        checked = checked.float().cpu().numpy()
    difference = checked.astype(np.float64) - exact
    return float(np.linalg.norm(difference) / np.linalg.norm(exact))


def _zyfa(case: Case, given: Given) -> Call:
    attention = jax.jit(
        functools.partial(
            zyfa_jax.attention, causal=case.causal, **descales_of(case, given)
        )
    )
    return functools.partial(attention, *map(jnp.asarray, given.arrays))


def _jax_nn(case: Case, given: Given) -> Call:
    if case.dtype != "bfloat16":
        raise ImportError("jax.nn has no FP8 attention")
    if case.head_dims[0] != case.head_dims[1]:
        raise ValueError("jax.nn takes values of the keys' head dim")
    if case.logit_bytes > MOST_LOGIT_BYTES:
        raise ValueError(f"jax.nn would hold {case.logit_bytes / 2**30:.0f} GiB")

    return jax_nn(case, given)


def _jax_aiter(case: Case, given: Given) -> Call:
    if case.dtype != "bfloat16":
        raise ImportError("taken in bfloat16 alone")
    mha: Any = importlib.import_module("jax_aiter.mha")

    @jax.jit
    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = mha.flash_attn_func(q, k, v, causal=case.causal)
        return out[0] if isinstance(out, tuple | list) else out

    return functools.partial(attention, *map(jnp.asarray, given.arrays))


def _torch(case: Case, given: Given) -> Call:
    if case.dtype != "bfloat16":
        raise ImportError("torch has no FP8 attention")
    torch: Any = importlib.import_module("torch")
    q, k, v = (x.transpose(1, 2).contiguous() for x in tensors_of(torch, given))

    def attention() -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=case.causal, enable_gqa=True
        )
        return Tensor(torch, out.transpose(1, 2))

    return attention


def _aiter(case: Case, given: Given) -> Call:
    torch: Any = importlib.import_module("torch")
    aiter: Any = importlib.import_module("aiter")
    tensors = tensors_of(torch, given)
    if case.dtype == "bfloat16":
        flash = functools.partial(aiter.flash_attn_func, *tensors)
    else:
        descales = (
            torch.tensor([x], dtype=torch.float32, device=torch_device(torch))
            for x in given.descales
        )
        flash = functools.partial(
            aiter.flash_attn_fp8_pertensor_func, *tensors, *descales
        )

    def attention() -> Any:
        out = flash(causal=case.causal)
        return Tensor(torch, out[0] if isinstance(out, tuple | list) else out)

    return attention


IMPLEMENTATIONS: dict[str, Callable[[Case, Given], Call]] = {
    "zyfa_jax": _zyfa,
    "jax.nn": _jax_nn,
    "jax-aiter": _jax_aiter,
    "aiter": _aiter,
    "torch": _torch,
}
"""Each gives a call, or raises ImportError where there is no such thing here."""


def _kinds(
    args: argparse.Namespace,
) -> Iterator[tuple[str, tuple[int, int], bool]]:
    for dtype in DTYPES:
        for head_dims in HEAD_DIMS:
            for mask in ("causal",) if args.quick else args.masks:
                yield dtype, head_dims, mask == "causal"


def _cases(
    args: argparse.Namespace, dtype: str, head_dims: tuple[int, int], causal: bool
) -> Iterator[Case]:
    if args.quick:
        yield Case(dtype, head_dims, causal, 160, 1, (2, 1))
        return
    heads = tuple(args.heads)
    for tokens in args.tokens:
        batch = max(1, TOKENS_AT_ONCE // tokens)
        yield Case(dtype, head_dims, causal, tokens, batch, heads)


def _table(results: list[Result], targets: tuple[str, ...]) -> Table:
    case = results[0].case
    heads, kv_heads = case.heads
    table = Table(
        title=f"{case.kind}, {heads} query and {kv_heads} key/value heads",
        title_justify="left",
    )
    for column in ("tokens", "batch", "implementation"):
        table.add_column(column)
    columns = ["ms", "TFLOP/s", "of peak", "error"]
    predicted = any(x.prediction is not None for x in results)
    if predicted:
        columns += ["cycle model", "measured / model"]
    for column in columns:
        table.add_column(column, justify="right")
    for result in results:
        case = result.case
        row = [str(case.tokens), str(case.batch), result.implementation]
        if result.seconds is None or result.tflops is None:
            table.add_row(*row, result.trouble)
            continue
        share = (
            f"{result.tflops / PEAKS[case.dtype]:.0%}" if "gfx950" in targets else ""
        )
        table.add_row(
            *row,
            f"{result.seconds * 1e3:.3f}",
            f"{result.tflops:{'.0f' if result.tflops >= 100 else '.3g'}}",
            share,
            f"{result.error:.4f}",
            *(_beside(result.tflops, result.prediction) if predicted else ()),
        )
    return table


def _beside(tflops: float, prediction: Prediction | None) -> tuple[str, str]:
    if prediction is None:
        return "", ""
    low, high = prediction.lowest, prediction.highest
    return (
        f"{prediction.tflops:.0f} ({low:.0f}-{high:.0f})",
        f"{tflops / prediction.tflops:.2f}",
    )
