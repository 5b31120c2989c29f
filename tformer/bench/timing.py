"""How long something takes: warmed up, repeated, and told with its spread, for one run says little."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

ENOUGH_SECONDS = 0.5
"""Quick work is repeated for at least so long, whatever the number of repeats asked for."""

MOST_REPEATS = 1000


@dataclass(frozen=True)
class Timing:
    """Seconds of one repetition.

    Attributes:
        median, minimum: over all repetitions.
        spread: difference of the upper and the lower quartile, as a share of the median.
        repeats: how many there were.
    """

    median: float
    minimum: float
    spread: float
    repeats: int


def measure(
    work: Callable[[], object],
    *,
    repeats: int,
    most_seconds: float,
    warm_ups: int = 1,
    synchronise: Callable[[], object] = lambda: None,
) -> Timing:
    """Time `work`, at least `repeats` times and for `ENOUGH_SECONDS`.

    Args:
        most_seconds: after so long, warm-up included, no further repetition begins; one is always timed.
        warm_ups: repetitions beforehand, which are not counted.
        synchronise: waits until a device has finished what it was given.
    """
    began = time.perf_counter()
    for _ in range(warm_ups):
        work()
    synchronise()
    times: list[float] = []
    first = time.perf_counter()
    while True:
        start = time.perf_counter()
        work()
        synchronise()
        now = time.perf_counter()
        times.append(now - start)
        done = len(times) >= repeats and now - first >= ENOUGH_SECONDS
        if done or len(times) >= max(repeats, MOST_REPEATS) or now - began >= most_seconds:
            return summarise(times)


def summarise(times: list[float]) -> Timing:
    """Median, minimum and spread of at least one duration."""
    median = statistics.median(times)
    lower, _, upper = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return Timing(median, min(times), (upper - lower) / median if median else 0.0, len(times))
