"""Batches of sequences that are about equally long: a batch takes as long as its longest sequence."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Sampler

from .. import checks

POOL = 20  # batches that are sorted together: the more, the less the lengths in a batch differ, and the less is random


def batches(lengths: Sequence[int], size: int, generator: torch.Generator) -> list[list[int]]:
    """Every index once: shuffled, sorted by length in pools of some batches, cut into batches, which are shuffled."""
    order: list[int] = torch.randperm(len(lengths), generator=generator).tolist()
    cut: list[list[int]] = []
    for start in range(0, len(order), size * POOL):
        pool = sorted(order[start : start + size * POOL], key=lengths.__getitem__)
        cut += [pool[i : i + size] for i in range(0, len(pool), size)]
    return [cut[i] for i in torch.randperm(len(cut), generator=generator).tolist()]


class LengthBatches(Sampler[list[int]]):
    """A batch sampler for `torch.utils.data.DataLoader`, where training is your own; `mslmn.Plan` has ``buckets``.

    Args:
        lengths: of the sequences.
        seed: with the epoch (`set_epoch`) decides the order, alone.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int = 0) -> None:
        self.lengths = [checks.size(f"lengths[{i}]", length) for i, length in enumerate(lengths)]
        self.batch_size, self.seed, self.epoch = checks.size("batch_size", batch_size), checks.size("seed", seed, 0), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = checks.size("epoch", epoch, 0)

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        (state,) = np.random.SeedSequence([self.seed, self.epoch]).generate_state(1, np.uint64)
        return iter(batches(self.lengths, self.batch_size, torch.Generator().manual_seed(int(state) >> 1)))
