"""Layers for every test that promises the same of all three."""

import torch

from mslmn import LMN, MSLMN, ClockworkRNN

LAYERS = {
    "LMN": lambda I, **options: LMN(I, 4, 3, **options),
    "MSLMN": lambda I, **options: MSLMN(I, 4, 3, num_modules=4, **options),
    "ClockworkRNN": lambda I, **options: ClockworkRNN(I, 3, num_modules=4, **options),
}


def make(kind, I=2, **options):
    """A layer whose every weight, bias and initial memory is away from zero."""
    layer = LAYERS[kind](I, **{"dtype": torch.float64, **options})
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(0.5 * torch.randn_like(p))
    return layer


def gradients(loss, layer, *inputs):
    return torch.autograd.grad(loss, [*inputs, *layer.parameters()])
