"""Libraries that hold what a plugin needs of ROCm, each function of them failing.

A library takes no part but being there: JAX's plugin links rocBLAS, MIOpen, RCCL and
others, and falls back or does without where they report an error.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
from typing import Any

from elftools.elf.elffile import ELFFile

# What every Linux has.
SYSTEM_LIBRARY = re.compile(
    r"(ld-linux.*|lib(c|m|rt|dl|pthread|gcc_s|stdc\+\+))\.so\.\d+"
)
SYSTEM_VERSION = re.compile(r"(GLIBC|GCC|GLIBCXX|CXXABI)_")
STANDARD_CPP = re.compile(r"_Z(N|NK)?S")

# What functions return, the first that fits: each library's own word for failure.
RETURNS = (
    (r".*(String|string|marketing_name)$", '(long)"a stub of ROCm\'s"'),
    (r"hip[A-Z](?!las|fft)", "801"),  # hipErrorNotSupported
    (r"hsa_", "0x1000"),  # HSA_STATUS_ERROR
    (r"numa_available", "-1"),
    (r"numa_bitmask_alloc", "0"),
    (r"", "1"),
)


def _versions(elf: Any) -> dict[int, str]:
    """The names of the symbol versions that a library needs, by index."""
    section = elf.get_section_by_name(".gnu.version_r")
    return {
        need["vna_other"]: need.name
        for _, needs in section.iter_versions()
        for need in needs
    }


def needs(library: pathlib.Path) -> tuple[list[str], list[str]]:
    """The libraries and the functions beyond the system's that a library needs."""
    with library.open("rb") as file:
        elf: Any = ELFFile(file)
        libraries = [
            tag.needed
            for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")
        ]
        versions = _versions(elf)
        numbers = elf.get_section_by_name(".gnu.version")
        functions = [
            symbol.name
            for i, symbol in enumerate(
                elf.get_section_by_name(".dynsym").iter_symbols()
            )
            if symbol["st_shndx"] == "SHN_UNDEF"
            and symbol["st_info"]["bind"] == "STB_GLOBAL"
            and not SYSTEM_VERSION.match(versions.get(numbers.get_symbol(i)["ndx"], ""))
            and not STANDARD_CPP.match(symbol.name)
        ]
    return [x for x in libraries if not SYSTEM_LIBRARY.fullmatch(x)], functions


def exports(library: pathlib.Path) -> set[str]:
    """The functions that a library has."""
    with library.open("rb") as file:
        elf: Any = ELFFile(file)
        symbols = elf.get_section_by_name(".dynsym")
        return {x.name for x in symbols.iter_symbols() if x["st_shndx"] != "SHN_UNDEF"}


def source(functions: list[str]) -> str:
    """C of the functions, all failing."""
    lines = []
    for name in functions:
        value = next(value for start, value in RETURNS if re.match(start, name))
        lines.append(f"long {name}(void) {{ return {value}; }}")
    return "\n".join(lines) + "\n"


def build(
    plugin: pathlib.Path, hip: pathlib.Path, folder: pathlib.Path
) -> list[pathlib.Path]:
    """Makes what the plugin needs but `hip`, libamdhip64, has not, in an empty folder.

    Returns:
      The libraries, to be loaded in this order before the plugin: the one with every
      function, and empty ones of the other names.
    """
    libraries, functions = needs(plugin)
    missing = sorted(set(functions) - exports(hip))
    made = []
    for name in libraries:
        if name.startswith("libamdhip64."):
            continue
        code = source(missing) if not made else ""
        made.append(folder / name)
        subprocess.run(
            [
                *("gcc", "-shared", "-fPIC", "-w", "-x", "c", "-"),
                *(f"-Wl,-soname,{name}", "-o", str(made[-1])),
            ],
            input=code,
            text=True,
            check=True,
        )
    return made
