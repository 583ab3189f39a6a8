"""Time first calls and later runs of several implementations, side by side."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: the first call (trace, compile, run), and the median of later runs."""

    first_call: float
    run: float


def measure(
    contenders: Mapping[str, Callable[[], Any]], runs: int
) -> tuple[dict[str, Timing], dict[str, Any]]:
    """Time each contender's first call, then `runs` rounds in which they take turns.

    Taking turns spreads other load of the machine evenly. A contender must block until
    its results are ready.

    Returns:
        The times, and the results of the first calls, by name.
    """
    first: dict[str, float] = {}
    results: dict[str, Any] = {}
    for name, call in contenders.items():
        first[name], results[name] = _timed(call)
    later: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(runs):
        for name, call in contenders.items():
            later[name].append(_timed(call)[0])
    times = {
        name: Timing(first[name], statistics.median(later[name])) for name in contenders
    }
    return times, results


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result
