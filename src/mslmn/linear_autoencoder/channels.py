"""Fewer features first: principal components of the channels, then any solver, then back.

The columns of Xi that belong to one lag are mapped alike, so with P (a, k) orthonormal, U = P U' is orthonormal too. A
step counts as often as it occurs in Xi, so the share of energy kept is that of Xi.
"""

import torch
from torch import Tensor

from .sequences import Sequences

SHARE = 0.99  # of the energy


def principal(sequences: Sequences, horizon: int, features: int) -> Tensor:
    """P (a, k), orthonormal: the fewest channels that keep `SHARE` of the energy of Xi."""
    C = torch.zeros(features, features, dtype=torch.float64, device=sequences.device)
    for bucket in sequences.buckets():
        x, lengths = bucket.x, bucket.lengths
        left = lengths[:, None] - torch.arange(x.shape[1], device=x.device)  # steps to the end: prefixes that have it
        weight = left.clamp(0, horizon).to(x.dtype).sqrt()[..., None]
        weighted = (x * weight).flatten(0, 1)
        C += (weighted.T @ weighted).double()
    values: Tensor
    vectors: Tensor
    values, vectors = torch.linalg.eigh(sequences.reduce(C))
    share = values.flip(0).clamp(min=0).cumsum(0)
    k = min(int((share < SHARE * share[-1]).sum()) + 1, features)
    return vectors[:, -k:].flip(1)
