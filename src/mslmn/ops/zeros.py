"""Constants that are there already: initial memories and clocks, and clocks at the end. On a GPU a kernel that fills a
few hundred bytes takes the host as long as a tenth of a small network's pass."""

from math import prod

import torch
from torch import Tensor

from . import backends

MOST = 2**20  # values: what is larger is filled when it is needed
VIEWS = 256
_buffers: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}  # never freed: CUDA graphs may read them
_views: dict[tuple[tuple[int, ...], torch.dtype, torch.device], Tensor] = {}


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros to read: several callers get the same memory."""
    if device.type != "cuda" or not backends.eager():
        return torch.zeros(shape, dtype=dtype, device=device)
    found = _views.get((shape, dtype, device))
    if found is None:
        if prod(shape) > MOST or torch.cuda.is_current_stream_capturing():
            return torch.zeros(shape, dtype=dtype, device=device)
        found = _view(shape, dtype, device)
    return found


def _view(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    buffers = _buffers.setdefault((device, dtype), [])
    with torch.inference_mode(False):
        if not buffers or len(buffers[-1]) < prod(shape):
            size = max(prod(shape), 2 * len(buffers[-1]) if buffers else 2**14)
            buffers.append(torch.zeros(size, dtype=dtype, device=device))
            torch.cuda.current_stream(device).synchronize()  # once: then every stream finds zeros
        if len(_views) >= VIEWS:
            _views.clear()
        view = _views[shape, dtype, device] = buffers[-1][: prod(shape)].view(shape)
    return view


AT_ONCE = 64  # clocks filled by one kernel, from the second of its kind on
FEW = 128  # sequences: the clocks of more keep more memory alive than they are worth
_clocks: dict[tuple[int, int, torch.device, int], list[Tensor]] = {}  # by stream: on another they may not be filled yet


def filled(value: int, count: int, device: torch.device) -> Tensor:  # (count,) int64
    """The value as often, for the caller alone: nobody else gets this memory."""
    alone = device.type != "cuda" or not backends.eager() or count > FEW  # in this order: tracers see no size compared
    if alone or torch.cuda.is_current_stream_capturing():
        return torch.full((count,), value, dtype=torch.int64, device=device)
    key = value, count, device, torch._C._cuda_getCurrentRawStream(device.index)
    clocks = _clocks.get(key)
    if clocks is None:  # who has a length of his own in each batch needs no more of them
        if len(_clocks) >= VIEWS:
            _clocks.clear()
        _clocks[key] = []
        return torch.full((count,), value, dtype=torch.int64, device=device)
    try:
        return clocks.pop()
    except IndexError:
        with torch.inference_mode(False):
            several = torch.full((AT_ONCE * count,), value, dtype=torch.int64, device=device)
            found, *rest = several.unsafe_split(count)
        clocks += rest
        return found
