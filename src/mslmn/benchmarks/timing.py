"""Honest times: candidates take turns in one process, and the median of many rounds counts."""

import ctypes
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")
LEAST_SECONDS = 2e-2  # of one measurement: shorter calls are repeated within it, as in training, where caches stay warm


class Disagreement(RuntimeError):
    """What was to be timed gives wrong numbers."""


def alternate(candidates: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds per call of each candidate, measured in turn, ``repeats`` rounds.

    Each round is in another order: a call pays for the caches and the heap that the one before it leaves.
    """
    calls = {name: _calls(candidate) for name, candidate in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    shuffled = random.Random(0)
    for _ in range(repeats):
        for name, candidate in shuffled.sample(list(candidates.items()), len(candidates)):
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


def extra_memory(call: Callable[[], Result]) -> tuple[Result, int | None]:
    """What a call returns, and by how many bytes it raised the peak of the resident memory; None but on Linux."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is taken now
        clear.write_text("5")  # the peak starts from here
        before = _kilobytes(status.read_text(), "VmRSS")
    except (OSError, AttributeError):
        return call(), None
    result = call()
    return result, 1024 * max(0, _kilobytes(status.read_text(), "VmHWM") - before)


def _kilobytes(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {name}")
    return int(found[1])
