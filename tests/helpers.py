"""Layers for every test that promises the same of all three."""

import numpy as np
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


def in_chunks(layer, x, chunks):
    """What the layer gives for chunks of these lengths, one after the other, and its state at the end."""
    state, parts = None, []
    for chunk in x.split(chunks):
        part, state = layer(chunk, state)
        parts.append(part)
    return torch.cat(parts), state


def captured(step):
    """A CUDA graph of a step, after some on a stream beside, and what the step returned in it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found


def walks(lengths, a=2, seed=0, noise=0.3):
    """Random walks and noise: a spectrum that falls, without end."""
    rng = np.random.default_rng(seed)
    return [0.3 * rng.normal(size=(T, a)).cumsum(0) + noise * rng.normal(size=(T, a)) for T in lengths]


def prefix_matrix(X, horizon):
    """The paper's Xi, one row after the other."""
    a = X[0].shape[1]
    rows = []
    for x in X:
        for t in range(len(x)):
            past = x[max(0, t - horizon + 1) : t + 1][::-1].ravel()
            rows.append(np.concatenate([past, np.zeros(horizon * a - len(past))]))
    return np.array(rows)
