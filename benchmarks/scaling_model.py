"""What attention over devices takes, on paper: bytes, seconds, and where they cross.

Plain causal attention in zigzag order, T tokens on each of n devices. A step of the
ring has half of T x T scores and sends T tokens of keys and values; its transfer hides
where that takes no longer than the scores. Both are linear in the head dims, so where
they cross does not depend on them: T = bytes * (key/value heads / query heads) * rate /
bandwidth. docs/parallel.md has the tables and what is left out.

`python -m benchmarks.scaling_model` prints them.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import plot
from .shapes import BF16, DEEPSEEK_V2_LITE, FP8, MISTRAL_7B, Model

NUMBER_BYTES = {FP8: 1, BF16: 2}
OUT_BYTES = 2  # bfloat16
RESULT_BYTES = 4  # of what results are merged into
MERGED_AT_ONCE = 3


@dataclasses.dataclass(frozen=True)
class Machine:
    """A node of GPUs; bandwidths are of one direction.

    Attributes:
      name: of the GPU.
      tflops: of one GPU's kernels at 16384 tokens, causal, by dtype and query/key dim.
      link: GB/s from a GPU to one other of its node, by the data sheet.
      links: to how many others at once.
      achieved: share of `link` that transfers get.
      network: GB/s of a GPU to other nodes, by the data sheet.
      memory: GB/s of a GPU's own.
    """

    name: str
    tflops: Mapping[tuple[str, int], float]
    link: float
    links: int
    achieved: float
    network: float
    memory: float

    def bandwidth(self, across_nodes: bool = False) -> float:
        """Bytes a second to the next device of a ring."""
        return (self.network if across_nodes else self.link) * self.achieved * 1e9

    def rate(self, model: Model, dtype: str) -> float:
        """FLOP a second."""
        return self.tflops[dtype, model.head_dims[0]] * 1e12


MI355X = Machine(
    "MI355X",
    # Shares of the measured dense peaks by the cycle model, docs/gfx950_timing.md.
    {
        (FP8, 128): 0.61 * 4968,
        (FP8, 192): 0.62 * 4968,
        (BF16, 128): 0.60 * 2495,
        (BF16, 192): 0.61 * 2495,
    },
    link=76.8,
    links=7,
    achieved=0.75,
    network=50,
    memory=6200,
)
H200 = Machine(
    "H200",
    # Measured, docs/h200.md.
    {(FP8, 128): 1185, (FP8, 192): 1260, (BF16, 128): 752, (BF16, 192): 732},
    link=450,
    links=1,
    achieved=0.8,
    network=50,
    memory=4800,
)
MACHINES = (MI355X, H200)


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the ring on one device: what it sends, and seconds."""

    sent_bytes: int
    transfer: float
    compute: float

    @property
    def hidden(self) -> bool:
        return self.transfer <= self.compute


def kv_bytes(model: Model, dtype: str, tokens: int) -> int:
    return tokens * model.heads[1] * sum(model.head_dims) * NUMBER_BYTES[dtype]


def causal_flops(model: Model, tokens: int) -> float:
    """Of half the score square."""
    return model.heads[0] * sum(model.head_dims) * float(tokens) ** 2


def step(
    machine: Machine,
    model: Model,
    dtype: str,
    tokens: int,
    across_nodes: bool = False,
) -> Step:
    """A step with so many tokens on each device."""
    sent = kv_bytes(model, dtype, tokens)
    return Step(
        sent,
        sent / machine.bandwidth(across_nodes),
        causal_flops(model, tokens) / machine.rate(model, dtype),
    )


def crossing(
    machine: Machine, model: Model, dtype: str, across_nodes: bool = False
) -> float:
    """Tokens of a device from which on a step hides its transfer."""
    heads, kv_heads = model.heads
    bytes_per_flop = machine.rate(model, dtype) / machine.bandwidth(across_nodes)
    return NUMBER_BYTES[dtype] * kv_heads / heads * bytes_per_flop


def merged_bytes(model: Model, tokens: int, parts: int) -> float:
    """What merging so many partial results of a device reads and writes."""
    if parts == 1:
        return 0.0
    merges = math.ceil((parts - 1) / (MERGED_AT_ONCE - 1))
    each = parts * OUT_BYTES + 2 * (merges - 1) * RESULT_BYTES + OUT_BYTES
    return tokens * model.heads[0] * model.head_dims[1] * each


def seconds(
    machine: Machine,
    model: Model,
    dtype: str,
    tokens: int,
    devices: int,
    method: str,
    across_nodes: bool = False,
) -> float:
    """Of attention over devices, with so many tokens in all.

    Args:
      machine: of the devices.
      model: its heads.
      dtype: of keys and values.
      tokens: of all devices.
      devices: how many.
      method: "ring" or "all_gather".
      across_nodes: whether some neighbours of the ring are in other nodes.
    """
    own = tokens // devices
    one = step(machine, model, dtype, own, across_nodes)
    if method == "ring":
        steps = one.compute + (devices - 1) * max(one.compute, one.transfer)
        return steps + merged_bytes(model, own, devices) / machine.memory / 1e9
    links = 1 if across_nodes else min(machine.links, max(devices - 1, 1))
    gather = (devices - 1) * one.transfer / links
    # Received, put into order: written, read, written.
    ordered = 3 * kv_bytes(model, dtype, tokens) / machine.memory / 1e9
    parts = 2 if devices > 1 else 1
    merged = merged_bytes(model, own, parts) / machine.memory / 1e9
    exposed = max(gather - one.compute, 0.0)  # of its own tokens
    return devices * one.compute + exposed + (ordered + merged) * (devices > 1)


def speed_up(
    machine: Machine,
    model: Model,
    dtype: str,
    tokens: int,
    devices: int,
    method: str,
    across_nodes: bool = False,
) -> float:
    """Over one device."""
    one = causal_flops(model, tokens) / machine.rate(model, dtype)
    return one / seconds(machine, model, dtype, tokens, devices, method, across_nodes)


def machine_of(device_kind: str) -> Machine | None:
    """The machine whose name is part of what JAX calls the device."""
    return next((x for x in MACHINES if x.name in device_kind), None)


def _panels() -> list[plot.Panel]:
    """Speed-up over tokens, one panel for each machine; in BF16, FP8 is alike."""
    lengths = [2**i for i in range(14, 21)]
    return [
        plot.Lines(
            f"{machine.name}, BF16",
            "speed-up",
            [
                plot.Line(
                    f"{model.name}, {method.replace('_', '-')}",
                    [
                        (n, speed_up(machine, model, BF16, n, 8, method))
                        for n in lengths
                    ],
                    peer=method == "all_gather",
                )
                for model in (MISTRAL_7B, DEEPSEEK_V2_LITE)
                for method in ("ring", "all_gather")
            ],
            level=8,
        )
        for machine in MACHINES
    ]


SHOWN = [(model, dtype) for model in (MISTRAL_7B, DEEPSEEK_V2_LITE)
         for dtype in (BF16, FP8)]  # fmt: skip
SHOWN_TOKENS = (16384, 131072, 1048576)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling_model")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="PNG, SVG or PDF")
    args = parser.parse_args(argv)
    if args.picture is not None:
        plot.save(args.picture, "Predicted, 8 GPUs of a node", _panels())
    console = Console(width=110)
    for across_nodes in (False, True):
        where = "between nodes" if across_nodes else "within a node"
        table = Table(title=f"A step of the ring, 16384 tokens a device, {where}")
        for name in ("GPU", "heads", "dtype"):
            table.add_column(name)
        for name in ("MB sent", "ms to send", "ms to compute", "hides from tokens"):
            table.add_column(name, justify="right")
        for machine in MACHINES:
            for model, dtype in SHOWN:
                x = step(machine, model, dtype, 16384, across_nodes)
                table.add_row(
                    machine.name,
                    model.name,
                    dtype,
                    f"{x.sent_bytes / 1e6:.0f}",
                    f"{x.transfer * 1e3:.2f}",
                    f"{x.compute * 1e3:.2f}",
                    f"{crossing(machine, model, dtype, across_nodes):.0f}",
                )
        console.print(table)
    table = Table(title="Speed-up on 8 GPUs of a node, ring / all-gather")
    for name in ("GPU", "heads", "dtype", *(f"{n // 1024}k" for n in SHOWN_TOKENS)):
        table.add_column(name)
    for machine in MACHINES:
        for model, dtype in SHOWN:
            cells = (
                " / ".join(
                    f"{speed_up(machine, model, dtype, tokens, 8, method):.2f}"
                    for method in ("ring", "all_gather")
                )
                for tokens in SHOWN_TOKENS
            )
            table.add_row(machine.name, model.name, dtype, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
