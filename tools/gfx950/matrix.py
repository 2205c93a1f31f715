"""Matrix instructions.

Products and their sums are formed in float64 and rounded to float32 once, together with
the accumulator. Sums of FP8 products are exact that way before the rounding; the
machine's own order of accumulation is not published, so its last bits may differ.

Layouts: a lane holds one row of A (column of B), lane modulo the tile's width, and the
lane group (lane over width) says which elements of K. Registers hold K in blocks of at
most 16 bytes, interleaved over the lane groups.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .decode import Instruction, Operand
from .errors import UnknownInstruction
from .floats import bf16_to_f32, decode_table, e8m0
from .operands import Access, Reader
from .registry import Step, opcode
from .state import Group

if TYPE_CHECKING:
    from .machine import Machine

F64, U32 = np.float64, np.uint32


@dataclasses.dataclass(frozen=True)
class Format:
    """How elements lie in a lane's registers."""

    name: str
    bits: int

    def decode(self, data: NDArray[np.uint8]) -> NDArray[np.float64]:
        """(..., bytes) to (..., elements)."""
        if self.name == "f32":
            return data.view(np.float32).astype(F64)
        if self.name == "f16":
            return data.view(np.float16).astype(F64)
        if self.name == "bf16":
            return bf16_to_f32(data.view(np.uint16)).astype(F64)
        if self.name == "i8":
            return data.view(np.int8).astype(F64)
        table = decode_table(self.name).astype(F64)
        if self.bits == 8:
            return table[data]
        if self.bits == 4:
            codes = np.stack([data & 15, data >> 4], -1)
            return table[codes.reshape(*data.shape[:-1], -1)]
        bits = np.unpackbits(data, axis=-1, bitorder="little")
        bits = bits.reshape(*data.shape[:-1], -1, 6)
        return table[np.packbits(bits, axis=-1, bitorder="little")[..., 0]]


FORMATS = {
    name: Format(name, bits)
    for name, bits in (
        ("f32", 32),
        ("f16", 16),
        ("bf16", 16),
        ("i8", 8),
        ("e4m3", 8),
        ("e5m2", 8),
        ("e2m3", 6),
        ("e3m2", 6),
        ("e2m1", 4),
    )
}
F8F6F4 = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")


def lane_data(
    machine: Machine, access: Access, operand: Operand
) -> tuple[Reader, list[int]]:
    """A reader of a register range as (waves, 64, bytes)."""
    rows = access.vector_rows(operand)
    first, last = rows[0], rows[-1] + 1
    registers = machine.state.v

    def read(g: Group) -> NDArray[np.uint8]:
        block = registers[first:last, g.index]
        return np.ascontiguousarray(block.transpose(1, 2, 0)).view(np.uint8)

    return read, rows


def arrange(data: NDArray[np.uint8], width: int, format: Format) -> NDArray[np.float64]:
    """(waves, 64, bytes) of an operand to (waves, width, K)."""
    waves, _, size = data.shape
    groups = 64 // width
    block = 24 if format.bits == 6 else min(size, 16)
    parts = data.reshape(waves, groups, width, size // block, block)
    ordered = parts.transpose(0, 2, 3, 1, 4).reshape(waves, width, groups * size)
    return format.decode(np.ascontiguousarray(ordered))


def accumulator_to_matrix(registers: NDArray[Any], width: int) -> NDArray[Any]:
    """(registers, waves, 64) to (waves, rows, columns)."""
    count, waves, _ = registers.shape
    groups = 64 // width
    split = registers.reshape(count // 4, 4, waves, groups, width)
    return split.transpose(2, 0, 3, 1, 4).reshape(waves, count * groups, width)


def matrix_to_accumulator(matrix: NDArray[Any], width: int) -> NDArray[Any]:
    waves, rows, _ = matrix.shape
    groups = 64 // width
    split = matrix.reshape(waves, rows // (4 * groups), groups, 4, width)
    return split.transpose(1, 3, 0, 2, 4).reshape(rows // groups, waves, 64)


def _accumulator_reader(machine: Machine, access: Access, operand: Operand) -> Any:
    if operand.file == "v":
        rows = access.vector_rows(operand)
        first, last = rows[0], rows[-1] + 1
        return lambda g: machine.state.v[first:last, g.index]
    if operand.file != "const":
        raise UnknownInstruction(f"accumulator {operand}")
    constant = np.full((operand.dwords, 1, 1), operand.value, U32)
    return lambda g: np.broadcast_to(constant, (operand.dwords, g.count, 64))


def _mfma(name: str, width: int, a_format: str, b_format: str) -> None:
    def compile(machine: Machine, instruction: Instruction) -> Step:
        access = Access(machine, instruction)
        return _multiply(machine, instruction, access, width, a_format, b_format)

    opcode(name)(compile)


def _multiply(
    machine: Machine,
    instruction: Instruction,
    access: Access,
    width: int,
    a_format: str,
    b_format: str,
    scales: tuple[Any, Any] | None = None,
) -> Step:
    a, b, c = instruction.sources[:3]
    formats = FORMATS[a_format], FORMATS[b_format]
    read_a, _ = lane_data(machine, access, a)
    read_b, _ = lane_data(machine, access, b)
    read_c = _accumulator_reader(machine, access, c)
    rows = access.vector_rows(instruction.destinations[0], write=True)
    first, last = rows[0], rows[-1] + 1
    integer = a_format == "i8"
    state = machine.state

    def run(g: Group) -> None:
        left = arrange(read_a(g), width, formats[0])
        right = arrange(read_b(g), width, formats[1])
        if scales is not None:
            left = left * scales[0](g)
            right = right * scales[1](g)
        product = np.matmul(left, right.transpose(0, 2, 1))
        addend = accumulator_to_matrix(read_c(g), width)
        if integer:
            total = product.astype(np.int64) + addend.view(np.int32)
            result = total.astype(np.int32).view(U32)
        else:
            total = product + addend.view(np.float32)
            result = total.astype(np.float32).view(U32)
        state.v[first:last, g.index] = matrix_to_accumulator(result, width)

    return access.finish(run, every_lane=True, every_lane_written=True)


for _shape, _kinds in {
    "32x32x8": ("f16", "bf16"),
    "16x16x16": ("f16", "bf16"),
    "32x32x16": ("f16", "bf16"),
    "16x16x32": ("f16", "bf16"),
    "32x32x2": ("f32",),
    "16x16x4": ("f32",),
}.items():
    for _kind in _kinds:
        _mfma(f"v_mfma_f32_{_shape}_{_kind}", int(_shape[:2]), _kind, _kind)
for _shape in ("32x32x16", "16x16x32", "32x32x32", "16x16x64"):
    _mfma(f"v_mfma_i32_{_shape}_i8", int(_shape[:2]), "i8", "i8")
for _shape in ("32x32x16", "16x16x32"):
    for _a, _a_format in (("fp8", "e4m3"), ("bf8", "e5m2")):
        for _b, _b_format in (("fp8", "e4m3"), ("bf8", "e5m2")):
            _mfma(
                f"v_mfma_f32_{_shape}_{_a}_{_b}", int(_shape[:2]), _a_format, _b_format
            )


def _formats(access: Access) -> tuple[str, str]:
    chosen = access.modifier("cbsz"), access.modifier("blgp")
    for value in chosen:
        if value >= len(F8F6F4):
            raise UnknownInstruction(f"matrix operand format {value}")
    return F8F6F4[chosen[0]], F8F6F4[chosen[1]]


@opcode("v_mfma_f32_32x32x64_f8f6f4", "v_mfma_f32_16x16x128_f8f6f4")
def _f8f6f4(machine: Machine, instruction: Instruction) -> Step:
    access = Access(machine, instruction)
    width = 32 if "32x32" in instruction.name else 16
    return _multiply(machine, instruction, access, width, *_formats(access))


@opcode("v_mfma_scale_f32_32x32x64_f8f6f4", "v_mfma_scale_f32_16x16x128_f8f6f4")
def _scaled(machine: Machine, instruction: Instruction) -> Step:
    """Lane row + width * block holds the scale of that row's K block of 32; op_sel and
    op_sel_hi choose the byte of the register."""
    access = Access(machine, instruction)
    access.modifier("abid")  # 1: it marks the scaled form
    width = 32 if "32x32" in instruction.name else 16
    low, high = access.modifier("opsel"), access.modifier("opsel_hi")
    scales = []
    for position, operand in enumerate(instruction.sources[3:]):
        byte = (low >> position & 1) | (high >> position & 1) << 1
        scales.append(_scale_reader(access, operand, byte, width))
    return _multiply(
        machine,
        instruction,
        access,
        width,
        *_formats(access),
        scales=(scales[0], scales[1]),
    )


def _scale_reader(access: Access, operand: Operand, byte: int, width: int) -> Any:
    read = access.reader(operand, "u32")
    if operand.file == "const" and operand.index >= 240:
        raise UnknownInstruction("a float constant as a block scale")
    shift = U32(8 * byte)

    def scale(g: Group) -> NDArray[np.float64]:
        words = np.broadcast_to(read(g), (g.count, 64))
        values = e8m0((words >> shift) & U32(255))
        blocks = values.reshape(g.count, 64 // width, width).transpose(0, 2, 1)
        return np.repeat(blocks, 32, axis=2)

    return scale
