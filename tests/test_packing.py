"""Packing by index gives what torch gives."""

import torch
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from mslmn import packing
from properties import given, st


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 3))
def test_packing_is_that_of_torch(lengths, features):
    xs = [torch.randn(n, features) for n in lengths]
    order = sorted(range(len(xs)), key=lambda i: -lengths[i])
    ours = packing.pack(xs)
    expected = pack_sequence([torch.cat([xs[i], torch.zeros(lengths[i], 1)], 1) for i in order])  # wants a feature
    assert torch.equal(ours.data, expected.data[:, :features])
    assert torch.equal(ours.batch_sizes, expected.batch_sizes)
    if order == list(range(len(xs))):
        assert ours.sorted_indices is None
    else:
        assert ours.sorted_indices.tolist() == order  # equally long ones keep their order
    assert packing.lengths(ours).tolist() == [lengths[i] for i in order]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_padding_and_its_inverse_are_those_of_torch(lengths):
    packed = packing.pack([torch.randn(n, 2, dtype=torch.float64) for n in sorted(lengths, reverse=True)])
    packed.data.requires_grad_()
    padded = packing.pad(packed)
    expected, _ = pad_packed_sequence(packed)
    assert torch.equal(padded, expected)
    weigh = torch.randn_like(padded)
    assert torch.equal(*(torch.autograd.grad((x * weigh).sum(), packed.data)[0] for x in (padded, expected)))
    again = packing.pack_like(padded, packed)
    assert torch.equal(again.data, packed.data) and again.batch_sizes is packed.batch_sizes
    assert torch.autograd.gradcheck(lambda x: packing.pack_like(x, packed).data, padded.detach().requires_grad_())
