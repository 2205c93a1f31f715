"""Code objects: their kernels, and their instructions as small frozen records.

The encodings, opcode names and operand widths come from tinygrad's CDNA tables, which
are generated from AMD's machine-readable ISA. What tinygrad leaves to its callers is
done here: which fields are scalar destinations, accumulation registers and constants.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgpack
from elftools.elf.elffile import ELFFile
from tinygrad.renderer.amd import decode_inst
from tinygrad.runtime.autogen.amd.common import Fmt, OpType

from .errors import UnknownInstruction

VCC = 106
M0 = 124
EXEC = 126

_FLOATS = (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0, 0.15915494309189532)
_SPECIAL = {102: "flat_scratch", 106: "vcc", 124: "m0", 126: "exec"}
_SCALE_PREFIX = (0xD3AC).to_bytes(2, "little")
_SOURCES = ("src0", "src1", "vsrc1", "src2", "ssrc0", "ssrc1")
_MEMORY_OPERANDS = ("addr", "vaddr", "saddr", "srsrc", "sbase", "soffset")
_DATA = ("data", "data0", "data1", "vdata")
_SCALAR_FIRST = ("sdst", "ssrc0", "ssrc1", "saddr", "soffset", "sdata")


@dataclasses.dataclass(frozen=True)
class Operand:
    """`file` is "v" (accumulation registers from 256), "s", or "const" (`value`)."""

    file: str
    index: int
    bits: int
    value: int = 0

    @property
    def dwords(self) -> int:
        return max(1, self.bits // 32)

    def __str__(self) -> str:
        if self.file == "const":
            if 240 <= self.index <= 248:
                return str(_FLOATS[self.index - 240])
            signed = self.value - (1 << 32) if self.value >> 31 == 1 else self.value
            return str(signed) if self.index != 255 else hex(self.value)
        letter, index = self.file, self.index
        if letter == "v" and index >= 256:
            letter, index = "a", index - 256
        if letter == "s":
            if index == 253:
                return "scc"
            if self.dwords == 2 and index in _SPECIAL:
                return _SPECIAL[index]
            if index == M0:
                return "m0"
            if index - 1 in _SPECIAL or index in _SPECIAL:
                name = _SPECIAL.get(index, _SPECIAL.get(index - 1, ""))
                return f"{name}_{'lo' if index in _SPECIAL else 'hi'}"
        if self.dwords == 1:
            return f"{letter}{index}"
        return f"{letter}[{index}:{index + self.dwords - 1}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction. `sources` holds what is read, in AMD's order; `modifiers` holds
    every other field that is set, so that an unknown one is noticed."""

    address: int
    size: int
    name: str
    encoding: str
    destinations: tuple[Operand, ...]
    sources: tuple[Operand, ...]
    named: Mapping[str, Operand]
    modifiers: Mapping[str, int]

    @property
    def next_address(self) -> int:
        return self.address + self.size

    def __str__(self) -> str:
        operands = ", ".join(str(o) for o in (*self.destinations, *self.sources))
        modifiers = " ".join(f"{k}:{v}" for k, v in self.modifiers.items())
        return " ".join(x for x in (self.name, operands, modifiers) if x)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel: its descriptor, its resources and the code it may reach."""

    name: str
    code: bytes = dataclasses.field(repr=False)
    entry: int
    kernarg_size: int
    lds_bytes: int
    scratch_bytes: int
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    accumulation_offset: int
    max_threads: int
    rsrc1: int
    rsrc2: int
    properties: int
    kernarg_preload: int
    hidden_arguments: tuple[tuple[str, int, int], ...]

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """What can be reached from the kernel's entry, by address."""
        return _reachable(self.code, self.entry)


class CodeObject:
    """An AMDGPU ELF file."""

    def __init__(self, data: bytes):
        elf: Any = ELFFile(io.BytesIO(data))
        metadata = _metadata(elf)
        self.target: str = metadata["amdhsa.target"]
        text = elf.get_section_by_name(".text")
        code, base = bytes(text.data()), int(text["sh_addr"])
        symbols = {s.name: s for s in elf.get_section_by_name(".dynsym").iter_symbols()}
        self.kernels: dict[str, Kernel] = {}
        for entry in metadata["amdhsa.kernels"]:
            symbol = symbols[entry[".symbol"]]
            section = elf.get_section(symbol["st_shndx"])
            start = symbol["st_value"] - section["sh_addr"]
            descriptor = bytes(section.data())[start : start + 64]
            (distance,) = struct.unpack_from("<q", descriptor, 16)
            address = symbol["st_value"] + distance - base
            self.kernels[entry[".name"]] = _kernel(entry, descriptor, code, address)


def _metadata(elf: Any) -> dict[str, Any]:
    for section in elf.iter_sections():
        if section["sh_type"] == "SHT_NOTE":
            for note in section.iter_notes():
                if note["n_name"] == "AMDGPU":
                    content = note["n_descdata"]
                    return msgpack.unpackb(content, strict_map_key=False)
    raise ValueError("not an AMDGPU code object: it has no AMDGPU metadata note")


def _kernel(
    metadata: dict[str, Any], descriptor: bytes, code: bytes, entry: int
) -> Kernel:
    lds, scratch, kernarg = struct.unpack_from("<III", descriptor, 0)
    rsrc3, rsrc1, rsrc2 = struct.unpack_from("<III", descriptor, 44)
    properties, preload = struct.unpack_from("<HH", descriptor, 56)
    hidden = tuple(
        (a[".value_kind"], a[".offset"], a[".size"])
        for a in metadata.get(".args", ())
        if a[".value_kind"].startswith("hidden_")
    )
    return Kernel(
        name=metadata[".name"],
        code=code,
        entry=entry,
        kernarg_size=kernarg,
        lds_bytes=lds,
        scratch_bytes=scratch,
        vgprs=metadata[".vgpr_count"],
        agprs=metadata.get(".agpr_count", 0),
        sgprs=metadata[".sgpr_count"],
        vgpr_spills=metadata.get(".vgpr_spill_count", 0),
        sgpr_spills=metadata.get(".sgpr_spill_count", 0),
        accumulation_offset=((rsrc3 & 63) + 1) * 4,
        max_threads=metadata.get(".max_flat_workgroup_size", 1024),
        rsrc1=rsrc1,
        rsrc2=rsrc2,
        properties=properties,
        kernarg_preload=preload,
        hidden_arguments=hidden,
    )


@functools.lru_cache(maxsize=64)
def _reachable(code: bytes, entry: int) -> tuple[Instruction, ...]:
    found: dict[int, Instruction] = {}
    todo = [entry]
    while todo:
        address = todo.pop()
        while address not in found:
            instruction = decode(code, address)
            found[address] = instruction
            target = branch_target(instruction)
            if target is not None:
                todo.append(target)
            if instruction.name in ("s_endpgm", "s_branch", "s_setpc_b64"):
                break
            address = instruction.next_address
    return tuple(found[a] for a in sorted(found))


def branch_target(instruction: Instruction) -> int | None:
    if not instruction.name.startswith(("s_branch", "s_cbranch")):
        return None
    distance = instruction.modifiers.get("simm16", 0)
    return instruction.next_address + 4 * (distance - ((distance & 0x8000) << 1))


def decode(code: bytes, address: int) -> Instruction:
    """The instruction at an address of the code."""
    # tinygrad knows a scaled matrix instruction by its second half alone, and would
    # take whatever precedes a plain one for the first half of a scaled one.
    scaled = code[address + 2 : address + 4] == _SCALE_PREFIX
    word = code[address : address + (16 if scaled else 8)]
    try:
        decoded: Any = decode_inst(word, "cdna")
    except (ValueError, AssertionError) as error:
        raise UnknownInstruction(
            f"no CDNA4 instruction at {address:#x}: {word[:8].hex()}"
        ) from error
    return _instruction(decoded, address)


def _instruction(decoded: Any, address: int) -> Instruction:
    encoding = type(decoded).__name__
    fields = {
        name: ((decoded._raw >> field.lo) & field.mask, field)
        for name, field in decoded._fields
    }
    values = {name: value for name, (value, _) in fields.items()}
    table = dict(decoded.operands)
    literal = values.pop("literal", None)
    for prefix in ("encoding", "op", "seg", "x2encoding"):
        values.pop(prefix, None)
    accumulators = _accumulation_fields(encoding, values, table)
    # The sources of SDWA that are scalars.
    scalars = values.pop("s0", 0), values.pop("s1", 0)
    operands: dict[str, Operand] = {}
    for name in [n for n in values if _is_operand(n, values, table)]:
        raw = values.pop(name)
        if raw in (0xF9, 0xFA) and name == "src0" and "vsrc0" in values:
            raw, name_in_table = values.pop("vsrc0"), "src0"
            raw += 0 if scalars[0] else 256
        elif name == "vsrc1" and scalars[1]:
            name_in_table = name
        else:
            name_in_table = name
            raw = _unified(raw, fields[name][1])
        format, bits, kind = table.get(name_in_table, (None, 32, None))
        bits = _bits(decoded, name_in_table, bits)
        scalar = name in ("vdst", "sdst") and kind in (
            OpType.OPR_SREG,
            OpType.OPR_SREG_NOVCC,
            OpType.OPR_SDST,
        )
        if scalar:
            raw &= 0xFF
        operands[name_in_table] = _operand(
            raw, bits, _constant_bits(format, bits), literal, name in accumulators
        )
    return Instruction(
        address=address,
        size=decoded.size(),
        name=decoded.op_name.lower().removesuffix("_e32").removesuffix("_e64"),
        encoding=encoding,
        destinations=tuple(
            operands[n] for n in ("vdst", "sdst", "sdata") if n in operands
        ),
        sources=tuple(
            operands[n]
            for n in (*_SOURCES, "scale_src0", "scale_src1", *_DATA, *_MEMORY_OPERANDS)
            if n in operands
        ),
        named=MappingProxyType(operands),
        modifiers=MappingProxyType(_modifiers(encoding, values, literal)),
    )


def _is_operand(name: str, values: dict[str, int], table: dict[str, Any]) -> bool:
    if name in ("sdst", "saddr", "scale_src0", "scale_src1"):
        return True
    if name in table and name != "simm16":
        return True
    return name == "src0" and "vsrc0" in values


def _accumulation_fields(
    encoding: str, values: dict[str, int], table: dict[str, Any]
) -> set[str]:
    """Takes the accumulation bits out of `values`; the operands that they mean."""
    only = (OpType.OPR_ACCVGPR, OpType.OPR_SRC_ACCVGPR)
    found = {n for n, (_, _, kind) in table.items() if kind in only}
    acc = values.pop("acc", 0)
    if values.pop("acc_cd", 0):
        found |= {"vdst", "src2"}
    if encoding in ("VOP3P_MFMA", "VOP3PX2"):
        found |= {n for n, bit in (("src0", 1), ("src1", 2)) if acc & bit}
    elif acc:
        found |= {"vdst", *_DATA}
    return found


def _unified(raw: int, field: Any) -> int:
    """A field's value in the 512-entry operand space."""
    if hasattr(field, "_align"):
        return raw * field._align
    return raw + getattr(field, "_valid_range", (0,))[0]


def _bits(decoded: Any, name: str, bits: int) -> int:
    if name in ("src0", "src1") and "F8F6F4" in decoded.op_name:
        return decoded.op_bits[name]
    if name in ("addr", "vaddr") and name in decoded.op_bits:
        return decoded.op_bits[name]
    return bits


def _constant_bits(format: Any, bits: int) -> int:
    """The size of the float that an inline constant stands for."""
    if format in (Fmt.FMT_NUM_PK2_F16, Fmt.FMT_NUM_PK2_BF16):
        return 16
    return 32 if format == Fmt.FMT_NUM_PK2_F32 or bits > 64 else bits


def _operand(
    raw: int, bits: int, constant_bits: int, literal: int | None, accumulation: bool
) -> Operand:
    if raw >= 256:
        return Operand("v", raw - 256 + (256 if accumulation else 0), bits)
    if raw < 128 or raw == 253:
        return Operand("s", raw, bits)
    if raw <= 192:
        return Operand("const", raw, bits, raw - 128)
    if raw <= 208:
        value = (192 - raw) & (0xFFFFFFFFFFFFFFFF if bits == 64 else 0xFFFFFFFF)
        return Operand("const", raw, bits, value)
    if 240 <= raw <= 248:
        value = _float_constant(_FLOATS[raw - 240], constant_bits)
        return Operand("const", raw, bits, value)
    if raw == 255 and literal is not None:
        return Operand("const", raw, bits, literal)
    raise UnknownInstruction(f"operand encoding {raw} is not emulated")


def _float_constant(value: float, bits: int) -> int:
    """The bits of an inline float constant: it has the operand's own type."""
    code = {16: "<e", 64: "<d"}.get(bits, "<f")
    return int.from_bytes(struct.pack(code, value), "little")


def _modifiers(
    encoding: str, values: dict[str, int], literal: int | None
) -> dict[str, int]:
    found = dict(values)
    if encoding == "VOP3P":
        found["opsel_hi"] |= found.pop("opsel_hi2") << 2
        if found["opsel_hi"] == 7:
            del found["opsel_hi"]
        else:
            found["opsel_hi"] |= 8  # present, even when all three are zero
    if encoding in ("VOP3P_MFMA",):
        for name in ("neg", "neg_hi", "clmp", "opsel", "opsel_hi", "opsel_hi2"):
            found.pop(name, None)
    if literal is not None:
        found["literal"] = literal
    return {name: value for name, value in found.items() if value}
