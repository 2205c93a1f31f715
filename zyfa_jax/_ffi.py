"""The compiled extension: loaded once, at the first call that needs it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
from collections.abc import Iterator
from types import ModuleType

import jax

from . import _spec

TARGET = "zyfa_attention"
QUANTIZE_TARGET = "zyfa_quantize"
# Names of each custom call by the platform that it is lowered for and the platform
# whose kernel it takes.
_TARGETS = {
    TARGET: {(name, name): TARGET for name in _spec.KERNELS},
    QUANTIZE_TARGET: {(name, name): QUANTIZE_TARGET for name in ("rocm", "cuda")},
}
logger = logging.getLogger("zyfa_jax")

_REMEDY = {
    "cpu": "reinstall with a C++17 compiler present: pip install --force-reinstall .",
    "rocm": (
        "reinstall with its architecture named: pip install --force-reinstall "
        "-C cmake.define.ZYFA_ROCM_ARCHS=gfx950 . ; calls take the blockwise path"
    ),
    "cuda": (
        "reinstall with NVIDIA's compiler (nvcc 12.8 or newer) present, or "
        "fetched: ZYFA_CUDA_NVCC=wheels pip install --force-reinstall . ; calls take "
        "the blockwise path"
    ),
}
# Why a kernel that was built runs on none of the devices, and what can be done.
_OTHER_ARCHS = {
    "rocm": "the CMake option ZYFA_ROCM_ARCHS says for which kernels are built",
    "cuda": "the kernel is for Hopper alone, compute capability 9.0",
}


@dataclasses.dataclass(frozen=True)
class Backend:
    """What one platform offers in this process.

    Attributes:
      platform: JAX's name of the platform.
      kernel: whether a kernel for it was built and loaded.
      targets: instruction sets or architectures of the kernel, best first.
      present: whether JAX has a device of it in this process.
      detail: the path that calls of `attention` take, and whether `quantize` has a
        kernel; the remedy where none is built.
    """

    platform: str
    kernel: bool
    targets: tuple[str, ...]
    present: bool
    detail: str


@functools.cache
def load() -> ModuleType | None:
    """The extension with its targets registered, or None where it was not built."""
    try:
        extension = importlib.import_module("zyfa_jax._ext")
    except ImportError as error:
        logger.warning("the compiled extension did not load: %s", error)
        return None
    for name, registrations in (
        (TARGET, extension.registrations()),
        (QUANTIZE_TARGET, extension.quantize_registrations()),
    ):
        for platform, handlers in registrations.items():
            jax.ffi.register_ffi_target(name, handlers, platform=platform)
    return extension


def target(platform: str | None, kernel: str | None, call: str = TARGET) -> str | None:
    """The name by which code for a platform calls a platform's kernel."""
    return _TARGETS[call].get((platform or "", kernel or ""))


@contextlib.contextmanager
def stand_in(platform: str = "rocm") -> Iterator[None]:
    """Lets code for the CPU call a GPU's kernels, by implementation="rocm" or "cuda".

    For tests that put a library in the driver's place which reads and writes host
    memory.
    """
    extension = load()
    if extension is None:
        raise RuntimeError("the compiled extension is not here")
    handlers = extension.handlers_on_host()[platform]
    for call, handler in handlers.items():
        name = f"{call}_{platform}"
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
        _TARGETS[call]["cpu", platform] = name
    try:
        yield
    finally:
        for call in handlers:
            del _TARGETS[call]["cpu", platform]


def has_kernel(platform: str) -> bool:
    """Whether this process can run a kernel of ours on its devices of the platform."""
    built = _built(platform)
    return bool(built) and all(arch in built for arch in _archs(platform))


def _built(platform: str) -> tuple[str, ...]:
    """The instruction sets or architectures of the platform's kernel, best first."""
    extension = load()
    if extension is None:
        return ()
    built = {
        "cpu": extension.cpu_targets,
        "rocm": extension.rocm_archs,
        "cuda": extension.cuda_archs,
    }
    return tuple(built[platform]())


def _archs(platform: str) -> tuple[str, ...]:
    """The architectures of the platform's devices in this process, as far as known."""
    if platform == "cpu" or not is_present(platform):
        return ()
    known = (getattr(x, "compute_capability", "") for x in jax.devices(platform))
    archs = {_arch(platform, str(x)) for x in known}
    return tuple(sorted(archs - {""}))


def _arch(platform: str, capability: str) -> str:
    """What JAX calls "gfx950:xnack-" or "9.0", as kernels are named; "" if unknown."""
    if platform == "rocm":
        arch = capability.partition(":")[0]
        return arch if arch.startswith("gfx") else ""
    digits = capability.replace(".", "")
    return f"sm_{digits}" if digits.isdecimal() else ""


def is_present(platform: str) -> bool:
    """Whether JAX has a device of the platform in this process."""
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


def backends() -> tuple[Backend, ...]:
    """What each platform offers here: kernels, instruction sets, remedies.

    Starts JAX's backends, as `jax.devices()` does.

    Returns:
      One `Backend` for each of "cpu", "rocm" and "cuda".
    """
    return tuple(map(_backend, ("cpu", "rocm", "cuda")))


def _backend(platform: str) -> Backend:
    built = _built(platform)
    present = is_present(platform)
    return Backend(platform, bool(built), built, present, detail(platform))


def detail(platform: str) -> str:
    """The path that calls take on a platform, and the remedy without a kernel."""
    built = _built(platform)
    if not built:
        return f"no kernel: {_REMEDY[platform]}"
    if has_kernel(platform):
        limits = _spec.KERNELS[platform]
        text = f"kernel ({built[0]}) for {limits}; the blockwise path for others"
        if target(platform, platform, QUANTIZE_TARGET):
            text += f"; quantize: kernel for {_spec.KernelLimits().dims_text()}"
        return text
    return (
        f"kernel ({built[0]}), but the devices here are "
        f"{', '.join(_archs(platform))}: {_OTHER_ARCHS[platform]}; calls take the "
        "blockwise path"
    )
