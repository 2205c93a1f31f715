"""The kernels for AMD's gfx950: registers, memory, and instructions for each tile.

Counted in the emulator (tools/gfx950), which tells no times: what one wave executes for
one more full tile of keys, beside AITER's FP8 prefill kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

import zyfa_jax
from zyfa_jax import _ffi

from . import gfx950_speed, plot

if TYPE_CHECKING:
    from tools import gfx950

FORMAT = 1
"""Of the report: goes up where a reader of it would have to change."""

# From a disassembly of AITER's FP8 v3 causal kernel, for 32 queries and 128 keys.
AITER = "AITER FP8 128x128"
AITER_MIX = {
    "v_mfma": 16,
    "v_exp_f32": 65,
    "v_mul_f32": 67,
    "v_add_f32": 64,
    "v_pk_fma_f32": 32,
    "v_max3_f32": 32,
    "v_cvt_pk_fp8_f32": 32,
    "v_other": 17,
    "ds_read_b128": 16,
    "ds_read_b64_tr_b8": 32,
    "buffer_load_dwordx4": 4,
    "s_waitcnt": 17,
    "s_barrier": 7,
    "s_nop": 6,
    "s_setprio": 2,
    "s_other": 8,
}

# Rows of the table: what an opcode starts with, the first that fits.
KINDS = {
    "matrix": ("v_mfma",),
    "v_exp": ("v_exp",),
    "maximum": ("v_max",),
    "arithmetic": (
        "v_pk_fma",
        "v_pk_mul",
        "v_pk_add",
        "v_mul_f",
        "v_add_f",
        "v_fma",
    ),
    "conversion": ("v_cvt", "v_perm_"),
    "other vector": ("v_",),
    "LDS read": ("ds_read_b128",),
    "LDS, transposed": ("ds_read_b64_tr",),
    "copy to LDS": ("buffer_load",),
    "s_waitcnt": ("s_waitcnt",),
    "s_barrier": ("s_barrier",),
    "s_nop": ("s_nop",),
    "other scalar": ("s_",),
}
MATRIX, VECTOR = "matrix", ("v_exp", "maximum", "arithmetic",
                            "conversion", "other vector")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TileMix:
    """Instructions of one wave for one full tile.

    Attributes:
      keys: of the tile; the queries of a wave are 32.
      kinds: how many of each of `KINDS`.
    """

    keys: int
    kinds: Counter[str]

    @property
    def total(self) -> int:
        return self.kinds.total()

    @property
    def vector(self) -> int:
        """Vector instructions beside the matrix ones."""
        return sum(self.kinds[kind] for kind in VECTOR)


def kind_of(opcode: str) -> str:
    return next(k for k, starts in KINDS.items() if opcode.startswith(starts))


def tile_mix(kernel: gfx950.Kernel) -> TileMix:
    """What a wave executes for one more full tile."""
    from tools.gfx950 import calls

    shape = calls.Shape.of(kernel.name)
    keys = 128 if shape.dtype.itemsize == 1 else 64

    def report(tiles: int) -> gfx950.Report:
        # All logits alike, so that no tile moves the maximum.
        q, k, v = (
            np.zeros((1, tokens, 1, dim), shape.dtype)
            for tokens, dim in (
                (calls.QUERY_BLOCK, shape.head_dim),
                (keys * tiles, shape.head_dim),
                (keys * tiles, shape.value_dim),
            )
        )
        return calls.attend(kernel, q, k, v, window=(-1, -1))[2]

    few, many = report(4), report(5)
    more = many.opcodes.copy()
    more.subtract(few.opcodes)
    kinds: Counter[str] = Counter()
    for opcode, count in more.items():
        if count:
            kinds[kind_of(opcode)] += count // many.waves
    return TileMix(keys, kinds)


def aiter_mix() -> TileMix:
    kinds: Counter[str] = Counter()
    for opcode, count in AITER_MIX.items():
        kinds[kind_of(opcode)] += count
    return TileMix(128, kinds)


def kernels() -> dict[str, gfx950.Kernel]:
    """The kernels that the extension holds."""
    from tools import gfx950

    extension = _ffi.load()
    if extension is None or "gfx950" not in extension.rocm_archs():
        raise SystemExit("no kernels for gfx950 were built: see zyfa_jax.backends()")
    return gfx950.CodeObject(extension.rocm_code_object("gfx950")).kernels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="where a report goes")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="PNG, SVG or PDF")


def run(args: argparse.Namespace) -> int:
    if args.picture is not None:
        plot.check(args.picture)
    console = Console()
    found = kernels()
    console.print(_resources(found))
    mixes = {
        name.removeprefix("zyfa_attention_"): tile_mix(kernel)
        for name, kernel in found.items()
        if name.startswith("zyfa_attention_") and "_f16_" not in name
    }
    console.print(_mixes({AITER: aiter_mix()} | mixes))
    prediction = gfx950_speed.Prediction.of(found)
    prediction.show(console)
    if args.json is not None:
        report = {
            "format": FORMAT,
            "command": "benchmarks gfx950",
            "zyfa_jax": zyfa_jax.__version__,
            "tiles": {
                name: {"keys": x.keys, "instructions": dict(x.kinds)}
                for name, x in (mixes | {AITER: aiter_mix()}).items()
            },
            "prediction": dataclasses.asdict(prediction),
        }
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if args.picture is not None:
        title = "gfx950 by the cycle model (no time was measured), random logits"
        plot.save(args.picture, title, prediction.picture())
    return 0


def _resources(found: dict[str, gfx950.Kernel]) -> Table:
    table = Table("kernel", title="Resources (machine code)")
    for column in ("VGPRs", "SGPRs", "LDS bytes", "scratch", "spills"):
        table.add_column(column, justify="right")
    for name, kernel in sorted(found.items()):
        spills = kernel.vgpr_spills + kernel.sgpr_spills
        row = (kernel.vgprs, kernel.sgprs, kernel.lds_bytes, kernel.scratch_bytes)
        table.add_row(name, *map(str, (*row, spills)))
    return table


def _mixes(mixes: dict[str, TileMix]) -> Table:
    table = Table(
        "per full tile", title="Instructions of a wave for a full tile (emulated)"
    )
    for name in mixes:
        table.add_column(name, justify="right")
    table.add_row("queries x keys", *(f"32 x {x.keys}" for x in mixes.values()))
    for kind in KINDS:
        table.add_row(kind, *(str(x.kinds[kind]) for x in mixes.values()))
    table.add_section()
    table.add_row("all vector", *(str(x.vector) for x in mixes.values()))
    table.add_row("all", *(str(x.total) for x in mixes.values()))
    return table
