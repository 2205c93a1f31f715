"""AMD's pseudocode, evaluated one lane at a time with exact Python numbers.

Only statements of the form `D0.type = expression;` are understood, with or without a
second one for SCC.
"""

from __future__ import annotations

import math
import re
import struct
from fractions import Fraction
from typing import Any

import numpy as np
from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE

_FLOAT = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


def _texts() -> dict[str, str]:
    texts: dict[str, str] = {}
    for op, text in PCODE.items():
        name = op.name.lower().removesuffix("_e32").removesuffix("_e64")
        texts.setdefault(name, text)
    return texts


TEXTS = _texts()


def destination_type(name: str) -> str:
    found = re.match(r"D0\.(\w+) = ", TEXTS[name])
    if found is None:
        raise ValueError(f"{name}: {TEXTS[name]}")
    return found[1]


def source_types(name: str) -> list[str]:
    """Types of S0, S1, S2 as the pseudocode reads them."""
    text = TEXTS[name].splitlines()[0]
    found: dict[str, str] = {}
    for source, kind in re.findall(r"(S\d)(?:\[\d+ : \d+\])?\.([a-z]+\d+)", text):
        found.setdefault(source, kind)
    for source in re.findall(r"(S\d)\[\d+ : \d+\]\.", text):
        found[source] = "u32"
    return [found[s] for s in sorted(found)]


class Value:
    """The bits of a source, read as any type."""

    def __init__(self, bits: int):
        self.bits = bits

    def __getattr__(self, kind: str) -> Any:
        letter, size = kind[0], int(re.sub(r"\D", "", kind))
        bits = self.bits & ((1 << size) - 1)
        if kind in _FLOAT:
            return float_of(bits, kind)
        if letter == "i" and bits >> (size - 1):
            return bits - (1 << size)
        return bits

    def field(self, high: int, low: int) -> int:
        return (self.bits >> low) & ((1 << (high - low + 1)) - 1)


def float_of(bits: int, kind: str) -> float:
    code = {"f16": ("<e", "<H"), "f32": ("<f", "<I"), "f64": ("<d", "<Q")}[kind]
    return struct.unpack(code[0], struct.pack(code[1], bits))[0]


def round_to(value: Fraction, kind: str) -> float:
    """Nearest float, ties to even."""
    digits, smallest, top = {
        "f16": (11, -24, 16),
        "f32": (24, -149, 128),
        "f64": (53, -1074, 1024),
    }[kind]
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - digits + 1, smallest)
    rounded = round(magnitude / unit) * unit
    sign = -1.0 if value < 0 else 1.0
    if rounded >= Fraction(2) ** top:
        return sign * math.inf
    return sign * float(rounded)


def exact_fma(a: float, b: float, c: float, kind: str) -> float:
    with np.errstate(all="ignore"):
        if not all(map(math.isfinite, (a, b, c))):
            return float(np.float64(a) * np.float64(b) + np.float64(c))
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact == 0:
            # In float64 the product of two floats of half its width cannot vanish.
            return float(np.float64(a) * np.float64(b) + np.float64(c))
    return round_to(exact, kind)


def _divide(a: float, b: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float64(a) / np.float64(b))


def evaluate(name: str, *sources: int, old: int = 0) -> int:
    """The bits of D0 after the instruction."""
    text = TEXTS[name].splitlines()[0].rstrip(";")
    kind = destination_type(name)
    expression = text.split(" = ", 1)[1]
    expression = re.sub(r"\{ (.*?), (.*?) \}", r"((\1) << 32 | (\2))", expression)
    condition = re.fullmatch(r"(.*) \? (.*) : (.*)", expression)
    if condition:
        expression = f"({condition[2]}) if ({condition[1]}) else ({condition[3]})"
    expression = re.sub(
        r"(S\d)(?:\.u32)?\[(\d+) : (\d+)\](?:\.u32)?", r"\1.field(\2, \3)", expression
    )
    expression = re.sub(r"\b(\d+)'[UI]\(", "(", expression)
    expression = re.sub(r"\b\d+'F\(", "(", expression)
    expression = re.sub(r"\b(\d+)(?:ULL|LL|U)\b", r"\1", expression)
    expression = re.sub(r"\b(0x[0-9a-f]+)LL\b", r"\1", expression)
    expression = re.sub(r"\b(\d+\.\d+)F\b", r"\1", expression)
    expression = re.sub(r"\b16'(\d)", r"\1", expression)
    names: dict[str, Any] = {f"S{i}": Value(s) for i, s in enumerate(sources)}
    names["D0"] = Value(old)
    names["fma"] = lambda a, b, c: exact_fma(a, b, c, kind)
    names["signext"] = lambda x: x
    names["math"] = math
    for short in ("i32", "u32"):
        names[f"v_min_{short}"], names[f"v_max_{short}"] = min, max
    if kind in _FLOAT and "/" in expression:
        numerator, denominator = expression.split(" / ")
        names["divide"] = _divide
        expression = f"divide({numerator}, {denominator})"
    with np.errstate(all="ignore"):
        result = eval(expression, {"__builtins__": {}}, names)
        if kind in _FLOAT:
            dtype = _FLOAT[kind]
            return int(np.array(result, dtype).view(f"u{dtype().itemsize}"))
    return int(result) & ((1 << int(kind[1:])) - 1)
