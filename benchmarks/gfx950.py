"""The kernels for AMD's gfx950: registers, memory, and instructions for each tile.

Counted in the emulator (tools/gfx950), which tells no times: what one wave executes for
one more full tile of keys, beside AITER's FP8 prefill kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections import Counter
from typing import TYPE_CHECKING

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from zyfa_jax import _ffi

from . import gfx950_speed, plot, report

if TYPE_CHECKING:
    from tools import gfx950

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
    from tools.gfx950.timing.workgroup import keys_of_tile

    shape = calls.Shape.of(kernel.name)
    keys = keys_of_tile(shape)

    def report(tiles: int) -> gfx950.Report:
        # All logits alike, so that no tile moves the maximum.
        q, k, v = (
            np.zeros((1, tokens, 1, dim), dtype)
            for tokens, dim, dtype in (
                (calls.QUERY_BLOCK, shape.head_dim, shape.dtype),
                (keys * tiles, shape.head_dim, shape.dtype),
                (keys * tiles, shape.value_dim, shape.value_dtype),
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
    report.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    report.check(args)
    console = Console()
    found = kernels()
    console.print(_resources(found))
    counted = {
        name.removeprefix("zyfa_attention_"): kernel
        for name, kernel in found.items()
        if name.startswith("zyfa_attention_") and "_f16_" not in name
    }
    mixes = {AITER: aiter_mix()}
    with Progress(console=console, transient=True) as progress:
        for name, kernel in progress.track(counted.items(), description="emulator"):
            mixes[name] = tile_mix(kernel)
    console.print(_mixes(mixes))
    with Progress(console=console, transient=True) as progress:
        track = functools.partial(progress.track, description="cycle model")
        prediction = gfx950_speed.Prediction.of(found, track)
    prediction.show(console)
    report.write(
        "gfx950",
        args,
        jax.devices("cpu")[0],
        resources={name: _resources_of(kernel) for name, kernel in found.items()},
        tiles={
            name: {"keys": x.keys, "instructions": dict(x.kinds)}
            for name, x in mixes.items()
        },
        heads=gfx950_speed.HEADS,
        prediction=dataclasses.asdict(prediction),
    )
    if args.picture is not None:
        plot.save(
            args.picture,
            "gfx950 by the cycle model: no time was measured",
            prediction.picture(),
            gfx950_speed.NOTE,
        )
    return 0


def _resources_of(kernel: gfx950.Kernel) -> dict[str, int]:
    return {
        "VGPRs": kernel.vgprs,
        "SGPRs": kernel.sgprs,
        "LDS bytes": kernel.lds_bytes,
        "scratch": kernel.scratch_bytes,
        "spills": kernel.vgpr_spills + kernel.sgpr_spills,
    }


def _resources(found: dict[str, gfx950.Kernel]) -> Table:
    table = Table("kernel", title="Resources (machine code)")
    rows = {name: _resources_of(kernel) for name, kernel in sorted(found.items())}
    for column in dict.fromkeys(x for row in rows.values() for x in row):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, *map(str, row.values()))
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
