"""ds instructions: reads, writes, transposing reads, atomics, lane permutes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .decode import Instruction, Operand
from .errors import UnknownInstruction
from .operands import Access, store
from .registry import Step, opcode
from .state import LANES, Group

if TYPE_CHECKING:
    from .machine import Machine

U32 = np.uint32


class DsAccess(Access):
    """The address and offsets that ds instructions share."""

    def __init__(self, machine: Machine, instruction: Instruction):
        super().__init__(machine, instruction)
        if self.modifier("gds"):
            raise UnknownInstruction("global data share")
        self.low, self.high = self.modifier("offset0"), self.modifier("offset1")
        self.read_address = self.reader(instruction.named["addr"], "u32")

    @property
    def offset(self) -> int:
        return self.low | self.high << 8

    def addresses(
        self, g: Group, offset: int
    ) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int64]]:
        """Active lanes as (position in the group, lane, address)."""
        address = np.broadcast_to(self.read_address(g), (g.count, 64))
        position, lane = np.nonzero(g.active())
        return position, lane, address[position, lane].astype(np.int64) + offset


def scatter_rows(
    machine: Machine,
    g: Group,
    rows: list[int],
    position: NDArray[np.intp],
    lane: NDArray[np.intp],
    data: NDArray[np.uint8],
) -> None:
    """(m, 4 * len(rows)) bytes into registers of the given lanes."""
    words = np.ascontiguousarray(data).view(U32)
    registers = machine.state.v
    whole = len(position) == g.count * 64
    for place, row in enumerate(rows):
        if whole:
            registers[row, g.index] = words[:, place].reshape(g.count, 64)
        else:
            registers[row, g.waves[position], lane] = words[:, place]


def gather_rows(
    machine: Machine,
    g: Group,
    rows: list[int],
    position: NDArray[np.intp],
    lane: NDArray[np.intp],
) -> NDArray[np.uint8]:
    words = np.empty((len(position), len(rows)), U32)
    registers = machine.state.v
    for place, row in enumerate(rows):
        words[:, place] = registers[row, g.waves[position], lane]
    return words.view(np.uint8)


def flight_rows(rows: list[int]) -> NDArray[np.intp]:
    return np.array(rows, np.intp)


def _sized(operand: Operand, dwords: int) -> Operand:
    return Operand(operand.file, operand.index, 32 * dwords)


def _read(name: str, size: int, count: int = 1, step: int = 0) -> None:
    """Reads of whole dwords; `count` and `step` (bytes) for the read2 family."""

    def compile(machine: Machine, instruction: Instruction) -> Step:
        access = DsAccess(machine, instruction)
        destination = _sized(instruction.destinations[0], size * count // 4)
        rows = access.vector_rows(destination, write=True)
        single = [access.offset]
        offsets = single if count == 1 else [access.low * step, access.high * step]
        flight = flight_rows(rows)

        def run(g: Group) -> None:
            machine.state.issue_lds(g, flight)
            position, lane, address = access.addresses(g, 0)
            parts = [
                machine.lds.load(g, position, lane, address + offset, size)
                for offset in offsets
            ]
            data = parts[0] if count == 1 else np.concatenate(parts, axis=1)
            scatter_rows(machine, g, rows, position, lane, data)

        return access.finish(run, counter="lgkmcnt")

    opcode(name)(compile)


def _write(name: str, size: int, count: int = 1, step: int = 0, half: int = 0) -> None:
    """Writes; sizes under 4 take the low bytes of `half` of the register."""

    def compile(machine: Machine, instruction: Instruction) -> Step:
        access = DsAccess(machine, instruction)
        datas = [instruction.named["data0"]]
        offsets = [access.offset]
        if count == 2:
            datas.append(instruction.named["data1"])
            offsets = [access.low * step, access.high * step]
        rows = []
        for data in datas:
            if size >= 4:
                rows.append(access.vector_rows(_sized(data, size // 4)))
            else:
                row = machine.state.row(data.index)
                access.reads.append((row, half))
                rows.append([row])
        first = 2 * half

        def run(g: Group) -> None:
            machine.state.issue_lds(g, None)
            for offset, data_rows in zip(offsets, rows, strict=True):
                position, lane, address = access.addresses(g, offset)
                data = gather_rows(machine, g, data_rows, position, lane)
                if size < 4:
                    data = data[:, first : first + size]
                machine.lds.store(g, position, lane, address, data)

        return access.finish(run, counter="lgkmcnt")

    opcode(name)(compile)


for _bits in (32, 64, 96, 128):
    _read(f"ds_read_b{_bits}", _bits // 8)
    _write(f"ds_write_b{_bits}", _bits // 8)
for _bits in (32, 64):
    _size = _bits // 8
    _read(f"ds_read2_b{_bits}", _size, 2, _size)
    _read(f"ds_read2st64_b{_bits}", _size, 2, 64 * _size)
    _write(f"ds_write2_b{_bits}", _size, 2, _size)
    _write(f"ds_write2st64_b{_bits}", _size, 2, 64 * _size)
for _size in (1, 2):
    _write(f"ds_write_b{8 * _size}", _size)
    _write(f"ds_write_b{8 * _size}_d16_hi", _size, half=1)


def _narrow_read(name: str, kind: Any, half: int | None) -> None:
    """Byte and halfword reads: extended to a register, or into one half of it."""

    def compile(machine: Machine, instruction: Instruction) -> Step:
        access = DsAccess(machine, instruction)
        destination = instruction.destinations[0]
        row = machine.state.row(destination.index)
        halves = (0, 1) if half is None else (half,)
        access.writes.extend((row, h) for h in halves)
        flight = flight_rows([row])
        size = np.dtype(kind).itemsize

        def run(g: Group) -> None:
            machine.state.issue_lds(g, flight)
            position, lane, address = access.addresses(g, access.offset)
            data = machine.lds.load(g, position, lane, address, size)
            narrow = np.ascontiguousarray(data).view(kind)[:, 0]
            merge_narrow(machine, g, row, position, lane, narrow, half)

        return access.finish(run, counter="lgkmcnt")

    opcode(name)(compile)


def merge_narrow(
    machine: Machine,
    g: Group,
    row: int,
    position: NDArray[np.intp],
    lane: NDArray[np.intp],
    narrow: NDArray[Any],
    half: int | None,
) -> None:
    """Extended 8 or 16-bit values into a register, or into one half of it."""
    registers, waves = machine.state.v, g.waves[position]
    wide = narrow.astype(np.int32).view(U32)
    if half is not None:
        shift = U32(16 * half)
        kept = registers[row, waves, lane] & ~(U32(0xFFFF) << shift)
        wide = kept | ((wide & U32(0xFFFF)) << shift)
    registers[row, waves, lane] = wide


NARROW = {"u8": np.uint8, "i8": np.int8, "u16": np.uint16, "i16": np.int16}
for _name, _kind in NARROW.items():
    _narrow_read(f"ds_read_{_name}", _kind, None)
for _name in ("u8", "i8", "u16"):
    _narrow_read(f"ds_read_{_name}_d16", NARROW[_name], 0)
    _narrow_read(f"ds_read_{_name}_d16_hi", NARROW[_name], 1)


def transpose(data: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """What ds_read_b64_tr_b<bits> makes of 64 lanes' own 8 bytes.

    16 lanes together hold 64 / bits rows of 16 elements, row after row in the order of
    the lanes; lane i receives column i.
    """
    blocks = data.reshape(-1, 16 * 8)
    elements = blocks.view(f"u{bits // 8}").reshape(-1, 64 // bits, 16)
    columns = np.ascontiguousarray(elements.transpose(0, 2, 1))
    return columns.view(np.uint8).reshape(data.shape)


@opcode("ds_read_b64_tr_b8", "ds_read_b64_tr_b16")
def _read_transposed(machine: Machine, instruction: Instruction) -> Step:
    access = DsAccess(machine, instruction)
    rows = access.vector_rows(_sized(instruction.destinations[0], 2), write=True)
    bits = int(instruction.name.rsplit("_b", 1)[1])
    flight = flight_rows(rows)

    def run(g: Group) -> None:
        if not g.full:
            raise UnknownInstruction("a transposing read with lanes switched off")
        machine.state.issue_lds(g, flight)
        position, lane, address = access.addresses(g, access.offset)
        data = machine.lds.load(g, position, lane, address, 8)
        scatter_rows(machine, g, rows, position, lane, transpose(data, bits))

    return access.finish(run, counter="lgkmcnt")


# Atomics: lanes and waves in order; they count as reads and writes of their own wave.

_ATOMICS: dict[str, tuple[str, Callable[..., Any]]] = {
    "add_u32": ("u4", lambda a, b: a + b),
    "sub_u32": ("u4", lambda a, b: a - b),
    "min_i32": ("i4", np.minimum),
    "max_i32": ("i4", np.maximum),
    "min_u32": ("u4", np.minimum),
    "max_u32": ("u4", np.maximum),
    "and_b32": ("u4", lambda a, b: a & b),
    "or_b32": ("u4", lambda a, b: a | b),
    "xor_b32": ("u4", lambda a, b: a ^ b),
    "min_f32": ("f4", np.fmin),
    "max_f32": ("f4", np.fmax),
    "add_f32": ("f4", lambda a, b: a + b),
}


def _atomic(name: str, kind: str, function: Callable[..., Any], returns: bool) -> None:
    def compile(machine: Machine, instruction: Instruction) -> Step:
        access = DsAccess(machine, instruction)
        source = access.vector_rows(_sized(instruction.named["data0"], 1))
        rows = None
        if returns:
            rows = access.vector_rows(instruction.destinations[0], write=True)
        flight = flight_rows(rows) if rows else None

        def run(g: Group) -> None:
            machine.state.issue_lds(g, flight)
            position, lane, address = access.addresses(g, access.offset)
            operand = gather_rows(machine, g, source, position, lane).view(kind)[:, 0]
            old = np.empty((len(position), 1), kind)
            for i in range(len(position)):
                one = slice(i, i + 1)
                where = (g, position[one], lane[one], address[one])
                old[i] = machine.lds.load(*where, 4).view(kind)[0]
                new = function(old[i], operand[i : i + 1]).astype(kind)
                machine.lds.store(*where, new[None].view(np.uint8))
            if rows:
                scatter_rows(machine, g, rows, position, lane, old.view(np.uint8))

        return access.finish(run, counter="lgkmcnt")

    opcode(name)(compile)


for _name, (_kind, _function) in _ATOMICS.items():
    _operation, _type = _name.split("_")
    _atomic(f"ds_{_name}", _kind, _function, False)
    _atomic(f"ds_{_operation}_rtn_{_type}", _kind, _function, True)


# Permutes: no LDS bytes are touched, but the result comes by lgkmcnt.


@opcode("ds_bpermute_b32")
def _bpermute(machine: Machine, instruction: Instruction) -> Step:
    access = DsAccess(machine, instruction)
    read = access.reader(instruction.named["data0"], "b32")
    rows = access.vector_rows(instruction.destinations[0], write=True)
    flight = flight_rows(rows)

    def run(g: Group) -> None:
        machine.state.issue_lds(g, flight)
        address = np.broadcast_to(access.read_address(g), (g.count, 64))
        source = ((address + U32(access.offset)) >> U32(2) & U32(63)).astype(np.intp)
        value = np.where(g.active(), read(g), U32(0))
        store(machine.state.v, rows[0], g, np.take_along_axis(value, source, 1), None)

    return access.finish(run, counter="lgkmcnt")


@opcode("ds_permute_b32")
def _permute(machine: Machine, instruction: Instruction) -> Step:
    access = DsAccess(machine, instruction)
    read = access.reader(instruction.named["data0"], "b32")
    rows = access.vector_rows(instruction.destinations[0], write=True)
    flight = flight_rows(rows)

    def run(g: Group) -> None:
        machine.state.issue_lds(g, flight)
        position, lane, address = access.addresses(g, access.offset)
        value = np.broadcast_to(read(g), (g.count, 64))[position, lane]
        result = np.zeros((g.count, 64), U32)
        result[position, address >> 2 & 63] = value
        store(machine.state.v, rows[0], g, result, None)

    return access.finish(run, counter="lgkmcnt")


@opcode("ds_swizzle_b32")
def _swizzle(machine: Machine, instruction: Instruction) -> Step:
    access = DsAccess(machine, instruction)
    access.reads.clear()  # the address field is not used
    read = access.reader(instruction.named["addr"], "b32")
    rows = access.vector_rows(instruction.destinations[0], write=True)
    flight = flight_rows(rows)
    offset = access.offset
    if offset >= 0xE000:
        raise UnknownInstruction("ds_swizzle_b32 in its FFT and rotate modes")
    if offset & 0x8000:
        source = (LANES & ~3) + ((offset >> (2 * (LANES & 3))) & 3)
    else:
        within = ((LANES & 31 & offset) | (offset >> 5 & 31)) ^ (offset >> 10 & 31)
        source = (LANES & 32) | within

    def run(g: Group) -> None:
        machine.state.issue_lds(g, flight)
        value = np.where(g.active(), read(g), U32(0))
        store(machine.state.v, rows[0], g, value[:, source], None)

    return access.finish(run, counter="lgkmcnt")
