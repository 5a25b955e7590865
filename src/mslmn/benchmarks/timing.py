"""Honest times: candidates take turns in one process, and the median of many rounds counts."""

import statistics
import time
from collections.abc import Callable, Mapping

LEAST_SECONDS = 2e-3  # of one measurement: shorter calls are repeated within it


def alternate(candidates: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds per call of each candidate, measured in turn, ``repeats`` rounds."""
    calls = {name: _calls(candidate) for name, candidate in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, candidate in candidates.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                candidate()
            times[name].append((time.perf_counter() - start) / calls[name])
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _calls(candidate: Callable[[], object]) -> int:
    """Warm up, and find how many calls make a measurement."""
    for _ in range(3):
        candidate()
    start = time.perf_counter()
    candidate()
    return max(1, round(LEAST_SECONDS / max(time.perf_counter() - start, 1e-9)))
