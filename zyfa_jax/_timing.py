"""Wall-clock medians of several calls, measured side by side in one process."""

import statistics
import time
from collections.abc import Callable, Mapping

import jax


def interleaved_medians(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    after_round: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Median seconds of each call, results awaited, after one untimed call of each.

    The calls take turns, so that a busy spell of the machine falls on all of them.
    `after_round` runs after each round, the untimed one included.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_index in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if round_index:
                seconds[name].append(time.perf_counter() - start)
        if after_round:
            after_round()
    return {name: statistics.median(times) for name, times in seconds.items()}
