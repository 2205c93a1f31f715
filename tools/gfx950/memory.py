"""Global memory: the launched buffers and nothing else."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from .errors import MemoryFault


@dataclasses.dataclass(frozen=True)
class Buffer:
    address: int
    array: NDArray[np.uint8]
    writable: bool
    name: str

    @property
    def end(self) -> int:
        return self.address + self.array.size


class Memory:
    """Buffers at their device addresses. Accesses must fall inside one of them."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def add(
        self, address: int, array: NDArray[np.uint8], writable: bool, name: str
    ) -> None:
        """Makes `array` the memory at `address`; written in place."""
        if array.dtype != np.uint8 or not array.flags.c_contiguous:
            raise ValueError(f"{name}: a contiguous uint8 array is needed")
        new = Buffer(address, array.reshape(-1), writable, name)
        for other in self.buffers:
            if new.address < other.end and other.address < new.end:
                raise ValueError(f"{name} overlaps {other.name}")
        self.buffers.append(new)
        self.buffers.sort(key=lambda b: b.address)

    def _find(self, address: int) -> Buffer | None:
        for buffer in self.buffers:
            if buffer.address <= address < buffer.end:
                return buffer
        return None

    def _split(
        self, addresses: NDArray[np.int64], size: int, verb: str
    ) -> list[tuple[Buffer, NDArray[np.intp] | slice]]:
        """The buffers that hold the accesses, each with the positions in it."""
        if addresses.size == 0:
            return []
        buffer = self._find(int(addresses[0]))
        if (
            buffer is not None
            and int(addresses.min()) >= buffer.address
            and int(addresses.max()) + size <= buffer.end
        ):
            return [(buffer, slice(None))]
        found: list[tuple[Buffer, NDArray[np.intp] | slice]] = []
        left = np.ones(addresses.shape, bool)
        for buffer in self.buffers:
            inside = (addresses >= buffer.address) & (addresses + size <= buffer.end)
            if inside.any():
                found.append((buffer, np.nonzero(inside)[0]))
                left &= ~inside
        if left.any():
            position = int(np.argmax(left))
            raise OutsideBuffers(
                f"{verb} of {size} bytes at {int(addresses[position]):#x}, "
                f"{self._nearest(int(addresses[position]))}",
                position,
            )
        return found

    def _nearest(self, address: int) -> str:
        below = [b for b in self.buffers if b.address <= address]
        if not below:
            return "below every buffer"
        last = below[-1]
        return f"{address - last.address} bytes into {last.name} of {last.array.size}"

    def load(self, addresses: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
        """(n,) addresses to (n, size) bytes."""
        out = np.empty((addresses.size, size), np.uint8)
        for buffer, where in self._split(addresses, size, "load"):
            offsets = addresses[where] - buffer.address
            out[where] = _gather(buffer.array, offsets, size)
        return out

    def store(self, addresses: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        """(n, size) bytes to (n,) addresses, the last of equal addresses winning."""
        size = data.shape[1]
        for buffer, where in self._split(addresses, size, "store"):
            if not buffer.writable:
                position = int(np.arange(addresses.size)[where][0])
                raise OutsideBuffers(
                    f"store to {buffer.name}, which is read-only", position
                )
            offsets = addresses[where] - buffer.address
            _scatter(buffer.array, offsets, np.ascontiguousarray(data[where]))


class OutsideBuffers(MemoryFault):
    """Carries the position of the access, for the caller to turn into a lane."""

    def __init__(self, what: str, position: int):
        super().__init__(what)
        self.position = position


def _unit(array: NDArray[np.uint8], offsets: NDArray[np.int64], size: int) -> int:
    """The widest word in which the accesses and the array are aligned."""
    together = int(np.bitwise_or.reduce(offsets)) | size | array.ctypes.data
    return min(together & -together, 8)


def _gather(
    array: NDArray[np.uint8], offsets: NDArray[np.int64], size: int
) -> NDArray[np.uint8]:
    unit = _unit(array, offsets, size)
    words = array[: array.size // unit * unit].view(f"u{unit}")
    places = (offsets // unit)[:, None] + np.arange(size // unit)
    return words[places].view(np.uint8)


def _scatter(
    array: NDArray[np.uint8], offsets: NDArray[np.int64], data: NDArray[np.uint8]
) -> None:
    size = data.shape[1]
    unit = _unit(array, offsets, size)
    words = array[: array.size // unit * unit].view(f"u{unit}")
    places = (offsets // unit)[:, None] + np.arange(size // unit)
    words[places] = data.view(f"u{unit}")
