"""What a model is trained for: NMSE, cross-entropy, CTC. Each knows its loss, its metric, its readout problem.

Losses and metrics are sums and counts, so that they add up over batches and processes without a trace of how the data
were cut.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from . import checks, ops, packing

Output = Tensor | PackedSequence


class Score(NamedTuple):
    """A sum over items and their number; the mean is what one looks at."""

    total: Tensor
    items: Tensor

    @property
    def mean(self) -> Tensor:
        return self.total / self.items


class Objective:
    """The interface. ``metric_name`` is what `metric` measures; higher is better where ``higher_is_better``."""

    metric_name = ""
    higher_is_better = False
    on_cpu = False  # whether it wants targets there, wherever the model is
    readout = "zeros"  # how to find that of a new module: "least squares", "convex", or leave it to training

    def prepare(self, batches: Iterable[tuple[Any, Any]]) -> None:
        """Look at the training data before the first loss, if there is anything to learn from it."""

    def restore(self, config: dict[str, Any]) -> None:
        """In place of `prepare`, where a run goes on: take over what it found, from the `config` it left."""

    def collate(self, targets: Sequence[Any]) -> Any:
        """Targets of single sequences as the target of a batch: packed if they go by steps, else stacked."""
        tensors = [torch.as_tensor(target) for target in targets]
        if self._by_step(tensors[0]):
            return packing.pack(tensors)
        return torch.stack(tensors)

    def _by_step(self, target: Tensor) -> bool:
        return target.dim() > 1

    def loss(self, output: Output, target: Any) -> Score:
        raise NotImplementedError

    def first_loss(self, output: Output, target: Any) -> Score:
        """What the first epochs train for, under ``Plan(flat_start=...)``, where the loss itself gives no start."""
        return self.loss(output, target)

    def metric(self, output: Output, target: Any) -> Score:
        raise NotImplementedError

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments, with what `prepare` found."""
        return {}


class NMSE(Objective):
    """Mean squared error over the variance of the target.

    Args:
        variance: of the target; found in the training data by `prepare` if not given. (Until then 1.)
    """

    metric_name = "NMSE"
    readout = "least squares"

    def __init__(self, variance: float | None = None) -> None:
        if variance is not None:
            checks.positive("variance", variance)
        self.variance, self._given = variance, variance is not None

    @property
    def config(self) -> dict[str, Any]:
        return {"variance": self.variance}

    def prepare(self, batches: Iterable[tuple[Any, Any]]) -> None:
        if self._given:
            return
        sums = torch.zeros(3, dtype=torch.float64)
        for _, target in batches:
            y = _data(target).double()
            sums += torch.stack([y.square().sum(), y.sum(), y.new_tensor(y.numel())]).cpu()
        squares, total, count = sums.tolist()
        variance = squares / count - (total / count) ** 2 if count else 0.0
        if not variance > 0:
            raise ValueError("the targets are constant, so NMSE is not defined; pass variance=1 for the plain error")
        self.variance = variance

    def restore(self, config: dict[str, Any]) -> None:
        if not self._given:
            self.variance = config["variance"]

    def loss(self, output: Output, target: Any) -> Score:
        y, expected = _data(output), _in_step(output, target)
        if y.shape != expected.shape:
            raise ValueError(
                f"the target must have the shape of the output, {tuple(y.shape)}, got {tuple(expected.shape)}; "
                "one value per output and step, of which a layer with pool leaves fewer"
            )
        error = (y - expected).square().sum() / (self.variance or 1.0)
        return Score(error, error.new_full((), y.numel()))

    metric = loss


class CrossEntropy(Objective):
    """Classification, of sequences (``output="last"``) or of every step (``"all"``). Targets are class numbers."""

    metric_name = "accuracy"
    higher_is_better = True
    readout = "convex"

    def loss(self, output: Output, target: Any) -> Score:
        logits, classes = self._checked(output, target)
        loss = F.cross_entropy(logits, classes, reduction="sum")
        return Score(loss, loss.new_full((), len(classes)))

    def metric(self, output: Output, target: Any) -> Score:
        logits, classes = self._checked(output, target)
        right = (logits.argmax(1) == classes).sum().to(logits.dtype)
        return Score(right, right.new_full((), len(classes)))

    def _by_step(self, target: Tensor) -> bool:
        return target.dim() > 0

    def _checked(self, output: Output, target: Any) -> tuple[Tensor, Tensor]:
        logits, classes = _data(output), _in_step(output, target)
        if logits.shape[:-1] != classes.shape or classes.is_floating_point():
            raise ValueError(
                f"targets must be class numbers of shape {tuple(logits.shape[:-1])}, got {classes.dtype} "
                f"{tuple(classes.shape)}; one number for each row of the output, of which a layer with pool leaves "
                "fewer"
            )
        O = logits.shape[-1]
        if classes.numel() and not 0 <= int(classes.min()) <= int(classes.max()) < O:
            raise ValueError(
                f"class numbers must be between 0 and {O - 1}, got {int(classes.min())} to {int(classes.max())}; "
                "renumber them, or give the model more outputs"
            )
        return logits.flatten(0, -2), classes.flatten()


class CTC(Objective):
    """Transcription: connectionist temporal classification (Graves et al. 2006), label 0 is the blank.

    The output is at every step (``output="all"``), packed, or ``(T, B, O)`` where all are equally long; a target is a
    list of label sequences, one tensor each. The loss of a sequence that is too short for its labels counts zero,
    so nothing is learnt from it: a layer with ``pool`` leaves fewer steps, of which each label needs one, and one more
    between two that are the same.
    On CUDA devices it is computed by kernels of ours, if they can be compiled, or else by torch.
    """

    metric_name = "character accuracy"
    higher_is_better = True
    on_cpu = True

    def collate(self, targets: Sequence[Any]) -> list[Tensor]:
        return [torch.as_tensor(target) for target in targets]

    def loss(self, output: Output, target: Sequence[Tensor]) -> Score:
        steps, order = _packed(output)
        O = steps.data.shape[-1]
        labels = _checked_labels(target, len(order), O)
        target = [target[i] for i in order]
        labels = labels if order == sorted(order) else _joined(target)
        counts = [t.shape[0] for t in target]  # Tensor.__len__ takes ten times as long
        wide = _wide(steps.data)
        if ops.ctc.takes(wide.device, steps.batch_sizes, counts):
            return Score(*ops.ctc.loss(wide, ops.ctc.prepare(labels, counts, steps.batch_sizes, wide.device)))
        loss = F.ctc_loss(
            packing.pad(PackedSequence(wide.log_softmax(-1), steps.batch_sizes)),
            packing.to_device(labels, wide.device),
            packing.lengths(steps),
            torch.tensor(counts, device="cpu"),
            reduction="sum",
            zero_infinity=True,
        )
        return Score(loss, loss.new_full((), len(target)))

    def first_loss(self, output: Output, target: Sequence[Tensor]) -> Score:
        """A flat start, as speech recognisers have it: cross-entropy at each step, with the L labels and the blanks
        before, between and behind them, 2 L + 1 in all, spread evenly over the T steps.

        Few of these targets are right, but those that are wrong differ from line to line, so what a network learns to
        answer is most often the label that is written there. CTC by itself begins with blanks everywhere.
        """
        steps, order = _packed(output)
        labels = _checked_labels(target, len(order), steps.data.shape[-1])
        expected = _spread(labels, [t.shape[0] for t in target], order, steps.batch_sizes.numpy())
        return _by_step(steps.data, packing.to_device(torch.from_numpy(expected), steps.data.device))

    def metric(self, output: Output, target: Sequence[Tensor]) -> Score:
        accuracies = [character_accuracy(found, t.tolist()) for found, t in zip(best_path(output), target, strict=True)]
        logits = _data(output)
        return Score(logits.new_full((), sum(accuracies)), logits.new_full((), len(accuracies)))


class PlacedCTC:
    """CTC for batches whose targets lie in a table on a CUDA device, see `ops.placed`: B sequences, at most N rows, T
    steps and so many labels each, O outputs. Where ``flat``, it is CTC's first loss."""

    NOWHERE = -100  # the target of rows of no step

    def __init__(self, B: int, T: int, N: int, O: int, labels: int, flat: bool) -> None:
        self.B, self.T, self.N, self.O, self.labels, self.flat = B, T, N, O, labels, flat
        self.size = N if flat else T + 3 * B + 1 + B * labels

    def table(self, target: Sequence[Tensor], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of a packed batch, in its order."""
        labels, counts = _checked_labels(target, self.B, self.O), [t.shape[0] for t in target]
        if self.flat:
            found = _spread(labels, counts, range(self.B), sizes)
        else:
            found, _ = ops.ctc.table(labels.cpu().numpy(), counts, sizes, self.T)
        return np.append(found, np.full(self.size - len(found), self.NOWHERE))

    def loss(self, logits: Tensor, table: Tensor) -> Score:
        if self.flat:
            return _by_step(logits, table)
        pairs = self.N * (self.labels + 1)
        room = ops.ctc.Targets(table, self.T, self.B, self.N, self.B * self.labels, self.labels, pairs)
        return Score(*ops.ctc.loss(_wide(logits), room))


def best_path(output: Output) -> list[list[int]]:
    """The likeliest label at each step, repeats collapsed, then blanks dropped; one list for each sequence."""
    steps, order = _packed(output)
    likeliest = PackedSequence(steps.data.argmax(-1).cpu(), steps.batch_sizes)
    paths = packing.pad(likeliest).T.numpy()  # (B, T)
    decoded: dict[int, list[int]] = {}
    for i, path, length in zip(order, paths, packing.lengths(steps).tolist(), strict=True):
        decoded[i] = collapsed(path[:length])
    return [decoded[i] for i in range(len(order))]


def collapsed(path: NDArray[np.int64]) -> list[int]:
    """The labels of a path: repeats once, blanks, label 0, not at all."""
    new = np.r_[True, path[1:] != path[:-1]]
    found: list[int] = path[new & (path != 0)].tolist()
    return found


def character_accuracy(found: Sequence[int], expected: Sequence[int]) -> float:
    """1 - edit distance / length; negative if more is wrong than there is."""
    if not expected:
        return float(not found)
    return 1 - edit_distance(found, expected) / len(expected)


def edit_distance(a: Sequence[int], b: Sequence[int]) -> int:
    """Levenshtein's, by rapidfuzz if it is there."""
    return int(_distance()(a, b))


@lru_cache
def _distance() -> Callable[[Sequence[int], Sequence[int]], int]:
    """Found out once: to look in vain for a package takes longer than a short distance."""
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        return _edit_distance
    return Levenshtein.distance


def _edit_distance(a: Sequence[int], b: Sequence[int]) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def _spread(labels: Tensor, counts: Sequence[int], order: Sequence[int], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """A label or a blank for each row of a packed batch: of each sequence, spread evenly over its steps."""
    lengths = np.array(counts)
    starts = (np.cumsum(lengths) - lengths)[order]  # of the sequences of the batch, in their order
    t, sequence = packing.coordinates(sizes)
    place = t * (2 * lengths[order] + 1)[sequence] // packing.lengths_of(sizes)[sequence]
    label = np.append(labels.cpu().numpy(), 0)[(starts[sequence] + place // 2).clip(max=len(labels))]
    return np.where(place & 1, label, 0)


def _by_step(logits: Tensor, expected: Tensor) -> Score:
    loss = F.cross_entropy(_wide(logits), expected, ignore_index=PlacedCTC.NOWHERE, reduction="sum")
    return Score(loss, (expected != PlacedCTC.NOWHERE).sum().to(loss.dtype))


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _data(x: Any) -> Tensor:
    if isinstance(x, PackedSequence):
        return x.data
    if not isinstance(x, Tensor):
        raise TypeError(
            f"outputs and targets must be tensors or packed sequences, got {type(x).__name__}; convert them"
        )
    return x


def _in_step(output: Any, target: Any) -> Tensor:
    """The rows of the target, in the order of the output's. Packed sequences of other lengths may still have as many
    rows, and equally long sequences may have been packed in another order."""
    rows = _data(target)
    if not isinstance(output, PackedSequence) or not isinstance(target, PackedSequence):
        return rows
    given, wanted = (x.sorted_indices for x in (target, output))  # None: in the caller's order
    same = torch.equal(output.batch_sizes, target.batch_sizes)
    if same and given is not wanted and not (given is not None and wanted is not None and torch.equal(given, wanted)):
        places = torch.arange(int(target.batch_sizes[0]), device="cpu")  # of the target's sequences
        if given is not None:
            places[given.cpu()] = places.clone()
        order = places if wanted is None else places[wanted.cpu()]  # where each of the output's sequences is
        long = packing.lengths(target)
        same = torch.equal(long, long[order])
        if same:
            rows = rows.index_select(0, packing.rows(target, order).to(rows.device))
    if not same:
        raise ValueError(
            "each target must be as long as its sequence, or, where a layer pools, as its output; pack both in the "
            "same order"
        )
    return rows


def _packed(output: Output) -> tuple[PackedSequence, list[int]]:
    """The output as a packed batch, and which sequence is the first of it, the second, ..."""
    if isinstance(output, PackedSequence):
        order = output.sorted_indices
        return output, list(range(int(output.batch_sizes[0]))) if order is None else order.tolist()
    if output.dim() != 3:
        raise ValueError(
            f"CTC needs an output at every step, (T, B, O), got {tuple(output.shape)}; "
            "build the model with output='all'"
        )
    T, B = output.shape[:2]
    return PackedSequence(output.flatten(0, 1), torch.full((T,), B, device="cpu")), list(range(B))


def _joined(target: Sequence[Tensor]) -> Tensor:
    """An empty tensor is one of floats, if nobody says otherwise."""
    return torch.cat([t if t.shape[0] else t.long() for t in target])


def _checked_labels(target: Sequence[Tensor], B: int, O: int) -> Tensor:
    """All labels, one sequence after the other."""
    if len(target) != B:
        raise ValueError(
            f"CTC needs a label sequence for each of {B} sequences, got {len(target)}; pass a list of tensors"
        )
    labels = _joined(target)
    if labels.is_floating_point():
        raise ValueError(f"labels must be whole numbers, got {labels.dtype}; convert them with .long()")
    if len(labels) and not 1 <= int(labels.min()) <= int(labels.max()) < O:
        i, wrong = next((i, t) for i, t in enumerate(target) if len(t) and not 1 <= int(t.min()) <= int(t.max()) < O)
        raise ValueError(
            f"labels must be between 1 and {O - 1} (0 is the blank), got {int(wrong.min())} to {int(wrong.max())} "
            f"in sequence {i}; renumber them, or give the model more outputs"
        )
    return labels
