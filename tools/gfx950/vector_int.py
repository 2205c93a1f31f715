"""Integer and bitwise vector instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import VCC, Instruction, Operand
from .operands import DTYPES, Access, Array
from .registry import Step, opcode
from .state import Group, lane_bits, lane_mask
from .vector import Sources, vector

if TYPE_CHECKING:
    from .machine import Machine

U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64
VCC_PAIR = Operand("s", VCC, 64)


def _saturate(exact: Array, low: int, high: int, dtype: Any) -> Array:
    return np.clip(exact, low, high).astype(dtype)


def _sum(wide: Any, sign: int) -> Any:
    low, high = np.iinfo(wide).min, np.iinfo(wide).max

    def add(a: Array, b: Array, *, clamp: bool) -> Array:
        if not clamp:
            return a + b if sign > 0 else a - b
        exact = a.astype(I64) + sign * b.astype(I64)
        return _saturate(exact, low, high, wide)

    return add


vector("v_add_u32", out="u32", ins="u32 u32", clamp=True)(_sum(U32, 1))
vector("v_sub_u32", out="u32", ins="u32 u32", clamp=True)(_sum(U32, -1))
vector("v_add_i32", out="i32", ins="i32 i32", clamp=True)(_sum(I32, 1))
vector("v_sub_i32", out="i32", ins="i32 i32", clamp=True)(_sum(I32, -1))
vector("v_add_u16", out="u16", ins="u16 u16", clamp=True)(_sum(np.uint16, 1))
vector("v_sub_u16", out="u16", ins="u16 u16", clamp=True)(_sum(np.uint16, -1))
vector("v_add_i16", out="i16", ins="i16 i16", clamp=True)(_sum(np.int16, 1))
vector("v_sub_i16", out="i16", ins="i16 i16", clamp=True)(_sum(np.int16, -1))


@vector("v_subrev_u32", out="u32", ins="u32 u32", clamp=True)
def _subrev(a: Array, b: Array, *, clamp: bool) -> Array:
    return _sum(U32, -1)(b, a, clamp=clamp)


def _mul_high(a: Array, b: Array, wide: Any, narrow: Any) -> Array:
    return ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(narrow)


def _u24(a: Array) -> Array:
    return a & U32(0xFFFFFF)


def _i24(a: Array) -> Array:
    return (a << I32(8)) >> I32(8)


_BINARY = {
    "v_and_b32": ("b32", lambda a, b: a & b),
    "v_or_b32": ("b32", lambda a, b: a | b),
    "v_xor_b32": ("b32", lambda a, b: a ^ b),
    "v_xnor_b32": ("b32", lambda a, b: ~(a ^ b)),
    "v_lshlrev_b32": ("u32", lambda n, a: a << (n & U32(31))),
    "v_lshrrev_b32": ("u32", lambda n, a: a >> (n & U32(31))),
    "v_ashrrev_i32": ("i32", lambda n, a: a >> (n & I32(31))),
    "v_lshlrev_b16": ("u16", lambda n, a: a << (n & np.uint16(15))),
    "v_lshrrev_b16": ("u16", lambda n, a: a >> (n & np.uint16(15))),
    "v_ashrrev_i16": ("i16", lambda n, a: a >> (n & np.int16(15))),
    "v_min_u32": ("u32", np.minimum),
    "v_max_u32": ("u32", np.maximum),
    "v_min_i32": ("i32", np.minimum),
    "v_max_i32": ("i32", np.maximum),
    "v_min_u16": ("u16", np.minimum),
    "v_max_u16": ("u16", np.maximum),
    "v_min_i16": ("i16", np.minimum),
    "v_max_i16": ("i16", np.maximum),
    "v_mul_lo_u32": ("u32", lambda a, b: a * b),
    "v_mul_lo_u16": ("u16", lambda a, b: a * b),
    "v_mul_hi_u32": ("u32", lambda a, b: _mul_high(a, b, U64, U32)),
    "v_mul_hi_i32": ("i32", lambda a, b: _mul_high(a, b, I64, I32)),
    "v_mul_u32_u24": ("u32", lambda a, b: _u24(a) * _u24(b)),
    "v_mul_i32_i24": ("i32", lambda a, b: _i24(a) * _i24(b)),
    "v_mul_hi_u32_u24": ("u32", lambda a, b: _mul_high(_u24(a), _u24(b), U64, U32)),
    "v_mul_hi_i32_i24": ("i32", lambda a, b: _mul_high(_i24(a), _i24(b), I64, I32)),
    "v_bcnt_u32_b32": ("u32", lambda a, b: np.bitwise_count(a).astype(U32) + b),
    "v_bfm_b32": (
        "u32",
        lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)),
    ),
    "v_cvt_pk_u16_u32": (
        "u32",
        lambda a, b: np.minimum(a, U32(0xFFFF)) | (np.minimum(b, U32(0xFFFF)) << 16),
    ),
    "v_cvt_pk_i16_i32": ("i32", lambda a, b: _pack_i16(a) | (_pack_i16(b) << U32(16))),
}


def _pack_i16(a: Array) -> Array:
    return np.clip(a, -0x8000, 0x7FFF).astype(np.int16).view(np.uint16).astype(U32)


for _name, (_kind, _function) in _BINARY.items():
    vector(_name, out=_kind, ins=f"{_kind} {_kind}")(_function)


def _median(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _align(a: Array, b: Array, shift: Array) -> Array:
    wide = (a.astype(U64) << U64(32)) | b
    return (wide >> shift.astype(U64)).astype(U32)


def _field(a: Array, offset: Array, size: Array) -> tuple[Array, Array]:
    offset, size = offset.astype(U32) & U32(31), size.astype(U32) & U32(31)
    return a >> offset.astype(a.dtype), size


def _bfe_u32(a: Array, offset: Array, size: Array) -> Array:
    shifted, size = _field(a, offset, size)
    return shifted & ((U32(1) << size) - U32(1))


def _bfe_i32(a: Array, offset: Array, size: Array) -> Array:
    shifted, size = _field(a, offset, size)
    left = (U32(32) - size) & U32(31)
    value = (shifted.view(U32) << left).view(I32) >> left.astype(I32)
    return np.where(size == 0, I32(0), value)


def _perm(a: Array, b: Array, select: Array) -> Array:
    a, b, select = np.broadcast_arrays(a, b, select)
    data = np.stack([b, a], -1).astype(U32).view(np.uint8)
    signs = np.where(data[..., 1::2] & 0x80, np.uint8(0xFF), np.uint8(0))
    zero = np.zeros_like(signs[..., :1])
    table = np.concatenate([data, signs, zero, ~zero, ~zero, ~zero], -1)
    chosen = np.minimum(np.ascontiguousarray(select)[..., None].view(np.uint8), 13)
    picked = np.take_along_axis(table, chosen.astype(np.intp), -1)
    return np.ascontiguousarray(picked).view(U32)[..., 0]


def _sad_u32(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(a, b) - np.minimum(a, b) + c


_TERNARY = {
    "v_and_or_b32": ("u32", lambda a, b, c: (a & b) | c),
    "v_or3_b32": ("u32", lambda a, b, c: a | b | c),
    "v_add3_u32": ("u32", lambda a, b, c: a + b + c),
    "v_xad_u32": ("u32", lambda a, b, c: (a ^ b) + c),
    "v_lshl_add_u32": ("u32", lambda a, b, c: (a << (b & U32(31))) + c),
    "v_add_lshl_u32": ("u32", lambda a, b, c: (a + b) << (c & U32(31))),
    "v_lshl_or_b32": ("u32", lambda a, b, c: (a << (b & U32(31))) | c),
    "v_bfi_b32": ("u32", lambda a, b, c: (a & b) | (~a & c)),
    "v_bfe_u32": ("u32", _bfe_u32),
    "v_bfe_i32": ("i32", _bfe_i32),
    "v_alignbit_b32": ("u32", lambda a, b, c: _align(a, b, c & U32(31))),
    "v_alignbyte_b32": ("u32", lambda a, b, c: _align(a, b, (c & U32(3)) * U32(8))),
    "v_perm_b32": ("u32", _perm),
    "v_min3_u32": ("u32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_u32": ("u32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_u32": ("u32", _median),
    "v_min3_i32": ("i32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": ("i32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_i32": ("i32", _median),
    "v_sad_u32": ("u32", _sad_u32),
    "v_mad_u32_u24": ("u32", lambda a, b, c: _u24(a) * _u24(b) + c),
    "v_mad_i32_i24": ("i32", lambda a, b, c: _i24(a) * _i24(b) + c),
}
for _name, (_kind, _function) in _TERNARY.items():
    vector(_name, out=_kind, ins=f"{_kind} {_kind} {_kind}")(_function)

for _kind in ("u16", "i16"):
    _three = f"{_kind} {_kind} {_kind}"
    vector(f"v_mad_legacy_{_kind}", out=_kind, ins=_three)(lambda a, b, c: a * b + c)
    for _name, _function in {
        "mad": lambda a, b, c: a * b + c,
        "min3": lambda a, b, c: np.minimum(np.minimum(a, b), c),
        "max3": lambda a, b, c: np.maximum(np.maximum(a, b), c),
        "med3": _median,
    }.items():
        vector(f"v_{_name}_{_kind}", out=_kind, ins=_three, keep=True)(_function)

vector("v_mad_u32_u16", out="u32", ins="u16 u16 u32")(
    lambda a, b, c: a.astype(U32) * b.astype(U32) + c
)
vector("v_mad_i32_i16", out="i32", ins="i16 i16 i32")(
    lambda a, b, c: a.astype(I32) * b.astype(I32) + c
)
vector("v_lshl_add_u64", out="u64", ins="u64 u32 u64")(
    lambda a, n, c: (a << (n & U32(7)).astype(U64)) + c
)
vector("v_lshlrev_b64", out="u64", ins="u32 u64")(
    lambda n, a: a << (n & U32(63)).astype(U64)
)
vector("v_lshrrev_b64", out="u64", ins="u32 u64")(
    lambda n, a: a >> (n & U32(63)).astype(U64)
)
vector("v_ashrrev_i64", out="i64", ins="u32 i64")(
    lambda n, a: a >> (n & U32(63)).astype(I64)
)
vector("v_mov_b32", "v_accvgpr_mov_b32", out="b32", ins="b32")(lambda a: a)
vector("v_accvgpr_read", "v_accvgpr_write", out="b32", ins="b32")(lambda a: a)
vector("v_mov_b64", out="b64", ins="b64")(lambda a: a)
vector("v_not_b32", out="b32", ins="b32")(lambda a: ~a)


@vector("v_bfrev_b32", out="b32", ins="b32")
def _bfrev(a: Array) -> Array:
    data = np.ascontiguousarray(a).view(np.uint8)
    bits = np.unpackbits(data, bitorder="big").reshape(-1, 32)
    order = np.arange(32).reshape(4, 8)[::-1].reshape(-1)
    packed = np.packbits(bits[:, order], axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view(U32).reshape(a.shape)


@vector("v_ffbh_u32", out="u32", ins="u32")
def _ffbh_u32(a: Array) -> Array:
    _, exponent = np.frexp(a.astype(np.float64))
    return np.where(a == 0, -1, 32 - exponent).astype(I32)


@vector("v_ffbl_b32", out="u32", ins="u32")
def _ffbl(a: Array) -> Array:
    lowest = a & (~a + U32(1))
    return np.where(a == 0, -1, np.bitwise_count(lowest - U32(1)).astype(I32))


@vector("v_ffbh_i32", out="i32", ins="i32")
def _ffbh_i32(a: Array) -> Array:
    same = np.where(a < 0, ~a, a)
    _, exponent = np.frexp(same.astype(np.float64))
    return np.where(same == 0, -1, 32 - exponent).astype(I32)


@vector("v_sat_pk_u8_i16", out="u16", ins="b32")
def _sat_pk_u8(a: Array) -> Array:
    low = (a << U32(16)).view(I32) >> 16
    high = a.view(I32) >> 16
    return (np.clip(low, 0, 255) | (np.clip(high, 0, 255) << 8)).astype(np.uint16)


def _ashr_pk(low: int, high: int) -> Any:
    def pack(a: Array, b: Array, n: Array) -> Array:
        shift = n & I32(31)
        x, y = np.clip(a >> shift, low, high), np.clip(b >> shift, low, high)
        return ((x & 0xFF) | ((y & 0xFF) << 8)).astype(np.uint16)

    return pack


vector("v_ashr_pk_u8_i32", out="u16", ins="i32 i32 i32", keep=True)(_ashr_pk(0, 255))
vector("v_ashr_pk_i8_i32", out="u16", ins="i32 i32 i32", keep=True)(_ashr_pk(-128, 127))


@opcode("v_bitop3_b32", "v_bitop3_b16")
def _bitop3(machine: Machine, instruction: Instruction) -> Step:
    access = Access(machine, instruction)
    table = (
        (access.modifier("omod") << 6)
        | (access.modifier("abs") << 3)
        | access.modifier("neg")
    )
    kind = "b16" if instruction.name.endswith("b16") else "b32"
    none = DTYPES[kind](0)
    sources = Sources(access)
    a, b, c = (sources.reader(o, kind, i) for i, o in enumerate(instruction.sources))
    half = sources.result_half
    write = access.writer(
        instruction.destinations[0], kind, half or 0, keep=half is not None
    )

    def run(g: Group) -> None:
        x, y, z = a(g), b(g), c(g)
        result: Any = none
        for term in range(8):
            if table >> term & 1:
                product = x if term & 4 else ~x
                product = product & (y if term & 2 else ~y)
                result = result | (product & (z if term & 1 else ~z))
        write(g, result, None)

    return access.finish(run)


# Carries: the mask result goes to VCC or to the scalar pair that VOP3 names.


def _carry(
    names: str, *, minus: bool, swap: bool = False, carry_in: bool = False
) -> None:
    def compile(machine: Machine, instruction: Instruction) -> Step:
        access = Access(machine, instruction)
        sources = Sources(access)
        a = sources.reader(instruction.sources[0], "u32", 0)
        b = sources.reader(instruction.sources[1], "u32", 1)
        carry = None
        if carry_in:
            third = instruction.sources[2:] or (VCC_PAIR,)
            carry = access.scalar(third[0], "u64")
        vdst, *sdst = instruction.destinations
        selects = sources.destination_select(vdst)
        write = selects or access.writer(vdst, "u32")
        write_mask = access.scalar_writer(sdst[0] if sdst else VCC_PAIR)
        saturates = access.modifier("clmp")
        masks = sources.mask

        def run(g: Group) -> None:
            x, y = a(g).astype(I64), b(g).astype(I64)
            if swap:
                x, y = y, x
            if carry is not None:
                y = y + lane_mask(carry(g))
            exact = x - y if minus else x + y
            over = np.broadcast_to((exact < 0) | (exact > 0xFFFFFFFF), (g.count, 64))
            value = np.clip(exact, 0, 0xFFFFFFFF) if saturates else exact
            lanes = masks(g) if masks is not None else None
            active = lane_bits(lanes) if lanes is not None else g.exec_bits
            write(g, value.astype(U32), lanes)
            write_mask(g, lane_bits(over) & active)

        return access.finish(run)

    opcode(names)(compile)


_carry("v_add_co_u32", minus=False)
_carry("v_sub_co_u32", minus=True)
_carry("v_subrev_co_u32", minus=True, swap=True)
_carry("v_addc_co_u32", minus=False, carry_in=True)
_carry("v_subb_co_u32", minus=True, carry_in=True)
_carry("v_subbrev_co_u32", minus=True, swap=True, carry_in=True)


@opcode("v_mad_u64_u32", "v_mad_i64_i32")
def _mad_64(machine: Machine, instruction: Instruction) -> Step:
    access = Access(machine, instruction)
    signed = instruction.name == "v_mad_i64_i32"
    narrow, wide, dtype = ("i32", "i64", I64) if signed else ("u32", "u64", U64)
    a, b = (access.reader(o, narrow) for o in instruction.sources[:2])
    c = access.reader(instruction.sources[2], wide)
    vdst, sdst = instruction.destinations
    write, write_mask = access.writer(vdst, wide), access.scalar_writer(sdst)

    def run(g: Group) -> None:
        product, addend = a(g).astype(dtype) * b(g).astype(dtype), c(g)
        total = product + addend
        crossed = (product ^ total) & (addend ^ total)
        over = crossed < 0 if signed else total < addend
        write(g, total, None)
        over = np.broadcast_to(over, (g.count, 64))
        write_mask(g, lane_bits(over) & g.exec_bits)

    return access.finish(run)
