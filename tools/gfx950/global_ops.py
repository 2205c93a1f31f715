"""Scalar loads, and vector loads and stores of global memory and of buffers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .decode import M0, Instruction, Operand
from .errors import MemoryFault, UnknownInstruction
from .lds_ops import flight_rows, gather_rows, merge_narrow, scatter_rows
from .memory import OutsideBuffers
from .operands import Access
from .registry import Step, opcode
from .state import LANES, NEVER, Group

if TYPE_CHECKING:
    from .machine import Machine

U32, I64 = np.uint32, np.int64
Lanes = NDArray[np.intp]


def _signed(value: int, bits: int) -> int:
    return value - ((value >> (bits - 1) & 1) << bits)


# Scalar loads.


def _scalar_load(name: str, dwords: int, buffer: bool) -> None:
    def compile(machine: Machine, instruction: Instruction) -> Step:
        access = Access(machine, instruction)
        access.modifier("glc")
        immediate = _signed(access.modifier("offset"), 21)
        if not access.modifier("imm"):
            raise UnknownInstruction("a scalar load whose offset is a register alone")
        offset = None
        if access.modifier("soffset_en"):
            offset = access.scalar(instruction.named["soffset"], "u32")
        base = instruction.named["sbase"]
        low = access.scalar(Operand("s", base.index, 64), "u64")
        records = None
        if buffer:
            records = access.scalar(Operand("s", base.index + 2, 32), "u32")
            access.scalar_reads.add(base.index + 3)
        first = instruction.destinations[0].index
        registers = frozenset(range(first, first + dwords))
        access.scalar_writes |= registers
        state = machine.state

        def run(g: Group) -> None:
            relative = np.full(g.count, immediate, I64)
            if offset is not None:
                relative += offset(g).astype(I64)
            address = low(g).astype(I64)
            inside = np.ones((g.count, dwords), bool)
            if records is not None:
                address &= 0xFFFFFFFFFFFF
                ends = relative[:, None] + 4 * np.arange(1, dwords + 1)
                inside = ends <= records(g).astype(I64)[:, None]
            address = (address + relative) & ~3
            state.issue_smem(g, registers)
            words = np.zeros((g.count, dwords), U32)
            for dword in range(dwords):
                waves = np.nonzero(inside[:, dword])[0]
                try:
                    data = machine.memory.load(address[waves] + 4 * dword, 4)
                except OutsideBuffers as fault:
                    raise MemoryFault(
                        fault.what, wave=int(waves[fault.position])
                    ) from fault
                words[waves, dword] = data.view(U32)[:, 0]
            state.s[g.index, first : first + dwords] = words

        return access.finish(run)

    opcode(name)(compile)


for _count in (1, 2, 4, 8, 16):
    _suffix = "" if _count == 1 else f"x{_count}"
    _scalar_load(f"s_load_dword{_suffix}", _count, False)
    _scalar_load(f"s_buffer_load_dword{_suffix}", _count, True)


@opcode("s_dcache_inv", "s_dcache_wb", "buffer_wbl2", "buffer_inv")
def _cache(machine: Machine, instruction: Instruction) -> Step:
    return lambda g: None


# What is moved: (name, bytes, narrow type, half of the register).

_LOADS: dict[str, tuple[int, Any, int | None]] = {
    "ubyte": (1, np.uint8, None),
    "sbyte": (1, np.int8, None),
    "ushort": (2, np.uint16, None),
    "sshort": (2, np.int16, None),
    "dword": (4, None, None),
    "dwordx2": (8, None, None),
    "dwordx3": (12, None, None),
    "dwordx4": (16, None, None),
    "ubyte_d16": (1, np.uint8, 0),
    "ubyte_d16_hi": (1, np.uint8, 1),
    "sbyte_d16": (1, np.int8, 0),
    "sbyte_d16_hi": (1, np.int8, 1),
    "short_d16": (2, np.uint16, 0),
    "short_d16_hi": (2, np.uint16, 1),
}
_STORES: dict[str, tuple[int, int]] = {
    "byte": (1, 0),
    "byte_d16_hi": (1, 1),
    "short": (2, 0),
    "short_d16_hi": (2, 1),
    "dword": (4, 0),
    "dwordx2": (8, 0),
    "dwordx3": (12, 0),
    "dwordx4": (16, 0),
}


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Of the active lanes: place in the group, lane, address, bytes in range."""

    position: Lanes
    lane: Lanes
    address: NDArray[np.int64]
    room: NDArray[np.int64]

    def chosen(self, mask: NDArray[np.bool_]) -> Addresses:
        if mask.all():
            return self
        fields = (self.position, self.lane, self.address, self.room)
        return Addresses(*(field[mask] for field in fields))


class Target:
    """The addresses of a vector memory instruction."""

    def __init__(self, access: Access):
        for name in ("sc0", "sc1", "nt"):
            access.modifier(name)

    def lanes(self, g: Group) -> Addresses:
        raise NotImplementedError


class GlobalTarget(Target):
    def __init__(self, access: Access, instruction: Instruction):
        super().__init__(access)
        self.offset = _signed(access.modifier("offset"), 13)
        base = instruction.named["saddr"]
        self.base = None
        address = instruction.named["addr"]
        if base.file == "s" and base.index not in (M0, 127):
            self.base = access.scalar(Operand("s", base.index, 64), "u64")
            self.address = access.reader(address, "u32")
        else:
            wide = Operand(address.file, address.index, 64)
            self.address = access.reader(wide, "u64")

    def lanes(self, g: Group) -> Addresses:
        position, lane = np.nonzero(g.active())
        value = np.broadcast_to(self.address(g), (g.count, 64))[position, lane]
        address = value.astype(I64) + self.offset
        if self.base is not None:
            address += self.base(g).astype(I64)[position]
        return Addresses(position, lane, address, np.full(len(lane), NEVER, I64))


class BufferTarget(Target):
    """A raw buffer: base, no stride, a byte count that bounds the offsets.

    The vector and the immediate offset are added in 32 bits, the scalar offset is not
    wrapped, and each dword of an access is checked for itself.
    """

    def __init__(self, access: Access, instruction: Instruction):
        super().__init__(access)
        self.immediate = access.modifier("offset")
        if access.modifier("idxen"):
            raise UnknownInstruction("a buffer access with an index")
        self.offset = None
        if access.modifier("offen"):
            self.offset = access.reader(instruction.named["vaddr"], "u32")
        self.scalar_offset = access.scalar(instruction.named["soffset"], "u32")
        first = instruction.named["srsrc"].index
        self.words = [
            access.scalar(Operand("s", first + i, 32), "u32") for i in range(4)
        ]

    def lanes(self, g: Group) -> Addresses:
        low, high, records, _ = (word(g).astype(I64) for word in self.words)
        if ((high >> 16) & 0x3FFF).any() or (high >> 31).any():
            raise UnknownInstruction("a buffer with a stride or a swizzle")
        base = low | (high & 0xFFFF) << 32
        position, lane = np.nonzero(g.active())
        offset = np.full(len(lane), self.immediate, I64)
        if self.offset is not None:
            varying = np.broadcast_to(self.offset(g), (g.count, 64))
            offset += varying[position, lane].astype(I64)
        offset &= 0xFFFFFFFF
        offset += self.scalar_offset(g).astype(I64)[position]
        room = np.maximum(records[position] - offset, 0)
        return Addresses(position, lane, base[position] + offset, room)


def _target(access: Access, instruction: Instruction) -> GlobalTarget | BufferTarget:
    if instruction.name.startswith("buffer_"):
        return BufferTarget(access, instruction)
    return GlobalTarget(access, instruction)


def _parts(size: int, lanes: Addresses) -> list[tuple[int, int, NDArray[np.bool_]]]:
    """(first byte, bytes, which lanes): all at once, or dword by dword where some
    lanes are partly out of range."""
    whole = lanes.room >= size
    unit = min(size, 4)
    if not (~whole & (lanes.room >= unit)).any():
        return [(0, size, whole)]
    return [(first, unit, lanes.room >= first + unit) for first in range(0, size, unit)]


def fetch(
    machine: Machine, target: Target, g: Group, size: int
) -> tuple[Lanes, Lanes, NDArray[np.uint8]]:
    """Loads of the active lanes: what is out of a buffer's range is zero."""
    lanes = target.lanes(g)
    data = np.zeros((len(lanes.lane), size), np.uint8)
    for first, count, inside in _parts(size, lanes):
        part = lanes.chosen(inside)
        try:
            loaded = machine.memory.load(part.address + first, count)
        except OutsideBuffers as fault:
            raise _placed(fault, part) from fault
        data[inside, first : first + count] = loaded
    return lanes.position, lanes.lane, data


def _placed(fault: OutsideBuffers, lanes: Addresses) -> MemoryFault:
    at = fault.position
    wave, lane = int(lanes.position[at]), int(lanes.lane[at])
    return MemoryFault(fault.what, wave=wave, lane=lane)


def _load(prefix: str, name: str, size: int, kind: Any, half: int | None) -> None:
    def compile(machine: Machine, instruction: Instruction) -> Step:
        access = Access(machine, instruction)
        if access.modifier("lds"):
            return _load_to_lds(machine, instruction, access, size)
        target = _target(access, instruction)
        operand = instruction.named["vdata" if prefix == "buffer" else "vdst"]
        if half is None:
            operand = Operand("v", operand.index, 8 * max(4, size))
            rows = access.vector_rows(operand, write=True)
        else:
            rows = [machine.state.row(operand.index)]
            access.writes.append((rows[0], half))
        flight = flight_rows(rows)

        def run(g: Group) -> None:
            position, lane, data = fetch(machine, target, g, size)
            machine.state.issue_vm(g, flight)
            if kind is None:
                scatter_rows(machine, g, rows, position, lane, data)
            else:
                narrow = np.ascontiguousarray(data).view(kind)[:, 0]
                merge_narrow(machine, g, rows[0], position, lane, narrow, half)

        return access.finish(run, counter="vmcnt")

    opcode(f"{prefix}_load_{name}")(compile)


def _load_to_lds(
    machine: Machine, instruction: Instruction, access: Access, size: int
) -> Step:
    """Lane i's data go to M0 + the instruction's offset + i * size."""
    immediate = instruction.modifiers.get("offset", 0)
    target = _target(access, instruction)
    if isinstance(target, GlobalTarget):
        immediate = _signed(immediate, 13)
    if size < 4:
        raise UnknownInstruction("a load of bytes or halfwords to LDS")
    base = access.scalar(Operand("s", M0, 32), "u32")

    def run(g: Group) -> None:
        position, lane, data = fetch(machine, target, g, size)
        machine.state.issue_vm(g, None)
        address = base(g).astype(I64)[position] + immediate + LANES[lane] * size
        machine.lds.store(g, position, lane, address, data, direct=True)

    return access.finish(run)


def _global_load_lds(name: str, size: int) -> None:
    def compile(machine: Machine, instruction: Instruction) -> Step:
        return _load_to_lds(machine, instruction, Access(machine, instruction), size)

    opcode(name)(compile)


def _store(prefix: str, name: str, size: int, half: int) -> None:
    def compile(machine: Machine, instruction: Instruction) -> Step:
        access = Access(machine, instruction)
        target = _target(access, instruction)
        operand = instruction.named["vdata" if prefix == "buffer" else "data"]
        if size >= 4:
            rows = access.vector_rows(Operand("v", operand.index, 8 * size))
        else:
            rows = [machine.state.row(operand.index)]
            access.reads.append((rows[0], half))

        def run(g: Group) -> None:
            lanes = target.lanes(g)
            machine.state.issue_vm(g, None)
            data = gather_rows(machine, g, rows, lanes.position, lanes.lane)
            if size < 4:
                data = data[:, 2 * half : 2 * half + size]
            for first, count, inside in _parts(size, lanes):
                part = lanes.chosen(inside)
                try:
                    machine.memory.store(
                        part.address + first, data[inside, first : first + count]
                    )
                except OutsideBuffers as fault:
                    raise _placed(fault, part) from fault

        return access.finish(run)

    opcode(f"{prefix}_store_{name}")(compile)


for _prefix in ("global", "buffer"):
    for _name, (_size, _kind, _half) in _LOADS.items():
        _load(_prefix, _name, _size, _kind, _half)
    for _name, (_size, _half) in _STORES.items():
        _store(_prefix, _name, _size, _half)
for _name, _size in (("dword", 4), ("dwordx3", 12), ("dwordx4", 16)):
    _global_load_lds(f"global_load_lds_{_name}", _size)
