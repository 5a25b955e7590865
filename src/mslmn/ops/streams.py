"""Two passes at once: on a CUDA device the second has a stream of its own. Autograd must not see it: for use inside of
its functions."""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

Tensors = TypeVar("Tensors", bound=tuple[Tensor | None, ...])


def both(device: torch.device, first: Callable[[], Tensors], second: Callable[[], Tensors]) -> tuple[Tensors, Tensors]:
    """What both return."""
    current, side = torch.cuda.current_stream(device), _side(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        two = second()
    one = first()
    current.wait_stream(side)
    for tensor in two:
        if tensor is not None:
            tensor.record_stream(current)  # the side stream's next use of its memory waits for its readers here
    return one, two


@lru_cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
