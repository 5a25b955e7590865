"""The row kernel Xi Xi^T: best when there are few steps and many columns.

Rows t and t' have the product sum_j x_t-j . x_t'-j: a cumulative sum along the diagonals of X X^T.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .prefixes import adjoint
from .problem import Problem, Solution, eigenvectors
from .sequences import Bucket

WELL_KNOWN = 1e-2  # smaller singular values, to this part of the first, leave U less orthogonal than 1e-12
MOST = 2**34  # bytes of a kernel


def solve(problem: Problem) -> Solution:
    if problem.rows**2 * 8 > MOST:
        raise ValueError(
            f"solver='rows' would need a matrix of {problem.rows:,} x {problem.rows:,} for {problem.steps:,} steps, "
            "every sequence as long as the longest; use 'gram', 'fft' or 'auto'"
        )
    bucket = together(problem.whole(), problem)
    n, T, a = bucket.x.shape
    squares, V = eigenvectors(kernel(bucket, problem.horizon), problem)
    s, ended = squares.sqrt(), bucket.ended()
    if ended is not None:
        V[ended.flatten()] = 0  # an approximate eigenvector has something where the kernel is zero
    U = V.new_zeros(problem.horizon, a, len(s))
    adjoint(bucket, (V / s).view(n, T, -1), U)  # Xi^T V S^-1
    if len(s) and s[-1] < WELL_KNOWN * s[0]:
        U = torch.linalg.qr(U.flatten(0, 1)).Q.view(U.shape)
    return Solution(s, U)


def kernel(bucket: Bucket, horizon: int) -> Tensor:
    """Xi Xi^T, (n * T, n * T), zero for steps past an end."""
    n, T, _ = bucket.x.shape
    x = bucket.x.flatten(0, 1)
    K = (x @ x.T).view(n, T, n, T)
    for later, earlier in zip(K[:, 1:, :, 1:].unbind(1), K[:, :-1, :, :-1].unbind(1), strict=True):
        later += earlier
    for t in range(T - 1, horizon - 1, -1):  # what the horizon has left behind
        K[:, t, :, horizon:] -= K[:, t - horizon, :, :-horizon]
    K = K.view(n * T, n * T)
    ended = bucket.ended()
    if ended is not None:
        K[ended.flatten()] = 0
        K[:, ended.flatten()] = 0
    return K


def together(buckets: list[Bucket], problem: Problem) -> Bucket:
    """All sequences in one bucket."""
    if len(buckets) == 1:
        return buckets[0]
    xs = [x[:length] for b in buckets for x, length in zip(b.x, b.lengths.tolist(), strict=True)]
    if not xs:
        empty = torch.zeros(0, 1, problem.features, dtype=torch.float64, device=problem.device)
        return Bucket(empty, torch.zeros(0, dtype=torch.int64, device=problem.device), range(0))
    return Bucket(
        pad_sequence(xs, batch_first=True),
        torch.tensor([len(x) for x in xs], device=problem.device),
        range(len(xs)),
    )
