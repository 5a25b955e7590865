"""The recurrences as plain loops: the definition that every faster backend is tested against.

    h_t   = tanh(Wxh x_t + b_h + sum_i Wmh[i] m_i,t-1)
    m_k,t = Whm[k] h_t + b_m[k] + sum_{i>=k} Wmm[i->k] m_i,t-1    if module k fires at t, else m_k,t-1

The part that needs no recurrence, ``a_t = Wxh x_t + b_h``, is one product for all steps and comes in as
``a``. Any float dtype; gradients are autograd's. Modules are numbered from 0 here, fastest first; sums
over modules are taken slowest first, so that a new slowest module with zero weights changes no bit.
Never optimised: what is fast lives beside it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import clock as clocks


class Run(NamedTuple):
    """What a pass over a batch leaves behind, every part differentiable."""

    memory: Tensor  # the memory after each step: (T, B, G), or packed (N, G)
    hidden: Tensor  # h at each step: (T, B, H), or packed (N, H)
    last: Tensor  # (B, G): the memory of each sequence after its own last step


def mslmn(
    a: Tensor,  # (T, B, H), or packed (N, H): Wxh x_t + b_h
    m: Tensor,  # (B, G): initial memory
    clock: Tensor,  # (B,) int64: steps consumed before the first one here
    Wmh: Sequence[Tensor],  # g of (H, M)
    Whm: Sequence[Tensor],  # g of (M, H)
    Wmm: Sequence[Tensor],  # module j of g: (jM, M), what it sends to modules 1..j
    b_m: Sequence[Tensor] | None,  # g of (M,)
    batch_sizes: Sequence[int] | None = None,
    reverse: bool = False,
) -> Run:
    """The MultiScale Linear Memory Network (one module: the LMN)."""
    g = len(Whm)

    def step(a_t: Tensor, m: Sequence[Tensor], fires: Tensor) -> tuple[Tensor, list[Tensor]]:
        h = torch.tanh(a_t + slowest_first([m[i] @ Wmh[i].T for i in range(g)]))
        received = send(m, Wmm)
        new = [h @ Whm[k].T + received[k] for k in range(g)]
        if b_m is not None:
            new = [new[k] + b_m[k] for k in range(g)]
        return h, hold(fires, new, m)

    return run(step, a, m, clock, g, batch_sizes, reverse)


def clockwork(
    a: Tensor,  # (T, B, G), or packed (N, G): Wxh[k] x_t + b_h[k] of every module k
    m: Tensor,  # (B, G): initial state
    clock: Tensor,  # (B,) int64
    Whh: Sequence[Tensor],  # module j of g: (jM, M), what it sends to modules 1..j
    batch_sizes: Sequence[int] | None = None,
    reverse: bool = False,
) -> Run:
    """The Clockwork RNN: ``m_k,t = tanh(Wxh[k] x_t + b_h[k] + sum_{i>=k} Whh[i->k] m_i,t-1)`` if k fires.

    Its modules are its hidden state: ``hidden`` and ``memory`` are the same numbers.
    """
    g, M = len(Whh), Whh[0].shape[1]

    def step(a_t: Tensor, m: Sequence[Tensor], fires: Tensor) -> tuple[Tensor, list[Tensor]]:
        received = send(m, Whh)
        new = [torch.tanh(a_k + received[k]) for k, a_k in enumerate(a_t.split(M, dim=-1))]
        held = hold(fires, new, m)
        return torch.cat(held, dim=-1), held

    return run(step, a, m, clock, g, batch_sizes, reverse)


def send(m: Sequence[Tensor], Wmm: Sequence[Tensor]) -> list[Tensor]:
    """``sum_{i>=k} Wmm[i->k] m_i`` for every module k, slowest sender first."""
    g, M = len(m), m[0].shape[-1]
    total = m[-1] @ Wmm[-1].T  # what the slowest sends to all
    received = [total[:, (g - 1) * M :]]
    for j in reversed(range(g - 1)):
        total = total[:, : (j + 1) * M] + m[j] @ Wmm[j].T
        received.insert(0, total[:, j * M :])
    return received


def slowest_first(terms: Sequence[Tensor]) -> Tensor:
    total = terms[-1]
    for term in reversed(terms[:-1]):
        total = total + term
    return total


def hold(fires: Tensor, new: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
    """The new memory of the modules that fire (B, g), the old one of the others."""
    return [torch.where(fires[:, k : k + 1], new[k], old[k]) for k in range(len(new))]


def run(
    step: Callable[[Tensor, Sequence[Tensor], Tensor], tuple[Tensor, list[Tensor]]],
    a: Tensor,
    m: Tensor,
    clock: Tensor,
    g: int,
    batch_sizes: Sequence[int] | None,
    reverse: bool,
) -> Run:
    """Walk the steps of a batch, each row at its own clock.

    In a packed batch, longest sequence first, the rows that have a step t are the first
    ``batch_sizes[t]``. Forwards, rows leave when they end and keep their last memory; in reverse, they
    join at their own last step with their initial one. Either way the other rows stand still.
    """
    ragged = batch_sizes is not None
    steps = a.split(list(batch_sizes)) if batch_sizes is not None else a.unbind(0)
    M = m.shape[-1] // g
    memory, hidden = [], []
    for a_t in reversed(steps) if reverse else steps:
        n = a_t.shape[0]
        clock = torch.cat([clock[:n] + 1, clock[n:]])
        h, modules = step(a_t, m[:n].split(M, dim=-1), clocks.active(clock[:n], g))
        m_t = torch.cat(modules, dim=-1)
        m = torch.cat([m_t, m[n:]])
        memory.append(m_t)
        hidden.append(h)
    if reverse:
        memory.reverse()
        hidden.reverse()
    join = torch.cat if ragged else torch.stack
    return Run(join(memory), join(hidden), m)
