"""Local data share: its bytes, and who may touch them when.

Each granule remembers its last write and, per wave, its last read, as numbers in the
accessing wave's own order of memory operations. A wave may rely on another wave's
access only if that wave had waited for it before a barrier that both have passed:
`visible` holds, for every wave, the numbers up to which that is so. Streams are
numbered 2 * wave for ds instructions and 2 * wave + 1 for loads straight to LDS.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .errors import EmulatorError, LdsRace, MemoryFault, MissingWait, UninitialisedRead
from .state import NEVER, Group, State

Bytes = NDArray[np.uint8]
Lanes = NDArray[np.intp]


class Lds:
    """The LDS of every workgroup that runs, one after another in flat arrays."""

    def __init__(self, state: State, size: int, granule: int, checks: bool):
        self.state = state
        self.size = size
        self.granule = granule
        self.checks = checks
        self.stride = -(-size // 16) * 16
        total, waves = state.workgroups * self.stride, state.waves_per_workgroup
        self.data = np.zeros(total, np.uint8)
        self.never = 2 * waves
        if not checks:
            return
        self.stream = np.full(total // granule, self.never, np.int16)
        self.number = np.zeros(total // granule, np.int32)
        self.reads = np.zeros((total // granule, waves), np.int32)
        self.visible = np.zeros((state.waves, 2 * waves + 1), np.int32)
        self.visible[:, self.never] = -1
        self.visible_reads = np.zeros((state.waves, waves), np.int32)
        everyone, own = np.arange(state.waves), state.wave_in_workgroup
        self.visible[everyone, 2 * own] = NEVER
        self.visible_reads[everyone, own] = NEVER

    def waited(self, g: Group) -> None:
        """After an s_waitcnt of vector memory: a wave sees its own loads to LDS."""
        if self.checks:
            own = self.state.wave_in_workgroup[g.index]
            self.visible[g.waves, 2 * own + 1] = self.state.vm_done[g.index]

    def synchronise(self, workgroups: NDArray[np.intp]) -> None:
        """A barrier of the given workgroups: all waves see what was waited for."""
        if not self.checks:
            return
        state, waves = self.state, self.state.waves_per_workgroup
        shape = (waves, state.workgroups)
        lds_done = state.lds_done.reshape(shape)[:, workgroups].T
        vm_done = state.vm_done.reshape(shape)[:, workgroups].T
        visible = self.visible.reshape(*shape, 2 * waves + 1)
        reads = self.visible_reads.reshape(*shape, waves)
        visible[:, workgroups, 0:-1:2] = lds_done
        visible[:, workgroups, 1:-1:2] = vm_done
        reads[:, workgroups] = lds_done
        for own in range(waves):
            visible[own, workgroups, 2 * own] = NEVER
            reads[own, workgroups, own] = NEVER

    # Accesses: flat lists of (wave position in the group, lane, address).

    def load(
        self, g: Group, position: Lanes, lane: Lanes, address: NDArray, size: int
    ) -> Bytes:
        """(m,) addresses to (m, size) bytes."""
        offset = self._place(g, position, lane, address, size)
        if self.checks:
            self._check_load(g, position, lane, offset, size)
        unit = self._unit(offset, size)
        words = self.data.view(f"u{unit}")
        where = (offset // unit)[:, None] + np.arange(size // unit)
        return words[where].view(np.uint8)

    def store(
        self,
        g: Group,
        position: Lanes,
        lane: Lanes,
        address: NDArray,
        data: Bytes,
        direct: bool = False,
    ) -> None:
        """(m, size) bytes to (m,) addresses; `direct`: by a vector memory load."""
        size = data.shape[1]
        offset = self._place(g, position, lane, address, size)
        if self.checks:
            self._check_store(g, position, lane, offset, size, direct)
        unit = self._unit(offset, size)
        where = (offset // unit)[:, None] + np.arange(size // unit)
        self.data.view(f"u{unit}")[where] = np.ascontiguousarray(data).view(f"u{unit}")

    @staticmethod
    def _unit(offset: NDArray, size: int) -> int:
        together = (int(np.bitwise_or.reduce(offset)) if offset.size else 0) | size
        return min(together & -together, 8)

    def _place(
        self, g: Group, position: Lanes, lane: Lanes, address: NDArray, size: int
    ) -> NDArray[np.int64]:
        address = address.astype(np.int64)
        bad = (address < 0) | (address + size > self.size)
        if bad.any():
            at = int(np.argmax(bad))
            raise MemoryFault(
                f"{size} bytes at LDS address {int(address[at]):#x}, "
                f"of {self.size} allocated",
                wave=int(position[at]),
                lane=int(lane[at]),
            )
        alignment = min(size & -size, 4)
        if alignment > 1 and (address & (alignment - 1)).any():
            at = int(np.argmax((address & (alignment - 1)) != 0))
            raise MemoryFault(
                f"LDS address {int(address[at]):#x} is not aligned to {alignment}",
                wave=int(position[at]),
                lane=int(lane[at]),
            )
        return address + self.state.workgroup[g.waves[position]] * self.stride

    def _granules(self, offset: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        first = offset // self.granule
        return first[:, None] + np.arange(max(1, size // self.granule))

    def _check_load(
        self, g: Group, position: Lanes, lane: Lanes, offset: NDArray, size: int
    ) -> None:
        state, granules = self.state, self._granules(offset, size)
        waves = g.waves[position]
        stream = self.stream[granules]
        early = self.number[granules] > self.visible[waves[:, None], stream]
        if early.any():
            raise self._fault("read", early, granules, position, lane, waves)
        own = state.wave_in_workgroup[waves]
        self.reads[granules, own[:, None]] = state.lds_issued[waves][:, None]

    def _check_store(
        self,
        g: Group,
        position: Lanes,
        lane: Lanes,
        offset: NDArray,
        size: int,
        direct: bool,
    ) -> None:
        state, granules = self.state, self._granules(offset, size)
        waves = g.waves[position]
        own = state.wave_in_workgroup[waves]
        stream = self.stream[granules]
        early = self.number[granules] > self.visible[waves[:, None], stream]
        early &= stream != self.never
        if early.any():
            raise self._fault("written", early, granules, position, lane, waves)
        limits = self.visible_reads[waves]
        if direct:
            limits = limits.copy()
            limits[np.arange(len(waves)), own] = state.lds_done[waves]
        unread = self.reads[granules] > limits[:, None, :]
        if unread.any():
            at, part, reader = (int(x[0]) for x in np.nonzero(unread))
            raise LdsRace(
                f"LDS address {self._address(granules[at, part]):#x} is written while "
                f"wave {reader}'s read of it may still be going on: no barrier that "
                "the reading wave reached after waiting for it lies between",
                wave=int(position[at]),
                lane=int(lane[at]),
            )
        mine = (2 * own + direct).astype(np.int16)
        issued = state.vm_issued if direct else state.lds_issued
        self.stream[granules] = mine[:, None]
        self.number[granules] = issued[waves][:, None]
        crossed = self.stream[granules] != mine[:, None]
        if crossed.any():
            at, part = (int(x[0]) for x in np.nonzero(crossed))
            other = int(self.stream[granules[at, part]]) // 2
            raise LdsRace(
                f"LDS address {self._address(granules[at, part]):#x} is written by "
                f"wave {other} as well, with no barrier between",
                wave=int(position[at]),
                lane=int(lane[at]),
            )

    def _address(self, granule: int) -> int:
        return int(granule) * self.granule % self.stride

    def _fault(
        self,
        verb: str,
        early: NDArray[np.bool_],
        granules: NDArray,
        position: Lanes,
        lane: Lanes,
        waves: NDArray,
    ) -> EmulatorError:
        at, part = (int(x[0]) for x in np.nonzero(early))
        granule = granules[at, part]
        stream = int(self.stream[granule])
        where = f"LDS address {self._address(granule):#x} is {verb}"
        place = {"wave": int(position[at]), "lane": int(lane[at])}
        if stream == self.never:
            return UninitialisedRead(f"{where} and was never written", **place)
        writer, direct = divmod(stream, 2)
        kind = "load to LDS" if direct else "ds_write"
        counter = "vmcnt" if direct else "lgkmcnt"
        if writer == self.state.wave_in_workgroup[waves[at]]:
            return MissingWait(
                f"{where} before the s_waitcnt {counter} that the wave's own {kind} "
                "needs",
                **place,
            )
        writing = self._waves_of(int(waves[at]))[writer]
        done = self.state.vm_done if direct else self.state.lds_done
        if self.number[granule] > done[writing]:
            return MissingWait(
                f"{where}, and wave {writer}, whose {kind} wrote it, has not waited "
                f"for {counter}",
                **place,
            )
        return LdsRace(
            f"{where}, and no barrier lies between that and wave {writer}'s {kind}",
            **place,
        )

    def _waves_of(self, wave: int) -> NDArray[np.intp]:
        return np.nonzero(self.state.workgroup == self.state.workgroup[wave])[0]
