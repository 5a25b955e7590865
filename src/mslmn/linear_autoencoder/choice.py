"""Which solver suits which size: `solve` runs the one that was asked for, or the best."""

from collections.abc import Callable
from dataclasses import replace

import torch

from . import channels, dense, fft, gram, rows, slices
from .problem import Problem, Solution

ROWS = 3000  # most rows of a row kernel
COLUMNS = 4000  # most columns of a Gram matrix
CHANNELS = 16  # fewest features worth reducing

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
        return SOLVERS[name](problem), name
    P = channels.principal(problem.sequences, problem.horizon, problem.features)
    if solver == "auto" and 2 * P.shape[1] > problem.features:  # not worth it
        return fft.solve(problem), "fft"
    sequences = problem.sequences.prepared(lambda x: x @ P.to(x.dtype))
    reduced = replace(problem, sequences=sequences, features=P.shape[1])
    name = small(reduced)
    solution = SOLVERS[name](reduced)
    return Solution(solution.s, torch.einsum("ak,hkr->har", P, solution.U)), f"pca + {name}"


def small(problem: Problem) -> str:
    """The solver for this size, without a reduction of channels: an explicit matrix if a small one will do."""
    matrices = problem.max_memory / 8 / 3  # numbers in each of three: the matrix and what decomposing it takes
    n = problem.columns
    in_one_place = not (problem.sequences.streamed or problem.sequences.distributed)
    kernel = problem.rows if in_one_place else torch.inf
    if kernel <= min(ROWS, n) and kernel**2 <= matrices:
        return "rows"
    return "gram" if n <= COLUMNS and n**2 <= matrices else "fft"
