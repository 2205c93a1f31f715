"""Writes a C++ source that holds code objects as arrays.

python embed_code_objects.py OUTPUT PLATFORM [ARCH FILE]...
"""

import pathlib
import sys


def main(output: str, platform: str, *pairs: str) -> None:
    lines = ['#include "csrc/gpu/code_object.h"', "", f"namespace zyfa::{platform} {{"]
    entries = []
    for arch, path in zip(pairs[::2], pairs[1::2], strict=True):
        data = pathlib.Path(path).read_bytes()
        lines.append(f"alignas(4096) static const unsigned char k_{arch}[] = {{")
        lines += [
            ",".join(map(str, data[start : start + 64])) + ","
            for start in range(0, len(data), 64)
        ]
        lines.append("};")
        entries.append(f'{{"{arch}", k_{arch}, sizeof(k_{arch})}},')
    lines += [
        "const CodeObject kCodeObjects[] = {",
        *entries,
        "};",
        f"const size_t kCodeObjectCount = {len(entries)};",
        f"}}  // namespace zyfa::{platform}",
        "",
    ]
    pathlib.Path(output).write_text("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
