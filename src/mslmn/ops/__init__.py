"""The recurrence, from input to memory, and the only switch between those who compute it.

Autocast stops here: the recurrence computes in the dtype of its weights, because a linear memory adds up thousands of
steps and would lose the small ones in low precision. On CUDA the fused kernels store inputs and outputs as autocast
wants them. For bfloat16 and float16 weights the fused backends compute in float32 and round what they return; the
reference computes in the dtype it is given.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import backends, cuda, fused, reference
from .weights import Weights

__all__ = ["Run", "Weights", "autocast_enabled", "lengths", "run"]


class Run(NamedTuple):
    """What a pass over a batch leaves behind, every part differentiable."""

    memory: Tensor  # the memory after each step: (T, B, G), or packed (N, G)
    hidden: Tensor  # h at each step: (T, B, H), or packed (N, H); Clockwork: the memory; empty if not needed
    last: Tensor  # (B, G): the memory of each sequence after its own last step


def run(
    x: Tensor,  # (T, B, I), or packed (N, I)
    m: Tensor,  # (B, G): initial memory
    clock: Tensor,  # (B,) int64: steps consumed before the first one here
    weights: Weights,
    batch_sizes: Tensor | None = None,  # (T,) int64, of a packed batch
    reverse: bool = False,
    need_hidden: bool = True,
) -> Run:
    """One pass over a batch of sequences, each at its own clock, in one direction."""
    dtype = weights.Wmm[0].dtype
    if m.dtype != dtype:
        m = m.to(dtype)
    if autocast_enabled(x.device.type):
        stored = torch.get_autocast_dtype(x.device.type) if dtype == torch.float32 and _narrow(x.device) else dtype
        with torch.autocast(x.device.type, enabled=False):
            return _run(x.to(stored), m, clock, weights, batch_sizes, reverse, need_hidden)
    return _run(x.to(dtype), m, clock, weights, batch_sizes, reverse, need_hidden)


def _narrow(device: torch.device) -> bool:
    """Whether inputs and outputs may be narrower than what is computed."""
    return device.type == "cuda" and not backends.needs_reference() and backends.choose(device) == "cuda"


def _run(
    x: Tensor,
    m: Tensor,
    clock: Tensor,
    weights: Weights,
    batch_sizes: Tensor | None,
    reverse: bool,
    need_hidden: bool,
) -> Run:
    if backends.needs_reference():
        sizes = None if batch_sizes is None else batch_sizes.tolist()
        return Run(*reference.run(x, m, clock, weights, sizes, reverse))
    dtype = m.dtype
    if dtype in (torch.bfloat16, torch.float16):
        wide = weights.map(Tensor.float)
        x = x if _narrow(x.device) else x.float()
        results = fused.run(x, m.float(), clock, wide, batch_sizes, reverse, need_hidden)
        memory, hidden, last = (result.to(dtype) for result in results)
    else:
        memory, hidden, last = fused.run(x, m, clock, weights, batch_sizes, reverse, need_hidden)
    return Run(memory, memory if weights.Wxh is None else hidden, last)


def lengths(batch_sizes: Tensor, B: int, device: torch.device) -> Tensor:  # (T,) -> (B,)
    """How long the sequences of a packed batch are, longest first, on a device."""
    if device.type == "cuda" and not torch.compiler.is_compiling():
        T = len(batch_sizes)
        return cuda.packing_of(batch_sizes, device)[T + 1 : T + 1 + B]  # there already: nothing waits for a copy
    rows = torch.arange(B, device=batch_sizes.device)
    return (batch_sizes[:, None] > rows).sum(0).to(device)


def autocast_enabled(device_type: str) -> bool:
    """Whether `torch.autocast` is on for this kind of device (``meta`` does not have it)."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)
