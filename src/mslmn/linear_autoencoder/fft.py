"""Block Lanczos on Xi^T Xi, multiplied by FFT: the solver for everything large.

It is a sum over sequences: data that are larger than memory are read again in each pass, and processes exchange one
all-reduce a pass. In float32, unless a tight tolerance is asked for or the wanted spectrum falls too deep.
"""

import torch
from torch import Tensor

from .prefixes import Prefixes
from .problem import SINGLE_TOL, Problem, Solution, block_width, rank


def solve(problem: Problem) -> Solution:
    if problem.tol >= SINGLE_TOL:
        squares, U = _iterate(problem, torch.float32)
        if problem.single_will_do(squares):
            return _solution(problem, squares, U)
    return _solution(problem, *_iterate(problem, torch.float64))


def _iterate(problem: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    n, p, h, a = problem.columns, problem.most, problem.horizon, problem.features
    width = min(n, block_width(p))
    itemsize = torch.finfo(dtype).bits // 8
    vectors = int(problem.max_memory / 2 / (n * itemsize))
    operator = Prefixes(problem.sequences, h, dtype, width, problem.max_memory / 4)

    def multiply(block: Tensor) -> Tensor:
        image = operator.normal(block.reshape(h, a, -1))
        return problem.sequences.reduce(image).view(n, -1)

    start = problem.random(n, width, dtype)
    return problem.largest(multiply, start, most=min(vectors, 10 * p))


def _solution(problem: Problem, squares: Tensor, U: Tensor) -> Solution:
    found = rank(squares, problem.columns)
    U = U[:, :found].double()
    U = torch.linalg.solve_triangular(torch.linalg.cholesky(U.T @ U), U.T, upper=False).T  # orthonormal to float64
    return Solution(squares[:found].sqrt(), U.view(problem.horizon, problem.features, found))
