"""Gradients against finite differences, in float64, through every mode that has its own path."""

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import mslmn
from helpers import LAYERS, make
from mslmn import State

pytestmark = pytest.mark.usefixtures("everywhere")
F64 = torch.float64


@pytest.mark.parametrize("kind", list(LAYERS))
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck(kind, bidirectional, packed):
    layer = make(kind, bidirectional=bidirectional, num_layers=1 if bidirectional else 2, learn_initial_state=True)
    names, values = zip(*layer.named_parameters(), strict=True)
    if packed:
        batch = pack_sequence([torch.randn(n, 2, dtype=F64) for n in (3, 5)], enforce_sorted=False)
        x = batch.data
    else:
        x = torch.randn(5, 2, 2, dtype=F64)

    def run(x, *values):
        input = PackedSequence(x, *batch[1:]) if packed else x
        output, state = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (input,))
        return (output.data if packed else output), state.memory

    inputs = [v.detach().requires_grad_() for v in (x, *values)]
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("kind", list(LAYERS))
def test_gradcheck_of_the_state_at_different_clocks(kind):
    layer = make(kind)
    x = torch.randn(4, 3, 2, dtype=F64)
    memory = torch.randn(1, 3, layer.output_size, dtype=F64, requires_grad=True)
    clock = torch.tensor([0, 3, 6])

    def run(memory):
        output, state = layer(x, State(memory, clock))
        return output, state.memory

    assert torch.autograd.gradcheck(run, (memory,))
    with mslmn.set_backend("reference"):
        assert torch.autograd.gradgradcheck(run, (memory,))
