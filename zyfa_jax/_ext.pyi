"""The compiled extension: FFI handlers and the CPU kernel's switches."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def registrations() -> dict[str, Any]:
    """Handlers of the FFI target "zyfa_attention", by platform of registration.

    Each as `jax.ffi.register_ffi_target` takes it.
    """

def quantize_registrations() -> dict[str, Any]:
    """Handlers of the FFI target "zyfa_quantize", as `registrations` gives them."""

def handlers_on_host() -> dict[str, dict[str, Any]]:
    """The handlers of "rocm" and of "cuda" for the platform "cpu", by FFI target.

    Buffers are the host's, for a library in the driver's place that launches on host
    memory; the CPU device's number is the GPU's.
    """

def rocm_archs() -> list[str]:
    """Architectures of AMD GPUs whose kernels are built in."""

def cuda_archs() -> list[str]:
    """Architectures of NVIDIA GPUs whose kernels are built in."""

def rocm_code_object(arch: str) -> bytes:
    """The machine code for one of `rocm_archs()`, an ELF file.

    Raises:
      ValueError: none is built in for it.
    """

def cuda_code_object(arch: str) -> bytes:
    """The machine code for one of `cuda_archs()`, a cubin.

    Raises:
      ValueError: none is built in for it.
    """

def cpu_targets() -> list[str]:
    """Instruction sets compiled in and usable on this machine, best first."""

def compiled_cpu_targets() -> list[str]:
    """Instruction sets compiled in, best first."""

def force_cpu_target(name: str | None) -> None:
    """Makes later calls run on one instruction set; None: on the best.

    A target that does not take a call's dtype leaves it to the next one.
    The environment variable ZYFA_JAX_CPU_TARGET does the same at import.

    Raises:
      ValueError: no such target is usable here.
    """

def fp8_softmax_block(
    target: str,
    acc: NDArray[np.float32],
    visible: NDArray[np.bool_],
    factor: NDArray[np.float32],
    running_max: NDArray[np.float32],
    quadratic: bool,
) -> tuple[
    NDArray[np.uint8], NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]
]:
    """The kernel's own FP8 probabilities of one block of keys.

    Args:
      target: one of `cpu_targets()`.
      acc: (rows, keys), keys <= 128: raw dot products of the FP8 values.
      visible: (rows, keys).
      factor: (rows,): logit in log2 units per unit of acc, not negative.
      running_max: (rows,): largest logit of earlier blocks, or -inf.
      quadratic: whether the code has the quadratic term.

    Returns:
      codes (rows, keys), e4m3 codes of the probabilities, 0 where not visible;
      shift (rows,), the block's weight is 2**-shift; new_max (rows,); row_sum
      (rows,), the sum of the codes' values, not yet weighted. A row with no
      visible key has codes 0, shift 0 and keeps its maximum. A row with a NaN
      has a NaN sum.

    Raises:
      ValueError: unknown target or shapes that do not match.
    """
