"""The column Gram matrix Xi^T Xi, from lagged products: best for short horizons, however long the sequences.

    G[j, k] = sum_t x_t-j x_t-k^T,    G[j+1, k+1] = G[j, k] - sum_i x_i,T-j x_i,T-k^T

so the first block row, a correlation, and the ends of the sequences give it all. Sums are in float64: in float32,
singular values under 3e-4 of the first are lost.
"""

import torch
from torch import Tensor

from .prefixes import Prefixes
from .problem import Problem, Solution, eigenvectors


def solve(problem: Problem) -> Solution:
    h, a = problem.horizon, problem.features
    values, vectors = eigenvectors(problem.sequences.reduce(matrix(problem)), problem)
    return Solution(values.sqrt(), vectors.view(h, a, -1))


def matrix(problem: Problem) -> Tensor:
    """Xi^T Xi, (n, n), of the sequences of this process."""
    h, a = problem.horizon, problem.features
    G = torch.zeros(h * a, h * a, dtype=torch.float64, device=problem.device)
    for bucket in problem.sequences.buckets(torch.float64):
        E = bucket.reversed_ends(h).flatten(1)
        G.addmm_(E.T, E)
    first = torch.zeros(h, a, a, dtype=torch.float64, device=problem.device)
    first[0] = torch.eye(a)
    first = Prefixes(problem.sequences, h, torch.float64, a).normal(first)  # (h, a, a): sum_t x_t-k x_t^T
    blocks = G.view(h, a, h, a)
    row = first.permute(2, 0, 1)  # (a, h, a): G[0, 0], G[0, 1], ..
    for j in range(h):
        following = row - blocks[j, :, j:]
        blocks[j, :, j:] = row
        row = following[:, :-1]
    for j in range(1, h):  # the lower half
        blocks[j, :, :j] = blocks[:j, :, j].permute(2, 0, 1)
    return G
