"""Floating-point vector instructions and comparisons.

The transcendental instructions are within 1 ulp on the machine; here they are rounded
correctly. They flush denormal inputs and results, as the machine's do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import EXEC, VCC, Instruction, Operand
from .errors import UnknownInstruction
from .floats import fma16, fma32, fma32_unrounded, fma64
from .operands import Access, Array
from .registry import Step, opcode
from .state import Group, lane_bits, lane_mask
from .vector import Sources, float_result, flush_denormals, vector

if TYPE_CHECKING:
    from .machine import Machine

F16, F32, F64 = np.float16, np.float32, np.float64
I32, U32 = np.int32, np.uint32


def _both_zero(a: Array, b: Array, result: Array, combine: Any) -> Array:
    """Orders -0 below +0, which NumPy leaves open."""
    zeros = (a == 0) & (b == 0)
    if not zeros.any():
        return result
    dtype = f"u{result.dtype.itemsize}"
    bits = combine(np.asarray(a).view(dtype), np.asarray(b).view(dtype))
    return np.where(zeros, bits.view(result.dtype), result)


def maximum(a: Array, b: Array) -> Array:
    """A NaN loses against a number."""
    return _both_zero(a, b, np.fmax(a, b), np.bitwise_and)


def minimum(a: Array, b: Array) -> Array:
    return _both_zero(a, b, np.fmin(a, b), np.bitwise_or)


def _nan_maximum(a: Array, b: Array) -> Array:
    return _both_zero(a, b, np.maximum(a, b), np.bitwise_and)


def _nan_minimum(a: Array, b: Array) -> Array:
    return _both_zero(a, b, np.minimum(a, b), np.bitwise_or)


def _max3(a: Array, b: Array, c: Array) -> Array:
    return maximum(maximum(a, b), c)


def _min3(a: Array, b: Array, c: Array) -> Array:
    return minimum(minimum(a, b), c)


def _med3(a: Array, b: Array, c: Array) -> Array:
    middle = maximum(minimum(a, b), minimum(maximum(a, b), c))
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(nan, _min3(a, b, c), middle)


for _bits, _fma in ((16, fma16), (32, fma32), (64, fma64)):
    _kind = f"f{_bits}"
    _two, _three = f"{_kind} {_kind}", f"{_kind} {_kind} {_kind}"
    for _name, _function in {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "subrev": lambda a, b: b - a,
        "mul": lambda a, b: a * b,
        "max": maximum,
        "min": minimum,
    }.items():
        if _bits != 64 or not _name.startswith("sub"):
            vector(f"v_{_name}_{_kind}", out=_kind, ins=_two)(_function)
    vector(f"v_fma_{_kind}", out=_kind, ins=_three, keep=_bits == 16)(_fma)
    if _bits != 16:
        vector(f"v_fmac_{_kind}", out=_kind, ins=f"{_two} ={_kind}")(_fma)
    if _bits != 64:
        vector(f"v_max3_{_kind}", out=_kind, ins=_three, keep=_bits == 16)(_max3)
        vector(f"v_min3_{_kind}", out=_kind, ins=_three, keep=_bits == 16)(_min3)
        vector(f"v_med3_{_kind}", out=_kind, ins=_three, keep=_bits == 16)(_med3)

_THREE = "f32 f32 f32"
vector("v_maximum3_f32", out="f32", ins=_THREE)(
    lambda a, b, c: _nan_maximum(_nan_maximum(a, b), c)
)
vector("v_minimum3_f32", out="f32", ins=_THREE)(
    lambda a, b, c: _nan_minimum(_nan_minimum(a, b), c)
)


@vector("v_mul_legacy_f32", out="f32", ins="f32 f32")
def _mul_legacy(a: Array, b: Array) -> Array:
    return np.where((a == 0) | (b == 0), F32(0), a * b)


@opcode("v_fmamk_f32", "v_fmaak_f32")
def _fma_literal(machine: Machine, instruction: Instruction) -> Step:
    access = Access(machine, instruction)
    sources = Sources(access)
    literal = Operand("const", 255, 32, instruction.modifiers.get("literal", 0))
    a, b = (sources.reader(o, "f32", i) for i, o in enumerate(instruction.sources))
    k = access.reader(literal, "f32")
    write = access.writer(instruction.destinations[0], "f32")
    multiplies = instruction.name == "v_fmamk_f32"
    finish = float_result(access, "f32")

    def run(g: Group) -> None:
        value = fma32(a(g), k(g), b(g)) if multiplies else fma32(a(g), b(g), k(g))
        write(g, finish(value) if finish else value, None)

    return access.finish(run)


# Transcendental functions.


def _through_f64(function: Any) -> Any:
    def compute(a: Array) -> Array:
        exact = function(flush_denormals(a).astype(F64))
        return flush_denormals(exact.astype(F32))

    return compute


_TRANSCENDENTAL = {
    "exp": np.exp2,
    "log": np.log2,
    "rcp": np.reciprocal,
    "rcp_iflag": np.reciprocal,
    "rsq": lambda a: np.reciprocal(np.sqrt(a)),
    "sqrt": np.sqrt,
    "sin": lambda a: np.sin(2 * np.pi * np.fmod(a, 1)),
    "cos": lambda a: np.cos(2 * np.pi * np.fmod(a, 1)),
}
for _name, _function in _TRANSCENDENTAL.items():
    vector(f"v_{_name}_f32", out="f32", ins="f32")(_through_f64(_function))
    if _name != "rcp_iflag":
        vector(f"v_{_name}_f16", out="f16", ins="f16")(
            lambda a, f=_function: f(a.astype(F64)).astype(F16)
        )
    if _name in ("rcp", "rsq", "sqrt"):
        vector(f"v_{_name}_f64", out="f64", ins="f64")(_function)


# Rounding and exponents.


def _fract(a: Array) -> Array:
    below_one = np.nextafter(a.dtype.type(1), a.dtype.type(0))
    fraction = a - np.floor(a)
    return np.where(fraction >= 1, below_one, fraction).astype(a.dtype)


def _mantissa(a: Array) -> Array:
    return np.where(np.isfinite(a), np.frexp(a)[0], a)


def _exponent(a: Array) -> Array:
    return np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(I32)


for _bits in (16, 32, 64):
    _kind = f"f{_bits}"
    for _name, _function in {
        "floor": np.floor,
        "ceil": np.ceil,
        "trunc": np.trunc,
        "rndne": np.rint,
        "fract": _fract,
        "frexp_mant": _mantissa,
    }.items():
        vector(f"v_{_name}_{_kind}", out=_kind, ins=_kind)(_function)

vector("v_frexp_exp_i32_f32", out="i32", ins="f32")(_exponent)
vector("v_frexp_exp_i32_f64", out="i32", ins="f64")(_exponent)
vector("v_frexp_exp_i16_f16", out="i16", ins="f16")(
    lambda a: _exponent(a).astype(np.int16)
)
vector("v_ldexp_f32", out="f32", ins="f32 i32")(
    lambda a, b: np.ldexp(a, np.clip(b, -400, 400))
)
vector("v_ldexp_f64", out="f64", ins="f64 i32")(
    lambda a, b: np.ldexp(a, np.clip(b, -4000, 4000))
)
vector("v_ldexp_f16", out="f16", ins="f16 i16")(
    lambda a, b: np.ldexp(a, np.clip(b, -100, 100).astype(I32))
)


# Division: the pieces of a correctly rounded quotient, as AMD's pseudocode has them.


@vector("v_div_fixup_f32", out="f32", ins=_THREE)
def _div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    d, n = denominator, numerator
    negative = np.signbit(d) ^ np.signbit(n)
    _, d_exponent = np.frexp(d)
    _, n_exponent = np.frexp(n)
    magnitude = np.abs(quotient)
    magnitude = np.where(n_exponent - d_exponent < -150, F32(0), magnitude)
    magnitude = np.where(np.isinf(d) | (n == 0), F32(0), magnitude)
    magnitude = np.where((d == 0) | np.isinf(n), F32(np.inf), magnitude)
    result = np.where(negative, -magnitude, magnitude)
    invalid = ((d == 0) & (n == 0)) | (np.isinf(d) & np.isinf(n))
    result = np.where(invalid, F32(-np.nan), result)
    result = np.where(np.isnan(d), d, result)
    return np.where(np.isnan(n), n, result).astype(F32)


@opcode("v_div_scale_f32")
def _div_scale(machine: Machine, instruction: Instruction) -> Step:
    access = Access(machine, instruction)
    sources = Sources(access)
    readers = [sources.reader(o, "f32", i) for i, o in enumerate(instruction.sources)]
    vdst, sdst = instruction.destinations
    write, write_mask = access.writer(vdst, "f32"), access.scalar_writer(sdst)

    def run(g: Group) -> None:
        s0, s1, s2 = (np.broadcast_to(read(g), (g.count, 64)) for read in readers)
        biased = [((x.view(U32) >> U32(23)) & U32(255)).astype(I32) for x in (s1, s2)]
        tiny = F32(2.0**-126)
        ratio = np.abs(s2.astype(F64) / s1.astype(F64))
        small_ratio = (ratio < tiny) & (ratio > 0)
        huge = biased[1] - biased[0] >= 96
        denormal = (np.abs(s1) < tiny) & (s1 != 0)
        # A denominator of 2^126 or more has a denormal reciprocal.
        inverse = np.abs(s1) > F32(2.0**126)
        up, down = np.ldexp(s0, 64), np.ldexp(s0, -64)
        value = np.where(biased[1] <= 23, up, s0)
        value = np.where(small_ratio, np.where(s0 == s2, up, s0), value)
        value = np.where(inverse, down, value)
        both = inverse & small_ratio
        value = np.where(both, np.where(s0 == s1, up, s0), value)
        value = np.where(denormal, up, value)
        value = np.where(huge, np.where(s0 == s1, up, s0), value)
        invalid = (s2 == 0) | (s1 == 0)
        value = np.where(invalid, F32(np.nan), value)
        flag = ~invalid & (huge | (~denormal & small_ratio))
        write(g, value.astype(F32), None)
        write_mask(g, lane_bits(np.ascontiguousarray(flag)) & g.exec_bits)

    return access.finish(run)


@opcode("v_div_fmas_f32")
def _div_fmas(machine: Machine, instruction: Instruction) -> Step:
    """Undoes v_div_scale. AMD's text has one factor, 2^32, which cannot be: what was
    scaled was the denominator by 2^64 or the numerator by 2^64, and the quotient so
    far (the addend) tells which."""
    access = Access(machine, instruction)
    sources = Sources(access)
    a, b, c = (sources.reader(o, "f32", i) for i, o in enumerate(instruction.sources))
    flags = access.scalar(Operand("s", VCC, 64), "u64")
    write = access.writer(instruction.destinations[0], "f32")
    finish = float_result(access, "f32")

    def run(g: Group) -> None:
        x, y, z = a(g), b(g), c(g)
        up = np.abs(z) >= 2
        factor = np.where(up, 2.0**64, 2.0**-64)
        factor = np.where(lane_mask(flags(g)), factor, 1.0)
        value = (fma32_unrounded(x, y, z) * factor).astype(F32)
        write(g, finish(value) if finish else value, None)

    return access.finish(run)


# Comparisons.

_RELATIONS = {
    "f": lambda a, b: (a != a) & False,
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: (a == a) & (b == b),
    "u": lambda a, b: (a != a) | (b != b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: ~(a < b),
    "tru": lambda a, b: (a == a) | True,
    "ne": lambda a, b: a != b,
    "t": lambda a, b: (a == a) | True,
}
_INTEGER = ("f", "lt", "eq", "le", "gt", "ne", "ge", "t")


def _classify(a: Array, wanted: Array) -> Array:
    magnitude, negative = np.abs(a), np.signbit(a)
    tiny = np.finfo(a.dtype).tiny
    bits = np.asarray(a).view(f"u{a.dtype.itemsize}")
    quiet = (bits >> bits.dtype.type(np.finfo(a.dtype).nmant - 1)) & 1
    zero, infinite = magnitude == 0, np.isinf(a)
    place = np.where(negative, 3, 8)
    place = np.where(magnitude < tiny, np.where(negative, 4, 7), place)
    place = np.where(zero, np.where(negative, 5, 6), place)
    place = np.where(infinite, np.where(negative, 2, 9), place)
    place = np.where(np.isnan(a), quiet.astype(np.int64), place)
    return ((wanted >> place.astype(U32)) & U32(1)) != 0


def _comparison(name: str, function: Any, first: str, second: str) -> None:
    writes_exec = name.startswith("v_cmpx")

    def compile(machine: Machine, instruction: Instruction) -> Step:
        access = Access(machine, instruction)
        sources = Sources(access)
        if sources.dpp:
            raise UnknownInstruction("a comparison with DPP")
        targets = instruction.destinations or (Operand("s", VCC, 64),)
        if sources.sdwa:
            index = targets[0].index if access.modifier("sd") else VCC
            targets = (Operand("s", index, 64),)
        a = sources.reader(instruction.sources[0], first, 0)
        b = sources.reader(instruction.sources[1], second, 1)
        if access.modifier("clmp"):
            raise UnknownInstruction("a comparison that signals")
        write = access.scalar_writer(targets[0])
        write_exec = access.scalar_writer(Operand("s", EXEC, 64))
        if not writes_exec:
            access.scalar_writes -= {EXEC, EXEC + 1}

        def run(g: Group) -> None:
            result = np.broadcast_to(function(a(g), b(g)), (g.count, 64))
            bits = lane_bits(result) & g.exec_bits
            write(g, bits)
            if writes_exec:
                write_exec(g, bits)

        return access.finish(run)

    opcode(name)(compile)


for _prefix in ("v_cmp", "v_cmpx"):
    for _relation, _function in _RELATIONS.items():
        if _relation not in ("ne", "t"):
            for _kind in ("f16", "f32", "f64"):
                _comparison(f"{_prefix}_{_relation}_{_kind}", _function, _kind, _kind)
        if _relation in _INTEGER:
            for _kind in ("i16", "u16", "i32", "u32", "i64", "u64"):
                _comparison(f"{_prefix}_{_relation}_{_kind}", _function, _kind, _kind)
    for _kind in ("f16", "f32", "f64"):
        _comparison(f"{_prefix}_class_{_kind}", _classify, _kind, "b32")
