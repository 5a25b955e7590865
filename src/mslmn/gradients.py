"""Gradients that go straight to the weights, for training loops of your own with small networks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from . import ops


@contextmanager
def direct_gradients() -> Iterator[None]:
    """Around one forward and one backward pass: the gradients of the layers' weights are added to their ``.grad`` at
    the end of the block, instead of going through autograd one by one.

    A layer has a gradient for each of dozens of parameters. To hand over that many takes autograd longer than a small
    network's whole pass takes a GPU, and so does it to wake the thread of its own in which it does that: within the
    block backward passes run in the thread that calls them. The gradients are the same to the bit; all others, of
    readouts and inputs, come as ever, and so do those of weights that have hooks. ``zero_grad`` goes before the block,
    clipping and the optimizer's step after it. Within it `torch.autograd.grad` and ``backward(inputs=...)`` do not find
    the weights, and what gathers gradients in autograd, as `DistributedDataParallel` does, misses them. If the block
    ends with an error, nothing is added.

    Example:
        >>> import torch, mslmn
        >>> layer, x = mslmn.MSLMN(3, 8, 4, num_modules=2), torch.randn(20, 5, 3)
        >>> with mslmn.direct_gradients():
        ...     layer(x)[0].square().sum().backward()
        >>> layer.cells[0].Wxh.grad.shape
        torch.Size([8, 3])
    """
    with ops.gradients_aside() as aside, torch.autograd.set_multithreading_enabled(False):
        yield
    collect(aside)


@torch.no_grad()
def collect(aside: Sequence[ops.Gradients]) -> None:
    """What was put aside, to the parameters; one that was used twice has two."""
    for one in aside:
        _await(one)
        sums: dict[int, tuple[Tensor, Tensor]] = {}  # of the weights that have a gradient, and another one now
        for weight, gradient in zip(one.weights, one.views(one.flat), strict=True):
            if weight.grad is None:
                weight.grad = gradient
            elif id(weight) in sums:  # one weight in two places: all at once, one could be lost
                weight.grad += gradient
            else:
                sums[id(weight)] = weight.grad, gradient
        if sums:
            torch._foreach_add_(*map(list, zip(*sums.values(), strict=True)))


def _await(one: ops.Gradients) -> None:
    """Where it is computed on another stream; autograd would wait too."""
    if not one.flat.is_cuda:
        return
    here = torch.cuda.current_stream(one.flat.device)
    if here.cuda_stream != one.stream:
        here.wait_stream(torch.cuda.ExternalStream(one.stream, one.flat.device))
        one.flat.record_stream(here)
