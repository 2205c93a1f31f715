"""Registers of all waves that run together, and what is known of each.

Arrays are indexed (register, wave, lane), so that one register of neighbouring waves is
one block. Waves are numbered `wave_in_workgroup * workgroups + workgroup`: the groups
of waves that a kernel keeps in step are then neighbours. Lane sets are 64-bit masks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .decode import EXEC, VCC, Kernel
from .errors import MissingWait, UninitialisedRead

ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
LANES = np.arange(64)
LANE_BITS = np.uint64(1) << np.arange(64, dtype=np.uint64)
NEVER = np.iinfo(np.int32).max

Array = NDArray[np.generic]
Index = slice | NDArray[np.intp]


def lane_mask(bits: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """(n,) masks as (n, 64) booleans."""
    return (bits[:, None] & LANE_BITS) != 0


def lane_bits(mask: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """(n, 64) booleans as (n,) masks."""
    packed = np.packbits(mask, axis=1, bitorder="little")
    return packed.view(np.uint64)[:, 0]


class Group:
    """Waves at one address, which execute together."""

    def __init__(self, state: State, waves: NDArray[np.intp]):
        self.state = state
        self.waves = waves
        self.count = len(waves)
        contiguous = int(waves[-1]) - int(waves[0]) + 1 == len(waves)
        self.index: Index = (
            slice(int(waves[0]), int(waves[-1]) + 1) if contiguous else waves
        )
        self.refresh()

    def refresh(self) -> None:
        """To be called after EXEC has changed."""
        self.exec_bits = self.state.s64[self.index, EXEC // 2]
        self.full = bool((self.exec_bits == ALL).all())
        self.exec_mask = None if self.full else lane_mask(self.exec_bits)

    def active(self) -> NDArray[np.bool_]:
        if self.exec_mask is None:
            return np.ones((self.count, 64), bool)
        return self.exec_mask


@dataclasses.dataclass(frozen=True)
class Cells:
    """Vector registers that an instruction touches, for the checks.

    A cell is half a register, so that conversions which fill one half are followed
    exactly. `every_lane`: whether lanes that EXEC switches off count too.
    """

    rows: frozenset[int]
    cells: frozenset[int]
    row_array: NDArray[np.intp]
    cell_array: NDArray[np.intp]
    every_lane: bool

    @staticmethod
    def of(
        rows: Sequence[int], halves: Sequence[int] = (0, 1), every_lane: bool = False
    ) -> Cells:
        unique = sorted(set(rows))
        cells = [2 * row + half for row in unique for half in halves]
        return Cells(
            frozenset(unique),
            frozenset(cells),
            np.array(unique, np.intp),
            np.array(cells, np.intp),
            every_lane,
        )

    def with_cells(self, other: Cells) -> Cells:
        cells = sorted(self.cells | other.cells)
        rows = sorted(self.rows | other.rows)
        return Cells(
            frozenset(rows),
            frozenset(cells),
            np.array(rows, np.intp),
            np.array(cells, np.intp),
            self.every_lane or other.every_lane,
        )


class State:
    """Registers, counters and the bookkeeping of what is valid or in flight."""

    def __init__(self, kernel: Kernel, workgroups: int, waves_per_workgroup: int):
        self.workgroups = workgroups
        self.waves_per_workgroup = waves_per_workgroup
        waves = self.waves = workgroups * waves_per_workgroup
        self.accumulation_offset = kernel.accumulation_offset
        rows = self.rows = max(kernel.vgprs, kernel.accumulation_offset) + kernel.agprs
        self.v = np.zeros((rows, waves, 64), np.uint32)
        self.v_valid = np.zeros((2 * rows, waves), np.uint64)
        self.v_known: set[int] = set()
        self.s = np.zeros((waves, 128), np.uint32)
        self.s64: NDArray[np.uint64] = self.s.view(np.uint64)
        self.s_valid = np.zeros((waves, 128), bool)
        self.s_known: set[int] = set()
        self.scc = np.zeros(waves, bool)
        self.scc_valid = np.zeros(waves, bool)
        self.fp16_overflow = np.zeros(waves, bool)
        self.pc = np.full(waves, kernel.entry, np.int64)
        self.workgroup = np.tile(np.arange(workgroups), waves_per_workgroup)
        self.wave_in_workgroup = np.repeat(np.arange(waves_per_workgroup), workgroups)

        # In-order counters: an access is done when its number is at most `done`.
        self.vm_issued = np.zeros(waves, np.int32)
        self.vm_done = np.zeros(waves, np.int32)
        self.lds_issued = np.zeros(waves, np.int32)
        self.lds_done = np.zeros(waves, np.int32)
        self.v_vm = np.zeros((rows, waves), np.int32)
        self.v_lds = np.zeros((rows, waves), np.int32)
        self.vm_rows: set[int] = set()
        self.lds_rows: set[int] = set()
        self.s_pending = np.zeros((waves, 128), bool)
        self.smem_registers: set[int] = set()
        self.smem_outstanding = np.zeros(waves, np.int32)

        self.s64[:, EXEC // 2] = ALL
        self.s_valid[:, EXEC : EXEC + 2] = True
        self.s_known |= {EXEC, EXEC + 1}

    def row(self, register: int) -> int:
        """The row of a vector register as instructions number it (AGPRs from 256)."""
        row = register
        if register >= 256:
            row = self.accumulation_offset + register - 256
        if row >= self.rows:
            raise UninitialisedRead(f"register {register} is beyond the allocation")
        return row

    # Checks of vector registers.

    def check_read(self, cells: Cells, group: Group) -> None:
        self._check_flight(cells, group, "read")
        if cells.cells <= self.v_known:
            return
        valid = self.v_valid[cells.cell_array][:, group.index]
        needed = ALL if cells.every_lane else group.exec_bits
        missing = ~valid & needed
        if missing.any():
            cell, wave = (int(x[0]) for x in np.nonzero(missing))
            bits = int(missing[cell, wave])
            register = self.name(int(cells.cell_array[cell]) // 2)
            raise UninitialisedRead(
                f"{register} is read and was never written",
                wave=wave,
                lane=(bits & -bits).bit_length() - 1,
            )

    def check_write(self, cells: Cells, group: Group, ordered: str = "") -> None:
        """`ordered`: the counter of a load, which may follow another of its kind into
        the same register, as they complete in order."""
        self._check_flight(cells, group, "overwritten", ordered)

    def _check_flight(
        self, cells: Cells, group: Group, verb: str, ordered: str = ""
    ) -> None:
        for pending, number, done, counter in (
            (self.vm_rows, self.v_vm, self.vm_done, "vmcnt"),
            (self.lds_rows, self.v_lds, self.lds_done, "lgkmcnt"),
        ):
            if not pending or counter == ordered or cells.rows.isdisjoint(pending):
                continue
            early = number[cells.row_array][:, group.index] > done[group.index]
            if early.any():
                row, wave = (int(x[0]) for x in np.nonzero(early))
                raise MissingWait(
                    f"{self.name(int(cells.row_array[row]))} is {verb} before the "
                    f"s_waitcnt {counter} that its load needs",
                    wave=wave,
                )

    def mark_written(self, cells: Cells, group: Group) -> None:
        if cells.cells <= self.v_known:
            return
        lanes = ALL if cells.every_lane else group.exec_bits
        if isinstance(group.index, slice):
            block = self.v_valid[cells.cell_array, group.index]
            self.v_valid[cells.cell_array, group.index] = block | lanes
        else:
            place = np.ix_(cells.cell_array, group.index)
            self.v_valid[place] |= lanes
        whole = (self.v_valid[cells.cell_array] == ALL).all(axis=1)
        self.v_known.update(cells.cell_array[whole].tolist())

    def name(self, row: int) -> str:
        if self.accumulation_offset <= row:
            return f"a{row - self.accumulation_offset}"
        return f"v{row}"

    # Checks of scalar registers.

    def check_scalar_read(self, registers: frozenset[int], group: Group) -> None:
        if not registers.isdisjoint(self.smem_registers):
            self._check_scalar_flight(registers, group, "read")
        if registers <= self.s_known:
            return
        for register in sorted(registers - self.s_known):
            valid = self.s_valid[group.index, register]
            if not valid.all():
                raise UninitialisedRead(
                    f"s{register} is read and was never written",
                    wave=int(np.argmin(valid)),
                )

    def check_scalar_write(self, registers: frozenset[int], group: Group) -> None:
        if not registers.isdisjoint(self.smem_registers):
            self._check_scalar_flight(registers, group, "overwritten")

    def _check_scalar_flight(
        self, registers: frozenset[int], group: Group, verb: str
    ) -> None:
        for register in sorted(registers & self.smem_registers):
            pending = self.s_pending[group.index, register]
            if pending.any():
                raise MissingWait(
                    f"s{register} is {verb} before the s_waitcnt lgkmcnt(0) that its "
                    "load needs",
                    wave=int(np.argmax(pending)),
                )

    def mark_scalar_written(self, registers: frozenset[int], group: Group) -> None:
        if registers <= self.s_known:
            return
        for register in registers - self.s_known:
            self.s_valid[group.index, register] = True
            if self.s_valid[:, register].all():
                self.s_known.add(register)

    # Memory operations in flight.

    def issue_vm(self, group: Group, rows: NDArray[np.intp] | None) -> None:
        self.vm_issued[group.index] += 1
        if rows is not None:
            number = self.vm_issued[group.index]
            self._set_flight(self.v_vm, rows, group, number)
            self.vm_rows.update(rows.tolist())

    def issue_lds(self, group: Group, rows: NDArray[np.intp] | None) -> None:
        self.lds_issued[group.index] += 1
        if rows is not None:
            number = self.lds_issued[group.index]
            self._set_flight(self.v_lds, rows, group, number)
            self.lds_rows.update(rows.tolist())

    @staticmethod
    def _set_flight(
        table: NDArray[np.int32],
        rows: NDArray[np.intp],
        group: Group,
        number: NDArray[np.int32],
    ) -> None:
        if isinstance(group.index, slice):
            table[rows, group.index] = number
        else:
            table[np.ix_(rows, group.index)] = number

    def issue_smem(self, group: Group, registers: frozenset[int]) -> None:
        self.smem_outstanding[group.index] += 1
        for register in registers:
            self.s_pending[group.index, register] = True
        self.smem_registers |= registers

    def wait(self, group: Group, vm: int | None, lgkm: int | None) -> None:
        """s_waitcnt: vector memory and LDS complete in order, scalar loads do not."""
        index = group.index
        if vm is not None:
            self.vm_done[index] = np.maximum(
                self.vm_done[index], self.vm_issued[index] - vm
            )
            self.vm_rows = self._still_pending(self.vm_rows, self.v_vm, self.vm_done)
        if lgkm is not None:
            self.lds_done[index] = np.maximum(
                self.lds_done[index], self.lds_issued[index] - lgkm
            )
            self.lds_rows = self._still_pending(
                self.lds_rows, self.v_lds, self.lds_done
            )
            if lgkm == 0 and self.smem_registers:
                self.smem_outstanding[index] = 0
                self.s_pending[index] = False
                self.smem_registers = {
                    r for r in self.smem_registers if self.s_pending[:, r].any()
                }

    @staticmethod
    def _still_pending(
        rows: set[int], numbers: NDArray[np.int32], done: NDArray[np.int32]
    ) -> set[int]:
        if not rows:
            return rows
        array = np.fromiter(rows, np.intp, len(rows))
        return set(array[(numbers[array] > done).any(axis=1)].tolist())

    @property
    def vcc(self) -> NDArray[np.uint64]:
        return self.s64[:, VCC // 2]
