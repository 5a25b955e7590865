"""Section 2.1 of the paper: with Whm = I, Wmm = 0 and b_m = 0 the LMN is the RNN, in every mode."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from mslmn import LMN, State

pytestmark = pytest.mark.usefixtures("everywhere")
I, H, B, T = 3, 5, 4, 11
OPTIONS = {"dtype": torch.float64}


def rnn_and_lmn(num_layers, bidirectional, bias, batch_first):
    options = {"num_layers": num_layers, "bidirectional": bidirectional, "bias": bias, **OPTIONS}
    rnn = nn.RNN(I, H, batch_first=batch_first, **options)
    lmn = LMN(I, H, H, batch_first=batch_first, **options)
    with torch.no_grad():
        for cell, (W_ih, W_hh, *b) in zip(lmn.cells, rnn.all_weights, strict=True):
            cell.Wxh.copy_(W_ih)
            cell.Wmh[0].copy_(W_hh)
            cell.Whm[0].copy_(torch.eye(H))
            cell.Wmm[0].zero_()
            if bias:
                b[1].zero_()  # nn.RNN has two biases with one gradient; ours is their sum
                cell.b_h.copy_(b[0])
                cell.b_m[0].zero_()
    return rnn, lmn


def sequences(form, batch_first):
    if form == "packed":
        return pack_sequence([torch.randn(n, I, **OPTIONS) for n in (4, 11, 1, 7)], enforce_sorted=False)
    if form == "unbatched":
        return torch.randn(T, I, **OPTIONS)
    return torch.randn(*((B, T) if batch_first else (T, B)), I, **OPTIONS)


def data(x):
    return x.data if isinstance(x, nn.utils.rnn.PackedSequence) else x


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("num_layers", "bidirectional", "form", "with_state", "bias", "batch_first"),
    list(
        itertools.product(
            (1, 2),
            (False, True),
            ("batched", "unbatched", "packed"),
            (False, True),
            (True, False),
            (False, True),
        )
    ),
)
def test_lmn_equals_rnn(num_layers, bidirectional, form, with_state, bias, batch_first):
    rnn, lmn = rnn_and_lmn(num_layers, bidirectional, bias, batch_first)
    x = sequences(form, batch_first)
    data(x).requires_grad_()
    cells = num_layers * (1 + bidirectional)
    h_0 = state = None
    if with_state:
        batch = () if form == "unbatched" else (B,)
        h_0 = torch.randn(cells, *batch, H, **OPTIONS, requires_grad=True)
        state = State(h_0, torch.randint(100, batch))  # with one module, any clock is the same

    expected, h_n = rnn(x, h_0)
    output, (memory, clock) = lmn(x, state)
    close(data(output), data(expected))
    close(memory, h_n)
    lengths = torch.tensor([4, 11, 1, 7]) if form == "packed" else T
    assert torch.equal(clock, (0 if state is None else state.clock) + torch.ones_like(clock) * lengths)

    # A loss that weighs every output and every final state differently.
    w_out, w_last = torch.randn_like(data(expected)), torch.randn_like(h_n)
    inputs = [data(x)] + ([h_0] if with_state else [])
    ours = [p for c in lmn.cells for p in [c.Wxh, c.Wmh[0]] + ([c.b_h] if bias else [])]
    theirs = [p for W_ih, W_hh, *b in rnn.all_weights for p in [W_ih, W_hh, *b[:1]]]
    grads = torch.autograd.grad((data(output) * w_out).sum() + (memory * w_last).sum(), inputs + ours)
    expected_grads = torch.autograd.grad((data(expected) * w_out).sum() + (h_n * w_last).sum(), inputs + theirs)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        close(grad, expected_grad)
