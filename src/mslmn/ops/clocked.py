"""The clocked recurrence and its adjoint in torch operations: any device, no compiler, no graph per step.

The algorithm of cpu.cpp, where it is written out, over whole batches: suffix sums z_j of the slow modules are kept
while their modules are, so a step multiplies only by the weights of modules that fire. Modules are numbered from 0.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import clock as clocks
from .weights import Weights


def forward(
    x: Tensor,  # (T, B, I), or packed (N, I)
    m: Tensor,  # (B, G)
    clock: Tensor,  # (B,) int64
    weights: Weights,
    batch_sizes: Tensor | None,  # (T,) int64
    reverse: bool,
    need_hidden: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Memories, hidden states (None if not needed) and last memories."""
    w, H, M, g = weights, weights.H, weights.M, weights.g
    U, biases = senders(w), bias_row(w)
    memory = x.new_empty((*x.shape[:-1], g * M))
    hidden = x.new_empty((*x.shape[:-1], H)) if need_hidden else None
    last = m.clone()
    modules = list(last.split(M, dim=1))  # views: what is written to them is the state
    z = [last.new_empty(len(last), H + (j + 1) * M) for j in range(g)]
    send(z, modules, U, biases, None)
    a = x if w.Wxh is None else x @ w.Wxh.T
    for rows, index, fires in steps(x, clock, g, batch_sizes, reverse):
        c = len(fires)
        z_t, m_t = [z_j[rows] for z_j in z], [m_k[rows] for m_k in modules]
        if w.Wxh is not None:
            h = torch.tanh(a[index] + z_t[0][:, :H])
            if hidden is not None:
                hidden[index] = h
            new = [torch.addmm(z_t[k][:, H + k * M :], h, w.Whm[k].T) for k in range(c)]
        else:
            new = [torch.tanh(torch.addmm(z_t[k][:, k * M :], a[index], w.Whm[k].T)) for k in range(c)]
        for k in range(c):
            put(m_t[k], new[k], fires[k])
        memory[index] = last[rows]
        send(z_t, m_t, U, biases, fires)
    return memory, hidden, last


def backward(
    x: Tensor,
    m: Tensor,
    clock: Tensor,
    weights: Weights,
    batch_sizes: Tensor | None,
    reverse: bool,
    memory: Tensor,
    hidden: Tensor | None,  # None: of the Clockwork RNN
    gmemory: Tensor | None,  # None: zero
    ghidden: Tensor | None,
    glast: Tensor | None,
    need_x: bool,
    need_weights: bool,
    *,
    checked: bool = False,  # or not: nothing is looked at here
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of x (None if not needed), of m, and of the weights, one after the other (empty if not needed)."""
    w, H, M, g = weights, weights.H, weights.M, weights.g
    hidden = None if w.Wxh is None else hidden
    U = senders(w)
    gm_all = torch.zeros_like(m) if glast is None else glast.clone()
    gm = list(gm_all.split(M, dim=1))
    gz = [m.new_zeros(len(m), H + min(j + 1, g) * M) for j in range(g + 1)]
    ga = x.new_zeros((*x.shape[:-1], H or g * M))
    sent: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(g)]  # gz_j and m_j when module j fired
    received: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(g)]  # gm_k and h (Clockwork: x)

    def receive(rows: slice, m_t: Tensor, fires: Sequence[Tensor | None]) -> None:
        for j, fired in enumerate(fires):
            part = gz[j][rows] if fired is None else gz[j][rows] * fired
            gm[j][rows].addmm_(part, U[j])
            gz[j + 1][rows, : part.shape[1]] += part
            if need_weights:
                sent[j].append((part.clone() if fired is None else part, m_t[:, j * M : (j + 1) * M]))
            put(gz[j][rows], torch.zeros((), dtype=x.dtype, device=x.device), fired)

    for rows, index, fires in reversed(list(steps(x, clock, g, batch_sizes, reverse))):
        if gmemory is not None:
            gm_all[rows] += gmemory[index]
        receive(rows, memory[index], fires)
        parts = []
        for k, fired in enumerate(fires):
            part = gm[k][rows].clone() if fired is None else gm[k][rows] * fired
            put(gm[k][rows], torch.zeros((), dtype=x.dtype, device=x.device), fired)
            if w.Wxh is None:
                part = part * (1 - memory[index][:, k * M : (k + 1) * M] ** 2)
                ga[index][:, k * M : (k + 1) * M] = part
            gz[k][rows, H + k * M :] += part
            parts.append(part)
            if need_weights:
                received[k].append((part, x[index] if hidden is None else hidden[index]))
        if hidden is not None:
            gh = sum((part @ w.Whm[k] for k, part in enumerate(parts)), torch.zeros_like(hidden[index]))
            if ghidden is not None:
                gh = gh + ghidden[index]
            ga[index] = gh * (1 - hidden[index] ** 2)
            gz[0][rows, :H] += ga[index]
    receive(slice(None), m, [None] * g)

    gx = None
    if need_x:
        gx = ga @ (torch.cat(list(w.Whm)) if w.Wxh is None else w.Wxh)
    gflat = x.new_zeros(0)
    if need_weights:
        gU = [outer_sum(records) for records in sent]
        gbias = gz[g].sum(0)
        grads = Weights(
            Wxh=None if w.Wxh is None else ga.flatten(0, -2).T @ x.flatten(0, -2),
            b_h=None if w.b_h is None else gbias[:H],
            Wmh=[gU_j[:H] for gU_j in gU] if w.Wmh else [],
            Whm=[outer_sum(records) if records else torch.zeros_like(w.Whm[k]) for k, records in enumerate(received)],
            Wmm=[gU_j[H:] for gU_j in gU],
            b_m=gbias[H:].split(M) if w.has_bias else [],
        )
        gflat = torch.cat([grad.reshape(-1) for grad in grads.flat()])
    return gx, gm_all, gflat


def senders(w: Weights) -> list[Tensor]:
    """``U_j = [Wmh[j]; Wmm[j]]``, (H + jM, M)."""
    return [torch.cat([w.Wmh[j], w.Wmm[j]]) for j in range(w.g)] if w.Wmh else list(w.Wmm)


def bias_row(w: Weights) -> Tensor:
    """z_{g+1}, (H + gM): the biases, or zeros."""
    if not w.has_bias:
        return w.Wmm[0].new_zeros(w.H + w.g * w.M)
    return torch.cat([*([] if w.b_h is None else [w.b_h]), *w.b_m])


def send(
    z: Sequence[Tensor],
    m: Sequence[Tensor],
    U: Sequence[Tensor],
    biases: Tensor,
    fires: Sequence[Tensor | None] | None,
) -> None:
    """``z_j = z_{j+1} + U_j m_j``, slowest first, of the modules that fired (None: of all)."""
    for j in reversed(range(len(z) if fires is None else len(fires))):
        slower = biases.expand(len(z[j]), -1) if j + 1 == len(z) else z[j + 1]
        put(z[j], torch.addmm(slower[:, : z[j].shape[1]], m[j], U[j].T), None if fires is None else fires[j])


def put(held: Tensor, new: Tensor, fired: Tensor | None) -> None:
    """Overwrite the rows that fired (None: all)."""
    held.copy_(new if fired is None else torch.where(fired, new, held))


def outer_sum(records: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """``sum left right^T`` over all rows of all records, as one product."""
    left, right = zip(*records, strict=True)
    return torch.cat(left).T @ torch.cat(right)


def steps(
    x: Tensor, clock: Tensor, g: int, batch_sizes: Tensor | None, reverse: bool
) -> Iterator[tuple[slice, int | slice, list[Tensor | None]]]:
    """For each step in order: its rows, where they lie in x, and per module that fires in any of them, in which.

    A module that fires in all rows has None there: nothing needs to be masked.
    """
    B = len(clock)
    T = x.shape[0] if batch_sizes is None else len(batch_sizes)
    if B == 0:
        return
    sizes = torch.full((T,), B, device="cpu") if batch_sizes is None else batch_sizes.cpu()
    has = torch.arange(B, device="cpu") < sizes[:, None]  # (T, B): which rows have a step t
    t = torch.arange(T, device="cpu")[:, None]
    count = clocks.count(clock.cpu() + (has.sum(0) - t if reverse else t + 1), g)  # (T, B)
    most = torch.where(has, count, 0).amax(1).tolist()
    least = torch.where(has, count, g).amin(1).tolist()
    ends = [0, *sizes.cumsum(0).tolist()]
    count = count.to(x.device)
    for s in reversed(range(T)) if reverse else range(T):
        n = ends[s + 1] - ends[s]
        fires = [None if k < least[s] else count[s, :n, None] > k for k in range(most[s])]
        yield slice(0, n), (s if batch_sizes is None else slice(ends[s], ends[s + 1])), fires
