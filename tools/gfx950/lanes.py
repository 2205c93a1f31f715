"""Instructions that choose by lane or move values between lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .decode import VCC, Instruction, Operand
from .errors import UnknownInstruction
from .operands import Access, store
from .registry import Step, opcode
from .state import LANE_BITS, LANES, Group, lane_mask
from .vector import Sources

if TYPE_CHECKING:
    from .machine import Machine

U32, U64 = np.uint32, np.uint64


@opcode("v_nop")
def _nop(machine: Machine, instruction: Instruction) -> Step:
    return lambda g: None


@opcode("v_cndmask_b32")
def _cndmask(machine: Machine, instruction: Instruction) -> Step:
    access = Access(machine, instruction)
    sources = Sources(access)
    # Negation and absolute value of its operands are a float's sign bit.
    kind = "f32" if sources.negative | sources.absolute else "b32"
    no, yes = (
        sources.reader(o, kind, i) for i, o in enumerate(instruction.sources[:2])
    )
    third = instruction.sources[2:] or (Operand("s", VCC, 64),)
    choose = access.scalar(third[0], "u64")
    (destination,) = instruction.destinations
    selects = sources.destination_select(destination)
    write = selects or access.writer(destination, "b32")
    masks = sources.mask

    def run(g: Group) -> None:
        value = np.where(lane_mask(choose(g)), yes(g), no(g))
        write(g, value, masks(g) if masks is not None else None)

    return access.finish(run)


def _first_lane(g: Group) -> np.ndarray:
    bits = g.exec_bits
    lowest = bits & (~bits + U64(1))
    return np.where(bits == 0, 0, np.bitwise_count(lowest - U64(1))).astype(np.intp)


@opcode("v_readfirstlane_b32")
def _readfirstlane(machine: Machine, instruction: Instruction) -> Step:
    access = Access(machine, instruction)
    read = access.reader(instruction.sources[0], "b32")
    write = access.scalar_writer(instruction.destinations[0])
    rows = np.arange(machine.state.waves)

    def run(g: Group) -> None:
        value = np.broadcast_to(read(g), (g.count, 64))
        write(g, value[rows[: g.count], _first_lane(g)])

    return access.finish(run)


@opcode("v_readlane_b32")
def _readlane(machine: Machine, instruction: Instruction) -> Step:
    access = Access(machine, instruction)
    source, chosen = instruction.sources
    row = machine.state.row(source.index)
    lane = access.scalar(chosen, "u32")
    write = access.scalar_writer(instruction.destinations[0])
    state = machine.state
    rows = np.arange(state.waves)
    access.reads.extend([(row, 0), (row, 1)])
    in_flight = access.finish(lambda g: None)
    access.reads.clear()

    def run(g: Group) -> None:
        lanes = (lane(g) & U32(63)).astype(np.intp)
        if machine.checks:
            known = state.v_valid[2 * row, g.index] & LANE_BITS[lanes]
            if not known.all():
                saved, g.exec_bits = g.exec_bits, LANE_BITS[lanes]
                try:
                    in_flight(g)
                finally:
                    g.exec_bits = saved
        write(g, state.v[row, g.index][rows[: g.count], lanes])

    step = access.finish(run)
    return step


@opcode("v_writelane_b32")
def _writelane(machine: Machine, instruction: Instruction) -> Step:
    access = Access(machine, instruction)
    source, chosen = instruction.sources
    value, lane = access.scalar(source, "u32"), access.scalar(chosen, "u32")
    state = machine.state
    row = state.row(instruction.destinations[0].index)

    def run(g: Group) -> None:
        lanes = (lane(g) & U32(63)).astype(np.intp)
        state.v[row, g.waves, lanes] = value(g)
        for half in (0, 1):
            state.v_valid[2 * row + half, g.waves] |= LANE_BITS[lanes]

    return access.finish(run)


@opcode("v_swap_b32")
def _swap(machine: Machine, instruction: Instruction) -> Step:
    access = Access(machine, instruction)
    (source,), (destination,) = instruction.sources, instruction.destinations
    a, b = access.reader(source, "b32"), access.reader(destination, "b32")
    write_a, write_b = (
        access.writer(source, "b32"),
        access.writer(destination, "b32"),
    )

    def run(g: Group) -> None:
        old_a, old_b = a(g).copy(), b(g).copy()
        write_a(g, old_b, None)
        write_b(g, old_a, None)

    return access.finish(run)


@opcode("v_permlane32_swap_b32", "v_permlane16_swap_b32")
def _permlane_swap(machine: Machine, instruction: Instruction) -> Step:
    """The upper half rows of the destination change places with the lower half rows
    of the source."""
    access = Access(machine, instruction)
    (source,), (destination,) = instruction.sources, instruction.destinations
    a, b = access.reader(source, "b32"), access.reader(destination, "b32")
    for operand in (source, destination):
        access.vector_rows(operand, write=True)
    rows = [machine.state.row(o.index) for o in (source, destination)]
    distance = 32 if "32_swap" in instruction.name else 16
    low = LANES[(LANES & distance) == 0]
    high = low + distance
    registers = machine.state.v
    for name in ("bc", "opsel"):  # fetch-inactive and bound control: no effect here
        access.modifier(name)

    def run(g: Group) -> None:
        active = g.active()
        if (active[:, low] != active[:, high]).any():
            raise UnknownInstruction("a lane swap with one of two lanes switched off")
        new_a, new_b = a(g).copy(), b(g).copy()
        new_a[:, low], new_b[:, high] = new_b[:, high], new_a[:, low].copy()
        store(registers, rows[0], g, new_a, None)
        store(registers, rows[1], g, new_b, None)

    return access.finish(run)


@opcode("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
def _mbcnt(machine: Machine, instruction: Instruction) -> Step:
    access = Access(machine, instruction)
    mask, base = (access.reader(o, "u32") for o in instruction.sources)
    write = access.writer(instruction.destinations[0], "u32")
    below = LANE_BITS - U64(1)
    if "_lo_" in instruction.name:
        part = below.astype(U32)
    else:
        part = (below >> U64(32)).astype(U32)

    def run(g: Group) -> None:
        write(g, np.bitwise_count(mask(g) & part).astype(U32) + base(g), None)

    return access.finish(run)
