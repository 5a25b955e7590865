"""Batches of similar length: every sequence once, the same order from the same seed and epoch, little to pad."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from mslmn.data.buckets import LengthBatches


@given(st.lists(st.integers(1, 900), max_size=200), st.integers(1, 40), st.integers(0, 5), st.integers(0, 5))
def test_every_sequence_is_in_one_batch_and_all_batches_but_one_are_full(lengths, size, seed, epoch):
    sampler = LengthBatches(lengths, size, seed)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler) == -(-len(lengths) // size)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert sum(len(batch) < size for batch in batches) <= 1
    assert batches == list(sampler)


def test_the_order_depends_on_seed_and_epoch_alone():
    lengths = np.random.default_rng(0).integers(100, 1200, 500).tolist()

    def order(seed, epoch):
        sampler = LengthBatches(lengths, 8, seed)
        sampler.set_epoch(epoch)
        torch.rand(3)  # other random numbers do not matter
        return list(sampler)

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert order(1, 1) == orders[3]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    together = [{frozenset(batch) for batch in found} for found in orders]
    assert len(together[0] & together[1]) < 5  # other batches, not only their order


def test_little_is_padded_and_batches_come_in_no_order():
    lengths = np.random.default_rng(0).integers(100, 1200, 5000).tolist()
    batches = list(LengthBatches(lengths, 32))
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    assert padded < 1.05 * sum(lengths)
    means = [np.mean([lengths[i] for i in batch]) for batch in batches]
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.25


def test_it_works_in_a_data_loader():
    data = [torch.ones(length, 2) for length in range(1, 21)]
    loader = DataLoader(data, batch_sampler=LengthBatches([len(x) for x in data], 4), collate_fn=pad_sequence)
    assert sum(int(batch[:, :, 0].sum()) for batch in loader) == 210 and len(loader) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3, 0], 2), r"lengths\[1\] must be at least 1, got 0"),
        (([3], 0), "batch_size must be at least 1, got 0"),
        (([3], 2, -1), "seed must be at least 0, got -1"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        LengthBatches(*arguments)
