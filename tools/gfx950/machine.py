"""Launching kernels: the first registers, the order of waves, barriers, errors."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from . import (
    convert,
    global_ops,
    lanes,
    lds_ops,
    matrix,
    packed,
    scalar,
    vector_float,
    vector_int,
)
from .decode import Instruction, Kernel, branch_target
from .errors import BarrierMismatch, EmulatorError, UnknownInstruction
from .lds import Lds
from .memory import Memory
from .registry import OPCODES, Step
from .state import Group, State, lane_bits

# The modules whose import fills the table of opcodes.
SEMANTICS = (
    convert,
    global_ops,
    lanes,
    lds_ops,
    matrix,
    packed,
    scalar,
    vector_float,
    vector_int,
)

READY, WAITING, ENDED = 0, 1, 2
KERNARG_ADDRESS = 0x7E0000000000
CODE_ADDRESS = 0x7E8000000000
BLOCK_ENDS = ("s_branch", "s_cbranch", "s_barrier", "s_endpgm", "s_setpc")
NO_LIMIT = np.iinfo(np.int64).max

Dim3 = tuple[int, int, int]
Observer = Callable[[Instruction, Group], None]


@dataclasses.dataclass
class Report:
    """What a launch executed, in wave instructions."""

    opcodes: Counter[str] = dataclasses.field(default_factory=Counter)
    addresses: Counter[int] = dataclasses.field(default_factory=Counter)
    waves: int = 0

    @property
    def instructions(self) -> int:
        return self.opcodes.total()


def launch(
    kernel: Kernel,
    *,
    grid: Dim3,
    block: Dim3,
    kernarg: bytes,
    memory: Memory,
    dynamic_lds: int = 0,
    on_instruction: Observer | None = None,
    checks: bool = True,
    waves_at_once: int = 256,
    instruction_limit: int | None = None,
) -> Report:
    """Runs `grid` workgroups of `block` threads.

    `checks`: registers and LDS bytes must have been written, waited for and shared
    properly; without, only memory bounds are checked. `waves_at_once` bounds the
    emulator's memory; `instruction_limit` (wave instructions) stops endless loops.
    """
    report = Report()
    threads = block[0] * block[1] * block[2]
    if not 0 < threads <= kernel.max_threads:
        raise ValueError(f"{threads} threads, of at most {kernel.max_threads}")
    waves = -(-threads // 64)
    together = max(1, waves_at_once // waves)
    for workgroups in _batches(grid, together):
        machine = Machine(kernel, workgroups, grid, block, memory, dynamic_lds, checks)
        machine.set_kernarg(kernarg)
        machine.observer = on_instruction
        machine.limit = instruction_limit
        with np.errstate(all="ignore"):
            machine.start()
            machine.run()
        machine.add_to(report)
    return report


def _batches(grid: Dim3, size: int) -> Iterator[list[Dim3]]:
    places = (
        (x, y, z)
        for z in range(grid[2])
        for y in range(grid[1])
        for x in range(grid[0])
    )
    while batch := list(itertools.islice(places, size)):
        yield batch


class Machine:
    """Workgroups that run together."""

    def __init__(
        self,
        kernel: Kernel,
        workgroups: list[Dim3],
        grid: Dim3,
        block: Dim3,
        memory: Memory,
        dynamic_lds: int,
        checks: bool,
    ):
        if kernel.scratch_bytes:
            raise UnknownInstruction(
                f"{kernel.name} uses {kernel.scratch_bytes} bytes of scratch memory"
            )
        self.kernel = kernel
        self.places = workgroups
        self.grid, self.block = grid, block
        self.checks = checks
        self.threads = block[0] * block[1] * block[2]
        self.state = State(kernel, len(workgroups), -(-self.threads // 64))
        self.state.fp16_overflow = np.full(
            self.state.waves, bool(kernel.rsrc1 >> 26 & 1)
        )
        self._set_mode()
        self.memory = Memory()
        self.memory.buffers = list(memory.buffers)
        self.code_address = CODE_ADDRESS
        self.instructions = kernel.instructions
        granule = _granule(self.instructions)
        self.lds = Lds(self.state, kernel.lds_bytes + dynamic_lds, granule, checks)
        self.status = np.full(self.state.waves, READY, np.int8)
        self.observer: Observer | None = None
        self.limit: int | None = None
        self.kernarg = b""

        self.index = {x.address: i for i, x in enumerate(self.instructions)}
        self.steps: list[Step | None] = [None] * len(self.instructions)
        self.ends = [x.name.startswith(BLOCK_ENDS) for x in self.instructions]
        self.counts = [0] * len(self.instructions)
        self.current = self.instructions[0]

    def _set_mode(self) -> None:
        """Rounding and denormal mode, DX10_CLAMP and IEEE from the descriptor."""
        rsrc1 = self.kernel.rsrc1
        self.mode = rsrc1 >> 12 & 255 | (rsrc1 >> 21 & 1) << 8 | (rsrc1 >> 23 & 1) << 9
        if self.mode & 15:
            raise UnknownInstruction("a rounding mode other than to nearest even")
        if self.mode >> 6 & 3 != 3:
            raise UnknownInstruction("16 and 64-bit floats without denormals")
        denormals = self.mode >> 4 & 3
        self.flush_input = denormals in (0, 2)
        self.flush_output = denormals in (0, 1)

    def _compile(self, instruction: Instruction) -> Step:
        """The instruction's step, made when it is first reached."""
        compiler = OPCODES.get(instruction.name)
        if compiler is None:
            raise UnknownInstruction(f"{instruction.name} is not emulated")
        return compiler(self, instruction)

    # The start of a wave.

    def set_kernarg(self, kernarg: bytes) -> None:
        """The arguments, with the hidden ones that follow them filled in."""
        data = bytearray(kernarg.ljust(self.kernel.kernarg_size, b"\0"))
        values = {"hidden_grid_dims": 3}
        for i, axis in enumerate("xyz"):
            values[f"hidden_block_count_{axis}"] = self.grid[i]
            values[f"hidden_group_size_{axis}"] = self.block[i]
        for kind, offset, size in self.kernel.hidden_arguments:
            if kind in values and offset >= len(kernarg):
                data[offset : offset + size] = values[kind].to_bytes(size, "little")
        self.kernarg = bytes(data)
        packet = struct.pack("<HHHHHHIII", 0, 3, *self.block, 0, *self._grid_threads())
        self.dispatch_address = KERNARG_ADDRESS + -(-len(data) // 256) * 256
        for address, content, name in (
            (KERNARG_ADDRESS, self.kernarg, "the kernel arguments"),
            (self.dispatch_address, packet.ljust(64, b"\0"), "the dispatch packet"),
            (CODE_ADDRESS, self.kernel.code, "the code"),
        ):
            if content:
                array = np.frombuffer(content, np.uint8).copy()
                self.memory.add(address, array, False, name)

    def _grid_threads(self) -> tuple[int, ...]:
        return tuple(g * b for g, b in zip(self.grid, self.block, strict=True))

    def start(self) -> None:
        self._start_scalars()
        state = self.state
        thread = state.wave_in_workgroup[:, None] * 64 + np.arange(64)
        bx, by, _ = self.block
        alive = thread < self.threads
        place = (thread % bx, thread // bx % by, thread // (bx * by))
        ids = np.zeros((state.waves, 64), np.uint32)
        for axis in range((self.kernel.rsrc2 >> 11 & 3) + 1):
            ids |= place[axis].astype(np.uint32) << np.uint32(10 * axis)
        state.v[0] = ids
        bits = lane_bits(alive)
        state.s64[:, 63] = bits
        state.v_valid[0:2] = bits
        if alive.all():
            state.v_known |= {0, 1}

    def _start_scalars(self) -> None:
        kernel, state = self.kernel, self.state
        next_register = 0

        def put(values: list[int | NDArray[np.int64]]) -> None:
            nonlocal next_register
            for value in values:
                state.s[:, next_register] = value
                state.s_valid[:, next_register] = True
                state.s_known.add(next_register)
                next_register += 1

        def skip(count: int) -> None:
            nonlocal next_register
            next_register += count

        def address(value: int) -> list[int | NDArray[np.int64]]:
            return [value & 0xFFFFFFFF, value >> 32]

        for bit, count, value in (
            (0, 4, None),
            (1, 2, self.dispatch_address),
            (2, 2, None),
            (3, 2, KERNARG_ADDRESS),
            (4, 2, None),
            (5, 2, None),
            (6, 1, None),
        ):
            if kernel.properties >> bit & 1:
                if value is None:
                    skip(count)
                else:
                    put(address(value))
        length, offset = kernel.kernarg_preload & 127, kernel.kernarg_preload >> 7
        preloaded = self.kernarg[4 * offset : 4 * (offset + length)]
        preloaded = preloaded.ljust(4 * length, b"\0")
        put(list(struct.unpack(f"<{length}I", preloaded)))
        next_register = kernel.rsrc2 >> 1 & 31
        for axis in range(3):
            if kernel.rsrc2 >> (7 + axis) & 1:
                column = np.array([place[axis] for place in self.places], np.int64)
                put([column[state.workgroup]])

    # Running.

    def run(self) -> None:
        """Waves that are furthest behind go first, so that those which part ways meet
        again at the first address that they share."""
        state = self.state
        while True:
            ready = np.nonzero(self.status == READY)[0]
            if not ready.size:
                return
            places = state.pc[ready]
            lowest = places.min()
            here = places == lowest
            limit = NO_LIMIT if here.all() else int(places[~here].min())
            self._run_block(ready[here], int(lowest), limit)

    def _run_block(self, waves: NDArray[np.intp], address: int, limit: int) -> None:
        group = Group(self.state, waves)
        steps, ends, instructions = self.steps, self.ends, self.instructions
        position = self.index[address]
        try:
            while True:
                self.current = instructions[position]
                self.counts[position] += group.count
                if self.observer is not None:
                    self.observer(self.current, group)
                step = steps[position]
                if step is None:
                    step = steps[position] = self._compile(self.current)
                step(group)
                if ends[position]:
                    break
                position = self.index[self.current.next_address]
                if instructions[position].address >= limit:
                    self.state.pc[waves] = instructions[position].address
                    break
        except EmulatorError as error:
            error.place = self._describe(error, group)
            raise
        if self.limit is not None:
            self.limit -= group.count
            if self.limit < 0:
                raise EmulatorError(f"{self.kernel.name} ran into the given limit")

    def _describe(self, error: EmulatorError, group: Group) -> str:
        wave = int(group.waves[error.wave or 0])
        place = self.places[int(self.state.workgroup[wave])]
        lane = "" if error.lane is None else f", lane {error.lane}"
        return (
            f"\n  at {self.current.address:#x}: {self.current}"
            f"\n  in {self.kernel.name}, workgroup {place}, "
            f"wave {int(self.state.wave_in_workgroup[wave])}{lane}"
        )

    def wait(self, g: Group, vm: int | None, lgkm: int | None) -> None:
        self.state.wait(g, vm, lgkm)
        if vm is not None:
            self.lds.waited(g)

    def take(self, g: Group, taken: NDArray[np.bool_]) -> None:
        """A branch: each wave goes on at the target or at the next instruction."""
        target = branch_target(self.current) or 0
        self.state.pc[g.index] = np.where(taken, target, self.current.next_address)

    def barrier(self, g: Group) -> None:
        shape = (self.state.waves_per_workgroup, self.state.workgroups)
        self.status[g.waves] = WAITING
        self.state.pc[g.index] = self.current.next_address
        status = self.status.reshape(shape)
        self._check_ended(status, g)
        complete = np.nonzero((status == WAITING).all(axis=0))[0]
        if complete.size:
            status[:, complete] = READY
            self.lds.synchronise(complete)

    def end(self, g: Group) -> None:
        self.status[g.waves] = ENDED
        shape = (self.state.waves_per_workgroup, self.state.workgroups)
        self._check_ended(self.status.reshape(shape), g)

    def _check_ended(self, status: NDArray[np.int8], g: Group) -> None:
        waiting, ended = status == WAITING, status == ENDED
        stuck = waiting.any(axis=0) & ended.any(axis=0)
        if not stuck.any():
            return
        workgroup = int(np.argmax(stuck))
        waits = np.nonzero(waiting[:, workgroup])[0].tolist()
        over = np.nonzero(ended[:, workgroup])[0].tolist()
        mine = np.nonzero(self.state.workgroup[g.waves] == workgroup)[0]
        raise BarrierMismatch(
            f"waves {over} have ended and waves {waits} wait for them at a barrier",
            wave=int(mine[0]) if mine.size else None,
        )

    def add_to(self, report: Report) -> None:
        report.waves += self.state.waves
        for instruction, count in zip(self.instructions, self.counts, strict=True):
            if count:
                report.opcodes[instruction.name] += count
                report.addresses[instruction.address] += count


def _granule(instructions: tuple[Instruction, ...]) -> int:
    """The smallest unit in which the kernel touches LDS."""
    names = [x.name for x in instructions if x.name.startswith("ds_")]
    if any(n.startswith(("ds_write_b8", "ds_read_u8", "ds_read_i8")) for n in names):
        return 1
    halves = ("ds_write_b16", "ds_read_u16", "ds_read_i16")
    return 2 if any(n.startswith(halves) for n in names) else 4
