"""From cycles of a tile to a kernel's share of the machine's peak."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Iterable, Sequence

from ..calls import QUERY_BLOCK, Shape
from ..decode import Kernel
from .compute_unit import CATEGORIES, Timing, simulate
from .constants import Constants
from .schedules import PUBLIC, Public
from .trace import Trace
from .workgroup import keys_of_tile, record

# A causal block of a public kernel beside its full tiles: prologue, epilogue and what
# masking adds, of which the traces hold nothing.
PUBLIC_BLOCK = 8000.0


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cycles of a workgroup.

    Attributes:
      tile: of one more full tile.
      block: of a block of queries beside its full tiles.
      parts: of `tile`, where they go (`CATEGORIES`).
      lds: of `tile`, in which LDS is busy.
    """

    tile: float
    block: float
    parts: dict[str, float]
    lds: float


@dataclasses.dataclass(frozen=True)
class Work:
    """Causal attention of one batch entry."""

    tokens: int
    heads: int
    head_dim: int
    keys: int  # of a tile

    @property
    def flops(self) -> float:
        return self.heads * self.tokens**2 * (self.head_dim + 128)


def _difference(
    few: Sequence[Trace], many: Sequence[Trace], tiles: int, c: Constants
) -> tuple[Timing, Cost]:
    a, b = simulate(few, c), simulate(many, c)
    return a, Cost(
        (b.cycles - a.cycles) / tiles,
        0.0,
        {k: (b.parts[k] - a.parts[k]) / tiles for k in CATEGORIES},
        (b.lds_busy - a.lds_busy) / tiles,
    )


class Traced:
    """A kernel of the package: traces of a workgroup with a few tiles and with more."""

    FEW, MANY = 768, 1536

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.shape = Shape.of(kernel.name)
        self.keys = keys_of_tile(self.shape)
        self._traces: dict[tuple[bool, int], list[Trace]] = {}
        self._costs: dict[tuple[Constants, bool], Cost] = {}

    def traces(self, rescales: bool, tokens: int) -> list[Trace]:
        key = rescales, tokens
        if key not in self._traces:
            self._traces[key] = record(self.kernel, tokens, rescales=rescales)
        return self._traces[key]

    def cost(self, c: Constants, rescales: bool = False) -> Cost:
        """With `rescales`, every tile moves every query's maximum."""
        key = c, rescales
        if key not in self._costs:
            self._costs[key] = self._cost(c, rescales)
        return self._costs[key]

    def _cost(self, c: Constants, rescales: bool) -> Cost:
        few, many = (self.traces(rescales, n) for n in (self.FEW, self.MANY))
        timing, cost = _difference(few, many, (self.MANY - self.FEW) // self.keys, c)
        full = (self.FEW - QUERY_BLOCK) // self.keys
        return dataclasses.replace(cost, block=timing.cycles - full * cost.tile)

    def work(self, tokens: int, heads: int) -> Work:
        return Work(tokens, heads, self.shape.head_dim, self.keys)

    def peak(self, c: Constants) -> float:
        fp8 = self.shape.dtype.itemsize == 1
        return c.dense_fp8_tflops if fp8 else c.dense_bf16_tflops


def public_cost(kernel: Public, c: Constants) -> Cost:
    few, many = 6, 12
    _, cost = _difference(kernel.traces(few), kernel.traces(many), many - few, c)
    return dataclasses.replace(cost, block=PUBLIC_BLOCK)


def random_rescaling(tile: int) -> float:
    """The chance that a workgroup's tile moves the maximum of one of its 256 queries,
    for random logits, when `tile` tiles came before."""
    return 1 - (1 - 1 / (tile + 1)) ** QUERY_BLOCK


def block_cycles(cost: Cost, full_tiles: float, rescaling: Cost | None = None) -> float:
    cycles = cost.block + full_tiles * cost.tile
    if rescaling is not None:
        more = sum(random_rescaling(i) for i in range(int(full_tiles)))
        cycles += more * (rescaling.tile - cost.tile)
    return cycles


def makespan(groups: Iterable[float], c: Constants) -> float:
    """Cycles until the last compute unit is done. Workgroups are dealt to the dies in
    turn, and on a die go to whichever compute unit is free first."""
    units = c.compute_units // c.dies
    free = [[0.0] * units for _ in range(c.dies)]
    for i, cycles in enumerate(groups):
        die = free[i % c.dies]
        heapq.heappush(die, heapq.heappop(die) + cycles + c.launch)
    return max(max(die) for die in free)


def groups_of(
    cost: Cost, work: Work, c: Constants, rescaling: Cost | None = None
) -> list[float]:
    """The launch's workgroups in order: blocks in pairs, long with short, if these
    still fill the machine twice (as the package does), else the longest first."""
    blocks = math.ceil(work.tokens / QUERY_BLOCK)
    time = [
        block_cycles(cost, i * QUERY_BLOCK // work.keys, rescaling)
        for i in range(blocks)
    ]
    if work.heads * ((blocks + 1) // 2) >= 2 * c.compute_units:
        one = [
            time[blocks - 1 - i] + (time[i] if i != blocks - 1 - i else 0.0)
            for i in range((blocks + 1) // 2)
        ]
    else:
        one = time[::-1]
    # Each die gets consecutive workgroups, whose heads share keys in its cache.
    flat = one * work.heads
    each = math.ceil(len(flat) / c.dies)
    return [
        flat[die * each + i]
        for i in range(each)
        for die in range(c.dies)
        if die * each + i < len(flat)
    ]


def tflops(
    cost: Cost, work: Work, c: Constants, rescaling: Cost | None = None
) -> float:
    seconds = makespan(groups_of(cost, work, c, rescaling), c) / (c.clock_ghz * 1e9)
    return work.flops / seconds / 1e12


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """A public kernel: what the model says before calibration, and what is published
    (the geometric mean of its range)."""

    kernel: Public
    cost: Cost
    modelled: float
    published: float


@functools.lru_cache(maxsize=64)
def calibrate(c: Constants) -> tuple[float, tuple[Calibrated, ...]]:
    """One factor for all kernels, by which the model is too fast: published over
    modelled, geometric mean. It stands for the clock that the machine sustains under
    matrix load, and for what the model leaves out."""
    found = []
    for kernel in PUBLIC:
        cost = public_cost(kernel, c)
        if kernel.causal:
            work = Work(kernel.tokens, 64, kernel.head_dim, kernel.keys)
            modelled = tflops(cost, work, c)
        else:
            seconds = cost.tile / (c.clock_ghz * 1e9)
            modelled = 8 * kernel.tile_flops * c.compute_units / seconds / 1e12
        published = math.sqrt(kernel.published[0] * kernel.published[1])
        found.append(Calibrated(kernel, cost, modelled, published))
    logs = [math.log(x.published / x.modelled) for x in found]
    return math.exp(sum(logs) / len(logs)), tuple(found)
