"""Shows the kernels of a code object: their resources and, on request, their code."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from . import OPCODES, CodeObject, Kernel


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.gfx950", description=__doc__)
    parser.add_argument("code_object", type=Path)
    parser.add_argument("--kernel", help="only the kernel of this name")
    parser.add_argument("--disassemble", action="store_true", help="print the code")
    parser.add_argument("--mix", action="store_true", help="count the opcodes")
    arguments = parser.parse_args()
    code = CodeObject(arguments.code_object.read_bytes())
    print(code.target)
    for name, kernel in code.kernels.items():
        if arguments.kernel in (None, name):
            _show(kernel, arguments.disassemble, arguments.mix)


def _show(kernel: Kernel, disassemble: bool, mix: bool) -> None:
    counts = Counter(x.name for x in kernel.instructions)
    print(f"\n{kernel.name}")
    print(
        f"  {kernel.vgprs} VGPRs (of these {kernel.agprs} AGPRs), {kernel.sgprs} SGPRs"
    )
    print(f"  {kernel.lds_bytes} bytes of LDS, {kernel.scratch_bytes} of scratch")
    print(f"  spills: {kernel.vgpr_spills} vector, {kernel.sgpr_spills} scalar")
    print(f"  {kernel.kernarg_size} bytes of arguments, {kernel.max_threads} threads")
    print(f"  {len(kernel.instructions)} instructions")
    missing = sorted(set(counts) - set(OPCODES))
    if missing:
        print(f"  not emulated: {', '.join(missing)}")
    if mix:
        for opcode, count in counts.most_common():
            print(f"  {count:6d} {opcode}")
    if disassemble:
        for instruction in kernel.instructions:
            print(f"  {instruction.address:#07x}  {instruction}")


if __name__ == "__main__":
    main()
