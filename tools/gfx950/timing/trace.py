"""What a wave executed, as the cycle model sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

SCALARS = 512  # scalar registers follow the vector ones
REGISTERS = SCALARS + 256


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One executed instruction.

    Attributes:
      kind: the unit that it needs: matrix, vector, packed, scalar, lds, copy, load,
        store, smem, wait, barrier, nop, priority, branch, end.
      rate: of vector ones, the name of the constant that says how long.
      reads, writes: registers; those of `accumulates` are read as the matrix
        instruction's addend.
      passes, hold: of matrix ones: slots of work, slots without vector instructions.
      phases: of LDS accesses, cycles that they need with 32 and with 64 banks.
      bytes: moved to or from LDS or memory.
      vm, lgkm: of waits, the counts to wait for; None: not at all.
      count: of nops, slots; of priorities, the level.
      taken: of branches.
      straddles: 8 bytes of code.
    """

    kind: str
    rate: str = "vector"
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    accumulates: tuple[int, ...] = ()
    passes: int = 0
    hold: int = 0
    scaled: bool = False
    transposed: bool = False
    phases: tuple[int, int] = (0, 0)
    bytes: int = 0
    vm: int | None = None
    lgkm: int | None = None
    count: int = 0
    taken: bool = False
    straddles: bool = False


Trace = list[Op]


# HipKittens, table 5: the lanes that a 16-byte read serves at once, four times.
_QUARTERS = ((0, 4), (12, 16), (20, 28)), ((4, 12), (16, 20), (28, 32))
PHASES_16 = tuple(
    tuple(32 * half + lane for first, last in part for lane in range(first, last))
    for half in (0, 1)
    for part in _QUARTERS
)
# The same on CDNA3, eight times (32 banks).
_EIGHTHS = ((0, 20), (4, 16), (8, 28), (12, 24))
PHASES_16_NARROW = tuple(
    tuple(32 * half + first + lane for first in pair for lane in range(4))
    for half in (0, 1)
    for pair in _EIGHTHS
)


def bank_cycles(addresses: Sequence[int], size: int, banks: int) -> int:
    """Cycles that 64 lanes' reads of `size` bytes take with 32 or 64 banks of 4 bytes.

    Lanes are served in phases that could use every bank once; a phase takes as many
    cycles as its busiest bank has different words to give.
    """
    if size == 16:
        phases = PHASES_16 if banks == 64 else PHASES_16_NARROW
    else:
        lanes = max(1, 4 * banks // size)
        phases = [range(i, min(i + lanes, 64)) for i in range(0, 64, lanes)]
    cycles = 0
    for phase in phases:
        words: dict[int, set[int]] = {}
        for lane in phase:
            if lane < len(addresses):
                first = addresses[lane] // 4
                for word in range(first, first + max(1, size // 4)):
                    words.setdefault(word % banks, set()).add(word)
        cycles += max((len(w) for w in words.values()), default=0)
    return cycles
