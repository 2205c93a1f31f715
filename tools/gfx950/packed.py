"""Packed vector instructions (VOP3P): two results from two halves of each operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Instruction, Operand
from .errors import UnknownInstruction
from .floats import bf16_to_f32, fma16, fma32
from .operands import DTYPES, Access, Array, Reader, width
from .registry import Step, opcode
from .state import Group
from .vector import flush_denormals
from .vector_float import maximum, minimum

if TYPE_CHECKING:
    from .machine import Machine

I32, U16, U32, U64 = np.int32, np.uint16, np.uint32, np.uint64


class Selectors:
    """op_sel, op_sel_hi, neg and neg_hi of a packed instruction."""

    def __init__(self, access: Access):
        self.low = access.modifier("opsel")
        self.high = access.modifier("opsel_hi", 7) & 7
        self.negate_low = access.modifier("neg")
        self.negate_high = access.modifier("neg_hi")

    def half(self, position: int, high: bool) -> int:
        return (self.high if high else self.low) >> position & 1

    def negated(self, position: int, high: bool) -> bool:
        return bool((self.negate_high if high else self.negate_low) >> position & 1)


def _half_reader(access: Access, operand: Operand, kind: str, half: int) -> Reader:
    """One half: 16 bits of a register, or one register of a pair."""
    if operand.file == "const" and half == 1:
        raise UnknownInstruction("the upper half of a constant")
    if width(kind) == 16:
        return access.reader(operand, kind, (half,))
    if operand.file == "v":
        return access.reader(Operand("v", operand.index + half, 32), kind)
    if operand.file == "s":
        return access.reader(Operand("s", operand.index + half, 32), kind)
    return access.reader(operand, kind)


def _packed(name: str, kind: str, count: int, function: Callable[..., Any]) -> None:
    def compile(machine: Machine, instruction: Instruction) -> Step:
        access = Access(machine, instruction)
        selectors = Selectors(access)
        floating = kind.startswith("f")
        halves: list[list[Reader]] = []
        for high in (False, True):
            readers = []
            for position, operand in enumerate(instruction.sources[:count]):
                half = selectors.half(position, high)
                read = _half_reader(access, operand, kind, half)
                if selectors.negated(position, high):
                    if not floating:
                        raise UnknownInstruction("neg on packed integers")
                    read = _negated(read)
                if kind == "f32" and machine.flush_input:
                    read = _flushed(read)
                readers.append(read)
            halves.append(readers)
        (destination,) = instruction.destinations
        clamps = access.modifier("clmp")
        if clamps and not floating:
            raise UnknownInstruction("clamp on packed integers")
        flush = kind == "f32" and machine.flush_output
        wide = width(kind) == 32
        write = access.writer(destination, "b64" if wide else "b32")

        def run(g: Group) -> None:
            results = []
            for readers in halves:
                value = function(*(read(g) for read in readers))
                if clamps:
                    top = DTYPES[kind](1)
                    value = np.where(value > 0, np.minimum(value, top), DTYPES[kind](0))
                results.append(flush_denormals(value) if flush else value)
            low, high = (np.asarray(r).view(U32 if wide else U16) for r in results)
            if wide:
                write(g, low.astype(U64) | (high.astype(U64) << U64(32)), None)
            else:
                write(g, low.astype(U32) | (high.astype(U32) << U32(16)), None)

        return access.finish(run)

    opcode(name)(compile)


def _negated(read: Reader) -> Reader:
    return lambda g: -read(g)


def _flushed(read: Reader) -> Reader:
    return lambda g: flush_denormals(read(g))


_packed("v_pk_fma_f32", "f32", 3, fma32)
_packed("v_pk_mul_f32", "f32", 2, lambda a, b: a * b)
_packed("v_pk_add_f32", "f32", 2, lambda a, b: a + b)
_packed("v_pk_fma_f16", "f16", 3, fma16)
_packed("v_pk_mul_f16", "f16", 2, lambda a, b: a * b)
_packed("v_pk_add_f16", "f16", 2, lambda a, b: a + b)
_packed("v_pk_max_f16", "f16", 2, maximum)
_packed("v_pk_min_f16", "f16", 2, minimum)
for _kind in ("u16", "i16"):
    _shift = "lshr" if _kind == "u16" else "ashr"
    _packed(f"v_pk_add_{_kind}", _kind, 2, lambda a, b: a + b)
    _packed(f"v_pk_sub_{_kind}", _kind, 2, lambda a, b: a - b)
    _packed(f"v_pk_max_{_kind}", _kind, 2, np.maximum)
    _packed(f"v_pk_min_{_kind}", _kind, 2, np.minimum)
    _packed(f"v_pk_mad_{_kind}", _kind, 3, lambda a, b, c: a * b + c)
_packed("v_pk_mul_lo_u16", "u16", 2, lambda a, b: a * b)
_packed("v_pk_lshlrev_b16", "u16", 2, lambda n, a: a << (n & U16(15)))
_packed("v_pk_lshrrev_b16", "u16", 2, lambda n, a: a >> (n & U16(15)))
_packed("v_pk_ashrrev_i16", "i16", 2, lambda n, a: a >> (n & np.int16(15)))


@opcode("v_pk_mov_b32")
def _pk_mov(machine: Machine, instruction: Instruction) -> Step:
    access = Access(machine, instruction)
    selectors = Selectors(access)
    first, second = instruction.sources
    low = _half_reader(access, first, "b32", selectors.half(0, False))
    high = _half_reader(access, second, "b32", selectors.half(1, False))
    write = access.writer(instruction.destinations[0], "b64")

    def run(g: Group) -> None:
        write(g, low(g).astype(U64) | (high(g).astype(U64) << U64(32)), None)

    return access.finish(run)


def _mix(name: str, half: int | None) -> None:
    """fma of operands that are float32 or, by op_sel_hi, a half of a float16 pair."""

    def compile(machine: Machine, instruction: Instruction) -> Step:
        access = Access(machine, instruction)
        low = access.modifier("opsel")
        is_half = access.modifier("opsel_hi", 7) & 7
        negative, absolute = access.modifier("neg"), access.modifier("neg_hi")
        readers = []
        for position, operand in enumerate(instruction.sources):
            bit = 1 << position
            if is_half & bit:
                if operand.file == "const" and operand.index >= 240:
                    raise UnknownInstruction("a constant as a half of a mixed sum")
                plain = access.reader(operand, "f16", (1 if low & bit else 0,))
                read = _widened(plain)
            else:
                read = access.reader(operand, "f32")
            if absolute & bit:
                read = _absolute(read)
            readers.append(_negated(read) if negative & bit else read)
        (destination,) = instruction.destinations
        clamps = access.modifier("clmp")
        if half is None:
            write = access.writer(destination, "f32")
        else:
            write = access.writer(destination, "f16", half, keep=True)

        def run(g: Group) -> None:
            value = fma32(*(read(g) for read in readers))
            if clamps:
                value = np.where(value > 0, np.minimum(value, np.float32(1)), 0)
            write(g, value.astype(np.float32 if half is None else np.float16), None)

        return access.finish(run)

    opcode(name)(compile)


def _widened(read: Reader) -> Reader:
    return lambda g: read(g).astype(np.float32)


def _absolute(read: Reader) -> Reader:
    return lambda g: np.abs(read(g))


_mix("v_mad_mix_f32", None)
_mix("v_mad_mixlo_f16", 0)
_mix("v_mad_mixhi_f16", 1)


# Dot products of packed elements, accumulated in 32 bits.


def _elements(words: Array, bits: int, signed: bool) -> list[Array]:
    fields = []
    for shift in range(0, 32, bits):
        field = (words >> U32(shift)) & U32((1 << bits) - 1)
        if signed:
            sign = U32(1 << (bits - 1))
            field = (field ^ sign) - sign
        fields.append(field)
    return fields


def _integer_dot(bits: int, signed: bool) -> Callable[..., Array]:
    def dot(a: Array, b: Array, c: Array) -> Array:
        pairs = zip(_elements(a, bits, signed), _elements(b, bits, signed), strict=True)
        total: Any = c
        for x, y in pairs:
            total = total + x * y
        return total

    return dot


def _float_dot(convert: Callable[[Array], Array]) -> Callable[..., Array]:
    def dot(a: Array, b: Array, c: Array) -> Array:
        total: Any = c.view(np.float32)
        for shift in (U32(16), U32(0)):
            x, y = (convert((w >> shift).astype(U16)) for w in (a, b))
            total = fma32(x, y, total)
        return total

    return dot


def _dot(name: str, function: Callable[..., Array], accumulates: bool = False) -> None:
    def compile(machine: Machine, instruction: Instruction) -> Step:
        access = Access(machine, instruction)
        constants = [o.index >= 240 for o in instruction.sources if o.file == "const"]
        if access.modifier("opsel_hi", 7) & 3 != 3 or any(constants):
            raise UnknownInstruction("op_sel_hi or a constant in a dot product")
        a, b, *c = (access.reader(o, "b32") for o in instruction.sources)
        (destination,) = instruction.destinations
        addend = access.reader(destination, "b32") if accumulates else c[0]
        write = access.writer(destination, "b32")

        def run(g: Group) -> None:
            write(g, function(a(g), b(g), addend(g)), None)

        return access.finish(run)

    opcode(name)(compile)


for _name, _bits, _signed in (
    ("v_dot2_i32_i16", 16, True),
    ("v_dot2_u32_u16", 16, False),
    ("v_dot4_i32_i8", 8, True),
    ("v_dot4_u32_u8", 8, False),
    ("v_dot8_i32_i4", 4, True),
    ("v_dot8_u32_u4", 4, False),
):
    _dot(_name, _integer_dot(_bits, _signed))
for _name, _bits in (("2c_i32_i16", 16), ("4c_i32_i8", 8), ("8c_i32_i4", 4)):
    _dot(f"v_dot{_name}", _integer_dot(_bits, True), accumulates=True)
_dot("v_dot2_f32_bf16", _float_dot(bf16_to_f32))
_dot("v_dot2_f32_f16", _float_dot(lambda x: x.view(np.float16).astype(np.float32)))
_dot("v_dot2c_f32_bf16", _float_dot(bf16_to_f32), accumulates=True)
_dot(
    "v_dot2c_f32_f16",
    _float_dot(lambda x: x.view(np.float16).astype(np.float32)),
    accumulates=True,
)
