"""Packed sequences, made and unmade by index: one copy each way, where torch makes one for every step or length.

A packed batch has its sequences longest first, and the rows of one step after the other. What the CPU does is done by
numpy, in one thread: between two batches torch's fall asleep, and waking them can take longer than training.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def pack(xs: Sequence[Tensor]) -> PackedSequence:
    """Sequences (T_i, ..) in any order; equally long ones keep theirs."""
    lengths = np.array([len(x) for x in xs])
    order = np.argsort(-lengths, kind="stable")
    by_length = lengths[order]
    batch_sizes = len(xs) - np.searchsorted(by_length[::-1], np.arange(by_length[0]), side="right")
    steps, rows = coordinates(batch_sizes)
    starts = np.cumsum(by_length) - by_length
    data = _taken([xs[i] for i in order], starts[rows] + steps)
    if (order == np.arange(len(xs))).all():
        return PackedSequence(data, torch.from_numpy(batch_sizes))
    return PackedSequence(data, torch.from_numpy(batch_sizes), torch.from_numpy(order))


def pad(packed: PackedSequence) -> Tensor:
    """(T, B, ..), longest sequence first, zeros behind each one's end."""
    data, sizes = packed.data, packed.batch_sizes
    T, B = len(sizes), int(sizes[0])
    padded = data.new_zeros(T * B, *data.shape[1:])
    return padded.index_copy(0, _places(packed), data).view(T, B, *data.shape[1:])


def pack_like(padded: Tensor, packed: PackedSequence) -> PackedSequence:
    """The inverse of `pad`: (T, B, ..), longest sequence first, in the form of a packed batch."""
    return PackedSequence(padded.flatten(0, 1).index_select(0, _places(packed)), *packed[1:])


def lengths(packed: PackedSequence) -> Tensor:
    """Of the sequences, longest first, on the CPU."""
    return torch.from_numpy(lengths_of(packed.batch_sizes.numpy()))


def lengths_of(batch_sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return len(batch_sizes) - np.searchsorted(batch_sizes[::-1], np.arange(batch_sizes[0]), side="right")


def coordinates(batch_sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each row of a packed batch: its step, its sequence."""
    steps = np.repeat(np.arange(len(batch_sizes)), batch_sizes)
    starts = np.cumsum(batch_sizes) - batch_sizes
    return steps, np.arange(len(steps)) - starts[steps]


def windows(batch_sizes: NDArray[np.int64], P: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Windows of P steps, from each sequence's first on, as the rows of a packed batch: its batch sizes; where each row
    goes, if every window has P places, one after the other; and how many rows each window has."""
    sizes = np.ascontiguousarray(batch_sizes[::P])
    steps, sequences = coordinates(batch_sizes)
    window = (np.cumsum(sizes) - sizes)[steps // P] + sequences
    return sizes, P * window + steps - steps // P * P, np.bincount(window)


def rows(packed: PackedSequence, order: Tensor) -> Tensor:
    """Where the rows of a packed batch are once its sequences come in another order, of equally long ones."""
    sizes = packed.batch_sizes.numpy()
    steps, sequences = coordinates(sizes)
    return torch.from_numpy((np.cumsum(sizes) - sizes)[steps] + order.numpy()[sequences])


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """Without waiting for what the device is doing."""
    if device.type != "cuda" or t.device.type != "cpu" or t.dtype == torch.bfloat16 or t.requires_grad:
        return t.to(device)
    pinned = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True)
    np.copyto(pinned.numpy(), t.numpy())
    return pinned.to(device, non_blocking=True)


def _taken(xs: list[Tensor], rows: NDArray[np.int64]) -> Tensor:
    """Some rows of all."""
    if any(x.device.type != "cpu" or x.dtype == torch.bfloat16 or x.requires_grad for x in xs):
        return torch.cat(xs).index_select(0, torch.from_numpy(rows).to(xs[0].device))
    return torch.from_numpy(np.concatenate([x.numpy() for x in xs]).take(rows, 0))


def _places(packed: PackedSequence) -> Tensor:
    """The row of each step in a matrix of T times B rows."""
    sizes = packed.batch_sizes.numpy()
    steps, rows = coordinates(sizes)
    return to_device(torch.from_numpy(steps * sizes[0] + rows), packed.data.device)
