"""Public kernels as traces: what the cycle model is calibrated on.

Written from the order of instructions in their published code: AITER's code objects for
gfx950 (`hsa/gfx950/fmha_v3_fwd` and `fmha_v4_fwd`) and the source of its OPUS kernels.
A trace holds full tiles only. Waves 0-3 and 4-7 run the same tiles some barriers apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .trace import Op, Trace

LOGITS, OUTPUT, OPERANDS, MISC = 0, 64, 256, 400
MAXIMUM, SUM, FACTOR = MISC, MISC + 1, MISC + 2


Tile = Callable[["Writer", bool, bool], None]


class Writer:
    """Writes one wave's trace; operands rotate through eight places of eight
    registers."""

    def __init__(self) -> None:
        self.trace: Trace = []
        self.bytes = 0
        self.written = 0  # in 4 registers
        self.used = 0

    def add(self, op: Op, size: int = 4) -> None:
        straddles = size == 8 and self.bytes % 8 == 4
        self.bytes += size
        self.trace.append(dataclasses.replace(op, straddles=straddles))

    def read_keys(self, count: int) -> None:
        """ds_read_b128."""
        for _ in range(count):
            first = OPERANDS + 4 * (self.written % 16)
            writes = tuple(range(first, first + 4))
            self.add(Op("lds", writes=writes, phases=(8, 4), bytes=1024), 8)
            self.written += 1

    def read_values(self, count: int) -> None:
        """ds_read_b64_tr_b8 or _b16."""
        for i in range(count):
            first = OPERANDS + 4 * (self.written % 16) + 2 * (i % 2)
            op = Op(
                "lds",
                writes=(first, first + 1),
                phases=(4, 2),
                bytes=512,
                transposed=True,
            )
            self.add(op, 8)
            self.written += i % 2

    def product(
        self,
        accumulator: int,
        passes: int,
        operand: int = 8,
        *,
        scaled: bool = False,
        other: tuple[int, ...] = (),
        narrow: bool = False,
    ) -> None:
        """A matrix instruction; `operand` counts the registers of the wider one."""
        first = OPERANDS + 4 * (self.used % 16)
        reads = tuple(range(first, first + operand)) + other
        self.used += operand // 4
        to = tuple(range(accumulator, accumulator + (4 if narrow else 16)))
        hold = 1 + -(-4 * operand // 16)
        op = Op(
            "matrix", reads=reads, writes=to, accumulates=to, passes=passes,
            hold=hold, scaled=scaled,
        )  # fmt: skip
        self.add(op, 16 if scaled else 8)

    def vector(
        self,
        count: int = 1,
        rate: str = "vector",
        *,
        reads: Callable[[int], tuple[int, ...]] = lambda i: (),
        writes: Callable[[int], tuple[int, ...]] = lambda i: (),
        kind: str = "vector",
        size: int = 8,
    ) -> None:
        for i in range(count):
            self.add(Op(kind, rate, reads(i), writes(i)), size)

    def maximum(self, count: int, first: int = 0) -> None:
        """A chain of v_max3_f32 over logits."""
        self.vector(
            count,
            reads=lambda i: (
                LOGITS + 2 * (i + first),
                LOGITS + 2 * (i + first) + 1,
                MAXIMUM,
            ),
            writes=lambda i: (MAXIMUM,),
        )

    def each(self, count: int, rate: str, first: int = 0, size: int = 4) -> None:
        """One instruction for each logit, in place."""
        self.vector(
            count,
            rate,
            reads=lambda i: (LOGITS + (i + first) % 64, FACTOR),
            writes=lambda i: (LOGITS + (i + first) % 64,),
            size=size,
        )

    def sums(self, count: int, first: int = 0) -> None:
        """A chain of v_add_f32."""
        self.vector(
            count,
            reads=lambda i: (LOGITS + (i + first) % 64, SUM),
            writes=lambda i: (SUM,),
            size=4,
        )

    def convert(self, count: int, rate: str, first: int = 0) -> None:
        """Two logits to one register."""
        self.vector(
            count,
            rate,
            reads=lambda i: (LOGITS + 2 * (i + first), LOGITS + 2 * (i + first) + 1),
            writes=lambda i: (LOGITS + (i + first) // 2,),
        )

    def scale_output(self, count: int, first: int = 0, kind: str = "vector") -> None:
        def registers(i: int) -> tuple[int, ...]:
            if kind == "packed":
                at = OUTPUT + (2 * (i + first)) % 64
                return (at, at + 1)
            return (OUTPUT + (i + first) % 64,)

        self.vector(
            count,
            reads=lambda i: (*registers(i), FACTOR),
            writes=registers,
            kind=kind,
            size=8 if kind == "packed" else 4,
        )

    def exchange(self) -> None:
        """The other half's maximum, and the rescaling factor from it."""
        self.nop(2)
        self.vector(
            1, "swap", reads=lambda i: (MAXIMUM,), writes=lambda i: (MAXIMUM,), size=4
        )
        self.vector(4, reads=lambda i: (MAXIMUM,), writes=lambda i: (MAXIMUM,), size=4)
        self.vector(reads=lambda i: (MAXIMUM,), writes=lambda i: (FACTOR,))

    def wait(self, lgkm: int | None = None, vm: int | None = None) -> None:
        self.add(Op("wait", lgkm=lgkm, vm=vm))

    def barrier(self, count: int = 1) -> None:
        for _ in range(count):
            self.add(Op("barrier"))

    def priority(self, level: int) -> None:
        self.add(Op("priority", count=level))

    def nop(self, slots: int) -> None:
        self.add(Op("nop", count=slots))

    def scalar(self, count: int = 1) -> None:
        for _ in range(count):
            self.add(Op("scalar"))

    def copy(self, count: int = 1) -> None:
        for _ in range(count):
            self.scalar()
            self.add(Op("copy", bytes=1024), 8)


@dataclasses.dataclass(frozen=True)
class Public:
    """A public kernel.

    Attributes:
      tile: writes one full tile of a wave: of waves 4-7, an odd one.
      behind: barriers by which waves 4-7 start later.
      keys: of a tile, for 32 queries.
      published: (low, high) TFLOP/s.
      causal: whether those are of causal attention, at `tokens`.
    """

    name: str
    tile: Tile
    behind: int
    keys: int
    head_dim: int
    fp8: bool
    published: tuple[float, float]
    causal: bool
    tokens: int
    source: str

    @property
    def tile_flops(self) -> int:
        """Of one wave."""
        return 2 * 32 * self.keys * (self.head_dim + 128)

    def traces(self, tiles: int) -> list[Trace]:
        found = []
        for behind in (False, True):
            writer = Writer()
            if behind:
                writer.barrier(self.behind)
            for number in range(tiles):
                self.tile(writer, behind, number % 2 == 1)
            found.append(writer.trace)
        barriers = min(sum(op.kind == "barrier" for op in trace) for trace in found)
        return [_until(trace, barriers) for trace in found for _ in range(4)]


def _until(trace: Trace, barriers: int) -> Trace:
    seen = 0
    for i, op in enumerate(trace):
        seen += op.kind == "barrier"
        if seen == barriers:
            return trace[: i + 1]
    return trace


def _values_phase(w: Writer, more: int) -> None:
    """O += V P in eight products; `more` reads of keys at the end."""
    for i in range(8):
        w.product(OUTPUT + 16 * (i // 2), 16, other=tuple(range(LOGITS, LOGITS + 8)))
        if i < 6:
            w.read_values(4)
            w.wait(lgkm=8)
        else:
            w.read_keys(more // 2)
            w.wait(lgkm=6 if i == 6 else None)


def aiter_fp8(w: Writer, behind: bool, odd: bool) -> None:
    del odd
    for i in range(8):
        w.wait(lgkm=2 if i < 7 else 4)
        w.product(LOGITS + 16 * (i // 2), 16)
        if i == 6 and not behind:
            w.barrier()
        if i == 0:
            w.vector(8 if behind else 4, size=4)
        if 0 < i < 5:
            w.copy()
        if i < 6:
            w.read_keys(2)
        else:
            w.read_values(4)
    w.nop(6)
    w.barrier()
    w.priority(0)
    w.barrier()
    w.vector(size=4)
    w.maximum(32)
    w.exchange()
    w.vector(
        32,
        kind="packed",
        reads=lambda i: (LOGITS + 2 * i, LOGITS + 2 * i + 1, FACTOR),
        writes=lambda i: (LOGITS + 2 * i, LOGITS + 2 * i + 1),
    )
    w.barrier()
    w.each(64, "transcendental")
    w.vector(5, size=4)
    w.vector(1, "transcendental", writes=lambda i: (FACTOR,), size=4)
    w.nop(1)
    w.vector(reads=lambda i: (FACTOR, SUM), writes=lambda i: (SUM,), size=4)
    w.sums(64)
    w.scale_output(25)
    if behind:
        w.wait(vm=0)
        w.barrier()
    w.scale_output(39, 25)
    w.barrier()
    w.convert(32, "convert_fp8")
    w.barrier()
    if not behind:
        w.wait(vm=0)
    w.wait(lgkm=8)
    w.priority(1)
    w.barrier()
    _values_phase(w, 4)
    w.scalar(4)


def _mha_v4_values(w: Writer, keys: int, passes: int, last_wait: int) -> None:
    codes = tuple(range(LOGITS, LOGITS + 16))
    for _ in range(2):
        w.product(MISC + 8, 4, other=codes, narrow=True)
    w.used -= 4  # their operand is a constant
    for i in range(8):
        w.product(OUTPUT + 16 * (i // 2), passes, other=codes[:8])
        if i < 6:
            w.read_values(4)
            w.wait(lgkm=4)
        elif i == 6:
            w.read_keys(keys)
            w.wait(lgkm=last_wait)
    w.scalar(3)


def mha_v4_fp8(w: Writer, behind: bool, odd: bool) -> None:
    # A bfloat16 product of constants seeds the accumulator.
    w.product(LOGITS, 8, 4)
    w.used -= 1
    w.vector(5, size=4)
    for i in range(8):
        w.wait(lgkm=(2 if i < 7 else 4) if behind or i < 7 else 6)
        w.product(LOGITS + 16 * (i // 2), 16, scaled=True)
        if 0 < i < 5:
            w.copy()
        if i == 5 and not behind:
            w.read_keys(2)
            w.barrier()
        elif i < 6:
            w.read_keys(2)
        elif behind:
            w.read_values(4)
        else:
            w.read_values(6 if i == 6 else 2)
    w.barrier(1 if behind or not odd else 0)
    w.priority(0)
    w.barrier(1 if behind else 2)
    w.vector(2, size=4)
    w.maximum(32)
    w.each(64, "convert")
    w.vector(reads=lambda i: (MAXIMUM,), writes=lambda i: (FACTOR,))
    w.nop(2)
    w.scalar()
    w.convert(32, "convert_fp8")
    if behind:
        w.wait(vm=0)
    w.barrier((3 if odd else 2) if behind else 1)
    if not behind:
        w.wait(vm=0)
    w.wait(lgkm=4)
    w.priority(1)
    w.barrier()
    _mha_v4_values(w, 4, 16, 4)


def mha_v4_mxfp4(w: Writer, behind: bool, odd: bool) -> None:
    w.vector(4, size=4)
    w.product(LOGITS, 8, 4)
    w.used -= 1
    w.wait(lgkm=0)
    for i in range(8):
        if i in (0, 2, 4):
            w.read_keys(2)
        w.product(LOGITS + 16 * (i // 2), 8, 4, scaled=True)
        if i < 3:
            w.copy()
        w.wait(lgkm=3 if i % 2 == 0 else 2)
        if i == 5 and not behind:
            w.barrier()
        if i in (5, 6):
            w.read_values(4)
    w.priority(0)
    w.barrier(2 if behind else 1 if odd else 3)
    w.vector(size=4)
    w.maximum(32)
    w.vector(7, reads=lambda i: (MAXIMUM,), writes=lambda i: (MAXIMUM,), size=4)
    w.vector(reads=lambda i: (MAXIMUM,), writes=lambda i: (FACTOR,))
    w.nop(2)
    w.scalar()
    w.vector(
        64,
        "convert",
        reads=lambda i: (LOGITS + i, LOGITS + i % 16),
        writes=lambda i: (LOGITS + i % 16,),
    )
    w.barrier(2 if behind and odd else 1)
    w.wait(vm=0, lgkm=4)
    w.priority(1)
    w.barrier(2 if behind and odd else 1)
    _mha_v4_values(w, 3, 16, 3)


def mha_v4_int8(w: Writer, behind: bool, odd: bool) -> None:
    del odd
    for i in range(8):
        w.wait(lgkm=2 if i < 7 else 4)
        for _ in range(2):
            w.product(LOGITS + 16 * (i // 2), 8, 4)
        if i == 0:
            w.vector(4, size=4)
        if 0 < i < 5:
            w.copy()
        if i == 6 and not behind:
            w.barrier()
        if i < 6:
            w.read_keys(2)
        else:
            w.read_values(4 if i == 6 else 8)
    w.barrier()
    w.priority(0)
    w.barrier(2)
    w.each(64, "convert")
    w.vector(2, size=4)
    w.each(64, "vector", size=8)
    w.maximum(32)
    w.each(64, "convert")
    w.vector(reads=lambda i: (MAXIMUM,), writes=lambda i: (FACTOR,))
    w.nop(2)
    w.scalar()
    if behind:
        w.wait(vm=0)
        w.barrier()
    for half in range(2):
        w.convert(16, "convert_fp8", 16 * half)
        w.product(MISC + 8, 8, other=(LOGITS,), narrow=True)
        w.used -= 2
    w.barrier(2)
    w.wait(vm=None if behind else 0, lgkm=8)
    w.priority(1)
    w.barrier()
    _values_phase(w, 4)
    w.scalar(3)


def _interleaved(
    w: Writer, products: int, accumulators: int, work: list[Callable[[], None]]
) -> None:
    """Matrix instructions of 16-bit numbers, each followed by a piece of `work`."""
    per = products // (accumulators // 16)
    start = LOGITS if accumulators == 32 else OUTPUT
    for i in range(products):
        other = () if accumulators == 32 else (LOGITS + i % per,)
        w.product(start + 16 * (i // per), 8, 4, other=other)
        if i < len(work):
            work[i]()


def _copies(w: Writer, count: int = 2) -> None:
    w.copy(count)
    w.scalar(5)
    w.nop(1)
    w.nop(1)


def bf16(rescale: bool, head_dim: int) -> Tile:
    """AITER's BF16 v3 (`rescale`), and OPUS, which rescales rarely: matrix work with
    softmax between it in one phase, reads in the next."""
    key_products = head_dim // 16 * 2

    def tile(w: Writer, behind: bool, odd: bool) -> None:
        del odd

        def first() -> list[Callable[[], None]]:
            exps = [
                lambda i=i: w.each(3, "transcendental", 16 + 3 * i) for i in range(5)
            ]
            adds = [lambda i=i: w.sums(6, 6 * i) for i in range(5)]
            scales = [lambda i=i: w.scale_output(6, 6 * i) for i in range(2)]
            casts = [lambda i=i: w.convert(5, "vector", 5 * i) for i in range(3)]
            return [*exps, *adds, *(scales if rescale else []), *casts]

        def second() -> list[Callable[[], None]]:
            maxima = [lambda i=i: w.maximum(5 + i % 2, 5 * i) for i in range(3)]
            shifts = [lambda i=i: w.each(6, "vector", 6 * i, 8) for i in range(5)]
            exps = [lambda i=i: w.each(3, "transcendental", 3 * i) for i in range(5)]
            return [*maxima, w.exchange, *shifts, *exps]

        def read_keys() -> None:
            w.read_keys(key_products)

        def read_values() -> None:
            w.read_values(32)

        def memory(read: Callable[[], None]) -> None:
            if not behind:
                w.nop(24)
            _copies(w)
            if not behind:
                w.nop(40)
            read()

        if behind:
            memory(read_keys)
            w.wait(vm=4, lgkm=0)
            w.barrier()
        else:
            w.wait(lgkm=0)
        _interleaved(w, key_products, 32, first())
        if not behind:
            w.wait(vm=4)
        w.barrier()
        memory(read_values)
        w.wait(lgkm=0, vm=4 if behind else None)
        w.barrier()
        _interleaved(w, 16, 64, second())
        if rescale:
            w.scale_output(24, 8, "packed")
        if not behind:
            w.wait(vm=4)
            w.barrier()
            memory(read_keys)

    return tile


PUBLIC = (
    Public(
        "AITER FP8 v3", aiter_fp8, 4, 128, 128, True, (0.39 * 4968, 0.39 * 4968), True,
        32768, "39 % of FP8 peak at 32k",
    ),
    Public(
        "MHA v4, FP8", mha_v4_fp8, 4, 128, 128, True, (3050, 3050), False, 65536,
        "aiter/ops/mha_v4.md",
    ),
    Public(
        "MHA v4, MXFP4 keys", mha_v4_mxfp4, 4, 128, 128, True, (3695, 3695),
        False, 65536, "aiter/ops/mha_v4.md",
    ),
    Public(
        "MHA v4, INT8 keys", mha_v4_int8, 4, 128, 128, True, (2315, 2315), False,
        65536, "aiter/ops/mha_v4.md",
    ),
    Public(
        "AITER BF16 v3", bf16(True, 128), 0, 64, 128, False, (1231, 1324), True, 32768,
        "49 to 53 % of BF16 peak",
    ),
    Public(
        "OPUS, HipKittens BF16", bf16(False, 128), 0, 64, 128, False, (1246, 1259),
        True, 16384, "HipKittens: 1259, AITER 1246 beside it",
    ),
    Public(
        "OPUS BF16 192/128", bf16(False, 192), 0, 64, 192, False, (1238, 1376), True,
        32768, "AITER: up to 1376",
    ),
)  # fmt: skip
