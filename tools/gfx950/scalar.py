"""Scalar instructions: one value per wave."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import EXEC, VCC, Instruction, Operand
from .errors import UnknownInstruction
from .operands import Access, Array
from .registry import Step, opcode
from .state import Group

if TYPE_CHECKING:
    from .machine import Machine

I32, U32, I64, U64 = np.int32, np.uint32, np.int64, np.uint64
ZERO = "result is not zero"


def scalar(
    *names: str, out: str, ins: str, scc: Any = None, carry: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a scalar function.

    `scc`: None leaves SCC, ZERO sets it where the result is not zero, "function" says
    that the function returns (result, scc). `carry`: SCC is the last argument.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def compile(machine: Machine, instruction: Instruction) -> Step:
            access = Access(machine, instruction)
            access.modifier("simm16")
            kinds = ins.split()
            given = iter(instruction.sources)
            readers = []
            for kind in kinds:
                if kind == "k":
                    readers.append(_constant(instruction))
                elif kind.startswith("="):
                    readers.append(access.scalar(instruction.destinations[0], kind[1:]))
                else:
                    readers.append(access.scalar(next(given), kind))
            write = None
            if out:
                write = access.scalar_writer(instruction.destinations[0])
            state = machine.state
            needs_scc = carry

            def run(g: Group) -> None:
                arguments = [read(g) for read in readers]
                if needs_scc:
                    check_scc(machine, g)
                    arguments.append(state.scc[g.index])
                value = function(*arguments)
                flag = None
                if scc == "function":
                    value, flag = value
                elif scc is ZERO:
                    flag = value != 0
                if write is not None:
                    write(g, value)
                if flag is not None:
                    set_scc(machine, g, flag)

            return access.finish(run)

        opcode(*names)(compile)
        return function

    return register


def check_scc(machine: Machine, g: Group) -> None:
    from .errors import UninitialisedRead

    if machine.checks and not machine.state.scc_valid[g.index].all():
        raise UninitialisedRead("scc is read and was never written")


def set_scc(machine: Machine, g: Group, flag: Array) -> None:
    machine.state.scc[g.index] = flag
    machine.state.scc_valid[g.index] = True


def _constant(instruction: Instruction) -> Callable[[Group], Array]:
    value = instruction.modifiers.get("simm16", 0)
    signed = np.array([value - ((value & 0x8000) << 1)], I32)
    return lambda g: np.broadcast_to(signed, (g.count,))


# Arithmetic.


def _add_u32(a: Array, b: Array) -> tuple[Array, Array]:
    return a + b, (a.astype(U64) + b) > 0xFFFFFFFF


def _sub_u32(a: Array, b: Array) -> tuple[Array, Array]:
    return a - b, b > a


def _addc(a: Array, b: Array, scc: Array) -> tuple[Array, Array]:
    total = a.astype(U64) + b + scc
    return total.astype(U32), total > 0xFFFFFFFF


def _subb(a: Array, b: Array, scc: Array) -> tuple[Array, Array]:
    total = a.astype(I64) - b - scc
    return total.astype(U32), total < 0


def _add_i32(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    return total, ((a ^ total) & (b ^ total)) < 0


def _sub_i32(a: Array, b: Array) -> tuple[Array, Array]:
    total = a - b
    return total, ((a ^ b) & (a ^ total)) < 0


scalar("s_add_u32", out="u32", ins="u32 u32", scc="function")(_add_u32)
scalar("s_sub_u32", out="u32", ins="u32 u32", scc="function")(_sub_u32)
scalar("s_addc_u32", out="u32", ins="u32 u32", scc="function", carry=True)(_addc)
scalar("s_subb_u32", out="u32", ins="u32 u32", scc="function", carry=True)(_subb)
scalar("s_add_i32", out="i32", ins="i32 i32", scc="function")(_add_i32)
scalar("s_sub_i32", out="i32", ins="i32 i32", scc="function")(_sub_i32)
scalar("s_addk_i32", out="i32", ins="=i32 k", scc="function")(_add_i32)
scalar("s_mulk_i32", out="i32", ins="=i32 k")(lambda a, k: a * k)
scalar("s_mul_i32", out="i32", ins="i32 i32")(lambda a, b: a * b)
scalar("s_mul_hi_u32", out="u32", ins="u32 u32")(
    lambda a, b: ((a.astype(U64) * b) >> U64(32)).astype(U32)
)
scalar("s_mul_hi_i32", out="i32", ins="i32 i32")(
    lambda a, b: ((a.astype(I64) * b) >> I64(32)).astype(I32)
)
for _kind in ("i32", "u32"):
    scalar(f"s_min_{_kind}", out=_kind, ins=f"{_kind} {_kind}", scc="function")(
        lambda a, b: (np.minimum(a, b), a < b)
    )
    scalar(f"s_max_{_kind}", out=_kind, ins=f"{_kind} {_kind}", scc="function")(
        lambda a, b: (np.maximum(a, b), a > b)
    )
scalar("s_absdiff_i32", out="i32", ins="i32 i32", scc=ZERO)(
    lambda a, b: np.abs(a.astype(I64) - b).astype(U32)
)
scalar("s_abs_i32", out="i32", ins="i32", scc=ZERO)(np.abs)
for _n in range(1, 5):
    scalar(f"s_lshl{_n}_add_u32", out="u32", ins="u32 u32", scc="function")(
        lambda a, b, n=_n: (
            (a << U32(n)) + b,
            (a.astype(U64) << U64(n)) + b > 0xFFFFFFFF,
        )
    )

# Logic.

_LOGIC = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
for _name, _function in _LOGIC.items():
    for _kind in ("b32", "b64"):
        scalar(f"s_{_name}_{_kind}", out=_kind, ins=f"{_kind} {_kind}", scc=ZERO)(
            _function
        )
for _bits in (32, 64):
    _u, _i, _t = f"u{_bits}", f"i{_bits}", {32: U32, 64: U64}[_bits]
    scalar(f"s_lshl_b{_bits}", out=_u, ins=f"{_u} u32", scc=ZERO)(
        lambda a, n, t=_t, m=_bits - 1: a << (n & U32(m)).astype(t)
    )
    scalar(f"s_lshr_b{_bits}", out=_u, ins=f"{_u} u32", scc=ZERO)(
        lambda a, n, t=_t, m=_bits - 1: a >> (n & U32(m)).astype(t)
    )
    scalar(f"s_ashr_{_i}", out=_i, ins=f"{_i} u32", scc=ZERO)(
        lambda a, n, m=_bits - 1: a >> (n & U32(m)).astype(a.dtype)
    )
    scalar(f"s_not_b{_bits}", out=_u, ins=_u, scc=ZERO)(lambda a: ~a)
    scalar(f"s_mov_b{_bits}", out=_u, ins=_u)(lambda a: a)
    scalar(f"s_bcnt1_i32_b{_bits}", out="i32", ins=_u, scc=ZERO)(
        lambda a: np.bitwise_count(a).astype(I32)
    )
    scalar(f"s_bcnt0_i32_b{_bits}", out="i32", ins=_u, scc=ZERO)(
        lambda a: np.bitwise_count(~a).astype(I32)
    )
    scalar(f"s_ff1_i32_b{_bits}", out="i32", ins=_u)(
        lambda a, t=_t: np.where(
            a == 0, -1, np.bitwise_count((a & (~a + t(1))) - t(1)).astype(I32)
        ).astype(I32)
    )
    scalar(f"s_ff0_i32_b{_bits}", out="i32", ins=_u)(
        lambda a, t=_t: np.where(
            ~a == 0, -1, np.bitwise_count((~a & (a + t(1))) - t(1)).astype(I32)
        ).astype(I32)
    )
    scalar(f"s_bfm_b{_bits}", out=_u, ins="u32 u32")(
        lambda a, b, t=_t, m=_bits - 1: (
            ((t(1) << (a & U32(m)).astype(t)) - t(1)) << (b & U32(m)).astype(t)
        )
    )
    scalar(f"s_cselect_b{_bits}", out=_u, ins=f"{_u} {_u}", carry=True)(
        lambda a, b, scc: np.where(scc, a, b)
    )
    scalar(f"s_bitset1_b{_bits}", out=_u, ins=f"u32 ={_u}")(
        lambda n, d, t=_t, m=_bits - 1: d | (t(1) << (n & U32(m)).astype(t))
    )
    scalar(f"s_bitset0_b{_bits}", out=_u, ins=f"u32 ={_u}")(
        lambda n, d, t=_t, m=_bits - 1: d & ~(t(1) << (n & U32(m)).astype(t))
    )
    scalar(f"s_cmov_b{_bits}", out=_u, ins=f"{_u} ={_u}", carry=True)(
        lambda a, d, scc: np.where(scc, a, d)
    )
    scalar(f"s_bitcmp0_b{_bits}", out="", ins=f"{_u} u32", scc="function")(
        lambda a, n, t=_t, m=_bits - 1: (
            None,
            (a >> (n & U32(m)).astype(t)) & t(1) == 0,
        )
    )
    scalar(f"s_bitcmp1_b{_bits}", out="", ins=f"{_u} u32", scc="function")(
        lambda a, n, t=_t, m=_bits - 1: (
            None,
            (a >> (n & U32(m)).astype(t)) & t(1) == 1,
        )
    )


def _leading(a: Array, bits: int) -> Array:
    """Zeros above the highest one, by bisection: float64 would round 64-bit values."""
    value, count = a.astype(U64), np.full(a.shape, bits - 64, I32)
    for shift in (32, 16, 8, 4, 2, 1):
        empty = (value >> U64(64 - shift)) == 0
        value = np.where(empty, value << U64(shift), value)
        count = count + np.where(empty, shift, 0)
    return np.where(a == 0, -1, count).astype(I32)


scalar("s_flbit_i32_b32", out="i32", ins="u32")(lambda a: _leading(a, 32))
scalar("s_flbit_i32_b64", out="i32", ins="u64")(lambda a: _leading(a, 64))
scalar("s_flbit_i32", out="i32", ins="i32")(
    lambda a: _leading(np.where(a < 0, ~a, a).view(U32), 32)
)


def _bit_reverse(a: Array) -> Array:
    size = a.dtype.itemsize
    data = np.ascontiguousarray(a).view(np.uint8).reshape(-1, size)[:, ::-1]
    bits = np.unpackbits(data, axis=1, bitorder="big")
    packed = np.packbits(bits, axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view(a.dtype)[:, 0]


scalar("s_brev_b32", out="u32", ins="u32")(_bit_reverse)
scalar("s_brev_b64", out="u64", ins="u64")(_bit_reverse)
scalar("s_sext_i32_i8", out="i32", ins="i32")(lambda a: (a << 24) >> 24)
scalar("s_sext_i32_i16", out="i32", ins="i32")(lambda a: (a << 16) >> 16)
scalar("s_movk_i32", out="i32", ins="k")(lambda k: k)
scalar("s_cmovk_i32", out="i32", ins="k =i32", carry=True)(
    lambda k, d, scc: np.where(scc, k, d)
)
scalar("s_pack_ll_b32_b16", out="u32", ins="u32 u32")(
    lambda a, b: (a & U32(0xFFFF)) | (b << U32(16))
)
scalar("s_pack_lh_b32_b16", out="u32", ins="u32 u32")(
    lambda a, b: (a & U32(0xFFFF)) | (b & U32(0xFFFF0000))
)
scalar("s_pack_hh_b32_b16", out="u32", ins="u32 u32")(
    lambda a, b: (a >> U32(16)) | (b & U32(0xFFFF0000))
)


def _bfe(a: Array, control: Array, signed: bool) -> Array:
    bits = 8 * a.dtype.itemsize
    unsigned = {32: U32, 64: U64}[bits]
    offset = control & U32(bits - 1)
    size = (control >> U32(16)) & U32(127)
    shifted = a >> offset.astype(a.dtype)
    left = np.clip(bits - size.astype(I32), 0, bits - 1)
    field = shifted.view(unsigned) << left.astype(unsigned)
    kind = {32: I32, 64: I64}[bits] if signed else unsigned
    return np.where(size == 0, kind(0), field.view(kind) >> left.astype(kind))


for _kind in ("u32", "i32", "u64", "i64"):
    scalar(f"s_bfe_{_kind}", out=_kind, ins=f"{_kind} u32", scc=ZERO)(
        lambda a, c, signed=_kind[0] == "i": _bfe(a, c, signed)
    )

# Comparisons.

_RELATIONS = {
    "eq": lambda a, b: (None, a == b),
    "lg": lambda a, b: (None, a != b),
    "gt": lambda a, b: (None, a > b),
    "ge": lambda a, b: (None, a >= b),
    "lt": lambda a, b: (None, a < b),
    "le": lambda a, b: (None, a <= b),
}
for _name, _function in _RELATIONS.items():
    for _kind in ("i32", "u32"):
        scalar(
            f"s_cmp_{_name}_{_kind}", out="", ins=f"{_kind} {_kind}", scc="function"
        )(_function)
    scalar(f"s_cmpk_{_name}_i32", out="", ins="=i32 k", scc="function")(_function)
    scalar(f"s_cmpk_{_name}_u32", out="", ins="=u32 k", scc="function")(
        lambda a, k, f=_function: f(a, k.view(U32) & U32(0xFFFF))
    )
for _name in ("eq", "lg"):
    scalar(f"s_cmp_{_name}_u64", out="", ins="u64 u64", scc="function")(
        _RELATIONS[_name]
    )

# EXEC.

_SAVE = {
    **{name: _LOGIC[name] for name in ("and", "or", "xor", "nand", "nor", "xnor")},
    "andn2": lambda s, e: s & ~e,
    "orn2": lambda s, e: s | ~e,
    "andn1": lambda s, e: ~s & e,
    "orn1": lambda s, e: ~s | e,
}


def _saveexec(name: str, function: Callable[..., Array], save: bool) -> None:
    def compile(machine: Machine, instruction: Instruction) -> Step:
        access = Access(machine, instruction)
        read = access.scalar(instruction.sources[0], "u64")
        write = access.scalar_writer(instruction.destinations[0])
        write_exec = access.scalar_writer(Operand("s", EXEC, 64))

        def run(g: Group) -> None:
            old = g.exec_bits.copy()
            new = function(read(g), old)
            write(g, old if save else new)
            write_exec(g, new)
            set_scc(machine, g, new != 0)

        return access.finish(run)

    opcode(name)(compile)


for _name, _function in _SAVE.items():
    _saveexec(f"s_{_name}_saveexec_b64", _function, True)
_saveexec("s_andn1_wrexec_b64", _SAVE["andn1"], False)
_saveexec("s_andn2_wrexec_b64", _SAVE["andn2"], False)

# Control flow. A step that ends a block returns whether the branch is taken.


@opcode(
    "s_nop",
    "s_setprio",
    "s_sleep",
    "s_wakeup",
    "s_icache_inv",
    "s_sethalt",
    "s_incperflevel",
    "s_decperflevel",
)
def _no_effect(machine: Machine, instruction: Instruction) -> Step:
    return lambda g: None


@opcode("s_waitcnt")
def _waitcnt(machine: Machine, instruction: Instruction) -> Step:
    field = instruction.modifiers.get("simm16", 0)
    vm = (field & 15) | (field >> 14 & 3) << 4
    lgkm = field >> 8 & 15
    vm_wait, lgkm_wait = (None if vm == 63 else vm), (None if lgkm == 15 else lgkm)
    return lambda g: machine.wait(g, vm_wait, lgkm_wait)


@opcode("s_barrier")
def _barrier(machine: Machine, instruction: Instruction) -> Step:
    return machine.barrier


@opcode("s_endpgm")
def _endpgm(machine: Machine, instruction: Instruction) -> Step:
    return machine.end


@opcode("s_branch")
def _branch(machine: Machine, instruction: Instruction) -> Step:
    return lambda g: machine.take(g, np.ones(g.count, bool))


def _conditional(name: str, condition: Callable[[Machine, Group], Array]) -> None:
    def compile(machine: Machine, instruction: Instruction) -> Step:
        def run(g: Group) -> None:
            machine.take(g, condition(machine, g))

        return run

    opcode(name)(compile)


def _scc(machine: Machine, g: Group) -> Array:
    check_scc(machine, g)
    return machine.state.scc[g.index]


def _vcc(machine: Machine, g: Group) -> Array:
    if machine.checks:
        machine.state.check_scalar_read(frozenset((VCC, VCC + 1)), g)
    return machine.state.vcc[g.index] != 0


_conditional("s_cbranch_scc0", lambda m, g: ~_scc(m, g))
_conditional("s_cbranch_scc1", _scc)
_conditional("s_cbranch_vccz", lambda m, g: ~_vcc(m, g))
_conditional("s_cbranch_vccnz", _vcc)
_conditional("s_cbranch_execz", lambda m, g: g.exec_bits == 0)
_conditional("s_cbranch_execnz", lambda m, g: g.exec_bits != 0)

# The mode register, of which FP16_OVFL may change while a kernel runs.

MODE, FP16_OVERFLOW = 1, 23


def _mode_field(instruction: Instruction) -> tuple[int, int]:
    field = instruction.modifiers.get("simm16", 0)
    if field & 63 != MODE:
        raise UnknownInstruction(f"hardware register {field & 63}")
    return field >> 6 & 31, (field >> 11 & 31) + 1


@opcode("s_setreg_imm32_b32", "s_setreg_b32")
def _setreg(machine: Machine, instruction: Instruction) -> Step:
    access = Access(machine, instruction)
    access.modifier("simm16")
    offset, size = _mode_field(instruction)
    if instruction.name == "s_setreg_b32":
        read = access.scalar(instruction.destinations[0], "u32")
    else:
        literal = instruction.modifiers.get("literal", 0)
        read = access.scalar(Operand("const", 255, 32, literal), "u32")

    def run(g: Group) -> None:
        value = read(g).astype(np.int64) & ((1 << size) - 1)
        state = machine.state
        old = machine.mode | state.fp16_overflow[g.index].astype(np.int64) << 23
        new = (old & ~(((1 << size) - 1) << offset)) | (value << offset)
        fixed = 0x3FF & ~(1 << FP16_OVERFLOW)
        if ((new ^ machine.mode) & fixed).any():
            raise UnknownInstruction("a change of the rounding, denormal or IEEE mode")
        state.fp16_overflow[g.index] = (new >> FP16_OVERFLOW) & 1

    return access.finish(run)


@opcode("s_getreg_b32")
def _getreg(machine: Machine, instruction: Instruction) -> Step:
    access = Access(machine, instruction)
    access.modifier("simm16")
    offset, size = _mode_field(instruction)
    write = access.scalar_writer(instruction.destinations[0])

    def run(g: Group) -> None:
        overflow = machine.state.fp16_overflow[g.index].astype(np.int64)
        mode = machine.mode | overflow << FP16_OVERFLOW
        write(g, (mode >> offset & ((1 << size) - 1)).astype(U32))

    return access.finish(run)


@opcode("s_getpc_b64")
def _getpc(machine: Machine, instruction: Instruction) -> Step:
    access = Access(machine, instruction)
    write = access.scalar_writer(instruction.destinations[0])
    address = U64(machine.code_address + instruction.next_address)
    return access.finish(lambda g: write(g, np.full(g.count, address)))
