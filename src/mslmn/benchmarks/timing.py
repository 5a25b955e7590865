"""Honest times: candidates take turns in one process, and the median of many rounds counts."""

import ctypes
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

Result = TypeVar("Result")
Clock = Callable[[Callable[[], object], int], float]  # seconds that a call takes, so many times one after the other
LEAST_SECONDS = 2e-2  # of one measurement: shorter calls are repeated within it, as in training, where caches stay warm


class Disagreement(RuntimeError):
    """What was to be timed gives wrong numbers."""


def wall_clock(call: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - start


def event_clock(call: Callable[[], object], times: int) -> float:
    """Between two events on the GPU: its own time, or the host's where that is more."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def alternate(
    candidates: Mapping[str, Callable[[], object]],
    repeats: int,
    clock: Clock = wall_clock,
    least: float | None = None,  # seconds of one measurement; LEAST_SECONDS by default
) -> dict[str, float]:
    """Median seconds per call of each candidate, measured in turn, ``repeats`` rounds.

    Each round is in another order: a call pays for the caches and the heap that the one before it leaves.
    """
    least = LEAST_SECONDS if least is None else least
    calls = {name: _calls(candidate, clock, least) for name, candidate in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    shuffled = random.Random(0)
    for _ in range(repeats):
        for name, candidate in shuffled.sample(list(candidates.items()), len(candidates)):
            times[name].append(clock(candidate, calls[name]) / calls[name])
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _calls(candidate: Callable[[], object], clock: Clock, least: float) -> int:
    """Warm up, and find how many calls make a measurement."""
    for _ in range(3):
        candidate()
    return max(1, round(least / max(clock(candidate, 1), 1e-9)))


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
