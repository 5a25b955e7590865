"""When each module fires: the only place where a modulus is computed.

Steps are counted from 1, as in the paper (x^1 .. x^l). Module k = 1..g fires at step t if

    t mod 2^(k-1) == 0

so module 1 fires at every step, and when a module fires every faster one does: the modules active at t
are 1..c(t), c(t) = min(g, 1 + trailing zeros of t). A *clock* is the number of steps already consumed;
the first step after clock c is t = c + 1.

Dimensions, in this package: T steps, B batch, I input size, H hidden size, M memory size per module,
g modules (fastest first), G = g*M, D directions, L layers.
"""

import operator

import torch
from torch import Tensor

MAX_MODULES = 63  # the slowest period, 2^62, still fits the int64 clock


def period(k: int) -> int:
    """Steps between two updates of module ``k = 1, 2, ..``: ``2^(k-1)``."""
    if k < 1:
        raise ValueError(f"modules are numbered from 1, the fastest, got module {k}; add 1 to an index from 0")
    return 1 << (k - 1)


def num_modules(length: int) -> int:
    """How many modules a sequence of ``length`` steps can use: every one whose period is at most ``length``.

    >>> num_modules(300), num_modules(97)  # the paper's two experiments
    (9, 7)
    """
    steps = operator.index(length)
    if steps < 1:
        raise ValueError(f"length must be at least 1 step, got {steps}; drop empty sequences first")
    return steps.bit_length()


def active(t: Tensor, g: int) -> Tensor:  # (...) int64 -> (..., g) bool
    """Which of ``g`` modules fire at the steps ``t``: entry ``[..., k-1]`` belongs to module k.

    >>> active(torch.tensor([1, 2, 4]), 3).int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    periods = torch.bitwise_left_shift(torch.ones_like(t)[..., None], torch.arange(g, device=t.device))
    return t[..., None] % periods == 0


def count(t: Tensor, g: int) -> Tensor:  # (...) int64 -> (...) int64
    """How many of ``g`` modules fire at the steps ``t``: c(t), the fastest ones."""
    return active(t, g).sum(-1)


def firing_steps(k: int, length: int, clock: int = 0) -> range:
    """The positions ``0..length-1`` of a sequence at which module ``k`` fires, after ``clock`` steps.

    A ``range``, so it selects, counts and strides: ``h[firing_steps(k, T)]`` is the sequence that
    module k sees.

    >>> list(firing_steps(2, 6)), list(firing_steps(2, 6, clock=1))
    ([1, 3, 5], [0, 2, 4])
    """
    if length < 0:
        raise ValueError(f"length must not be negative, got {length}")
    p = period(k)
    return range((-clock - 1) % p, length, p)
