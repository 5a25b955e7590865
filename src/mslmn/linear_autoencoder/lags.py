"""What states say about each lag of the past: a decoder fitted to them, and errors."""

import torch
from torch import Tensor

from . import scan
from .prefixes import adjoint
from .sequences import Bucket, Sequences


def fit(sequences: Sequences, A: Tensor, B: Tensor, horizon: int) -> Tensor:
    """D (h, a, p), which reads each lag from a state, by least squares over all rows of Xi.

    The tied decoder is optimal for ideal states, U^T xi; recursive ones differ. D = Xi^T M (M^T M)^-1, with the states
    M, is U again where they do not. One pass, one all-reduce.
    """
    p, a = A.shape
    sums = A.new_zeros(horizon * a + p, p)  # Xi^T M, and M^T M below
    products, G = sums[: horizon * a].view(horizon, a, p), sums[horizon * a :]
    for bucket in sequences.buckets(A.dtype, width=p):
        states, ended = scan.encode(bucket.x, A, B), bucket.ended()
        if ended is not None:
            states.masked_fill_(ended[..., None], 0)
        adjoint(bucket, states, products)
        G += states.flatten(0, 1).T @ states.flatten(0, 1)
    sequences.reduce(sums)
    inverse: Tensor = torch.linalg.pinv(G, hermitian=True)
    return products @ inverse


def errors_at_ends(bucket: Bucket, decoded: Tensor) -> Tensor:
    """(lags, 2): squared errors of what the last states were decoded to, (n, lags, a), and squares of what was."""
    steps = decoded.shape[1]
    past = bucket.reversed_ends(steps)
    exists = torch.arange(steps, device=past.device) < bucket.lengths[:, None]
    wrong = (decoded - past).masked_fill(~exists[..., None], 0)
    return torch.stack([_squares(wrong.transpose(0, 1)), _squares(past.transpose(0, 1))], 1)


def errors_everywhere(bucket: Bucket, states: Tensor, D: Tensor) -> Tensor:
    """(lags, 2): the same over every state, (n, T, p), decoded by D, (p, lags, a)."""
    x, ended = bucket.x, bucket.ended()
    if ended is not None:
        states = states.masked_fill(ended[..., None], 0)
    sums = []
    for j in range(D.shape[1]):
        past = x[:, : x.shape[1] - j]
        if ended is not None:
            past = past.masked_fill(ended[:, j:, None], 0)
        sums.append(torch.stack([_squares((states[:, j:] @ D[:, j] - past)[None]), _squares(past[None])], 1))
    return torch.cat(sums)


def _squares(x: Tensor) -> Tensor:
    squares: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64).square()  # no float32 overflow
    return squares
