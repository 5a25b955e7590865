"""The recurrence, and the only place that decides how it is computed.

Today every tensor, on every device, takes the reference loop.

Autocast stops here. The large product ``Wxh x`` of a whole sequence may run in low precision; the
recurrence runs in the dtype of its weights, because a linear memory adds up thousands of steps and
would lose the small ones in bfloat16.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from . import reference
from .reference import Run

__all__ = ["Run", "autocast_enabled", "clockwork", "mslmn"]


def mslmn(
    a: Tensor,  # (T, B, H), or packed (N, H): Wxh x_t + b_h
    m: Tensor,  # (B, G)
    clock: Tensor,  # (B,) int64
    Wmh: Sequence[Tensor],  # g of (H, M)
    Whm: Sequence[Tensor],  # g of (M, H)
    Wmm: Sequence[Tensor],  # module j of g: (jM, M)
    b_m: Sequence[Tensor] | None,  # g of (M,)
    batch_sizes: Sequence[int] | None = None,
    reverse: bool = False,
) -> Run:
    """One pass of the MS-LMN over a batch of sequences; see `reference.mslmn`."""
    with _no_autocast(m.device.type):
        return reference.mslmn(a.to(m.dtype), m, clock, Wmh, Whm, Wmm, b_m, batch_sizes, reverse)


def clockwork(
    a: Tensor,  # (T, B, G), or packed (N, G): Wxh x_t + b_h
    m: Tensor,  # (B, G)
    clock: Tensor,  # (B,) int64
    Whh: Sequence[Tensor],  # module j of g: (jM, M)
    batch_sizes: Sequence[int] | None = None,
    reverse: bool = False,
) -> Run:
    """One pass of the Clockwork RNN over a batch of sequences; see `reference.clockwork`."""
    with _no_autocast(m.device.type):
        return reference.clockwork(a.to(m.dtype), m, clock, Whh, batch_sizes, reverse)


def autocast_enabled(device_type: str) -> bool:
    """Whether `torch.autocast` is on for this kind of device (some, as ``meta``, do not have it)."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _no_autocast(device_type: str) -> AbstractContextManager[object]:
    if autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
