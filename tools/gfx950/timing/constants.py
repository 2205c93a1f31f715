"""What the cycle model assumes of the machine: every number, with its source.

Where sources disagree or none is published, a constant has a range, from the value that
makes kernels faster to the one that makes them slower. Times are shader cycles unless
said otherwise; a slot is the four cycles in which a SIMD issues a wave's instruction.

Sources, by the letters that the comments use:

A  AMD: CDNA4 ISA and whitepaper, as the project's kernel notes quote them; rates that
   AMD's measured dense throughput confirms.
C  rocprofiler-compute's documentation of the CDNA compute unit.
H  HipKittens (arXiv 2511.08083), table 5: phases and banks of LDS reads, measured on
   an MI355X.
L  LLVM: pull request 233721 (fits thread traces of an MI350X), 239095, and the wait
   states of GCNHazardRecognizer for gfx950.
P  github.com/tingqli/pyhip, docs/mfma-valu-coissue.md and mem_latency.md: measured on
   gfx942, and where said on gfx950.
T  facebookexperimental/triton pull request 2507: measured on gfx950.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Constants:
    # The chip (A).
    compute_units: int = 256
    dies: int = 8
    simds: int = 4
    clock_ghz: float = 2.4
    dense_fp8_tflops: float = 4968.0  # measured; 98.7 % of 2.4 GHz
    dense_bf16_tflops: float = 2495.0

    # Issue. A wave issues at most one instruction a slot, and a SIMD at most one of
    # each kind (vector and matrix count as one), from different waves (C, P).
    slot: float = 4.0
    # s_waitcnt, s_nop and the like leave the wave's buffer without a unit.
    control: float = 4.0
    # A taken branch refills the buffer.
    branch: float = 16.0
    # An 8-byte instruction that straddles 8 bytes, when the wave could have issued the
    # next at once (P, gfx942: 1.0).
    straddle: float = 0.5
    barrier: float = 16.0  # from the last wave's arrival to the next instruction

    # Vector unit: cycles that an instruction keeps it (P). Exponentials: 16 on gfx942
    # (P), of which A doubles the rate; AITER's kernels do not fit 16. Conversions are
    # not published: MHA v4 does not fit 4 for `convert`. LLVM's scheduling model has
    # v_cvt_pknorm_* among the full-rate instructions, and v_cvt_i32_f32 at a quarter.
    vector: float = 4.0
    transcendental: float = 8.0
    convert_fp8: float = 8.0  # v_cvt_pk_fp8_f32, v_cvt_scalef32_*
    convert_norm: float = 8.0  # v_cvt_pknorm_*
    convert: float = 8.0  # other v_cvt_*
    swap: float = 4.0  # v_permlane*_swap
    # From the end of an instruction to a dependent one: 8 in all for a 4-cycle
    # instruction (T).
    forward: float = 4.0
    to_scalar: float = 16.0  # vector results in scalar registers

    # Matrix unit. It is busy for 4 cycles a pass, and first keeps the vector unit for
    # 1 + (bytes of the wider operand) / 16 slots (L; P: the port is shared by waves).
    # Results can be read by others after passes + 4 slots, and be accumulated on by the
    # next matrix instruction without loss, or nearly (T: 18 cycles for 16).
    result_slots: int = 4
    accumulate: float = 1.0
    # LDS and memory instructions of the SIMD wait as long as vector ones, or one slot.
    hold_memory: bool = True
    # A scaled one that finds the unit idle is one slot late (L).
    scale_slots: int = 1
    # v_pk_{add,mul,fma}_f32 use the matrix unit's datapath: they wait until it is idle
    # (L: passes + 2 or 3 slots from the own wave's instruction; P: 1 cycle when another
    # wave's, and 5 cycles each), and keep it.
    packed: float = 5.0
    packed_after_own: float = 12.0
    packed_after_other: float = 4.0

    # LDS. 64 banks for 8 and 16-byte reads (H); 128 bytes a cycle as CDNA3 (C, P), or
    # 256 (A); half of it to each pair of SIMDs (C).
    lds_bytes: float = 128.0
    lds_latency: float = 56.0  # T: 69 with the first read's own cycles, P: 52 to 64
    lds_in_flight: int = 16  # lgkmcnt has four bits
    # ds_read_b64_tr_*, relative to a plain read of as many bytes.
    transposed: float = 1.0
    lds_write_bytes: float = 128.0  # by copies from memory (H: 32 banks for writes)

    # Memory: 64 bytes a cycle and CU from the first-level cache (A, C); from L2, the
    # memory-side cache or HBM after (T: 790, P: 500 to 800; L2 hits are nearer).
    memory_bytes: float = 64.0
    memory_latency: float = 700.0
    scalar_latency: float = 200.0
    store: float = 16.0

    # A workgroup's end to the first instruction of the next on its CU; unpublished.
    launch: float = 1500.0


# Unresolved: (favourable, unfavourable).
RANGES: dict[str, tuple[float, float]] = {
    "control": (1.0, 4.0),
    "branch": (8.0, 32.0),
    "straddle": (0.0, 1.0),
    "barrier": (8.0, 40.0),
    "transcendental": (8.0, 16.0),
    "convert_fp8": (4.0, 16.0),
    "convert_norm": (4.0, 8.0),
    "convert": (4.0, 8.0),
    "forward": (0.0, 4.0),
    "accumulate": (0.0, 2.0),
    "hold_memory": (0, 1),
    "packed_after_own": (8.0, 12.0),
    "packed_after_other": (0.0, 8.0),
    "lds_bytes": (256.0, 128.0),
    "lds_latency": (48.0, 64.0),
    "transposed": (1.0, 2.0),
    "memory_latency": (500.0, 900.0),
    "launch": (500.0, 4000.0),
}


def nominal() -> Constants:
    return Constants()


def favourable() -> Constants:
    return dataclasses.replace(Constants(), **{k: v[0] for k, v in RANGES.items()})


def unfavourable() -> Constants:
    return dataclasses.replace(Constants(), **{k: v[1] for k, v in RANGES.items()})
