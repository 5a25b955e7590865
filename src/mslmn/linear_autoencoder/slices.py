"""The slice-wise truncated SVD of Pasa and Sperduti (2014), which the paper used.

Xi is read in slices of one lag, (L, a), the oldest first; each is put beside V S of those before, decomposed, and cut
to p columns again. Cutting loses what later slices would have needed, so the result is not the optimum.

    A = S^-1 V^T X,    B = S^-1 V^T R V S          R moves each row to the next step of its sequence
"""

import torch
from torch import Tensor

from .prefixes import adjoint
from .problem import Problem, Solution, rank
from .sequences import Bucket


def solve(problem: Problem) -> Solution:
    buckets = problem.whole()
    steps = [bucket.x.shape[0] * bucket.x.shape[1] for bucket in buckets]
    Y = torch.zeros(sum(steps), 0, dtype=torch.float64, device=problem.device)  # V S so far; padding has zero rows
    for lag in range(problem.horizon - 1, -1, -1):
        newer = torch.cat([lagged(bucket, lag).flatten(0, 1) for bucket in buckets])
        Y = torch.cat([Y, newer], 1)
        Q = torch.linalg.svd(Y.T @ Y).U  # as published; eigh would take half the time
        Y = Y @ Q[:, : problem.p]  # all p of them: the published code loses the last
    squares = Y.square().sum(0)
    found = rank(squares, len(squares))
    s = squares[:found].sqrt()
    V = (Y[:, :found] / s).split(steps)
    A = torch.zeros(found, problem.features, dtype=s.dtype, device=s.device)
    B = torch.zeros(found, found, dtype=s.dtype, device=s.device)
    U = torch.zeros(problem.horizon, problem.features, found, dtype=s.dtype, device=s.device)
    for bucket, rows in zip(buckets, V, strict=True):
        v = rows.view(*bucket.x.shape[:2], found)
        A += (v / s).flatten(0, 1).T @ bucket.x.flatten(0, 1)
        B += (v[:, 1:] / s).flatten(0, 1).T @ (v[:, :-1] * s).flatten(0, 1)
        adjoint(bucket, v / s, U)
    U = torch.linalg.qr(U.flatten(0, 1)).Q.view(U.shape)
    return Solution(s, U, (A, B))


def lagged(bucket: Bucket, lag: int) -> Tensor:
    """x_t-lag for each step, zeros before the start and past the end: (n, T, a)."""
    x, T = bucket.x, bucket.x.shape[1]
    result = torch.zeros_like(x)
    if lag < T:
        result[:, lag:] = x[:, : T - lag]
    ended = bucket.ended()
    return result if ended is None else result.masked_fill_(ended[..., None], 0)
