"""Which solver suits which size: `solve` runs the one that was asked for, or the best."""

from collections.abc import Callable
from dataclasses import replace

import torch

from . import channels, dense, fft, gram, rows, slices
from .problem import LOSSLESS, Problem, Solution

ROWS = 3000  # most rows of a row kernel
COLUMNS = 4000  # most columns of a Gram matrix
CHANNELS = 16  # fewest features worth reducing
DEPTH = 1e-5  # singular values below this part of the first suffer from being squared
DENSE = 10**9  # multiply-adds of the SVD of Xi that is then worth its time

SOLVERS: dict[str, Callable[[Problem], Solution]] = {
    "dense": dense.solve,
    "slices": slices.solve,
    "rows": rows.solve,
    "gram": gram.solve,
    "fft": fft.solve,
}
NAMES = ("auto", *SOLVERS, "pca")


def solve(problem: Problem, solver: str) -> tuple[Solution, str]:
    """The solution, and who found it."""
    if solver in SOLVERS:
        return SOLVERS[solver](problem), solver
    name = small(problem)
    if solver == "auto" and (name != "fft" or problem.features < CHANNELS):
        return _deep(problem, SOLVERS[name](problem), name)
    P = channels.principal(problem.sequences, problem.horizon, problem.features)
    if solver == "auto" and 2 * P.shape[1] > problem.features:  # not worth it
        return _deep(problem, fft.solve(problem), "fft")
    sequences = problem.sequences.prepared(lambda x: x @ P.to(x.dtype))
    reduced = replace(problem, sequences=sequences, features=P.shape[1])
    name = small(reduced)
    solution = SOLVERS[name](reduced)
    if solver == "auto" and solution.s.square().sum() > channels.SHARE * LOSSLESS * problem.energy:
        return _deep(problem, fft.solve(problem), "fft")  # these components could keep what the channels lost
    return Solution(solution.s, torch.einsum("ak,hkr->har", P, solution.U)), f"pca + {name}"


def _deep(problem: Problem, solution: Solution, name: str) -> tuple[Solution, str]:
    """The same, or from Xi itself, if squares hide what is small, and Xi is small."""
    s, size = solution.s, problem.steps * problem.columns
    deep = len(s) < problem.most or s[-1] < DEPTH * s[0]
    fits = size <= numbers(problem) and size * min(problem.steps, problem.columns) <= DENSE
    if deep and fits and not problem.sequences.distributed:
        return dense.solve(problem), "dense"
    return solution, name


def numbers(problem: Problem) -> float:
    """In each of three matrices that fit the memory: one, and what decomposing it takes."""
    return problem.max_memory / 8 / 3


def small(problem: Problem) -> str:
    """The solver for this size, without a reduction of channels: an explicit matrix if a small one will do."""
    n = problem.columns
    in_one_place = not (problem.sequences.streamed or problem.sequences.distributed)
    kernel = problem.rows if in_one_place else torch.inf
    if kernel <= min(ROWS, n) and kernel**2 <= numbers(problem):
        return "rows"
    return "gram" if n <= COLUMNS and n**2 <= numbers(problem) else "fft"
