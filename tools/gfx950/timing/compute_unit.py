"""One compute unit: eight waves on four SIMDs, instruction by instruction."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from .constants import Constants
from .trace import REGISTERS, SCALARS, Op, Trace

INFINITY = float("inf")
CATEGORIES = ("matrix", "vector", "lds", "memory", "barrier", "issue")


@dataclasses.dataclass
class Wave:
    trace: Trace
    simd: int
    number: int
    at: int = 0
    next: float = 0.0
    priority: int = 0
    last_issue: float = -1.0
    ready: list[float] = dataclasses.field(default_factory=lambda: [0.0] * REGISTERS)
    chain: list[float] = dataclasses.field(default_factory=lambda: [0.0] * REGISTERS)
    lds_done: list[float] = dataclasses.field(default_factory=list)
    memory_done: list[float] = dataclasses.field(default_factory=list)
    scalar_done: float = 0.0
    waits_at_barrier: bool = False
    own: float = 0.0  # when the head may go by itself
    stalls: list[tuple[str, float, float]] = dataclasses.field(default_factory=list)
    ended: float = 0.0


@dataclasses.dataclass
class Simd:
    port: float = 0.0  # vector and matrix issue
    matrix: float = 0.0  # the matrix unit is idle from then on
    matrix_wave: int = -1
    packed: float = 0.0  # packed instructions use its datapath until then
    scalar: float = 0.0
    lds: float = 0.0
    memory: float = 0.0
    matrix_busy: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    vector_busy: list[tuple[float, float]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Cycles of a workgroup, and of what they consist (mean of the SIMDs).

    `lds_busy` is of all SIMDs.
    """

    cycles: float
    parts: dict[str, float]
    lds_busy: float


def simulate(traces: Sequence[Trace], constants: Constants) -> Timing:
    """Wave i runs on SIMD i % 4."""
    return _ComputeUnit(traces, constants).run()


class _ComputeUnit:
    def __init__(self, traces: Sequence[Trace], constants: Constants):
        self.c = constants
        self.simds = [Simd() for _ in range(constants.simds)]
        self.waves = [
            Wave(trace, i % constants.simds, i) for i, trace in enumerate(traces)
        ]
        self.on = [
            [w for w in self.waves if w.simd == s] for s in range(constants.simds)
        ]
        self.lds_pair = [0.0, 0.0]
        self.lds_busy = 0.0
        self.lds_writes: list[list[tuple[float, float]]] = [[], []]
        self.memory_free = 0.0
        self.memory_changed = False
        wide = constants.lds_bytes > 128
        self.width = 1 if wide else 0
        self.rates = {
            name: float(getattr(constants, name))
            for name in (
                "vector", "transcendental", "convert_fp8", "convert_norm",
                "convert", "swap",
            )
        }  # fmt: skip

    def run(self) -> Timing:
        for wave in self.waves:
            self._look(wave)
        candidates = [self._best(s) for s in range(self.c.simds)]
        while True:
            simd = min(range(self.c.simds), key=lambda s: candidates[s][0])
            time, wave = candidates[simd]
            if wave is None:
                break
            synchronised = self._issue(wave, time)
            self._look(wave)
            if synchronised:
                candidates = [self._best(s) for s in range(self.c.simds)]
            else:
                candidates[simd] = self._best(simd)
                if self.memory_changed:
                    candidates = [self._best(s) for s in range(self.c.simds)]
        if any(w.waits_at_barrier for w in self.waves):
            raise ValueError("waves wait at a barrier for others that have ended")
        return self._timing()

    # Which wave a SIMD issues from next, and when.

    def _look(self, wave: Wave) -> None:
        """When the next instruction's operands are there."""
        if wave.at >= len(wave.trace) or wave.waits_at_barrier:
            wave.own = INFINITY
            return
        op = wave.trace[wave.at]
        time = wave.next
        ready = wave.ready
        for r in op.reads:
            if ready[r] > time:
                time = ready[r]
        for r in op.accumulates:
            if wave.chain[r] > time:
                time = wave.chain[r]
        if op.kind == "matrix" or op.kind == "vector" or op.kind == "packed":
            # A result that is still being written is not overwritten.
            for r in op.writes:
                if wave.chain[r] > time:
                    time = wave.chain[r]
        wave.own = time

    def _best(self, number: int) -> tuple[float, Wave | None]:
        best: Wave | None = None
        best_time = INFINITY
        for wave in self.on[number]:
            if wave.own == INFINITY:
                continue
            time = self._earliest(wave, wave.trace[wave.at])
            if time < best_time or (
                time == best_time
                and best is not None
                and (-wave.priority, wave.last_issue)
                < (-best.priority, best.last_issue)
            ):
                best, best_time = wave, time
        return best_time, best

    def _earliest(self, wave: Wave, op: Op) -> float:
        simd, time, kind = self.simds[wave.simd], wave.own, op.kind
        if kind == "vector":
            return max(time, simd.port)
        if kind == "matrix":
            return max(time, simd.port, simd.matrix, simd.packed)
        if kind == "packed":
            if simd.matrix > time - self.c.packed_after_own:
                own = simd.matrix_wave == wave.number
                after = self.c.packed_after_own if own else self.c.packed_after_other
                time = max(time, simd.matrix + after)
            return max(time, simd.port)
        if kind == "scalar" or kind == "smem":
            return max(time, simd.scalar)
        if kind == "lds":
            if len(wave.lds_done) >= self.c.lds_in_flight:
                time = max(time, wave.lds_done[-self.c.lds_in_flight])
            return max(time, simd.lds)
        if kind in ("copy", "load", "store"):
            return max(time, simd.memory, self.memory_free)
        if kind == "wait":
            return self._waited(wave, op)
        return time

    def _waited(self, wave: Wave, op: Op) -> float:
        time = wave.own
        if op.lgkm is not None:
            if len(wave.lds_done) > op.lgkm:
                time = max(time, wave.lds_done[-1 - op.lgkm])
            if op.lgkm == 0:
                time = max(time, wave.scalar_done)
        if op.vm is not None and len(wave.memory_done) > op.vm:
            time = max(time, wave.memory_done[-1 - op.vm])
        return time

    # Issuing.

    def _issue(self, wave: Wave, time: float) -> bool:
        """Whether a barrier was completed."""
        c, op, simd = self.c, wave.trace[wave.at], self.simds[wave.simd]
        wave.at += 1
        self.memory_changed = False
        kind = op.kind
        start = wave.next
        wave.last_issue = wave.ended = time
        wave.next = time + c.slot
        if op.straddles and time <= start:
            wave.next += c.straddle
        if kind == "vector":
            self._vector(wave, simd, op, time)
        elif kind == "matrix":
            self._matrix(wave, simd, op, time)
        elif kind == "packed":
            simd.packed = time + c.packed
            self._vector(wave, simd, op, time)
        elif kind == "scalar":
            simd.scalar = time + c.slot
            for r in op.writes:
                wave.ready[r] = wave.chain[r] = time + c.slot
        elif kind == "smem":
            simd.scalar = time + c.slot
            wave.scalar_done = max(wave.scalar_done, time + c.scalar_latency)
            for r in op.writes:
                wave.ready[r] = wave.chain[r] = time + c.scalar_latency
        elif kind == "lds":
            self._lds(wave, simd, op, time)
        elif kind in ("copy", "load", "store"):
            self._memory(wave, simd, op, time)
        elif kind == "wait":
            if time > start:
                late = op.vm is not None and self._memory_is_late(wave, op)
                wave.stalls.append(("memory" if late else "lds", start, time))
            wave.next = time + c.control
        elif kind == "nop":
            wave.next = time + c.slot * op.count
        elif kind == "priority":
            wave.priority = op.count
            wave.next = time + c.control
        elif kind == "branch":
            if op.taken:
                wave.next = time + c.branch
        elif kind == "barrier":
            return self._barrier(wave, time)
        elif kind == "end":
            wave.at = len(wave.trace)
        return False

    def _memory_is_late(self, wave: Wave, op: Op) -> bool:
        lds = (
            wave.lds_done[-1 - op.lgkm]
            if op.lgkm is not None and len(wave.lds_done) > op.lgkm
            else 0.0
        )
        vm = op.vm or 0
        done = wave.memory_done
        return len(done) > vm and done[-1 - vm] >= lds

    def _vector(self, wave: Wave, simd: Simd, op: Op, time: float) -> None:
        end = time + self.rates[op.rate]
        simd.port = end
        simd.vector_busy.append((time, end))
        ready = end + self.c.forward
        for r in op.writes:
            wave.chain[r] = wave.ready[r] = (
                ready + self.c.to_scalar if r >= SCALARS else ready
            )

    def _matrix(self, wave: Wave, simd: Simd, op: Op, time: float) -> None:
        c = self.c
        hold, passes = op.hold, op.passes
        if op.scaled and time >= simd.matrix + c.slot:
            hold, passes = hold + c.scale_slots, passes + c.scale_slots
        end = time + c.slot * passes
        simd.port = time + c.slot * hold
        if c.hold_memory:
            simd.lds = max(simd.lds, simd.port)
            simd.memory = max(simd.memory, simd.port)
        simd.matrix, simd.matrix_wave = end, wave.number
        simd.matrix_busy.append((time, end))
        for r in op.writes:
            wave.ready[r] = end + c.slot * c.result_slots
            wave.chain[r] = end + c.accumulate

    def _lds(self, wave: Wave, simd: Simd, op: Op, time: float) -> None:
        c = self.c
        simd.lds = time + c.slot
        pair = wave.simd // 2
        free = self.lds_pair[pair]
        writes = self.lds_writes[pair]
        while writes and writes[0][0] <= max(time, free):
            arrival, cycles = heapq.heappop(writes)
            free = max(free, arrival) + cycles
        # Each pair of SIMDs gets half of the width.
        cycles = 2 * op.phases[self.width] * (c.transposed if op.transposed else 1.0)
        cycles = max(cycles, 2 * op.bytes / c.lds_bytes)
        start = max(time + c.slot, free)
        self.lds_pair[pair] = start + cycles
        self.lds_busy += cycles / 2
        done = start + cycles + c.lds_latency - c.slot
        if wave.lds_done:
            done = max(done, wave.lds_done[-1])
        wave.lds_done.append(done)
        for r in op.writes:
            wave.ready[r] = wave.chain[r] = done

    def _memory(self, wave: Wave, simd: Simd, op: Op, time: float) -> None:
        c = self.c
        self.memory_changed = True
        simd.memory = time + c.slot
        cycles = c.store if op.kind == "store" else op.bytes / c.memory_bytes
        self.memory_free = time + cycles
        done = time + cycles + c.memory_latency
        if op.kind == "copy":
            write = op.bytes / c.lds_write_bytes
            for writes in self.lds_writes:
                heapq.heappush(writes, (done, write))
            self.lds_busy += write
            done += write
        if wave.memory_done:
            done = max(done, wave.memory_done[-1])
        wave.memory_done.append(done)
        for r in op.writes:
            wave.ready[r] = wave.chain[r] = done

    def _barrier(self, wave: Wave, time: float) -> bool:
        wave.waits_at_barrier = True
        wave.next = time
        if not all(w.waits_at_barrier or not w.trace for w in self.waves):
            return False
        for w in self.waves:
            if w.waits_at_barrier:
                w.waits_at_barrier = False
                w.stalls.append(("barrier", w.next, time + self.c.barrier))
                w.next = w.ended = time + self.c.barrier
                self._look(w)
        return True

    # Where the cycles went.

    def _timing(self) -> Timing:
        cycles = max(w.ended for w in self.waves)
        size = int(cycles) + 1
        parts = dict.fromkeys(CATEGORIES, 0.0)
        for number, simd in enumerate(self.simds):
            left = np.ones(size, bool)
            stalls = [s for w in self.on[number] for s in w.stalls]
            for name in CATEGORIES[:-1]:
                if name == "matrix":
                    spans = simd.matrix_busy
                elif name == "vector":
                    spans = simd.vector_busy
                else:
                    spans = [(a, b) for kind, a, b in stalls if kind == name]
                here = np.zeros(size + 1, np.int32)
                if spans:
                    edges = np.minimum(np.array(spans), size).astype(np.int64)
                    np.add.at(here, edges[:, 0], 1)
                    np.add.at(here, edges[:, 1], -1)
                covered = (np.cumsum(here[:-1]) > 0) & left
                parts[name] += float(covered.sum())
                left &= ~covered
            parts["issue"] += float(left.sum())
        mean = {k: v / len(self.simds) for k, v in parts.items()}
        return Timing(cycles, mean, self.lds_busy)
