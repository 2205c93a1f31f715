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
    QUANTIZE_TARGET: {("rocm", "rocm"): QUANTIZE_TARGET},
}
logger = logging.getLogger("zyfa_jax")

_REMEDY = {
    "cpu": "reinstall with a C++17 compiler present: pip install --force-reinstall .",
    "rocm": (
        "reinstall with its architecture named: pip install --force-reinstall "
        "-C cmake.define.ZYFA_ROCM_ARCHS=gfx950 . ; calls take the blockwise path"
    ),
    "cuda": "this version holds no Hopper kernel; calls take the blockwise path",
}


@dataclasses.dataclass(frozen=True)
class Backend:
    """What one platform offers in this process.

    Attributes:
      platform: JAX's name of the platform.
      kernel: whether a kernel for it was built and loaded.
      targets: instruction sets or architectures of the kernel, best first.
      present: whether JAX has a device of it in this process.
      detail: the path that calls take, and the remedy where no kernel is built.
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
def stand_in() -> Iterator[None]:
    """Lets code for the CPU call the ROCm kernels, by implementation="rocm".

    For tests that put a library in HIP's place which reads and writes host memory.
    """
    extension = load()
    if extension is None:
        raise RuntimeError("the compiled extension is not here")
    for call, handler in (
        (TARGET, extension.rocm_handler_on_host()),
        (QUANTIZE_TARGET, extension.rocm_quantize_handler_on_host()),
    ):
        name = f"{call}_rocm"
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
        _TARGETS[call]["cpu", "rocm"] = name
    try:
        yield
    finally:
        for names in _TARGETS.values():
            del names["cpu", "rocm"]


def has_kernel(platform: str) -> bool:
    """Whether this process can run a kernel of ours on its devices of the platform."""
    built = _built(platform)
    return bool(built) and all(arch in built for arch in _archs(platform))


def _built(platform: str) -> tuple[str, ...]:
    """The instruction sets or architectures of the platform's kernel, best first."""
    extension = load()
    if extension is None:
        return ()
    if platform == "cpu":
        return tuple(extension.cpu_targets())
    return tuple(extension.rocm_archs()) if platform == "rocm" else ()


def _archs(platform: str) -> tuple[str, ...]:
    """The architectures of the platform's devices in this process, as far as known."""
    if platform != "rocm" or not is_present(platform):
        return ()
    known = (getattr(x, "compute_capability", "") for x in jax.devices(platform))
    archs = {str(x).partition(":")[0] for x in known}
    return tuple(sorted(x for x in archs if x.startswith("gfx")))


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
    if not built:
        detail = f"no kernel: {_REMEDY[platform]}"
    elif has_kernel(platform):
        limits = _spec.KERNELS[platform]
        detail = f"kernel ({built[0]}) for {limits}; the blockwise path for others"
    else:
        detail = (
            f"kernel ({built[0]}), but the devices here are "
            f"{', '.join(_archs(platform))}: the CMake option ZYFA_ROCM_ARCHS says for "
            "which kernels are built; calls take the blockwise path"
        )
    return Backend(platform, bool(built), built, is_present(platform), detail)
