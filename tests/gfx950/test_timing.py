"""The cycle model on traces made by hand, whose times are known."""

from __future__ import annotations

import dataclasses
from collections import Counter

import assembly
import numpy as np
import pytest

from tools.gfx950.timing import (
    Constants,
    Op,
    Recorder,
    Timing,
    Trace,
    bank_cycles,
    nominal,
    schedules,
    simulate,
    whole,
)

C = dataclasses.replace(Constants(), straddle=0.0)
MATRIX = 64.0  # 16 passes


def run(*traces: Trace, c: Constants = C) -> Timing:
    return simulate(traces, c)


def vector(*writes: int, reads: tuple[int, ...] = (), rate: str = "vector") -> Op:
    return Op("vector", rate, reads, writes)


def matrix(
    to: int, *, passes: int = 16, hold: int = 3, reads: tuple[int, ...] = ()
) -> Op:
    registers = tuple(range(to, to + 16))
    return Op(
        "matrix", reads=reads, writes=registers, accumulates=registers,
        passes=passes, hold=hold,
    )  # fmt: skip


def read(*writes: int, phases: tuple[int, int] = (8, 4)) -> Op:
    return Op("lds", writes=writes, phases=phases, bytes=1024)


def per_op(op: Op, c: Constants = C, count: int = 200) -> float:
    """Cycles for one more of many independent instructions of a wave."""
    few = run([dataclasses.replace(op)] * count, c=c).cycles
    return (run([op] * (2 * count), c=c).cycles - few) / count


@pytest.mark.parametrize(
    ("op", "cycles"),
    [
        (vector(), C.vector),
        (vector(rate="transcendental"), C.transcendental),
        (vector(rate="convert_fp8"), C.convert_fp8),
        (Op("packed"), 4.0),
        (Op("scalar"), 4.0),
        (Op("nop", count=5), 20.0),
        (matrix(0), MATRIX + C.accumulate),
        (Op("copy", bytes=1024), 1024 / C.memory_bytes),
    ],
)
def test_throughput_of_each_unit(op, cycles):
    assert per_op(op) == pytest.approx(cycles)


def test_matrix_instructions_with_their_own_accumulators_follow_at_once():
    trace = [matrix(16 * (i % 4)) for i in range(80)]
    assert run(trace).cycles == pytest.approx(79 * MATRIX)
    assert run(trace).parts["matrix"] == pytest.approx(79 * MATRIX / 4, abs=1)


def test_a_dependent_vector_instruction_waits():
    chain = [vector(1, reads=(1,))] * 100
    assert run(chain).cycles == pytest.approx(99 * (C.vector + C.forward))


def test_a_matrix_result_is_read_after_its_passes_and_four_slots():
    trace = [matrix(0), vector(100, reads=(3,)), Op("end")]
    done = run(trace).cycles - C.slot
    assert done == pytest.approx(MATRIX + C.slot * C.result_slots)


def test_vector_work_hides_under_another_waves_matrix_work():
    free = int((MATRIX - 3 * C.slot) / C.vector)
    products = [matrix(16 * (i % 4)) for i in range(50)]
    hidden = run(products, *[[]] * 3, [vector()] * (50 * free)).cycles
    assert hidden == pytest.approx(run(products).cycles, abs=2 * MATRIX)
    more = run(products, *[[]] * 3, [vector()] * (50 * (free + 4))).cycles
    assert more > hidden + 40 * 4 * C.vector


def test_packed_floats_wait_for_the_matrix_unit():
    products = [matrix(16 * (i % 4)) for i in range(50)]
    alone = run(products).cycles
    plain = run(products, *[[]] * 3, [vector()] * 100).cycles
    packed = run(products, *[[]] * 3, [Op("packed")] * 100).cycles
    assert plain == pytest.approx(alone)
    assert packed >= alone + 50 * C.packed


def test_a_barrier_waits_for_the_last_wave():
    slow = [*[vector()] * 50, Op("barrier"), vector()]
    quick = [Op("barrier"), vector()]
    assert run(slow, quick).cycles == pytest.approx(50 * C.vector + C.barrier)


def test_a_barrier_that_one_wave_does_not_reach():
    with pytest.raises(ValueError, match="barrier"):
        run([Op("barrier"), Op("barrier")], [Op("barrier")])


def test_a_wait_for_lds_counts_reads_in_order():
    def done(lgkm: int) -> float:
        return run([read(1), read(2), Op("wait", lgkm=lgkm), Op("end")]).cycles

    assert done(0) - done(1) == pytest.approx(2 * 8)
    assert done(2) < done(1)


def test_lds_serves_pairs_of_simds_at_half_its_width_each():
    trace = [*[read(1 + i % 4) for i in range(100)], Op("wait", lgkm=0), Op("end")]
    one, two, four = (run(*[trace] * n).cycles for n in (1, 2, 4))
    assert one == pytest.approx(100 * 1024 / (C.lds_bytes / 2), rel=0.05)
    assert two == pytest.approx(2 * one, rel=0.05)  # SIMDs 0 and 1 are a pair
    assert four == pytest.approx(two, rel=0.05)


def test_conflicts_and_width_of_lds():
    wide = dataclasses.replace(C, lds_bytes=256.0)
    trace = [read(1 + i % 4) for i in range(100)]
    conflicts = [read(1 + i % 4, phases=(16, 8)) for i in range(100)]
    assert run(conflicts).cycles == pytest.approx(2 * run(trace).cycles, rel=0.1)
    assert run(*[trace] * 4, c=wide).cycles == pytest.approx(
        run(*[trace] * 4).cycles / 2, rel=0.1
    )


def test_a_wait_for_memory_takes_its_latency():
    trace = [Op("copy", bytes=1024), Op("wait", vm=0), Op("end")]
    timing = run(trace)
    assert timing.cycles == pytest.approx(16 + C.memory_latency + 8 + C.control)


def test_priority_decides_who_issues():
    def behind(priority: int) -> float:
        first = [Op("priority", count=priority), *[vector()] * 100]
        second = [Op("priority", count=1), *[vector()] * 100]
        marks = run([*first, Op("barrier")], *[[]] * 3, [*second, Op("barrier")])
        return marks.cycles

    # Both together take as long; which ends first differs.
    assert behind(0) == pytest.approx(behind(2), abs=8)


def test_parts_add_up():
    products = [matrix(16 * (i % 4)) for i in range(20)]
    timing = run(products, *[[]] * 3, [vector()] * 500)
    assert sum(timing.parts.values()) == pytest.approx(timing.cycles, abs=1)


# Banks.


def test_consecutive_lanes_have_no_conflicts():
    lanes = [16 * lane for lane in range(64)]
    assert bank_cycles(lanes, 16, 64) == 4
    assert bank_cycles(lanes, 16, 32) == 8
    assert bank_cycles([8 * lane for lane in range(64)], 8, 64) == 2


def test_lanes_at_one_bank_take_turns():
    assert bank_cycles([256 * lane for lane in range(64)], 4, 64) == 64
    assert bank_cycles([0] * 64, 4, 64) == 1  # the same word is given to all


def test_rows_of_128_bytes_conflict_and_swizzled_ones_do_not():
    plain = [128 * (lane % 32) + 16 * (lane // 32) for lane in range(64)]
    swizzled = [
        128 * row + ((16 * (lane // 32)) ^ (((row & 7) ^ (row >> 3 & 1)) * 16))
        for lane in range(64)
        for row in [lane % 32]
    ]
    assert bank_cycles(plain, 16, 64) == 32
    assert bank_cycles(swizzled, 16, 64) == 4


# Public kernels.


def test_public_kernels_come_out_near_what_is_published():
    factor, found = whole.calibrate(nominal())
    assert 0.85 < factor < 1.0
    for one in found:
        ratio = factor * one.modelled / one.published
        assert ratio == pytest.approx(1, abs=0.1), one.kernel.name


def test_public_kernels_have_the_published_mix():
    trace = schedules.PUBLIC[0].traces(4)[0]
    fewer = schedules.PUBLIC[0].traces(3)[0]
    mix = Counter((x.kind, x.rate) for x in trace)
    mix.subtract(Counter((x.kind, x.rate) for x in fewer))
    assert mix["matrix", "vector"] == 16
    assert mix["vector", "transcendental"] == 65
    assert mix["packed", "vector"] == 32
    assert mix["vector", "convert_fp8"] == 32
    assert mix["lds", "vector"] == 48
    assert mix["barrier", "vector"] == 7
    assert mix["copy", "vector"] == 4


# Whole kernels.


def test_workgroups_go_to_the_first_free_compute_unit():
    c = dataclasses.replace(C, compute_units=4, dies=2, launch=0.0)
    assert whole.makespan([8, 8, 1, 1, 1, 1, 1, 1], c) == 8
    assert whole.makespan([1] * 8, c) == 2


def test_pairs_of_blocks_have_equal_work():
    cost = whole.Cost(tile=100.0, block=1000.0, parts={}, lds=0.0)
    many = whole.groups_of(cost, whole.Work(16384, 64, 128, 128), C)
    assert len(many) == 64 * 32
    assert len(set(many)) == 1
    few = whole.groups_of(cost, whole.Work(2048, 1, 128, 128), C)
    assert sorted(few, reverse=True) == few


def test_without_a_mask_every_block_sees_every_key():
    cost = whole.Cost(tile=100.0, block=1000.0, parts={}, lds=0.0)
    masked, full = (whole.Work(16384, 64, 128, 128, causal=x) for x in (True, False))
    assert full.flops == 2 * masked.flops
    assert set(whole.groups_of(cost, full, C)) == {1000 + 128 * 100}
    assert len(whole.groups_of(cost, full, C)) == 64 * 64


def test_rescaling_is_added_to_the_blocks():
    cost = whole.Cost(tile=100.0, block=1000.0, parts={}, lds=0.0)
    work = whole.Work(512, 1, 128, 128)
    assert whole.groups_of(cost, work, C, [0, 10, 25, 30, 40]) == [1225, 1000]


def test_a_maximum_moves_seldom_where_the_row_sum_is_large():
    fp8 = whole.moved_maxima(True, 128, 64)
    assert len(fp8) == 65
    assert fp8[:4] == (0, 1, 2, 3)
    assert 8 < fp8[32] < 28
    assert fp8[64] - fp8[32] < fp8[32] - fp8[0]
    assert whole.moved_maxima(False, 64, 64)[1:] == (1,) * 64


# Compiled code.

BODY = """
  v_lshlrev_b32 v1, 4, v0
  v_mov_b32 v4, 1.0
  v_mov_b32 v5, v4
  v_mov_b32 v6, v4
  v_mov_b32 v7, v4
  v_exp_f32 v2, v4
  v_pk_mul_f32 v[4:5], v[4:5], v[4:5]
  ds_write_b128 v1, v[4:7]
  s_waitcnt lgkmcnt(0)
  s_barrier
  ds_read_b128 v[8:11], v1
  s_waitcnt lgkmcnt(0)
  s_setprio 1
  s_nop 3
"""


@pytest.fixture(scope="module")
def recorded():
    kernel = assembly.build({"k": BODY}, lds=2048)["k"]
    recorder = Recorder()
    memory = np.zeros(64, np.uint32)
    assembly.run(kernel, memory, memory.copy(), block=128, on_instruction=recorder)
    return recorder.traces


def test_the_recorder_follows_each_wave(recorded):
    assert sorted(recorded) == [0, 1]
    kinds = [x.kind for x in recorded[0]]
    assert kinds == [
        *["vector"] * 6, "packed", "lds", "wait", "barrier", "lds", "wait", "priority",
        "nop", "end",
    ]  # fmt: skip


def test_the_recorder_keeps_rates_registers_and_banks(recorded):
    trace = recorded[1]
    assert trace[5].rate == "transcendental"
    assert trace[5].reads == (4,)
    assert trace[5].writes == (2,)
    assert trace[10].phases == (8, 4)
    assert trace[10].writes == (8, 9, 10, 11)
    assert (trace[8].lgkm, trace[8].vm) == (0, None)
    assert trace[13].count == 4


def test_a_recorded_kernel_runs_in_the_model(recorded):
    timing = simulate([recorded[0], recorded[1]], C)
    assert C.lds_latency < timing.cycles < 400
