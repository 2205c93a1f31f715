"""The compiled extension: loaded once, at the first call that needs it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from types import ModuleType

import jax

TARGET = "zyfa_attention"
logger = logging.getLogger("zyfa_jax")

_REMEDY = {
    "cpu": "reinstall with a C++17 compiler present: pip install --force-reinstall .",
    "rocm": "this version holds no gfx950 kernel; calls take the blockwise path",
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
    for name, handler in extension.registrations().items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return extension


def has_kernel(platform: str) -> bool:
    """Whether this process can run a kernel of ours on the platform."""
    return platform == "cpu" and load() is not None


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
    extension = load() if has_kernel(platform) else None
    targets: tuple[str, ...] = tuple(extension.cpu_targets()) if extension else ()
    if targets:
        detail = (
            f"kernel ({targets[0]}) for head dims that are multiples of 8 up to 256; "
            "the blockwise path for others"
        )
    else:
        detail = f"no kernel: {_REMEDY[platform]}"
    return Backend(platform, bool(targets), targets, is_present(platform), detail)
