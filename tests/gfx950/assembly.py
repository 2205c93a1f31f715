"""Small gfx950 kernels, built by the clang of the ziglang wheel."""

from __future__ import annotations

import functools
import pathlib
import struct
import subprocess
import tempfile
from typing import Any

import numpy as np
import ziglang

from tools.gfx950 import CodeObject, Kernel, Memory, Report, launch

_ZIG = pathlib.Path(ziglang.__file__).parent / "zig"
_TARGET = ("-target", "amdgcn-amd-amdhsa", "-mcpu=gfx950")
IN, OUT = 0x10000000, 0x20000000


def _run(*command: Any) -> None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)


def assemble(text: str) -> bytes:
    """Assembly to a code object."""
    with tempfile.TemporaryDirectory() as folder:
        source, built = pathlib.Path(folder, "k.s"), pathlib.Path(folder, "k.o")
        linked = pathlib.Path(folder, "k.co")
        source.write_text(f'.amdgcn_target "amdgcn-amd-amdhsa--gfx950"\n{text}')
        _run(_ZIG, "clang", *_TARGET, "-c", source, "-o", built)
        _run(_ZIG, "ld.lld", "-shared", built, "-o", linked)
        return linked.read_bytes()


@functools.cache
def compile_hip(source: str, *flags: str) -> bytes:
    """HIP, without the runtime's headers, to a code object."""
    with tempfile.TemporaryDirectory() as folder:
        text, bitcode = pathlib.Path(folder, "k.hip"), pathlib.Path(folder, "k.bc")
        built, linked = pathlib.Path(folder, "k.o"), pathlib.Path(folder, "k.co")
        text.write_text(
            "#define __global__ __attribute__((global))\n"
            "#define __device__ __attribute__((device))\n"
            f"#define __shared__ __attribute__((shared))\n{source}"
        )
        front = ("-x", "hip", "--offload-arch=gfx950", "-nogpuinc", "-nogpulib")
        device = ("--cuda-device-only", "-O3", "-emit-llvm", "-c", *flags)
        _run(_ZIG, "clang", *front, *device, text, "-o", bitcode)
        back = ("-nogpulib", "-O3", "-c", "-x", "ir")
        _run(_ZIG, "clang", *_TARGET, *back, bitcode, "-o", built)
        _run(_ZIG, "ld.lld", "-shared", built, "-o", linked)
        return linked.read_bytes()


def kernel_text(
    name: str,
    body: str,
    *,
    lds: int = 0,
    vgprs: int = 128,
    agprs: int = 0,
    denormals: int = 3,
) -> str:
    """A kernel of two pointers (s[0:1]: their place) and the metadata it needs."""
    return f"""
.text
.globl {name}
.p2align 8
.type {name},@function
{name}:
{body}
  s_endpgm
.rodata
.p2align 6
.amdhsa_kernel {name}
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_kernarg_size 16
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_next_free_vgpr {vgprs + agprs}
  .amdhsa_accum_offset {vgprs}
  .amdhsa_next_free_sgpr 96
  .amdhsa_float_denorm_mode_32 {denormals}
.end_amdhsa_kernel
"""


def metadata_text(kernels: dict[str, tuple[int, int, int]]) -> str:
    """Metadata of kernels: name to (LDS bytes, VGPRs, AGPRs)."""
    entries = "".join(
        f"""
  - .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: 16
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: 0
    .wavefront_size: 64
    .sgpr_count: 96
    .vgpr_count: {vgprs + agprs}
    .agpr_count: {agprs}
    .max_flat_workgroup_size: 1024"""
        for name, (lds, vgprs, agprs) in kernels.items()
    )
    return f"""
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.target: amdgcn-amd-amdhsa--gfx950
amdhsa.kernels:{entries}
...
.end_amdgpu_metadata
"""


def build(
    bodies: dict[str, str],
    *,
    lds: int = 0,
    vgprs: int = 128,
    agprs: int = 0,
    denormals: int = 3,
) -> dict[str, Kernel]:
    """Kernels from their bodies, in one code object."""
    texts = [
        kernel_text(name, body, lds=lds, vgprs=vgprs, agprs=agprs, denormals=denormals)
        for name, body in bodies.items()
    ]
    about = dict.fromkeys(bodies, (lds, vgprs, agprs))
    return CodeObject(assemble("".join(texts) + metadata_text(about))).kernels


# Kernels that load one value per lane into v10, v11, ..., do something, and store
# v40, v41, ... (or from `first`): value i of lane j lies at dword 64 * i + j.


def lane_body(text: str, inputs: int, outputs: int, first: int = 40) -> str:
    loads, stores = [], []
    for i in range(inputs):
        loads.append(f"global_load_dword v{10 + i}, v1, s[4:5] offset:{256 * (i % 8)}")
        if i % 8 == 7:
            loads.append("v_add_u32 v1, 0x800, v1")
    for i in range(outputs):
        stores.append(
            f"global_store_dword v2, v{first + i}, s[6:7] offset:{256 * (i % 8)}"
        )
        if i % 8 == 7:
            stores.append("v_add_u32 v2, 0x800, v2")
    newline = "\n  "
    return f"""
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  v_lshlrev_b32 v1, 2, v0
  v_mov_b32 v2, v1
  s_waitcnt lgkmcnt(0)
  {newline.join(loads)}
  s_waitcnt vmcnt(0)
  {newline.join(text.splitlines())}
  {newline.join(stores)}
"""


def run_lanes(kernel: Kernel, inputs: np.ndarray, outputs: int) -> np.ndarray:
    """(values, 64) uint32 in, (outputs, 64) uint32 back, one wave."""
    given = np.ascontiguousarray(inputs, dtype=np.uint32)
    result = np.zeros((outputs, 64), np.uint32)
    run(kernel, given, result)
    return result


def run(
    kernel: Kernel,
    given: np.ndarray,
    result: np.ndarray,
    *,
    block: int = 64,
    grid: int = 1,
    **options: Any,
) -> Report:
    """Launches with the arrays' addresses as the two arguments."""
    memory = Memory()
    memory.add(IN, given.reshape(-1).view(np.uint8), False, "in")
    memory.add(OUT, result.reshape(-1).view(np.uint8), True, "out")
    return launch(
        kernel,
        grid=(grid, 1, 1),
        block=(block, 1, 1),
        kernarg=struct.pack("<QQ", IN, OUT),
        memory=memory,
        **options,
    )
