"""Fewer steps: means of windows of P steps, which begin at each sequence's first; the last one may have fewer.

    y_s = mean(x_t),    P (s - 1) < t <= min(P s, T),    s = 1 .. ceil(T / P)

Nothing is added up in an order that is left to chance, and autograd derives all of it: the sums' gradients are
repeated and selected, never scattered.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def pooled(x: Tensor, P: int) -> Tensor:  # (T, B, n) -> (ceil(T / P), B, n)
    T = x.shape[0]
    if not torch.compiler.is_compiling():  # tracers would ask whether it is
        P = min(P, T)
    S = -(-T // P)
    counts = (T - P * torch.arange(S, device=x.device)).clamp(max=P)
    padded = F.pad(x, (0, 0, 0, 0, 0, S * P - T))
    return _means(padded.unflatten(0, (S, P)), counts[:, None, None])


def pooled_rows(x: Tensor, places: Tensor, counts: Tensor, P: int) -> Tensor:  # (N, n), (N,), (S,) -> (S, n)
    """Of a packed batch, whose S windows `packing.windows` found: row i is one of window places[i] // P, of its
    counts[..] rows."""
    S = counts.shape[0]
    rows = x.new_zeros(S * P, *x.shape[1:]).index_copy(0, places, x)  # its gradient is a selection
    return _means(rows.unflatten(0, (S, P)), counts[:, None])


def placed_windows(
    table: Tensor, T: int, N: int, below: Tensor, S_T: int, S: int, P: int
) -> tuple[Tensor, Tensor]:  # (N,), (S,)
    """The places and counts of `pooled_rows`, found on the device, for a packed batch of at most T steps and N rows,
    whose windows have at most S_T steps and S rows, the last one for rows of no step; `ops.packing_table` says how they
    lie, in ``table`` and ``below``."""
    B = (len(table) - T - 2) // 2
    steps, rows = _coordinates(table[: T + 1], N)
    windows = below.take(steps // P) + rows
    places = torch.where(steps < T, P * windows + steps - steps // P * P, P * (S - 1))
    steps, rows = _coordinates(below[: S_T + 1], S)
    lengths = table[T + 1 : T + 1 + B].take(rows.clamp(max=B - 1))
    return places, (lengths - P * steps).clamp(1, P)


def _coordinates(offsets: Tensor, N: int) -> tuple[Tensor, Tensor]:  # (T + 1,) -> (N,), (N,)
    """Of each row, its step and its sequence; rows of no step have the step T."""
    rows = torch.arange(N, device=offsets.device)
    steps = torch.searchsorted(offsets[1:], rows, right=True)
    return steps, rows - offsets.take(steps)


def _means(windows: Tensor, counts: Tensor) -> Tensor:  # (S, P, ..) -> (S, ..)
    wide = torch.promote_types(windows.dtype, torch.float32)  # a sum in float16 may overflow where its mean does not
    return (windows.sum(1, dtype=wide) / counts).to(windows.dtype)
