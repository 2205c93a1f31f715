"""Speed of prefill over several devices, of any kind, beside one of them.

The call under pmap, shard_map and jit, spread over batch rows or heads, and
`zyfa_jax.parallel`, spread over tokens. Each spread call takes turns with the same
problem on one device (speed-up) and with one device's share of it (weak scaling: the
ideal is that both take as long, for causal tokens per share of the work). Standard
normal inputs, causal; medians of the wall clock. Results are compared with one
device's: bit for bit where nothing is merged. Collectives are read off the compiled
programs. What a ring or a gather does not hide is the difference to the same program
without its collectives. docs/parallel.md has the model that stands beside it.

On CPUs the devices share the cores, so that a speed-up of 1 is the ideal there: what
is below is what spreading costs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import zyfa_jax
from zyfa_jax import _check, parallel

from . import plot, report, scaling_model
from .calls import Call, text_of
from .shapes import BF16, DEEPSEEK_V2_LITE, FP8, MISTRAL_7B, Model
from .timing import interleaved_medians, wall_seconds

TOKENS = {"cpu": (1024,), "gpu": (16384, 65536, 131072, 262144, 1048576)}
MODELS = (MISTRAL_7B, DEEPSEEK_V2_LITE)
DTYPES = (BF16, FP8)
AXIS = "devices"
COMPARED_ROWS = 512
"""Of each device's tokens, evenly spread, are compared."""
MOST_SECONDS = 10
"""For the repeats of one device, of which there is one at least."""
# Relative, of results that are merged: one more rounding to bfloat16, and with FP8
# probabilities that are coded against other maxima.
TOLERANCES = {BF16: 4e-3, FP8: 3e-2}
# Least shares of linear speed-up on GPUs, and the fewest tokens they are for.
BARS = {
    "rows or heads, 2 devices": 0.98,
    "rows or heads, more": 0.97,
    "tokens, 2 devices": 0.95,
    "tokens, more": 0.9,
}
LONG = 131072
KINDS = "all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter"


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to spread the call.

    Attributes:
      name: of it.
      over: "batch", "heads" or "tokens".
      collectives: the kind that its program may have.
    """

    name: str
    over: str
    collectives: str | None = None

    @property
    def method(self) -> Any:
        return (
            self.collectives
            and {
                "collective-permute": "ring",
                "all-gather": "all_gather",
            }[self.collectives]
        )


WAYS = (
    Way("pmap, batch", "batch"),
    Way("shard_map, batch", "batch"),
    Way("jit, batch", "batch"),
    Way("shard_map, heads", "heads"),
    Way("jit, heads", "heads"),
    Way("ring, tokens", "tokens", "collective-permute"),
    Way("all-gather, tokens", "tokens", "all-gather"),
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is spread over devices.

    Attributes:
      model: its heads.
      dtype: of q, k and v.
      batch: rows.
      tokens: of a row.
    """

    model: Model
    dtype: str
    batch: int
    tokens: int

    def share(self, over: str, devices: int) -> Problem:
        """Of one of the devices. Its causal tokens are a `devices`-th of its work."""
        if over == "batch":
            return dataclasses.replace(self, batch=self.batch // devices)
        if over == "heads":
            return dataclasses.replace(self, model=self.model.share(devices))
        return dataclasses.replace(self, tokens=self.tokens // devices)

    def inputs(self) -> tuple[Any, ...]:
        heads, kv_heads = self.model.heads
        qk, v = self.model.head_dims
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = ((heads, qk), (kv_heads, qk), (kv_heads, v))
        arrays = [
            jax.random.normal(key, (self.batch, self.tokens, *shape), jnp.bfloat16)
            for key, shape in zip(keys, shapes, strict=True)
        ]
        if self.dtype == FP8:
            return tuple(zyfa_jax.quantize(x).detach() for x in arrays)
        return tuple(arrays)


@dataclasses.dataclass(frozen=True)
class Result:
    """One way on so many devices; `trouble` says why there are no numbers.

    Attributes:
      seconds: of the spread call.
      one_device: of the same problem on one device.
      one_share: of one device's share of it, on one device; not on CPUs, where the
        others have the same cores.
      without_collectives: of the spread call with its collectives left out.
      difference: to one device's result, relative, in norm; 0 is the same bits.
      collectives: of the compiled program: how many of each kind.
      device_bytes: of the program on one device: arguments, results and what it holds
        in between, by the compiler; None where it does not tell.
      devices_used: on how many a part of the result lies.
      predicted: speed-up by the model.
    """

    way: Way
    problem: Problem
    devices: int
    seconds: float | None = None
    one_device: float | None = None
    one_share: float | None = None
    without_collectives: float | None = None
    difference: float | None = None
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)
    device_bytes: int | None = None
    devices_used: int = 0
    predicted: float | None = None
    trouble: str = ""

    @property
    def speed_up(self) -> float | None:
        if self.seconds is None or self.one_device is None:
            return None
        return self.one_device / self.seconds

    @property
    def weak(self) -> float | None:
        """Share of the ideal, where a device has as much as one device alone had.

        A device's share of causal tokens is so much of one device's work that all of
        them have n times the work of it each.
        """
        if self.seconds is None or self.one_share is None:
            return None
        work = self.devices if self.way.over == "tokens" else 1
        return work * self.one_share / self.seconds

    @property
    def exposed(self) -> float | None:
        """Share of the time that collectives take and nothing hides."""
        if self.seconds is None or self.without_collectives is None:
            return None
        return max(1 - self.without_collectives / self.seconds, 0.0)

    @property
    def wrong(self) -> str:
        """What should not be, if anything."""
        if self.trouble:
            return self.trouble
        expected = {self.way.collectives} if self.devices > 1 else set()
        unexpected = self.collectives.keys() - expected
        if unexpected:
            return f"unexpected {', '.join(sorted(unexpected))}"
        if self.devices_used != self.devices:
            return f"results on {self.devices_used} devices"
        most = TOLERANCES[self.problem.dtype] if self.way.collectives else 0.0
        if self.difference is None or not self.difference <= most:
            return f"differs from one device by {self.difference}"
        return ""

    def as_json(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "way": self.way.name,
            "model": problem.model.name,
            "heads": problem.model.heads,
            "head_dims": problem.model.head_dims,
            "dtype": problem.dtype,
            "batch": problem.batch,
            "tokens": problem.tokens,
            "devices": self.devices,
            "seconds": self.seconds,
            "one_device_seconds": self.one_device,
            "one_share_seconds": self.one_share,
            "without_collectives_seconds": self.without_collectives,
            "speed_up": self.speed_up,
            "predicted_speed_up": self.predicted,
            "weak_scaling": self.weak,
            "exposed": self.exposed,
            "difference": self.difference,
            "collectives": self.collectives,
            "device_bytes": self.device_bytes,
            "wrong": self.wrong,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices", type=report.positive, help="all by default; on CPUs 8"
    )
    parser.add_argument(
        "--tokens",
        type=report.positive,
        nargs="+",
        help="of `parallel`; the fewest of them are those of the other ways. Multiples "
        "of twice as many as there are devices; by default about 1024 on CPUs",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=[x.name for x in MODELS],
        default=[x.name for x in MODELS],
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--repeats", type=report.positive, default=5)
    report.add_arguments(parser)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="128 tokens of few heads, one repeat: only shows it runs",
    )


def run(args: argparse.Namespace) -> int:
    report.check(args)
    devices = _devices(args.devices)
    if args.devices is not None:
        if not 0 < args.devices <= len(devices):
            print(f"--devices {args.devices}, but JAX sees {len(devices)} here")
            return 2
        devices = devices[: args.devices]
    unit = _unit(len(devices))
    if uneven := [x for x in args.tokens or () if x % unit]:
        print(
            f"--tokens {uneven[0]}, but on {len(devices)} devices it takes multiples "
            f"of {unit}, such as {_rounded_up(uneven[0], unit)}"
        )
        return 2
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    for name, value in _check.environment(devices[0]).items():
        console.print(f"{name}: {value}", highlight=False)
    machine = f"{len(devices)} x {devices[0].device_kind}"
    results: list[Result] = []
    repeats = 1 if args.quick else args.repeats

    def write() -> None:
        report.write(
            "scaling",
            args,
            devices[0],
            devices=len(devices),
            results=[x.as_json() for x in results],
            peak_bytes=[_peak_bytes(x) for x in devices],
        )

    for model, dtype in _kinds(args, len(devices)):
        of_kind = []
        if counts := [x for x in _counts(len(devices)) if model.heads[1] % x]:
            console.print(
                f"{model.name}: {model.heads[1]} key/value heads are not spread over "
                f"{' or '.join(map(str, counts))} devices"
            )
        with Progress(console=console, transient=True) as progress:
            groups = list(_groups(args, model, dtype, devices))
            task = progress.add_task(f"{machine}, {model.name}", total=len(groups))
            for ways, problem, some in groups:
                of_kind += measure(ways, problem, some, repeats)
                progress.advance(task)
        console.print(_table(of_kind, devices[0]))
        for line in _wrongs(of_kind):
            console.print(line, highlight=False, markup=False)
        results += of_kind
        write()  # what follows may fail, or never end
    if args.picture is not None:
        shared = devices[0].platform == "cpu"
        note = "Devices share the cores: 1 is the ideal." if shared else ""
        plot.save(args.picture, machine, _panels(results, len(devices), shared), note)
    return 1 if any(x.wrong for x in results) else 0


def _devices(count: int | None) -> list[Any]:
    """All devices; a CPU is split into so many."""
    with contextlib.suppress(RuntimeError):  # there are devices already
        jax.config.update("jax_num_cpu_devices", 8 if count is None else max(count, 1))
    return jax.devices()


def _kinds(args: argparse.Namespace, devices: int) -> Iterator[tuple[Model, str]]:
    for model in MODELS:
        if model.name not in args.models:
            continue
        if args.quick:
            heads = math.lcm(*_counts(devices))
            model = dataclasses.replace(model, heads=(heads, heads))
        for dtype in args.dtypes:
            yield model, dtype


def _groups(
    args: argparse.Namespace, model: Model, dtype: str, devices: Sequence[Any]
) -> Iterator[tuple[list[Way], Problem, Sequence[Any]]]:
    """Ways that take turns on one problem, over so many devices."""
    kind = "cpu" if devices[0].platform == "cpu" else "gpu"
    lengths = (128,) if args.quick else args.tokens or TOKENS[kind]
    lengths = [_rounded_up(x, _unit(len(devices))) for x in lengths]
    for count in _counts(len(devices)):
        some = devices[:count]
        for over in ("batch", "heads"):
            if over == "heads" and model.heads[1] % count:
                continue
            batch = count if over == "batch" else 1
            yield _ways(over), Problem(model, dtype, batch, min(lengths)), some
        for tokens in lengths:
            yield _ways("tokens"), Problem(model, dtype, 1, tokens), some


def _counts(devices: int) -> list[int]:
    """Powers of two from two on, and all."""
    powers = [2**i for i in range(1, devices.bit_length())]
    return [x for x in powers if x < devices] + [devices]


def _unit(devices: int) -> int:
    """What tokens are a multiple of, to be spread in zig-zag order over each count."""
    return math.lcm(*(2 * x for x in _counts(devices)))


def _rounded_up(tokens: int, unit: int) -> int:
    return tokens + -tokens % unit


def _ways(over: str) -> list[Way]:
    return [way for way in WAYS if way.over == over]


def _peak_bytes(device: Any) -> int | None:
    """Of all that ran."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


# ---- Measuring


def measure(
    ways: Sequence[Way], problem: Problem, devices: Sequence[Any], repeats: int
) -> list[Result]:
    """Ways to spread one problem, taking turns with one device."""
    over = ways[0].over
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    with jax.default_device(devices[0]):
        inputs = problem.inputs()
        attention = jax.jit(zyfa_jax.attention)
        calls: dict[Any, Call] = {"one device": functools.partial(attention, *inputs)}
        if devices[0].platform != "cpu":
            share = problem.share(over, len(devices)).inputs()
            calls["one share"] = functools.partial(attention, *share)
    one = jax.block_until_ready(calls["one device"]())
    once = wall_seconds(calls["one device"], 1)
    repeats = max(min(repeats, round(MOST_SECONDS / once)), 1)
    found: dict[Way, Result] = {}
    for way in ways:
        empty = Result(way, problem, len(devices))
        try:
            spread = Spread.of(way, inputs, mesh)
            found[way] = spread.checked(empty, one)
        except Exception as error:  # too little memory for one is no end of the others
            found[way] = dataclasses.replace(empty, trouble=text_of(error))
            continue
        calls[way] = spread.call
        if spread.without is not None:
            calls[way, "without"] = spread.without
    del one
    seconds = interleaved_medians(calls, repeats, wall_seconds, lambda: None)
    return [
        dataclasses.replace(
            result,
            seconds=seconds.get(way),
            one_device=seconds["one device"],
            one_share=seconds.get("one share"),
            without_collectives=seconds.get((way, "without")),
            predicted=_predicted(way, problem, devices),
        )
        for way, result in found.items()
    ]


@dataclasses.dataclass(frozen=True)
class Spread:
    """A problem spread over devices.

    Attributes:
      call: gives the output, not awaited.
      program: what it runs, compiled.
      positions: of the output's tokens, by their place.
      without: the same without its collectives, and what it runs.
    """

    call: Call
    program: Any
    positions: np.ndarray
    without: Call | None = None
    without_program: Any = None

    @classmethod
    def of(cls, way: Way, inputs: tuple[Any, ...], mesh: Mesh) -> Spread:
        tokens = inputs[0].shape[1]
        natural = np.arange(tokens)
        if way.over == "tokens":
            return cls._over_tokens(way, inputs, mesh)
        if way.name.startswith("pmap"):
            rows = jax.tree.map(
                lambda x: x.reshape(mesh.size, -1, *x.shape[1:]), inputs
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                call: Any = jax.pmap(
                    zyfa_jax.attention, devices=list(mesh.devices.flat)
                )
                placed = jax.pmap(lambda *x: x, devices=list(mesh.devices.flat))(*rows)
                program = call.lower(*placed).compile()
            return cls(functools.partial(call, *placed), program, natural)
        specs = [_specs(x, way.over) for x in inputs]
        placed = _place(inputs, mesh, specs)
        call = zyfa_jax.attention
        if way.name.startswith("shard_map"):
            out = _specs(jnp.zeros((1, 1, 1, 1)), way.over)
            call = jax.shard_map(call, mesh=mesh, in_specs=tuple(specs), out_specs=out)
        program = jax.jit(call).lower(*placed).compile()
        return cls(functools.partial(program, *placed), program, natural)

    @classmethod
    def _over_tokens(cls, way: Way, inputs: tuple[Any, ...], mesh: Mesh) -> Spread:
        inputs = tuple(parallel.zigzag(x, mesh.size) for x in inputs)
        placed = _place(inputs, mesh, [_specs(x, "tokens") for x in inputs])
        axes = ((), (AXIS,), ())

        def call(q: Any, k: Any, v: Any, exchange: bool) -> Any:
            plan, operands = parallel._over_mesh(
                q, k, v, mesh, axes, "zigzag", way.method, {}
            )
            plan = dataclasses.replace(plan, exchange=exchange)
            return parallel._sharded(operands, None, plan=plan, mesh=mesh, axes=axes)[0]

        program, without = (
            jax.jit(functools.partial(call, exchange=x)).lower(*placed).compile()
            for x in (True, False)
        )
        return cls(
            functools.partial(program, *placed),
            program,
            parallel.positions(inputs[0].shape[1], mesh.size),
            functools.partial(without, *placed),
            without,
        )

    def checked(self, result: Result, one: Any) -> Result:
        """With what is compared with one device's result, and read off the program."""
        out = self.call()
        if out.ndim == 5:  # of pmap
            one = one.reshape(out.shape)
        shards = out.addressable_shards
        return dataclasses.replace(
            result,
            difference=_difference(shards, one, self.positions),
            collectives=collectives(self.program.as_text() or ""),
            device_bytes=_program_bytes(self.program),
            devices_used=len({shard.device for shard in shards}),
        )


def collectives(text: str) -> dict[str, int]:
    """The collectives of a compiled program: how many of each kind."""
    return dict(Counter(re.findall(rf" ({KINDS})(?:-start)?\(", text)))


def _difference(shards: Sequence[Any], one: jax.Array, positions: np.ndarray) -> float:
    """Norm of it, of some of the tokens, relative to that of one device's result."""
    square = difference = 0.0
    for shard in shards:
        *leading, of_tokens, heads, dim = shard.index
        tokens = positions[of_tokens]
        at = np.arange(0, len(tokens), max(len(tokens) // COMPARED_ROWS, 1))
        axis = one.ndim - 3
        want = one[(*leading, slice(None), heads, dim)]
        got, want = (
            np.asarray(jnp.take(x, i, axis=axis), np.float32)
            for x, i in ((shard.data, at), (want, tokens[at]))
        )
        difference += float(np.square(got - want, dtype=np.float64).sum())
        square += float(np.square(want, dtype=np.float64).sum())
    return (difference / square) ** 0.5


def _program_bytes(program: Any) -> int | None:
    try:
        of = program.memory_analysis()
        return int(
            of.argument_size_in_bytes
            + of.output_size_in_bytes
            + of.temp_size_in_bytes
        )  # fmt: skip
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def _specs(x: Any, over: str) -> Any:
    """Of an array (batch, tokens, heads, dim) or of a Quantized's descales as well."""
    dims = {"batch": (0, 0), "tokens": (1, None), "heads": (2, 1)}[over]

    def of(leaf: Any) -> P:
        dim = dims[0] if leaf.ndim == 4 else dims[1]
        return P() if dim is None else P(*[None] * dim, AXIS)

    return jax.tree.map(of, x)


def _place(inputs: Sequence[Any], mesh: Mesh, specs: Sequence[Any]) -> list[Any]:
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
        list(inputs),
        list(specs),
    )


def _predicted(way: Way, problem: Problem, devices: Sequence[Any]) -> float | None:
    if devices[0].platform == "cpu":
        return 1.0  # they share the cores
    machine = scaling_model.machine_of(devices[0].device_kind)
    if way.over != "tokens":
        return float(len(devices))
    if machine is None:
        return None
    return scaling_model.speed_up(
        machine,
        problem.model,
        problem.dtype,
        problem.tokens,
        len(devices),
        way.method,
    )


# ---- What is shown


def _table(results: Sequence[Result], device: Any) -> Table:
    first = results[0].problem
    heads, kv_heads = first.model.heads
    gpu = device.platform != "cpu"
    table = Table(
        title=f"{first.model.name}, {heads} query and {kv_heads} key/value heads, "
        f"{first.dtype}",
        title_justify="left",
    )
    table.add_column("way")
    columns = ["on", "rows", "tokens", "ms", "one: ms", "speed-up", "model"]
    columns += ["weak"] * gpu + ["exposed", "MiB each", "differs", "collectives"]
    for name in columns + ["bar"] * gpu:
        table.add_column(name, justify="right", no_wrap=True)
    for x in results:
        cells = [
            x.way.name,
            str(x.devices),
            str(x.problem.batch),
            str(x.problem.tokens),
            _number(x.seconds, 1e3, 2),
            _number(x.one_device, 1e3, 2),
            _number(x.speed_up, 1, 2),
            _number(x.predicted, 1, 2),
            *[_number(x.weak, 100, 0, " %")] * gpu,
            _number(x.exposed, 100, 0, " %"),
            _number(x.device_bytes, 2**-20, 0),
            "no bit" if x.difference == 0 else _number(x.difference, 1, 4),
            ", ".join(f"{n} {kind}" for kind, n in x.collectives.items()),
            *[_bar(x)] * gpu,
        ]
        table.add_row(*cells)
    return table


def _wrongs(results: Sequence[Result]) -> Iterator[str]:
    for x in results:
        if x.wrong:
            of = x.problem
            yield f"{x.way.name}, {x.devices} devices, {of.tokens} tokens: {x.wrong}"


def _number(x: float | None, times: float, digits: int, unit: str = "") -> str:
    return "" if x is None else f"{x * times:.{digits}f}{unit}"


def _bar(x: Result) -> str:
    what = "tokens" if x.way.over == "tokens" else "rows or heads"
    if x.speed_up is None or (what == "tokens" and x.problem.tokens < LONG):
        return ""
    bar = BARS[f"{what}, {'2 devices' if x.devices == 2 else 'more'}"]
    share = x.speed_up / x.devices
    return f"{share:.3f} {'>=' if share >= bar else '<'} {bar}"


def _panels(results: Sequence[Result], most: int, shared: bool) -> list[plot.Panel]:
    """Over devices at the fewest tokens, and over tokens on all devices.

    The model is drawn where devices share nothing.
    """
    kinds: dict[str, list[Result]] = {}
    for x in results:
        title = f"{x.problem.model.name}, {x.problem.dtype}"
        kinds.setdefault(title, []).append(x)
    panels: list[plot.Panel] = []
    for title, of_kind in kinds.items():
        fewest = min(x.problem.tokens for x in of_kind)
        panels.append(
            plot.Lines(
                f"{title}, {fewest} tokens",
                "speed-up",
                _lines(
                    [x for x in of_kind if x.problem.tokens == fewest],
                    "devices",
                    shared,
                ),
                level=1.0 if shared else None,
                over="devices",
            )
        )
    for title, of_kind in kinds.items():
        longer = [x for x in of_kind if x.devices == most and x.way.over == "tokens"]
        if len({x.problem.tokens for x in longer}) > 1:
            lines = _lines(longer, "tokens", shared)
            panels.append(
                plot.Lines(f"{title}, {most} devices", "speed-up, by length", lines)
            )
    return panels


def _lines(results: Sequence[Result], over: str, shared: bool) -> list[plot.Line]:
    lines = []
    for way in dict.fromkeys(x.way for x in results):
        for name, peer in ((way.name, False), (f"{way.name}: model", True)):
            points = [
                (x.devices if over == "devices" else x.problem.tokens, y)
                for x in results
                if x.way == way
                and (y := x.predicted if peer else x.speed_up) is not None
            ]
            modelled = way.over == "tokens" and not shared
            if points and (modelled or not peer):
                lines.append(plot.Line(name, points, peer=peer))
    return lines
