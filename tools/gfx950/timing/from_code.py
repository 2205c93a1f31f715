"""Traces of compiled kernels, from the emulator."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from ..decode import VCC, Instruction, Operand
from ..state import Group
from .trace import SCALARS, Op, Trace, bank_cycles

_TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
_CONVERT_FP8 = re.compile(r"v_cvt_(scalef32_|sr_|pk_)*(fp8|bf8|f16_fp8|f32_fp8)")
_PACKED = re.compile(r"v_pk_(add|mul|fma|mov)_[fb]32")
_MATRIX = re.compile(r"v_s?mf\w+?_\w+?_(\d+)x(\d+)x(\d+)_?(\w+)")
_LDS_SIZE = re.compile(r"_b(\d+)$|_tr_b\d+$")
_NO_UNIT = ("s_nop", "s_sleep", "s_sethalt", "s_setprio", "v_nop")
_FP6_OR_4 = (2, 3, 4)  # formats of f8f6f4 operands that are below a byte


def registers(operand: Operand) -> tuple[int, ...]:
    if operand.file == "const":
        return ()
    first = operand.index + (SCALARS if operand.file == "s" else 0)
    return tuple(range(first, first + operand.dwords))


def _all(operands: Any) -> tuple[int, ...]:
    return tuple(r for operand in operands for r in registers(operand))


def classify(instruction: Instruction) -> Op:
    """The instruction as an Op; what its execution adds is missing."""
    name, named = instruction.name, instruction.named
    modifiers = instruction.modifiers
    straddles = instruction.size >= 8 and instruction.address % 8 == 4
    reads, writes = _all(instruction.sources), _all(instruction.destinations)
    simm = modifiers.get("simm16", 0)
    op = Op("scalar", reads=reads, writes=writes, straddles=straddles)
    if name == "s_waitcnt":
        vm, lgkm = simm & 15 | simm >> 14 << 4, simm >> 8 & 15
        return Op("wait", vm=vm if vm < 63 else None, lgkm=lgkm if lgkm < 15 else None)
    if name == "s_barrier":
        return Op("barrier")
    if name == "s_setprio":
        return Op("priority", count=simm)
    if name.startswith(_NO_UNIT):
        return Op("nop", count=(simm & 15) + 1 if name == "s_nop" else 1)
    if name == "s_endpgm":
        return Op("end")
    if name.startswith(("s_branch", "s_cbranch", "s_setpc")):
        reads = (SCALARS + VCC, SCALARS + VCC + 1) if "vcc" in name else ()
        return Op("branch", reads=reads)
    if name.startswith(("s_load", "s_buffer_load")):
        return dataclasses.replace(op, kind="smem")
    if name.startswith("s_"):
        return op
    if name.startswith("ds_"):
        match = _LDS_SIZE.search(name)
        bits = 64 if "_tr_" in name else int(match.group(1)) if match else 32
        return dataclasses.replace(
            op, kind="lds", bytes=8 * bits, transposed="_tr_" in name
        )
    if name.startswith(("buffer_", "global_")):
        return _memory(instruction, op)
    if (match := _MATRIX.match(name)) is not None:
        return _matrix(instruction, op, match)
    return _vector(instruction, op, named)


def _memory(instruction: Instruction, op: Op) -> Op:
    name = instruction.name
    width = re.search(r"x(\d)$", name)
    size = 256 * (int(width.group(1)) if width else 1)
    if "store" in name:
        return dataclasses.replace(op, kind="store", writes=(), bytes=size)
    if instruction.modifiers.get("lds"):
        address = _all(v for k, v in instruction.named.items() if k != "vdata")
        return dataclasses.replace(
            op, kind="copy", reads=address, writes=(), bytes=size
        )
    return dataclasses.replace(op, kind="load", bytes=size)


def matrix_passes(m: int, n: int, k: int, element: str, small: bool) -> int:
    """Slots of a matrix instruction, at AMD's dense rates. `small`: both operands of
    f8f6f4 have fewer than eight bits. Shapes that gfx942 had too run at its rates."""
    new = m * k >= (1024 if element == "i8" else 512)
    if element == "f8f6f4":
        rate = 4096 if small else 2048
    elif element in ("i8", "bf16", "f16", "bf16_1k"):
        rate = (1024 if new else 512) * (2 if element == "i8" else 1)
    elif element.startswith(("fp8", "bf8")):
        rate = 2048 if new else 1024
    else:
        rate = 256
    return max(1, 2 * m * n * k // rate // 4)


def _matrix(instruction: Instruction, op: Op, match: re.Match[str]) -> Op:
    named, modifiers = instruction.named, instruction.modifiers
    m, n, k = (int(match.group(i)) for i in (1, 2, 3))
    element = match.group(4)
    formats = (modifiers.get("cbsz", 0), modifiers.get("blgp", 0))
    small = element == "f8f6f4" and all(f in _FP6_OR_4 for f in formats)
    passes = matrix_passes(m, n, k, element, small)
    if "smfmac" in instruction.name:
        passes = passes // 2  # half of A is zeros that are not multiplied
    widest = max(4 * named[x].dwords for x in ("src0", "src1"))
    reads = tuple(
        r
        for key, v in named.items()
        if key not in ("vdst", "src2")
        for r in registers(v)
    )
    accumulates = registers(named["src2"]) if "src2" in named else ()
    if "smfmac" in instruction.name:
        accumulates, reads = op.writes, reads + accumulates
    return dataclasses.replace(
        op,
        kind="matrix",
        reads=reads,
        accumulates=accumulates,
        passes=passes,
        hold=1 + -(-widest // 16),
        scaled="_scale_" in instruction.name,
    )


def _vector(instruction: Instruction, op: Op, named: Any) -> Op:
    name = instruction.name
    reads, writes = op.reads, op.writes
    if name.startswith("v_cmp") and not writes:
        writes = (SCALARS + VCC, SCALARS + VCC + 1)
    if "_swap_" in name:
        writes = writes + registers(named["src0"])
        reads = reads + op.writes
    if name.startswith(("v_fmac", "v_pk_fmac", "v_dot")) or "opsel" in dict(
        instruction.modifiers
    ):
        reads = reads + op.writes
    kind, rate = "vector", "vector"
    if _PACKED.match(name):
        kind = "packed"
    elif _TRANSCENDENTAL.match(name):
        rate = "transcendental"
    elif "pknorm" in name:
        rate = "convert_norm"
    elif _CONVERT_FP8.match(name):
        rate = "convert_fp8"
    elif name.startswith("v_cvt"):
        rate = "convert"
    elif "_swap_" in name:
        rate = "swap"
    return dataclasses.replace(op, kind=kind, rate=rate, reads=reads, writes=writes)


class Recorder:
    """An observer for `launch`, which records the waves of one workgroup."""

    def __init__(self) -> None:
        self.traces: dict[int, Trace] = {}
        self._branch: dict[int, Instruction] = {}
        self._ops: dict[int, Op] = {}
        self._with_phases: dict[tuple[int, tuple[int, int]], Op] = {}
        self._phases: dict[tuple[int, bytes], tuple[int, int]] = {}

    def __call__(self, instruction: Instruction, group: Group) -> None:
        address = instruction.address
        op = self._ops.get(address)
        if op is None:
            op = self._ops[address] = classify(instruction)
        for position, wave in enumerate(group.waves.tolist()):
            if group.state.workgroup[wave]:
                continue
            wave = int(group.state.wave_in_workgroup[wave])
            trace = self.traces.setdefault(wave, [])
            if trace and trace[-1].kind == "branch":
                taken = self._branch[wave].next_address != address
                trace[-1] = dataclasses.replace(trace[-1], taken=taken)
            if op.kind == "lds":
                trace.append(self._accessed(instruction, op, group, position))
            else:
                trace.append(op)
            if op.kind == "branch":
                self._branch[wave] = instruction

    def _accessed(
        self, instruction: Instruction, op: Op, group: Group, position: int
    ) -> Op:
        if "permute" in instruction.name or "swizzle" in instruction.name:
            return dataclasses.replace(op, phases=(2, 1))
        row = group.state.row(instruction.named["addr"].index)
        lanes = group.state.v[row, group.waves[position]].astype(np.int64)
        relative = (lanes - (int(lanes.min()) & ~255)).astype(np.int32)
        key = op.bytes, relative.tobytes()
        phases = self._phases.get(key)
        if phases is None:
            size = op.bytes // 64
            lists = relative.tolist()
            phases = (
                bank_cycles(lists, size, 32),
                bank_cycles(lists, size, 64),
            )
            self._phases[key] = phases
        whole = instruction.address, phases
        done = self._with_phases.get(whole)
        if done is None:
            done = self._with_phases[whole] = dataclasses.replace(op, phases=phases)
        return done
