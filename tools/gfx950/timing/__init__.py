"""A cycle model of gfx950, run on the emulator's traces."""

from .compute_unit import Timing, simulate
from .constants import RANGES, Constants, favourable, nominal, unfavourable
from .from_code import Recorder
from .trace import Op, Trace, bank_cycles

__all__ = [
    "RANGES",
    "Constants",
    "Op",
    "Recorder",
    "Timing",
    "Trace",
    "bank_cycles",
    "favourable",
    "nominal",
    "simulate",
    "unfavourable",
]
