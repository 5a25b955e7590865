"""The recurrence, from input to memory, and the only switch between those who compute it.

Autocast stops here: the recurrence computes in the dtype of its weights, because a linear memory adds up thousands of
steps and would lose the small ones in low precision. On CUDA the fused kernels store inputs and outputs as autocast
wants them. For bfloat16 and float16 weights the fused backends compute in float32 and round what they return; the
reference computes in the dtype it is given.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import backends, ctc, cuda, fused, reference
from .cuda import Pooling, next_pooling, packing_table, placed
from .fused import Gradients, gradients_aside
from .weights import KeptWeights, Weights
from .zeros import filled, zeros

__all__ = [
    "Gradients",
    "KeptWeights",
    "Pooling",
    "Run",
    "Weights",
    "autocast_enabled",
    "ctc",
    "filled",
    "gradients_aside",
    "lengths",
    "next_pooling",
    "packing_table",
    "placed",
    "places",
    "run",
    "run_both",
    "zeros",
]


class Run(NamedTuple):
    """What a pass over a batch leaves behind, every part differentiable."""

    memory: Tensor  # the memory after each step: (T, B, G), or packed (N, G)
    hidden: Tensor | None  # h at each step: (T, B, H), or packed (N, H); Clockwork: the memory; None if not needed
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
        x = x.to(_stored(x.device, dtype))
        with torch.autocast(x.device.type, enabled=False):
            return _run(x, m, clock, weights, batch_sizes, reverse, need_hidden)
    if x.dtype != dtype:
        x = x.to(dtype)
    return _run(x, m, clock, weights, batch_sizes, reverse, need_hidden)


def run_both(
    x: Tensor,
    first: tuple[Tensor, Tensor, Weights],  # initial memory, clock and weights, forward in time
    second: tuple[Tensor, Tensor, Weights],  # backward in time
    batch_sizes: Tensor | None = None,
    need_hidden: bool = True,
) -> tuple[Run, Run]:
    """Both directions of a layer, at once where that is possible."""
    dtype = first[2].Wmm[0].dtype
    plain = dtype in (torch.float32, torch.float64) and first[0].dtype == second[0].dtype == dtype
    if x.device.type != "cuda" or not plain or torch.compiler.is_compiling() or backends.needs_reference():
        return (
            run(x, *first, batch_sizes, False, need_hidden),
            run(x, *second, batch_sizes, True, need_hidden),
        )
    x = x.to(_stored(x.device, dtype) if autocast_enabled("cuda") else dtype)
    with torch.autocast("cuda", enabled=False):
        found = fused.run_both(x, first, second, batch_sizes, need_hidden)
    clockwork = first[2].Wxh is None
    one, two = (Run(memory, memory if clockwork else hidden, last) for memory, hidden, last in found)
    return one, two


def _stored(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Of inputs and outputs under autocast."""
    return torch.get_autocast_dtype(device.type) if dtype == torch.float32 and _narrow(device) else dtype


def _narrow(device: torch.device) -> bool:
    """Whether inputs and outputs may be narrower than what is computed."""
    return device.type == "cuda" and not backends.needs_reference() and _has_kernels(device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # the search for a compiler is not for it
def _has_kernels(device: torch.device) -> bool:
    return backends.choose(device) == "cuda"


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
        memory, hidden, last = fused.run(x, m.float(), clock, wide, batch_sizes, reverse, need_hidden)
        memory, hidden, last = memory.to(dtype), None if hidden is None else hidden.to(dtype), last.to(dtype)
    else:
        memory, hidden, last = fused.run(x, m, clock, weights, batch_sizes, reverse, need_hidden)
    return Run(memory, memory if weights.Wxh is None else hidden, last)


def places(weights: Weights, device: torch.device) -> bool:
    """Whether a batch may be `placed`, which only the CUDA kernels look at."""
    if backends.needs_reference() or backends.choose(device) != "cuda":
        return False
    dtype = weights.Wmm[0].dtype
    return cuda.why_not_these(weights.sizes, dtype, dtype, device.index) is None


def lengths(batch_sizes: Tensor, B: int, device: torch.device) -> Tensor:  # (T,) -> (B,)
    """How long the sequences of a packed batch are, longest first, on a device."""
    if device.type == "cuda" and not torch.compiler.is_compiling():
        T = batch_sizes.shape[0]
        return cuda.packing_of(batch_sizes, device)[T + 1 : T + 1 + B]  # there already: nothing waits for a copy
    rows = torch.arange(B, device=batch_sizes.device)
    return (batch_sizes[:, None] > rows).sum(0).to(device)


def autocast_enabled(device_type: str) -> bool:
    """Whether `torch.autocast` is on for this kind of device (``meta`` does not have it)."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)
