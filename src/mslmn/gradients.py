"""Gradients that go straight to the weights, for training loops of your own with small networks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from . import ops


@contextmanager
def direct_gradients() -> Iterator[None]:
    """Around a forward and a backward pass: the gradients of the layers' weights are added to their ``.grad`` at the
    end of the block, instead of going through autograd one by one.

    A layer has a gradient for each of dozens of parameters. To hand over that many takes autograd longer than a small
    network's whole pass takes a GPU. The gradients are the same to the bit; all others, of readouts and inputs, come as
    ever, and so do those of weights that have hooks. But `torch.autograd.grad` does not find the weights within the
    block, and what gathers gradients in autograd, as `DistributedDataParallel` does, misses them. If the block ends
    with an error, nothing is added.

    Example:
        >>> import torch, mslmn
        >>> layer, x = mslmn.MSLMN(3, 8, 4, num_modules=2), torch.randn(20, 5, 3)
        >>> with mslmn.direct_gradients():
        ...     layer(x)[0].square().sum().backward()
        >>> layer.cells[0].Wxh.grad.shape
        torch.Size([8, 3])
    """
    with ops.gradients_aside() as aside:
        yield
    collect(aside)


def collect(aside: Sequence[ops.Gradients]) -> None:
    """What was put aside, to the parameters; one that was used twice has two."""
    for one in aside:
        for weight, gradient in zip(one.weights, one.views(one.flat), strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
