"""Sequences as a caller has them, read as padded buckets, checked once, summed over every process.

Legend: n sequences of T steps and a features; L steps in all; h the horizon in steps.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, distributed
from torch.nn.utils.rnn import pad_sequence

PADDING = 1.25  # sequences of one bucket may be this much longer than its shortest
BUCKET_BYTES = 2**25  # of one bucket, or of its states: what is copied at a time

Batch = Tensor | list[Tensor]  # (n, T, a), or (T, a) of each


@dataclass(frozen=True)
class Bucket:
    """Sequences of nearly one length."""

    x: Tensor  # (n, T, a), zero after each sequence's own end
    lengths: Tensor  # (n,), int64, on the device of x
    index: range | list[int]  # where each stood in its batch

    def ended(self) -> Tensor | None:
        """(n, T), which steps are past the end; None if there are none."""
        n, T, _ = self.x.shape
        if int(self.lengths.sum()) == n * T:
            return None
        return torch.arange(T, device=self.x.device) >= self.lengths[:, None]

    def reversed_ends(self, horizon: int) -> Tensor:
        """The last steps of each sequence, newest first, zeros before its start: (n, h, a)."""
        n, T, a = self.x.shape
        index = self.lengths[:, None] - 1 - torch.arange(min(horizon, T), device=self.x.device)  # (n, lags)
        last = self.x.gather(1, index.clamp(min=0)[..., None].expand(-1, -1, a))
        ends = self.x.new_zeros(n, horizon, a)
        ends[:, : last.shape[1]] = last.masked_fill((index < 0)[..., None], 0)
        return ends


@dataclass(frozen=True)
class Survey:
    """What one look at all sequences, of all processes, tells."""

    sequences: int
    steps: int
    longest: int
    features: int
    largest: float  # absolute value
    double: bool  # whether any is in float64
    total: Tensor  # (a,), float64: the sum over all steps


class Sequences:
    """A list of (T, a) arrays, one (n, T, a) array, or an iterable of such batches that can be read again."""

    def __init__(self, X: Any, *, distributed: bool = False) -> None:
        self.X = X
        self.streamed = not isinstance(X, (list, tuple, np.ndarray, Tensor))
        self.distributed = distributed
        self.prepare: Callable[[Tensor], Tensor] | None = None
        self.count: int | None = None  # of sequences, once all were read
        if self.streamed and (isinstance(X, (Iterator, str, bytes, dict)) or not isinstance(X, Iterable)):
            raise TypeError(
                "sequences come as a list of (T, a) arrays, one (n, T, a) array, or an iterable of such batches that "
                f"can be read more than once, got {type(X).__name__}; put what it yields in a list"
            )

    def batches(self) -> Iterator[Batch]:
        """Batch by batch, as they are."""
        first = 0
        for batch in self.X if self.streamed else (self.X,):
            tensors = _tensors(batch, first)
            first += len(tensors)
            yield tensors
        if self.count not in (None, first):
            raise ValueError(
                f"the iterable gave {self.count} sequences when it was read first, and {first} later; it must give the "
                "same each time: let __iter__ start anew, or put what it yields in a list"
            )
        self.count = first

    def buckets(self, dtype: torch.dtype | None = None, width: int = 1) -> Iterator[Bucket]:
        """Every sequence that has a step, beside others of its length, prepared (see `prepared`) and cast.

        So few at a time that ``width`` numbers for each step are not too many either.
        """
        for batch in self.batches():
            yield from self.batch_buckets(batch, dtype, width)

    def batch_buckets(self, batch: Batch, dtype: torch.dtype | None = None, width: int = 1) -> Iterator[Bucket]:
        for bucket in _buckets(batch, width):
            x = bucket.x
            if self.prepare is not None:
                x, ended = self.prepare(x), bucket.ended()
                x = x if ended is None else x.masked_fill(ended[..., None], 0)
            yield Bucket(x.to(dtype or x.dtype), bucket.lengths, bucket.index)

    def prepared(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same sequences, each step mapped by the function, after those that already map it."""
        before = self.prepare
        mapped = type(self)(self.X, distributed=self.distributed)
        mapped.count = self.count
        mapped.prepare = function if before is None else lambda x: function(before(x))
        return mapped

    def survey(self) -> Survey:
        """Sizes and sums over every process; wrong, missing or non-finite data is an error on every one of them."""
        problem: Exception | None = None
        found = Survey(0, 0, 0, 0, 0.0, False, torch.zeros(0, dtype=torch.float64))
        try:
            for batch in self.batches():
                for x in (batch,) if isinstance(batch, Tensor) else batch:
                    found = _seen(x, found)
        except Exception as error:  # also what the caller's iterable raises: the other processes wait
            problem = error
        if self.distributed:
            found, problem = self._agreed(found, problem)
        if problem is None and not found.sequences:
            problem = ValueError("there is no sequence; pass at least one (T, a) array")
        if problem is not None:
            raise problem
        return found

    def _agreed(self, mine: Survey, problem: Exception | None) -> tuple[Survey, Exception | None]:
        here = exchange_device()
        fewest = -mine.features or -torch.inf
        sizes = (mine.longest, mine.largest, mine.double, mine.features, fewest, problem is not None)
        most = torch.tensor(sizes, dtype=torch.float64, device=here)
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
        longest, largest, double, features, fewest, failed = most.tolist()
        if failed:
            return mine, problem or ValueError("the sequences of another process are wrong; its own message says how")
        if features != -fewest and features:
            return mine, ValueError(
                f"every process must have sequences of as many features, got {-fewest:.0f} in one and {features:.0f} "
                "in another; fit one autoencoder per kind of data"
            )
        total = mine.total if mine.features else mine.total.new_zeros(int(features))
        sums = torch.cat([torch.tensor([mine.sequences, mine.steps], dtype=torch.float64), total.cpu()]).to(here)
        self.reduce(sums)
        sequences, steps = (round(count) for count in sums[:2].tolist())
        total = sums[2:].to(self.device)
        return Survey(sequences, steps, int(longest), int(features), largest, bool(double), total), None

    def reduce(self, value: Tensor) -> Tensor:
        """In place, the sum over all processes."""
        if self.distributed:
            distributed.all_reduce(value)
        return value

    def from_first(self, value: Tensor) -> Tensor:
        """In place, what the first process has."""
        if self.distributed:
            distributed.broadcast(value, src=0)
        return value

    @cached_property
    def device(self) -> torch.device:
        """Of the data; for a process without data, where processes exchange theirs."""
        x = next((x for batch in self.batches() for x in batch), None)
        if x is not None:
            return x.device
        return exchange_device() if self.distributed else torch.device("cpu")


def are_torch(X: Any) -> bool:
    """Whether sequences come as tensors, not as NumPy arrays."""
    arrays = (np.ndarray, Tensor)
    batches = (X,) if isinstance(X, (list, tuple, *arrays)) else X
    first = next((x for batch in batches for x in ((batch,) if isinstance(batch, arrays) else batch)), None)
    return isinstance(first, Tensor)


def check_batch(batch: Batch, first: int, check_features: Callable[[int], None]) -> None:
    """Its values are finite, and there are as many features as the check wants."""
    for i, x in enumerate((batch,) if isinstance(batch, Tensor) else batch):
        check_features(x.shape[-1])
        largest(x, first + i)


def exchange_device() -> torch.device:
    if distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _seen(x: Tensor, before: Survey) -> Survey:
    """The survey after one more sequence (T, a), or n more, (n, T, a)."""
    features, index = x.shape[-1], before.sequences
    if index and features != before.features:
        raise ValueError(
            f"every sequence must have as many features, got {before.features} in sequence 0 and {features} in "
            f"sequence {index}; fit one autoencoder per kind of data"
        )
    total = x.sum(tuple(range(x.ndim - 1)), dtype=torch.float64)
    return Survey(
        index + (1 if x.ndim == 2 else len(x)),
        before.steps + x.shape[:-1].numel(),
        max(before.longest, x.shape[-2] if len(x) else 0),
        features,
        max(before.largest, largest(x, index)),
        before.double or x.dtype == torch.float64,
        before.total + total if index else total,
    )


def largest(x: Tensor, first: int) -> float:
    """The largest absolute value; an error if one is not finite, in the sequence number ``first`` or those after."""
    if not x.numel():
        return 0.0
    low, high = (float(bound) for bound in torch.aminmax(x))  # both NaN if there is one anywhere
    if not -torch.inf < low <= high < torch.inf:
        raise _not_finite(x, first)
    return max(-low, high)


def _not_finite(x: Tensor, first: int) -> ValueError:
    """x (T, a), the sequence number ``first``, or (n, T, a), those from it on."""
    x = x if x.ndim == 3 else x[None]
    i, step, feature = (~torch.isfinite(x)).nonzero()[0].tolist()
    return ValueError(
        f"sequence {first + i} has {x[i, step, feature].item()} at step {step}, feature {feature}; "
        "every value must be finite: drop the sequence, or fill the gap"
    )


def _tensors(batch: Any, first: int) -> Batch:
    """A batch as floating-point tensors; ``first`` is the number of its first sequence."""
    if isinstance(batch, (np.ndarray, Tensor)):
        if batch.ndim != 3:
            remedy = "put a single sequence in a list" if batch.ndim == 2 else "add what is missing"
            raise ValueError(f"an array of sequences has the shape (n, T, a), got {tuple(batch.shape)}; {remedy}")
        return _tensor(batch, first)
    if not isinstance(batch, (list, tuple)):
        raise TypeError(
            f"a batch is a list of (T, a) arrays or one (n, T, a) array, got {type(batch).__name__}; "
            "let the iterable yield sequences and nothing else"
        )
    tensors = [_tensor(x, first + i) for i, x in enumerate(batch)]
    for i, x in enumerate(tensors):
        if x.ndim != 2:
            remedy = "add a feature dimension, x[:, None]" if x.ndim == 1 else "pass the array itself, not in a list"
            raise ValueError(f"sequence {first + i} must have the shape (T, a), got {tuple(x.shape)}; {remedy}")
        if x.device != tensors[0].device:
            raise ValueError(
                f"sequence {first + i} is on {x.device}, sequence {first} on {tensors[0].device}; move them to one"
            )
    mixed = any(x.dtype != tensors[0].dtype for x in tensors)
    return [x.double() for x in tensors] if mixed else tensors


def _tensor(x: Any, index: int) -> Tensor:
    if isinstance(x, Tensor):
        if x.is_complex() or x.layout != torch.strided:
            raise TypeError(f"sequence {index} must be dense and real, got {x.dtype}, {x.layout}; convert it")
        if x.dtype in (torch.float64, torch.float32):
            return x.detach()
        return x.detach().to(torch.float32 if x.is_floating_point() else torch.float64)
    array = np.asarray(x)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"sequence {index} must hold real numbers, got {array.dtype}; convert it with astype(float)")
    if array.dtype not in (np.float64, np.float32):
        array = array.astype(np.float32 if array.dtype == np.float16 else np.float64)
    if not array.dtype.isnative or any(s < 0 or s // array.itemsize * array.itemsize != s for s in array.strides):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")  # what torch can share
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")  # it is only read
        return torch.from_numpy(array)


def _buckets(batch: Batch, width: int) -> Iterator[Bucket]:
    if isinstance(batch, Tensor):
        n, T, a = batch.shape
        rows = max(1, BUCKET_BYTES // max(1, T * max(a, width) * batch.element_size()))
        for start in range(0, n if T else 0, rows):
            x = batch[start : start + rows]
            yield Bucket(x, torch.full((len(x),), T, device=x.device), range(start, start + len(x)))
        return
    order = sorted((i for i, x in enumerate(batch) if len(x)), key=lambda i: len(batch[i]))
    while order:
        shortest = len(batch[order[0]])
        count = next((k for k, i in enumerate(order) if len(batch[i]) > PADDING * shortest), len(order))
        step = max(batch[order[0]].shape[1], width) * batch[order[0]].element_size()  # bytes
        count = min(count, max(1, BUCKET_BYTES // (shortest * step)))
        index, order = order[:count], order[count:]
        xs = [batch[i] for i in index]
        yield Bucket(
            pad_sequence(xs, batch_first=True) if count > 1 else xs[0][None],
            torch.tensor([len(x) for x in xs], device=xs[0].device),
            index,
        )
