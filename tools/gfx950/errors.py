"""What the emulator refuses, each by its own class."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """The program did what the machine does not define, or what is not emulated.

    Raised where it happens with what is wrong; the machine adds the instruction, its
    address, the workgroup and the wave.
    """

    def __init__(self, what: str, *, wave: int | None = None, lane: int | None = None):
        super().__init__(what)
        self.what = what
        self.wave = wave
        self.lane = lane
        self.place = ""

    def __str__(self) -> str:
        return f"{self.what}{self.place}"


class UnknownInstruction(EmulatorError):
    """An opcode, modifier or operand that is not emulated."""


class MemoryFault(EmulatorError):
    """An access outside the launched buffers, or a write to a read-only one."""


class UninitialisedRead(EmulatorError):
    """A register or LDS byte that nothing has written."""


class MissingWait(EmulatorError):
    """A register or LDS byte that an access in flight still owns."""


class LdsRace(EmulatorError):
    """Two waves at the same LDS bytes with no barrier between."""


class BarrierMismatch(EmulatorError):
    """A wave ends while others of its workgroup wait for it."""
