"""Inputs that are heard as if they were standardised."""

import pytest
import torch
from torch import nn

from mslmn import LMN, MSLMN, ClockworkRNN, SequenceModel, standardise


def shifted(T=9, n=4, I=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scale, shift = torch.tensor([0.01, 1.0, 300.0]), torch.tensor([5.0, 0.0, -70.0])
    return [torch.randn(T + i, I, generator=generator, dtype=torch.float64) * scale + shift for i in range(n)]


ENCODERS = {
    "MSLMN": lambda: MSLMN(3, 5, 4, 2, num_layers=2, bidirectional=True),
    "LMN": lambda: LMN(3, 5, 4),
    "ClockworkRNN": lambda: ClockworkRNN(3, 4, 3, bidirectional=True),
    "RNN": lambda: nn.RNN(3, 5, num_layers=2),
    "GRU": lambda: nn.GRU(3, 5, bidirectional=True),
    "LSTM": lambda: nn.LSTM(3, 5, num_layers=2, bidirectional=True),
}


@pytest.mark.parametrize("gain", [1.0, 3.0])
@pytest.mark.parametrize("kind", ENCODERS)
def test_a_standardised_model_hears_what_it_heard_of_standardised_inputs(kind, gain):
    xs = shifted()
    whole = torch.cat(xs)
    mean, std = whole.mean(0), whole.std(0, correction=0)
    model = SequenceModel(ENCODERS[kind](), 2, output="all").double()
    before = [model((gain * (x - mean) / std)[:, None]) for x in xs]
    assert standardise(model, xs, gain) is model
    for x, expected in zip(xs, before, strict=True):
        torch.testing.assert_close(model(x[:, None]), expected)
    assert not torch.allclose(model((gain * (xs[0] - mean) / std)[:, None]), before[0])


def test_a_feature_that_never_changes_is_heard_as_zero():
    xs = [torch.cat([x[:, :2], torch.full((len(x), 1), 0.1, dtype=torch.float64)], 1) for x in shifted()]
    zeroed = [torch.cat([x[:, :2], torch.zeros(len(x), 1, dtype=torch.float64)], 1) for x in xs]
    one, other = (SequenceModel(LMN(3, 5, 4), 2, output="all").double() for _ in range(2))
    other.load_state_dict(one.state_dict())
    standardise(one, xs)
    standardise(other, zeroed)
    torch.testing.assert_close(one(xs[0][:, None]), other(zeroed[0][:, None]))


def test_standardise_takes_batches_and_networks_without_input():
    xs = shifted(n=1)[0][:8]
    one, several = (SequenceModel(LMN(3, 5, 4), 2).double() for _ in range(2))
    several.load_state_dict(one.state_dict())
    standardise(one, [xs])
    standardise(several, [xs.unflatten(0, (2, 4))])
    for a, b in zip(one.parameters(), several.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    standardise(LMN(0, 5, 4), [torch.empty(3, 0)])


@pytest.mark.parametrize(
    ("xs", "message"),
    [
        ([], "there is nothing to find mean and variance of; pass the inputs that the model is trained on"),
        (
            [torch.ones(4, 3), torch.ones(3, 4)],
            r"sequence 1 must be finite numbers \(T, 3\) or \(T, B, 3\), got \(3, 4\)",
        ),
        ([torch.ones(3)], r"sequence 0 must be .* got \(3,\); mend it, or leave it out"),
        ([torch.full((2, 3), float("nan"))], "got NaN or infinite values"),
    ],
)
def test_what_cannot_be_standardised_is_told_and_nothing_changes(xs, message):
    model = SequenceModel(LMN(3, 5, 4), 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        standardise(model, xs)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    without = SequenceModel(LMN(3, 5, 4, bias=False), 2)
    weight = without.encoder.cells[0].Wxh.clone()
    with pytest.raises(ValueError, match="centred by biases, and this layer has none; build it with bias=True"):
        standardise(without, [torch.randn(4, 3)])
    assert torch.equal(without.encoder.cells[0].Wxh, weight)


def test_only_recurrent_layers_are_standardised():
    with pytest.raises(ValueError, match="gain must be"):
        standardise(LMN(3, 5, 4), [torch.randn(4, 3)], gain=0)
    with pytest.raises(TypeError, match=r"expected a layer of mslmn, .*, got Linear"):
        standardise(nn.Linear(3, 2), [torch.randn(4, 3)])
