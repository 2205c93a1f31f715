"""Conversions between number formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Instruction
from .errors import UnknownInstruction
from .floats import (
    bf16_to_f32,
    decode_table,
    encode_fp8,
    f32_to_bf16,
    f32_to_f16_toward_zero,
)
from .operands import Access, Array
from .registry import Step, opcode
from .state import Group
from .vector import Sources, vector

if TYPE_CHECKING:
    from .machine import Machine

F16, F32, F64 = np.float16, np.float32, np.float64
I32, U16, U32, U64 = np.int32, np.uint16, np.uint32, np.uint64


def to_integer(a: Array, low: int, high: int, dtype: Any) -> Array:
    """Truncates and clamps; a NaN is zero."""
    wide = np.clip(np.trunc(a.astype(F64)), low, high)
    return np.where(np.isnan(a), 0, wide).astype(np.int64).astype(dtype)


def _pack(low: Array, high: Array) -> Array:
    low, high = np.asarray(low), np.asarray(high)
    return low.astype(U32) | (high.astype(U32) << U32(16))


def _bits16(a: Array) -> Array:
    return np.asarray(a).astype(F16).view(U16)


_U32_MAX, _I32_MIN, _I32_MAX = 0xFFFFFFFF, -0x80000000, 0x7FFFFFFF
for _bits in (32, 64):
    _kind = f"f{_bits}"
    vector(f"v_cvt_u32_{_kind}", out="u32", ins=_kind)(
        lambda a: to_integer(a, 0, _U32_MAX, U32)
    )
    vector(f"v_cvt_i32_{_kind}", out="i32", ins=_kind)(
        lambda a: to_integer(a, _I32_MIN, _I32_MAX, I32)
    )
vector("v_cvt_rpi_i32_f32", out="i32", ins="f32")(
    lambda a: to_integer(np.floor(a.astype(F64) + 0.5), _I32_MIN, _I32_MAX, I32)
)
vector("v_cvt_flr_i32_f32", out="i32", ins="f32")(
    lambda a: to_integer(np.floor(a), _I32_MIN, _I32_MAX, I32)
)
vector("v_cvt_f32_u32", out="f32", ins="u32")(lambda a: a.astype(F32))
vector("v_cvt_f32_i32", out="f32", ins="i32")(lambda a: a.astype(F32))
vector("v_cvt_f64_u32", out="f64", ins="u32")(lambda a: a.astype(F64))
vector("v_cvt_f64_i32", out="f64", ins="i32")(lambda a: a.astype(F64))
vector("v_cvt_f64_f32", out="f64", ins="f32")(lambda a: a.astype(F64))
vector("v_cvt_f32_f64", out="f32", ins="f64")(lambda a: a.astype(F32))
vector("v_cvt_f16_f32", out="f16", ins="f32")(lambda a: a.astype(F16))
vector("v_cvt_f32_f16", out="f32", ins="f16")(lambda a: a.astype(F32))
vector("v_cvt_f16_u16", out="f16", ins="u16")(lambda a: a.astype(F16))
vector("v_cvt_f16_i16", out="f16", ins="i16")(lambda a: a.astype(F16))
vector("v_cvt_u16_f16", out="u16", ins="f16")(lambda a: to_integer(a, 0, 0xFFFF, U16))
vector("v_cvt_i16_f16", out="i16", ins="f16")(
    lambda a: to_integer(a, -0x8000, 0x7FFF, np.int16)
)
vector("v_cvt_f32_bf16", out="f32", ins="u16")(bf16_to_f32)
for _byte in range(4):
    vector(f"v_cvt_f32_ubyte{_byte}", out="f32", ins="u32")(
        lambda a, byte=_byte: ((a >> U32(8 * byte)) & U32(255)).astype(F32)
    )
vector("v_cvt_off_f32_i4", out="f32", ins="u32")(
    lambda a: (((a & U32(15)) ^ U32(8)).astype(F32) - F32(8)) / F32(16)
)


def _norm(a: Array, low: float, scale: float) -> Array:
    clamped = np.clip(np.nan_to_num(a.astype(F64), nan=0.0), low, 1.0)
    return np.rint(clamped * scale).astype(I32).astype(U16)


vector("v_cvt_pknorm_u16_f32", out="u32", ins="f32 f32")(
    lambda a, b: _pack(_norm(a, 0, 65535), _norm(b, 0, 65535))
)
vector("v_cvt_pknorm_i16_f32", out="u32", ins="f32 f32")(
    lambda a, b: _pack(_norm(a, -1, 32767), _norm(b, -1, 32767))
)
vector("v_cvt_pk_f16_f32", out="u32", ins="f32 f32")(
    lambda a, b: _pack(_bits16(a), _bits16(b))
)
vector("v_cvt_pk_bf16_f32", out="u32", ins="f32 f32")(
    lambda a, b: _pack(f32_to_bf16(a), f32_to_bf16(b))
)
vector("v_cvt_pkrtz_f16_f32", out="u32", ins="f32 f32")(
    lambda a, b: _pack(f32_to_f16_toward_zero(a), f32_to_f16_toward_zero(b))
)
vector("v_pack_b32_f16", out="u32", ins="f16 f16")(
    lambda a, b: _pack(np.asarray(a).view(U16), np.asarray(b).view(U16))
)


@vector("v_cvt_pk_u8_f32", out="u32", ins="f32 u32 u32")
def _cvt_pk_u8(a: Array, byte: Array, old: Array) -> Array:
    shift = (byte & U32(3)) * U32(8)
    nearest = to_integer(np.rint(a), 0, 255, U32)
    return (old & ~(U32(255) << shift)) | (nearest << shift)


# FP8. A "scale" is a float32 of which only the exponent counts.

_FORMATS = {"fp8": "e4m3", "bf8": "e5m2"}


def _exponent_of(scale: Array) -> Array:
    bits = np.asarray(scale).view(U32)
    return ((bits >> U32(23)) & U32(255)).astype(I32) - 127


def _to_fp8(name: str, format: str, source: str, scaled: bool, packed: bool) -> None:
    """v_cvt[_scalef32]_pk_{fp8,bf8}_{f32,f16,bf16}: two values to one half."""

    def compile(machine: Machine, instruction: Instruction) -> Step:
        access = Access(machine, instruction)
        sources = Sources(access)
        half = sources.result_half or 0
        sources.select &= ~8
        kinds = ["u32"] if packed else ["f32", "f32"]
        readers = [
            sources.reader(operand, kind, position)
            for position, (operand, kind) in enumerate(
                zip(instruction.sources, kinds, strict=False)
            )
        ]
        scale = None
        if scaled:
            scale = sources.reader(instruction.sources[len(kinds)], "f32", len(kinds))
        write = access.writer(instruction.destinations[0], "u16", half, keep=True)
        state = machine.state

        def run(g: Group) -> None:
            if packed:
                both = readers[0](g)
                low, high = (
                    _half_value((both >> U32(shift)).astype(U16), source)
                    for shift in (0, 16)
                )
            else:
                low, high = (read(g) for read in readers)
            if scale is not None:
                exponent = -_exponent_of(scale(g))
                low, high = (np.ldexp(x.astype(F64), exponent) for x in (low, high))
            saturate = state.fp16_overflow[g.index][:, None]
            codes = [encode_fp8(x, format, saturate) for x in (low, high)]
            write(g, codes[0].astype(U16) | (codes[1].astype(U16) << U16(8)), None)

        return access.finish(run)

    opcode(name)(compile)


def _half_value(codes: Array, kind: str) -> Array:
    return codes.view(F16) if kind == "f16" else bf16_to_f32(codes)


def _from_fp8(name: str, format: str, scaled: bool) -> None:
    """v_cvt[_scalef32]_pk_f32_{fp8,bf8}: one half to two values."""
    table = decode_table(format)

    def compile(machine: Machine, instruction: Instruction) -> Step:
        access = Access(machine, instruction)
        sources = Sources(access)
        read = sources.reader(instruction.sources[0], "u16", 0)
        scale = access.reader(instruction.sources[1], "f32") if scaled else None
        if sources.sdwa and access.modifier("dst_sel") != 6:
            raise UnknownInstruction("a part of a register pair as destination")
        write = access.writer(instruction.destinations[0], "u64")

        def run(g: Group) -> None:
            codes = read(g)
            pair = np.stack([table[codes & U16(255)], table[codes >> U16(8)]], -1)
            if scale is not None:
                pair = np.ldexp(pair, _exponent_of(scale(g))[..., None])
            write(g, np.ascontiguousarray(pair).view(U64)[..., 0], None)

        return access.finish(run)

    opcode(name)(compile)


for _short, _format in _FORMATS.items():
    vector(f"v_cvt_f32_{_short}", out="f32", ins="u32")(
        lambda a, format=_format: decode_table(format)[a & U32(255)]
    )
    _to_fp8(f"v_cvt_pk_{_short}_f32", _format, "f32", scaled=False, packed=False)
    for _source in ("f32", "f16", "bf16"):
        _to_fp8(
            f"v_cvt_scalef32_pk_{_short}_{_source}",
            _format,
            _source,
            scaled=True,
            packed=_source != "f32",
        )
    _from_fp8(f"v_cvt_pk_f32_{_short}", _format, scaled=False)
    _from_fp8(f"v_cvt_scalef32_pk_f32_{_short}", _format, scaled=True)
