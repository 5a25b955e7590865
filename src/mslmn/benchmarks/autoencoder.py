"""LinearAutoencoder against the slice-wise algorithm that the paper used, one thread, in one run.

A time is reported only if the sequences decoded from their states are no worse than those of the slices.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..linear_autoencoder import LinearAutoencoder
from .machine import machine
from .timing import Disagreement, extra_memory

OSCILLATORS = 24
NOISE = 0.1


@dataclass(frozen=True)
class Case:
    """n sequences of T steps and a features, p components."""

    n: int
    T: int
    a: int
    p: int
    horizon: int | None = None
    wanted: float | None = None  # times faster than slices
    minutes: bool = False  # of slices

    @property
    def name(self) -> str:
        return f"{self.n}x{self.T}x{self.a} p{self.p}" + (f" h{self.horizon}" if self.horizon else "")


CASES = (
    Case(1, 300, 13, 50, wanted=15),
    Case(175, 90, 13, 50, wanted=8),
    Case(1, 10_000, 8, 32, wanted=35),
    Case(20, 600, 144, 100, wanted=12),
    Case(312, 600, 144, 100, wanted=50, minutes=True),
    Case(1, 1_000_000, 4, 32, horizon=500),
)


@dataclass(frozen=True)
class Row:
    """What was measured of a case: seconds, bytes beside the data, relative error of what is decoded."""

    case: str
    solver: str
    seconds: float
    memory: int | None
    error: float
    slices_seconds: float | None
    slices_error: float | None
    wanted: float | None

    @property
    def ratio(self) -> float | None:
        return None if self.slices_seconds is None else self.slices_seconds / self.seconds


def run(repeats: int, full: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Every measurement, ready for JSON; raises `Disagreement` rather than time a worse result."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [measure(case, repeats, full, progress) for case in CASES]
    finally:
        torch.set_num_threads(before)
    return {"machine": machine(), "rows": [{**asdict(row), "ratio": row.ratio} for row in rows]}


def measure(case: Case, repeats: int, full: bool, progress: Callable[[str], None]) -> Row:
    X = oscillators(case)
    progress(case.name)
    ours, memory = extra_memory(lambda: fit(case, X, "auto"))
    error = decoded_error(ours, X)
    slices_seconds, slices_error = None, None
    seconds: list[float] = []
    if case.wanted is not None and (full or not case.minutes):
        progress(f"{case.name}: slices")
        slow: list[float] = []
        for result in _in_turns(case, X, repeats, seconds, slow):
            slices_error = decoded_error(result, X)
            if error > slices_error:
                raise Disagreement(
                    f"{case.name}: the error is {error:.4f} with {ours.solver_} and {slices_error:.4f} with slices; "
                    "no time is reported for a worse result"
                )
        slices_seconds = statistics.median(slow)
    else:
        check_energy(case, X, ours)
        seconds = [_timed(lambda: fit(case, X, "auto"))[0] for _ in range(3)]
    return Row(
        case.name, ours.solver_, statistics.median(seconds), memory, error, slices_seconds, slices_error, case.wanted
    )


def _in_turns(
    case: Case, X: Tensor, repeats: int, ours: list[float], slices: list[float]
) -> Iterator[LinearAutoencoder]:
    """Time both in turns, slices as often as takes seconds; gives what slices found first."""
    for turn in range(repeats):
        if turn < 3 or sum(ours) + sum(slices) < 10:
            ours.append(_timed(lambda: fit(case, X, "auto"))[0])
        if turn == 0 or sum(slices) < 5:
            seconds, result = _timed(lambda: fit(case, X, "slices"))
            slices.append(seconds)
            if turn == 0:
                yield result


def check_energy(case: Case, X: Tensor, ours: LinearAutoencoder) -> None:
    """Where slices are too slow: another solver keeps as much of the energy."""
    other = fit(case, X, "fft")
    kept, expected = (float(m.singular_values_.square().sum() / m.energy_) for m in (ours, other))
    if kept < 0.99 * expected:
        raise Disagreement(
            f"{case.name}: {kept:.4f} of the energy is kept with {ours.solver_}, {expected:.4f} with fft; "
            "no time is reported for a worse result"
        )


def fit(case: Case, X: Tensor, solver: str) -> LinearAutoencoder:
    return LinearAutoencoder(case.p, horizon=case.horizon, solver=solver, random_state=0).fit(X)


def decoded_error(autoencoder: LinearAutoencoder, X: Tensor) -> float:
    """|decoded - x| / |x| of every sequence, decoded from its last state as far as the horizon."""
    steps = autoencoder.horizon_
    decoded = autoencoder.inverse_transform(autoencoder.transform(X), steps)
    past = X[:, -steps:]
    return float((decoded - past).norm() / past.norm())


def oscillators(case: Case) -> Tensor:
    """(n, T, a), float64: damped oscillators, struck now and then, seen through a random mixture, and noise."""
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    k, steps = OSCILLATORS, min(case.T, 3000)  # by then the slowest has died away
    pole = torch.exp(torch.complex(-(10 ** -(0.5 + 2 * uniform(k))), 0.01 + 0.5 * uniform(k)))
    response = (pole ** torch.arange(steps)[:, None]).real  # (steps, k)
    mixture = normal(k, case.a)
    x = torch.empty(case.n, case.T, case.a, dtype=torch.float64)
    for i in range(case.n):
        struck = normal(case.T, k) * (uniform(case.T, k) < 0.05)
        length = case.T + steps
        spectrum = torch.fft.rfft(struck, n=length, dim=0) * torch.fft.rfft(response, n=length, dim=0)
        x[i] = torch.fft.irfft(spectrum, n=length, dim=0)[: case.T] @ mixture
    return x / x.std() + NOISE * normal(case.n, case.T, case.a)


def _timed(call: Callable[[], LinearAutoencoder]) -> tuple[float, LinearAutoencoder]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result
