"""Inputs that are heard as if they were standardised: an untrained network does not know how large they are.

A step of a pen across a line moves it by a fraction of a percent of what the weights of an untrained network hear.
"""

from collections.abc import Iterable
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from . import checks
from .cells import Cell
from .layers import ClockedLayer
from .model import SequenceModel

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def standardise(model: Model, inputs: Iterable[Tensor], gain: float = 1.0) -> Model:
    """Let the weights that read the input begin as if each feature had mean 0 and variance gain^2, before training:

        Wxh <- Wxh diag(gain / sigma)        b_h <- b_h - Wxh mu        so Wxh x + b_h hears gain (x - mu) / sigma

    mu and sigma are those of all steps of ``inputs``; a feature that never changes (sigma = 0) is heard as 0. The
    inputs themselves stay what they are, and nothing is computed for it later.

    Args:
        model: a layer of this package, `nn.RNN`, `nn.LSTM` or `nn.GRU`, or a `SequenceModel` of one; its first layer
            changes, in place, in both directions.
        inputs: sequences, (T, I) or (T, B, I), such as the model is trained on.
        gain: more than 1 where what matters is less than a standard deviation; it bends hidden states further.

    Returns the model.

    Example:
        >>> import mslmn
        >>> positions = [torch.randn(300, 2).cumsum(0) for _ in range(8)]
        >>> layer = mslmn.standardise(mslmn.MSLMN(2, 25, 25, num_modules=7), positions)
    """
    checks.positive("gain", gain)
    encoder = model.encoder if isinstance(model, SequenceModel) else model
    pairs = _heard(encoder)
    mu, sigma = (found.to(pairs[0][0]) for found in _moments(inputs, cast(int, encoder.input_size)))
    for W, b in pairs:
        if b is None:
            raise ValueError("inputs are centred by biases, and this layer has none; build it with bias=True")
        W.mul_(gain / sigma)
        b.sub_(W @ mu)
    return model


def _heard(encoder: nn.Module) -> list[tuple[Tensor, Tensor | None]]:
    """The weights that read the input, in each direction, with their biases."""
    if isinstance(encoder, ClockedLayer):
        cells = list(encoder.cells)[: encoder.num_directions]
        return [pair for cell in cells for pair in cast(Cell, cell).heard()]
    if not isinstance(encoder, nn.RNNBase):
        raise TypeError(
            f"expected a layer of mslmn, nn.RNN, nn.LSTM or nn.GRU, got {type(encoder).__name__}; pass the layer that "
            "reads the input"
        )
    suffixes = ["l0", "l0_reverse"] if encoder.bidirectional else ["l0"]
    return [(getattr(encoder, f"weight_ih_{s}"), getattr(encoder, f"bias_ih_{s}", None)) for s in suffixes]


def _moments(inputs: Iterable[Tensor], I: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each feature, (I,); 1 where it never changes."""
    steps = []
    for i, x in enumerate(inputs):
        x = torch.as_tensor(x).detach()
        right = x.dim() in (2, 3) and x.shape[-1] == I
        if not right or not torch.isfinite(x).all():
            got = "NaN or infinite values" if right else tuple(x.shape)
            raise ValueError(
                f"sequence {i} must be finite numbers (T, {I}) or (T, B, {I}), got {got}; mend it, or leave it out"
            )
        steps.append(x.to("cpu", torch.float64).flatten(0, -2))
    if not sum(map(len, steps)):
        raise ValueError("there is nothing to find mean and variance of; pass the inputs that the model is trained on")
    whole = torch.cat(steps)
    mean = whole.mean(0)
    std = (whole - mean).square().mean(0).sqrt()
    return mean, std.masked_fill(std <= 1e-12 * mean.abs(), 1.0)
