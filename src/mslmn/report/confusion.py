"""Which words were taken for which, and whether they end alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..experiments.records import ARRAYS, Record, RecordError
from .arrays import damaged, load


@dataclass(frozen=True)
class Confusion:
    """Test clips counted by word (rows) and by answer (columns); words of one suffix stand together."""

    counts: NDArray[np.int64]  # (classes, classes)
    names: list[str]
    suffixes: list[int]  # -1: shares its suffix with none

    @property
    def related(self) -> NDArray[np.bool_]:  # (classes, classes)
        """Which words share a suffix; each does with itself."""
        suffixes = np.array(self.suffixes)
        same: NDArray[np.bool_] = (suffixes[:, None] == suffixes) & (suffixes >= 0)
        return same | np.eye(len(suffixes), dtype=bool)

    @property
    def has_suffixes(self) -> bool:
        return bool(self.related.sum() > len(self.names))

    @property
    def clips(self) -> int:
        return int(self.counts.sum())

    @property
    def correct(self) -> int:
        return int(np.trace(self.counts))

    @property
    def within(self) -> int:
        return int(self.counts[self.related].sum()) - self.correct

    @property
    def across(self) -> int:
        return int(self.counts[~self.related].sum())

    @property
    def chance(self) -> float:
        """The share of errors within a suffix if errors fell on the other words at random."""
        others = self.related.sum(1) - 1
        return float(np.average(others / (len(self.names) - 1), weights=self.counts.sum(1)))

    def groups(self) -> list[tuple[int, int, str]]:
        """First word, one past the last word and common ending of each suffix."""
        starts = [i for i, s in enumerate(self.suffixes) if i == 0 or s < 0 or s != self.suffixes[i - 1]]
        ends = [*starts[1:], len(self.suffixes)]
        return [(a, b, ending(self.names[a:b])) for a, b in zip(starts, ends, strict=True) if b > a + 1]


def ending(words: Sequence[str]) -> str:
    """
    >>> ending(["subway", "leeway", "highway"])
    'way'
    """
    length = 0
    while all(len(word) > length for word in words) and len({word[-1 - length] for word in words}) == 1:
        length += 1
    return words[0][len(words[0]) - length :]


def confusion(records: Sequence[Record]) -> Confusion | None:
    """Summed over runs; None if no run left its predictions."""
    total: NDArray[np.int64] | None = None
    names: list[str] = []
    suffixes: list[int] = []
    for record in records:
        found = load(record, expected=1, predicted=1, names=1, suffixes=1)
        if found is None:
            continue
        words, groups = found[2].astype(str).tolist(), found[3].tolist()
        counts = _count(record, found[0], found[1], len(words))
        if len(groups) != len(words):
            raise damaged(record, f"{len(words)} words, {len(groups)} suffixes")
        if total is None:
            names, suffixes, total = words, groups, np.zeros_like(counts)
        if (words, groups) != (names, suffixes):
            raise RecordError(f"{record.folder / ARRAYS} has other words than the runs before; report on one data set")
        total += counts
    if total is None or not total.any():
        return None
    order = sorted(range(len(names)), key=lambda i: (suffixes[i] < 0, suffixes[i], i))
    return Confusion(total[np.ix_(order, order)], [names[i] for i in order], [suffixes[i] for i in order])


def _count(record: Record, expected: NDArray[Any], predicted: NDArray[Any], classes: int) -> NDArray[np.int64]:
    counts = np.zeros((classes, classes), dtype=np.int64)
    answers = np.concatenate([expected, predicted])
    if len(expected) != len(predicted) or not np.isin(answers, np.arange(classes)).all():
        raise damaged(record, f"expected and predicted must be as many, and numbers of {classes} words")
    np.add.at(counts, (expected.astype(int), predicted.astype(int)), 1)
    return counts
