"""Reading and writing the operands of one instruction.

An `Access` is made when an instruction is compiled. Its readers and writers are small
closures; on the way it notes which registers the instruction touches, so that the
finished step can check and mark them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .decode import Instruction, Operand
from .errors import UnknownInstruction
from .registry import Step
from .state import Cells, Group

if TYPE_CHECKING:
    from .machine import Machine

Array = NDArray[Any]
Reader = Callable[[Group], Array]
Writer = Callable[[Group, Array, NDArray[np.bool_] | None], None]

DTYPES: dict[str, Any] = {
    "b32": np.uint32,
    "u32": np.uint32,
    "i32": np.int32,
    "f32": np.float32,
    "b64": np.uint64,
    "u64": np.uint64,
    "i64": np.int64,
    "f64": np.float64,
    "b16": np.uint16,
    "u16": np.uint16,
    "i16": np.int16,
    "f16": np.float16,
}
FLOATS = ("f16", "f32", "f64")


def width(kind: str) -> int:
    return int(kind[1:])


class Access:
    """The operands of one instruction, with the record of what it touches."""

    def __init__(self, machine: Machine, instruction: Instruction):
        self.machine = machine
        self.state = machine.state
        self.instruction = instruction
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int]] = []
        self.scalar_reads: set[int] = set()
        self.scalar_writes: set[int] = set()
        self.left = dict(instruction.modifiers)
        self.left.pop("literal", None)

    def modifier(self, name: str, default: int = 0) -> int:
        """A modifier's value; asking for it says that it is emulated."""
        return self.left.pop(name, default)

    # Whole registers.

    def vector_rows(self, operand: Operand, *, write: bool = False) -> list[int]:
        """The rows of a vector operand, noted as read or written."""
        if operand.file != "v":
            raise UnknownInstruction(f"{operand} where a vector register is needed")
        rows = [self.state.row(operand.index + i) for i in range(operand.dwords)]
        (self.writes if write else self.reads).extend(
            (row, half) for row in rows for half in (0, 1)
        )
        return rows

    def reader(
        self, operand: Operand, kind: str, halves: Sequence[int] = (0, 1)
    ) -> Reader:
        """Values of an operand as (waves, 64), (waves, 1) or (1, 1)."""
        if width(kind) == 64:
            return self._reader64(operand, kind)
        raw = self._reader32(operand, halves)
        if width(kind) == 16:
            high = tuple(halves) == (1,)
            dtype = DTYPES[kind]
            if high:
                return lambda g: (raw(g) >> 16).astype(np.uint16).view(dtype)
            return lambda g: raw(g).astype(np.uint16).view(dtype)
        if DTYPES[kind] is np.uint32:
            return raw
        dtype = DTYPES[kind]
        return lambda g: raw(g).view(dtype)

    def _reader32(self, operand: Operand, halves: Sequence[int]) -> Reader:
        state = self.state
        if operand.file == "v":
            row = state.row(operand.index)
            self.reads.extend((row, half) for half in halves)
            registers = state.v
            return lambda g: registers[row, g.index]
        if operand.file == "s":
            index = operand.index
            if index == 253:
                return lambda g: state.scc[g.index][:, None].astype(np.uint32)
            self.scalar_reads.add(index)
            return lambda g: state.s[g.index, index][:, None]
        constant = np.full((1, 1), operand.value & 0xFFFFFFFF, np.uint32)
        return lambda g: constant

    def _reader64(self, operand: Operand, kind: str) -> Reader:
        state, dtype = self.state, DTYPES[kind]
        if operand.file == "v":
            low, high = state.row(operand.index), state.row(operand.index + 1)
            self.reads.extend((row, half) for row in (low, high) for half in (0, 1))

            def read(g: Group) -> Array:
                words = np.empty((g.count, 64, 2), np.uint32)
                words[..., 0] = state.v[low, g.index]
                words[..., 1] = state.v[high, g.index]
                return words.view(dtype)[..., 0]

            return read
        if operand.file == "s":
            pair = self._pair(operand)
            return lambda g: state.s64[g.index, pair][:, None].view(dtype)
        constant = np.full((1, 1), self._constant64(operand, kind), np.uint64)
        constant = constant.view(dtype)
        return lambda g: constant

    @staticmethod
    def _constant64(operand: Operand, kind: str) -> int:
        if operand.index != 255:
            return operand.value
        if kind == "f64":
            return operand.value << 32
        if kind == "i64" and operand.value >> 31:
            return operand.value | 0xFFFFFFFF00000000
        return operand.value

    def _pair(self, operand: Operand, *, write: bool = False) -> int:
        if operand.index % 2:
            raise UnknownInstruction(f"{operand}: a pair starts at an even register")
        (self.scalar_writes if write else self.scalar_reads).update(
            (operand.index, operand.index + 1)
        )
        return operand.index // 2

    # Scalars: (waves,).

    def scalar(self, operand: Operand, kind: str) -> Reader:
        if operand.file == "v":
            raise UnknownInstruction(f"{operand} where a scalar is needed")
        read = self.reader(operand, kind)
        if operand.file == "s":
            return lambda g: read(g)[:, 0]
        return lambda g: np.broadcast_to(read(g)[0], (g.count,))

    def scalar_writer(self, operand: Operand) -> Callable[[Group, Array], None]:
        state, index = self.state, operand.index
        if operand.file != "s" or index == 253:
            raise UnknownInstruction(f"{operand} cannot be written")
        if operand.dwords == 2:
            pair = self._pair(operand, write=True)
            refresh = index == 126

            def write64(g: Group, value: Array) -> None:
                state.s64[g.index, pair] = _bits(value, np.uint64)
                if refresh:
                    g.refresh()

            return write64
        self.scalar_writes.add(index)
        refresh = index in (126, 127)

        def write32(g: Group, value: Array) -> None:
            state.s[g.index, index] = _bits(value, np.uint32)
            if refresh:
                g.refresh()

        return write32

    # Vector results.

    def writer(
        self, operand: Operand, kind: str, half: int | None = None, keep: bool = False
    ) -> Writer:
        """Stores (waves, 64) results where EXEC, or the given mask, allows.

        16-bit results go to the low half and zero the other, or with `keep` to `half`
        alone.
        """
        if operand.file != "v":
            raise UnknownInstruction(f"{operand} cannot be written by a vector result")
        if width(kind) == 64:
            return self._writer64(operand)
        row = self.state.row(operand.index)
        if width(kind) == 16 and keep:
            self.writes.append((row, half or 0))
            return self._writer_half(row, half or 0)
        self.writes.extend((row, h) for h in (0, 1))
        narrow = width(kind) == 16
        registers = self.state.v

        def write(g: Group, value: Array, mask: NDArray[np.bool_] | None) -> None:
            value = (
                _bits(value, np.uint16).astype(np.uint32)
                if narrow
                else _bits(value, np.uint32)
            )
            store(registers, row, g, value, mask)

        return write

    def _writer64(self, operand: Operand) -> Writer:
        low, high = (self.state.row(operand.index + i) for i in (0, 1))
        self.writes.extend((row, half) for row in (low, high) for half in (0, 1))
        registers = self.state.v

        def write(g: Group, value: Array, mask: NDArray[np.bool_] | None) -> None:
            bits = _bits(value, np.uint64)
            store(registers, low, g, bits.astype(np.uint32), mask)
            store(registers, high, g, (bits >> np.uint64(32)).astype(np.uint32), mask)

        return write

    def _writer_half(self, row: int, half: int) -> Writer:
        registers = self.state.v
        shift = np.uint32(16 * half)
        kept = np.uint32(0x0000FFFF if half else 0xFFFF0000)

        def write(g: Group, value: Array, mask: NDArray[np.bool_] | None) -> None:
            bits = _bits(value, np.uint16).astype(np.uint32) << shift
            store(registers, row, g, (registers[row, g.index] & kept) | bits, mask)

        return write

    def finish(
        self,
        run: Step,
        *,
        every_lane: bool = False,
        every_lane_written: bool = False,
        counter: str = "",
    ) -> Step:
        """The checked step. All modifiers must have been asked for by now.

        `counter`: of a load, the counter that says when its result is there.
        """
        if self.left:
            names = ", ".join(f"{k}={v}" for k, v in self.left.items())
            raise UnknownInstruction(f"modifier not emulated: {names}")
        reads = _cells(self.reads, every_lane)
        writes = _cells(self.writes, every_lane_written)
        scalar_reads = frozenset(self.scalar_reads)
        scalar_writes = frozenset(self.scalar_writes)
        state = self.state
        if not self.machine.checks:
            return run

        def step(g: Group) -> None:
            if reads is not None:
                state.check_read(reads, g)
            if scalar_reads:
                state.check_scalar_read(scalar_reads, g)
            if writes is not None:
                state.check_write(writes, g, counter)
            if scalar_writes:
                state.check_scalar_write(scalar_writes, g)
            run(g)
            if writes is not None:
                state.mark_written(writes, g)
            if scalar_writes:
                state.mark_scalar_written(scalar_writes, g)

        return step


def _cells(touched: list[tuple[int, int]], every_lane: bool) -> Cells | None:
    if not touched:
        return None
    cells = Cells.of([], every_lane=every_lane)
    for half in (0, 1):
        rows = [row for row, h in touched if h == half]
        cells = cells.with_cells(Cells.of(rows, (half,), every_lane))
    return cells


def _bits(value: Array, dtype: Any) -> Array:
    value = np.asarray(value)
    size = np.dtype(dtype).itemsize
    if value.dtype.itemsize != size or value.dtype == np.bool_:
        return value.astype(dtype)
    return value.view(dtype)


def store(
    registers: NDArray[np.uint32],
    row: int,
    g: Group,
    value: Array,
    mask: NDArray[np.bool_] | None,
) -> None:
    """Writes one register of a group under EXEC, or under `mask` if given."""
    if mask is None:
        mask = g.exec_mask
    if mask is None:
        registers[row, g.index] = value
    elif isinstance(g.index, slice):
        np.copyto(registers[row, g.index], value, where=mask)
    else:
        registers[row, g.index] = np.where(mask, value, registers[row, g.index])
