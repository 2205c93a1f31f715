"""Times of calls that take turns: of their kernels alone where CUPTI gives them."""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .calls import Call

Timer = Callable[[Call, int], float]
LEAST_SECONDS = 0.003
"""Calls are repeated back to back to take that long together."""


def device_timer(platform: str) -> tuple[Timer, str]:
    """What takes the seconds of each of several calls back to back, and its name."""
    if platform == "cuda":
        try:
            cupti = importlib.import_module("jax._src.lib.mosaic_gpu")._mosaic_gpu_ext
            timer = functools.partial(kernel_seconds, cupti)
            x = jnp.ones(1024)
            jax.block_until_ready(x + 1)
            if timer(lambda: x + 1, 2) > 0:
                return timer, "CUPTI, kernels alone"
        except Exception:  # another profiler may hold it
            pass
    return wall_seconds, "the host's clock"


def kernel_seconds(cupti: Any, call: Call, times: int) -> float:
    cupti._cupti_init()
    try:
        jax.block_until_ready([call() for _ in range(times)])
    finally:
        kernels = cupti._cupti_get_timings(False)
    return sum(ms for _, ms in kernels) / 1e3 / times


def wall_seconds(call: Call, times: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready([call() for _ in range(times)])
    return (time.perf_counter() - start) / times


def interleaved_medians(
    calls: Mapping[Any, Call], repeats: int, timer: Timer, after_round: Call
) -> dict[Any, float]:
    """Median seconds of each call; the calls take turns, the first round is untimed."""
    times = {}
    for key, call in calls.items():
        jax.block_until_ready(call())
        once = max(wall_seconds(call, 1), 1e-6)
        times[key] = min(max(round(LEAST_SECONDS / once), 1), 50)
    seconds: dict[Any, list[float]] = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            seconds[key].append(timer(call, times[key]))
        after_round()
    return {key: statistics.median(x) for key, x in seconds.items()}
