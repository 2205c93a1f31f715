"""Lane-wise vector instructions: how operands, modifiers and results are wired.

`vector(...)` turns a function of arrays into the semantics of an opcode in all of its
encodings (VOP1, VOP2, VOP3, DPP, SDWA).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .decode import Instruction, Operand
from .errors import UnknownInstruction
from .operands import DTYPES, FLOATS, Access, Array, Reader, width
from .registry import Step, opcode
from .state import LANES, Group

if TYPE_CHECKING:
    from .machine import Machine

Function = Callable[..., Any]


def vector(
    *names: str, out: str, ins: str, clamp: bool = False, keep: bool = False
) -> Callable[[Function], Function]:
    """Registers a lane-wise function.

    `out` and `ins` are operand types; an input "=f32" is the destination's old value.
    `clamp`: the function takes a keyword of that name. `keep`: a 16-bit result leaves
    the register's other half alone.
    """

    def register(function: Function) -> Function:
        def compile(machine: Machine, instruction: Instruction) -> Step:
            return _compile(machine, instruction, function, out, ins, clamp, keep)

        opcode(*names)(compile)
        return function

    return register


def _compile(
    machine: Machine,
    instruction: Instruction,
    function: Function,
    out: str,
    ins: str,
    clamp: bool,
    keep: bool,
) -> Step:
    access = Access(machine, instruction)
    sources = Sources(access)
    (destination,) = instruction.destinations
    kinds = ins.split()
    half = sources.result_half
    readers = []
    given = iter(instruction.sources)
    for position, kind in enumerate(kinds):
        if kind.startswith("="):
            readers.append(access.reader(destination, kind[1:]))
        else:
            readers.append(sources.reader(next(given), kind, position))
    if next(given, None) is not None:
        raise UnknownInstruction("more operands than its semantics take")
    if clamp:
        clamps = bool(access.modifier("clmp"))
        plain = function
        function = lambda *arrays: plain(*arrays, clamp=clamps)  # noqa: E731
    finish = float_result(access, out) if out in FLOATS else None
    selects = sources.destination_select(destination)
    if selects is None:
        write = access.writer(
            destination, out, half if half else 0, keep or half is not None
        )
    else:
        write = selects
    masks = sources.mask

    def run(g: Group) -> None:
        value = function(*(read(g) for read in readers))
        if finish is not None:
            value = finish(value)
        write(g, value, masks(g) if masks is not None else None)

    return access.finish(run)


def float_result(access: Access, kind: str) -> Function | None:
    """Output modifier, clamp and denormal flushing of a float result."""
    omod = access.modifier("omod")
    clamps = access.modifier("clmp")
    flush = kind == "f32" and access.machine.flush_output
    if omod and not flush:
        raise UnknownInstruction("an output modifier with denormals on is ignored")
    if not (omod or clamps or flush):
        return None
    factor = DTYPES[kind]({0: 1, 1: 2, 2: 4, 3: 0.5}[omod])

    def finish(value: Array) -> Array:
        if omod:
            value = value * factor
        if clamps:
            value = np.where(value > 0, np.minimum(value, DTYPES[kind](1)), 0)
            value = value.astype(DTYPES[kind])
        return flush_denormals(value) if flush else value

    return finish


def flush_denormals(value: Array) -> Array:
    tiny = np.abs(value) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), value), value)


class Sources:
    """Source modifiers of the encodings that carry lane-wise instructions."""

    def __init__(self, access: Access):
        self.access = access
        encoding = access.instruction.encoding
        self.dpp = encoding.endswith("DPP16")
        self.sdwa = "SDWA" in encoding
        self.mask: Callable[[Group], NDArray[np.bool_] | None] | None = None
        self.negative = access.modifier("neg")
        self.absolute = access.modifier("abs")
        self.select = access.modifier("opsel")
        self.result_half = 1 if self.select & 8 else None
        for position in (0, 1):
            self.negative |= access.modifier(f"src{position}_neg") << position
            self.absolute |= access.modifier(f"src{position}_abs") << position
        if self.dpp:
            self._permute = self._dpp()
        if self.sdwa:
            self._selects = [access.modifier(f"src{i}_sel") for i in (0, 1)]
            self._extends = [access.modifier(f"src{i}_sext") for i in (0, 1)]

    def reader(self, operand: Operand, kind: str, position: int) -> Reader:
        access, bit = self.access, 1 << position
        raw_kind = kind
        halves = (0, 1)
        if width(kind) == 16:
            halves = (1,) if self.select & bit else (0,)
        elif self.select & bit:
            raise UnknownInstruction(f"op_sel on a {kind} operand")
        if self.sdwa and position < 2:
            read = self._sdwa_reader(operand, kind, position)
        elif self.dpp and position == 0:
            read = self._dpp_reader(access.reader(operand, kind, halves))
        else:
            read = access.reader(operand, raw_kind, halves)
        if kind == "f32" and access.machine.flush_input:
            unflushed = read
            read = lambda g: flush_denormals(unflushed(g))  # noqa: E731
        if not (self.negative | self.absolute) & bit:
            return read
        if kind not in FLOATS:
            raise UnknownInstruction(f"neg or abs on a {kind} operand")
        return self._signed(read, bool(self.absolute & bit), bool(self.negative & bit))

    @staticmethod
    def _signed(read: Reader, absolute: bool, negative: bool) -> Reader:
        if absolute and negative:
            return lambda g: -np.abs(read(g))
        return (lambda g: np.abs(read(g))) if absolute else (lambda g: -read(g))

    # SDWA: bytes or halves of a source, and of the destination.

    def _sdwa_reader(self, operand: Operand, kind: str, position: int) -> Reader:
        if width(kind) == 64:
            raise UnknownInstruction("SDWA on a 64-bit operand")
        select, extends = self._selects[position], self._extends[position]
        shift, mask, halves = {
            0: (0, 0xFF, (0,)),
            1: (8, 0xFF, (0,)),
            2: (16, 0xFF, (1,)),
            3: (24, 0xFF, (1,)),
            4: (0, 0xFFFF, (0,)),
            5: (16, 0xFFFF, (1,)),
            6: (0, 0xFFFFFFFF, (0, 1)),
        }[select]
        read = self.access.reader(operand, "b32", halves)
        sign = np.uint32((mask >> 1) + 1)
        narrow = np.uint16 if width(kind) == 16 else np.uint32

        def selected(g: Group) -> Array:
            bits = (read(g) >> np.uint32(shift)) & np.uint32(mask)
            if extends:
                bits = (bits ^ sign) - sign
            return bits.astype(narrow).view(DTYPES[kind])

        return selected

    def destination_select(
        self, destination: Operand
    ) -> Callable[[Group, Array, NDArray[np.bool_] | None], None] | None:
        """The writer of an SDWA destination, or None where there is no selection."""
        if not self.sdwa:
            return None
        access = self.access
        select = access.modifier("dst_sel")
        unused = access.modifier("dst_unused")
        if select == 6:
            return None
        if unused == 1:
            raise UnknownInstruction("sign extension of an SDWA result")
        size = 8 if select < 4 else 16
        shift = np.uint32(8 * select if select < 4 else 16 * (select - 4))
        mask = np.uint32((1 << size) - 1)
        read = access.reader(destination, "b32") if unused == 2 else None
        write = access.writer(destination, "b32")

        def selected(g: Group, value: Array, lanes: Any) -> None:
            value = np.asarray(value)
            narrow = {2: np.uint16, 4: np.uint32}[value.dtype.itemsize]
            bits = (value.view(narrow).astype(np.uint32) & mask) << shift
            if read is not None:
                bits = bits | (read(g) & ~(mask << shift))
            write(g, bits, lanes)

        return selected

    # DPP: the first source comes from another lane.

    def _dpp(self) -> tuple[NDArray[np.intp], NDArray[np.bool_], bool]:
        access = self.access
        control = access.modifier("dpp")
        zero = bool(access.modifier("bc"))
        row_mask, bank_mask = access.modifier("row_mask"), access.modifier("bank_mask")
        source = dpp_source(control)
        inside = source >= 0
        source = np.where(inside, source, 0)
        enabled = (
            (row_mask >> (LANES // 16)) & (bank_mask >> (LANES % 16 // 4)) & 1
        ) > 0

        def mask(g: Group) -> NDArray[np.bool_]:
            active = g.active()
            allowed = active & enabled
            return allowed if zero else allowed & inside & active[:, source]

        self.mask = mask
        return source, inside, zero

    def _dpp_reader(self, read: Reader) -> Reader:
        source, inside, _ = self._permute

        def permuted(g: Group) -> Array:
            value = np.broadcast_to(read(g), (g.count, 64))
            valid = inside & g.active()[:, source]
            return np.where(valid, value[:, source], value.dtype.type(0))

        return permuted


def dpp_source(control: int) -> NDArray[np.intp]:
    """The lane that each lane reads under a DPP control, -1 where there is none."""
    row, place = LANES & ~15, LANES & 15

    def within(target: Any) -> Any:
        return np.where((target >= 0) & (target < 16), row + target, -1)

    if control < 0x100:
        return (LANES & ~3) + ((control >> (2 * (LANES & 3))) & 3)
    amount = control & 15
    if 0x101 <= control <= 0x10F:
        return within(place + amount)
    if 0x111 <= control <= 0x11F:
        return within(place - amount)
    if 0x121 <= control <= 0x12F:
        return row + ((place - amount) & 15)
    if 0x150 <= control <= 0x15F:
        return row + amount
    simple = {
        0x130: np.where(LANES < 63, LANES + 1, -1),
        0x134: (LANES + 1) & 63,
        0x138: LANES - 1,
        0x13C: (LANES - 1) & 63,
        0x140: row + 15 - place,
        0x141: (LANES & ~7) + 7 - (LANES & 7),
        0x142: np.where(LANES >= 16, row - 1, -1),
        0x143: np.where(LANES >= 32, 31, -1),
    }
    if control not in simple:
        raise UnknownInstruction(f"DPP control {control:#x}")
    return simple[control]
