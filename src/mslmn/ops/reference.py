"""The recurrences as plain loops: the definition that every faster backend is tested against.

    h_t   = tanh(Wxh x_t + b_h + sum_i Wmh[i] m_i,t-1)
    m_k,t = Whm[k] h_t + b_m[k] + sum_{i>=k} Wmm[i->k] m_i,t-1    if module k fires at t, else m_k,t-1

and for the Clockwork RNN, whose weights go by the same names here,

    m_k,t = tanh(Whm[k] x_t + b_m[k] + sum_{i>=k} Wmm[i->k] m_i,t-1)    if module k fires at t, else m_k,t-1

Any float dtype; gradients are autograd's. Modules are numbered from 0, fastest first; sums over modules are taken
slowest first, so that a new slowest module with zero weights changes no bit. Never optimised: what is fast lives
beside it.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import clock as clocks
from .weights import Weights


def run(
    x: Tensor,  # (T, B, I), or packed (N, I)
    m: Tensor,  # (B, G): initial memory
    clock: Tensor,  # (B,) int64: steps consumed before the first one here
    weights: Weights,
    batch_sizes: Sequence[int] | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Memories, hidden states and last memories, walking the steps of a batch, each row at its own clock.

    In a packed batch, longest sequence first, the rows that have a step t are the first
    ``batch_sizes[t]``. Forwards, rows leave when they end and keep their last memory; in reverse, they
    join at their own last step with their initial one. Either way the other rows stand still.
    """
    step = clockwork_step if weights.Wxh is None else mslmn_step
    steps = x.unbind(0) if batch_sizes is None else x.split(list(batch_sizes))
    memory, hidden = [], []
    for x_t in reversed(steps) if reverse else steps:
        n = x_t.shape[0]
        clock = torch.cat([clock[:n] + 1, clock[n:]])
        h, modules = step(x_t, m[:n].split(weights.M, dim=-1), clocks.active(clock[:n], weights.g), weights)
        m_t = torch.cat(modules, dim=-1)
        m = torch.cat([m_t, m[n:]])
        memory.append(m_t)
        hidden.append(m_t if h is None else h)
    if reverse:
        memory.reverse()
        hidden.reverse()
    join = torch.stack if batch_sizes is None else torch.cat
    return join(memory), join(hidden), m


def mslmn_step(
    x: Tensor,  # (B, I)
    m: Sequence[Tensor],  # g of (B, M)
    fires: Tensor,  # (B, g)
    w: Weights,
) -> tuple[Tensor | None, list[Tensor]]:
    """h and the modules of the MultiScale Linear Memory Network after a step (one module: the LMN)."""
    a = F.linear(x, w.Wxh, w.b_h)  # type: ignore[arg-type]  # it has Wxh
    h = torch.tanh(a + slowest_first([m[i] @ w.Wmh[i].T for i in range(w.g)]))
    received = send(m, w.Wmm)
    new = [F.linear(h, w.Whm[k], w.b_m[k] if w.has_bias else None) + received[k] for k in range(w.g)]
    return h, hold(fires, new, m)


def clockwork_step(x: Tensor, m: Sequence[Tensor], fires: Tensor, w: Weights) -> tuple[Tensor | None, list[Tensor]]:
    """The modules of the Clockwork RNN after a step; they are its hidden state."""
    received = send(m, w.Wmm)
    new = [F.linear(x, w.Whm[k], w.b_m[k] if w.has_bias else None) + received[k] for k in range(w.g)]
    return None, hold(fires, [torch.tanh(n) for n in new], m)


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
