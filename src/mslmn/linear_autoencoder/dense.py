"""The paper's equations as they stand: form Xi, take its SVD. The oracle of the other solvers."""

import torch
from torch import Tensor

from .problem import Problem, Solution
from .sequences import Bucket


def solve(problem: Problem) -> Solution:
    Xi = torch.cat([prefixes(bucket, problem.horizon) for bucket in problem.whole()])  # (L, n)
    s, Uh = torch.linalg.svd(Xi, full_matrices=False)[1:]
    s, Uh = s[: problem.p], Uh[: problem.p]
    found = int((s > max(Xi.shape) * torch.finfo(s.dtype).eps * s[0]).sum())
    return Solution(s[:found], Uh[:found].T.reshape(problem.horizon, problem.features, found))


def prefixes(bucket: Bucket, horizon: int) -> Tensor:
    """Xi of these sequences, (rows, h * a): [x_t, x_t-1, ..] for each step."""
    n, T, a = bucket.x.shape
    Xi = bucket.x.new_zeros(n, T, horizon, a)
    for j in range(min(horizon, T)):
        Xi[:, j:, j] = bucket.x[:, : T - j]
    rows = Xi.flatten(2)
    ended = bucket.ended()
    return rows.flatten(0, 1) if ended is None else rows[~ended]
