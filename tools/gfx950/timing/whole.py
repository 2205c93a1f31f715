"""From cycles of a tile to a kernel's share of the machine's peak."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Iterable, Sequence

import numpy as np

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
    """Attention of one batch entry."""

    tokens: int
    heads: int
    head_dim: int
    keys: int  # of a tile
    causal: bool = True

    @property
    def flops(self) -> float:
        """Half of the square counts if causal."""
        square = self.heads * self.tokens**2 * (self.head_dim + 128)
        return square if self.causal else 2 * square

    def full_tiles(self, block: int) -> int:
        """Of a block of queries: the tiles that all of them see whole."""
        return (block * QUERY_BLOCK if self.causal else self.tokens) // self.keys


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
        self.fp8 = self.shape.dtype.itemsize == 1
        self._traces: dict[tuple[bool, bool, int], list[Trace]] = {}
        self._costs: dict[tuple[Constants, bool, bool], Cost] = {}

    def traces(self, tokens: int, rescales: bool, causal: bool) -> list[Trace]:
        key = rescales, causal, tokens
        if key not in self._traces:
            self._traces[key] = record(
                self.kernel, tokens, causal=causal, rescales=rescales
            )
        return self._traces[key]

    def cost(self, c: Constants, rescales: bool = False, causal: bool = True) -> Cost:
        """With `rescales`, every tile moves every query's maximum."""
        key = c, rescales, causal
        if key not in self._costs:
            self._costs[key] = self._cost(*key)
        return self._costs[key]

    def _cost(self, c: Constants, rescales: bool, causal: bool) -> Cost:
        few, many = (self.traces(n, rescales, causal) for n in (self.FEW, self.MANY))
        timing, cost = _difference(few, many, (self.MANY - self.FEW) // self.keys, c)
        full = (self.FEW - (QUERY_BLOCK if causal else 0)) // self.keys
        return dataclasses.replace(cost, block=timing.cycles - full * cost.tile)

    def rescaling(self, c: Constants, work: Work) -> list[float]:
        """Cycles that a block of n full tiles takes more, for every n, if the logits
        are random."""
        tiles = work.full_tiles(math.ceil(work.tokens / QUERY_BLOCK))
        each = self.cost(c, rescales=True).tile - self.cost(c).tile
        return [each * n for n in moved_maxima(self.fp8, self.keys, tiles)]

    def work(self, tokens: int, heads: int, causal: bool = True) -> Work:
        return Work(tokens, heads, self.shape.head_dim, self.keys, causal)

    def peak(self, c: Constants) -> float:
        return c.dense_fp8_tflops if self.fp8 else c.dense_bf16_tflops


def public_cost(kernel: Public, c: Constants) -> Cost:
    few, many = 6, 12
    _, cost = _difference(kernel.traces(few), kernel.traces(many), many - few, c)
    return dataclasses.replace(cost, block=PUBLIC_BLOCK)


@functools.lru_cache
def moved_maxima(fp8: bool, keys: int, tiles: int) -> tuple[float, ...]:
    """Of the first 0, 1, .. `tiles` tiles, in how many one of a workgroup's queries
    moves its maximum: the mean over a few workgroups whose logits are standard normal.

    The FP8 kernels move it when a probability exceeds 1/64 of the row's sum, the
    others when it exceeds 2^8 of its old maximum's.
    """
    rng = np.random.default_rng(0)
    samples, moved = 4, np.zeros(tiles + 1)
    for _ in range(samples):
        top = np.full(QUERY_BLOCK, -np.inf, np.float32)
        total = np.zeros(QUERY_BLOCK, np.float32)
        for tile in range(tiles):
            logits = rng.standard_normal((QUERY_BLOCK, keys), np.float32)
            logits *= np.float32(np.log2(np.e))
            largest = logits.max(axis=1)
            slack = np.log2(np.maximum(total, 64)) - 6 if fp8 else 8
            moves = largest > top + slack
            moved[tile + 1] += moves.any()
            new = np.where(moves, largest, top)
            total = total * np.exp2(top - new) + np.exp2(logits - new[:, None]).sum(1)
            top = new
    return tuple(np.cumsum(moved) / samples)


def block_cycles(
    cost: Cost, full_tiles: int, rescaling: Sequence[float] | None = None
) -> float:
    more = rescaling[full_tiles] if rescaling else 0.0
    return cost.block + full_tiles * cost.tile + more


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
    cost: Cost, work: Work, c: Constants, rescaling: Sequence[float] | None = None
) -> list[float]:
    """The launch's workgroups in order: causal blocks in pairs, long with short, if
    these still fill the machine twice (as the package does), else the longest first."""
    blocks = math.ceil(work.tokens / QUERY_BLOCK)
    time = [block_cycles(cost, work.full_tiles(i), rescaling) for i in range(blocks)]
    pairs = work.heads * ((blocks + 1) // 2) >= 2 * c.compute_units
    if work.causal and pairs:
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
    cost: Cost, work: Work, c: Constants, rescaling: Sequence[float] | None = None
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
