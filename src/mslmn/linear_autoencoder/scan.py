"""The linear recurrence of the autoencoder, without a loop over all steps.

encoder:   m_t = A x_t + B m_t-1
decoder:   x_t = A^T m_t,   m_t-1 = B^T m_t
"""

import math

import torch
from torch import Tensor

SEGMENT = 2**14  # steps computed at a time: bounds the memory


def encode(x: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """Every state, (n, T, p), of the sequences x, (n, T, a)."""
    states = x.new_empty(*x.shape[:2], len(B))
    m = x.new_zeros(len(x), len(B))
    for start in range(0, x.shape[1], SEGMENT):
        part = slice(start, start + SEGMENT)
        states[:, part] = _segment(x[:, part], m, A, B)
        m = states[:, part][:, -1]
    return states


def last(x: Tensor, lengths: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """The state at each sequence's own end, (n, p)."""
    ends = x.new_empty(len(x), len(B))
    m = x.new_zeros(len(x), len(B))
    for start in range(0, x.shape[1], SEGMENT):
        states = _segment(x[:, start : start + SEGMENT], m, A, B)
        here = (lengths > start) & (lengths <= start + SEGMENT)
        ends[here] = states[here, lengths[here] - 1 - start]
        m = states[:, -1]
    return ends


def decode(states: Tensor, A: Tensor, B: Tensor, steps: int) -> Tensor:
    """What the states, (n, p), remember: (n, steps, a), newest first."""
    remembered, power = states[:, None], B
    while remembered.shape[1] < steps:
        remembered = torch.cat([remembered, remembered @ power], 1)
        power = power @ power
    return remembered[:, :steps] @ A


def _segment(x: Tensor, m: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """States of x from the state m on.

    About sqrt(T) blocks of sqrt(T) steps: all blocks take their steps side by side, each from zero, and then get what
    the block before hands on. B is a contraction, so its powers stay small.
    """
    n, T, _ = x.shape
    p = len(B)
    steps = max(1, math.isqrt(T))
    blocks = -(-T // steps)
    whole = x.new_zeros(n, blocks * steps, p)
    whole[:, :T] = x @ A.T
    states = whole.view(n, blocks, steps, p)
    for t in range(1, steps):
        states[:, :, t] += states[:, :, t - 1] @ B.T
    powers = _powers(B.T, steps)
    carries = x.new_empty(n, blocks, p)
    for block in range(blocks):
        carries[:, block] = m
        m = states[:, block, -1] + m @ powers[-1]
    for t in range(steps):
        states[:, :, t] += carries @ powers[t]
    return whole[:, :T]


def _powers(B: Tensor, count: int) -> Tensor:
    """B, B^2, .. B^count: (count, p, p)."""
    powers, power = B[None], B
    while len(powers) < count:
        powers = torch.cat([powers, powers @ power])
        power = power @ power
    return powers[:count]
