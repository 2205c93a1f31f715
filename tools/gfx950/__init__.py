"""A functional emulator of AMD's gfx950 (Instinct MI350 series) for compiled kernels.

    code = CodeObject(open("kernels.co", "rb").read())
    memory = Memory()
    memory.add(0x10000, array, writable=True, name="out")
    launch(code.kernels["k"], grid=(1, 1, 1), block=(64, 1, 1),
           kernarg=struct.pack("<Q", 0x10000), memory=memory)

docs/gfx950_emulator.md says what is covered and what is not.
"""

from .decode import CodeObject, Instruction, Kernel
from .errors import (
    BarrierMismatch,
    EmulatorError,
    LdsRace,
    MemoryFault,
    MissingWait,
    UninitialisedRead,
    UnknownInstruction,
)
from .machine import Report, launch
from .memory import Memory
from .registry import OPCODES

__all__ = [
    "OPCODES",
    "BarrierMismatch",
    "CodeObject",
    "EmulatorError",
    "Instruction",
    "Kernel",
    "LdsRace",
    "Memory",
    "MemoryFault",
    "MissingWait",
    "Report",
    "UninitialisedRead",
    "UnknownInstruction",
    "launch",
]
