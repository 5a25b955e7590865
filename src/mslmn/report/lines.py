"""Lines of handwriting beside what a model read in them: which character it emitted where, and which are wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..data.handwriting import BLANK, UNKNOWN_CHARACTER
from ..experiments.records import Record
from .arrays import damaged, load


class Emission(NamedTuple):
    """A character of the best path, and the steps at which it is the likeliest label."""

    character: str
    first: int
    last: int
    right: bool


class Pair(NamedTuple):
    """A character of the text above one that was read; empty where one was left out, or put in."""

    expected: str
    read: str
    right: bool


@dataclass(frozen=True)
class Line:
    """A test line, as it was written and as a model read it."""

    xy: NDArray[np.float64]  # (T, 2), y downwards
    ends: NDArray[np.bool_]  # (T,) of strokes
    labels: list[int]  # (T,) of the best path
    characters: list[str]  # of each label
    expected: str

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Label, first and last step of each piece of the best path that is not blank."""
        found, first = [], 0
        for label, steps in groupby(self.labels):
            last = first + len(list(steps)) - 1
            if label != BLANK:
                found.append((label, first, last))
            first = last + 1
        return found

    @property
    def read(self) -> str:
        return "".join(self.characters[label] for label, *_ in self.runs)

    @cached_property
    def pairs(self) -> list[Pair]:
        """The text and what was read, aligned. A character without a label is right if it is read as unknown."""
        read = [self.characters[label] for label, *_ in self.runs]
        wanted = [letter if letter in self.characters else UNKNOWN_CHARACTER for letter in self.expected]
        return [
            Pair(
                "" if i is None else self.expected[i],
                "" if j is None else read[j],
                i is not None and j is not None and wanted[i] == read[j],
            )
            for i, j in align(wanted, read)
        ]

    @property
    def emissions(self) -> list[Emission]:
        read = [pair for pair in self.pairs if pair.read]
        return [Emission(pair.read, a, b, pair.right) for pair, (_, a, b) in zip(read, self.runs, strict=True)]

    @property
    def accuracy(self) -> float:
        """1 - edit distance / length."""
        wrong = sum(not pair.right for pair in self.pairs)
        return 1 - wrong / len(self.expected) if self.expected else float(not wrong)


def align(a: Sequence[str], b: Sequence[str]) -> list[tuple[int | None, int | None]]:
    """Indices of characters that belong together, with the fewest changes; None where the other has one more.

    >>> align("cat", "at")
    [(0, None), (1, 0), (2, 1)]
    """
    cost = np.zeros((len(a) + 1, len(b) + 1), dtype=np.int64)  # of what is left: a[i:] -> b[j:]
    cost[:, -1], cost[-1] = np.arange(len(a), -1, -1), np.arange(len(b), -1, -1)
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            cost[i, j] = min(cost[i + 1, j + 1] + (a[i] != b[j]), cost[i + 1, j] + 1, cost[i, j + 1] + 1)
    found: list[tuple[int | None, int | None]] = []
    i = j = 0
    while i < len(a) or j < len(b):
        if i < len(a) and j < len(b) and cost[i, j] == cost[i + 1, j + 1] + (a[i] != b[j]):
            found.append((i, j))
            i, j = i + 1, j + 1
        elif i < len(a) and cost[i, j] == cost[i + 1, j] + 1:
            found.append((i, None))
            i += 1
        else:
            found.append((None, j))
            j += 1
    return found


def examples(record: Record) -> list[Line]:
    """The lines that a run left to be shown; none if it left none."""
    found = load(record, starts=1, points=2, labels=1, characters=1, expected=1, recognised=1)
    if found is None:
        return []
    starts, points, labels, characters, expected, recognised = found
    if why := _wrong(starts, points, labels, characters, expected, recognised):
        raise damaged(record, why)
    known = [str(character) for character in characters.tolist()]
    lines = []
    for (a, b), text in zip(pairwise(starts.tolist()), expected.tolist(), strict=True):
        xy, ends = points[a:b, :2].astype(float), points[a:b, 2] > 0.5
        lines.append(Line(xy, ends, labels[a:b].tolist(), known, str(text)))
    for line, text in zip(lines, recognised.tolist(), strict=True):
        if line.read != text:
            raise damaged(record, "the best path does not say what was recognised")
    return lines


def _wrong(
    starts: NDArray[Any],
    points: NDArray[Any],
    labels: NDArray[Any],
    characters: NDArray[Any],
    expected: NDArray[Any],
    recognised: NDArray[Any],
) -> str:
    """Why the arrays do not fit; empty if they do."""
    if starts.dtype.kind not in "iu" or labels.dtype.kind not in "iu":
        return "starts and labels must be whole numbers"
    if any(texts.dtype.kind != "U" for texts in (characters, expected, recognised)):
        return "characters, expected and recognised must be text"
    if not characters[BLANK + 1 :].all():
        return "every label but that of the blank must have a character"
    if points.shape != (len(labels), 3) or points.dtype.kind not in "fiu" or not np.isfinite(points).all():
        return "points must be x, y and end of stroke of each label"
    if not len(starts) or starts[0] != 0 or starts[-1] != len(labels) or (starts[1:] <= starts[:-1]).any():
        return "starts must lead from 0 to the number of points"
    if not len(expected) == len(recognised) == len(starts) - 1:
        return "expected and recognised must have a text for each line"
    if not np.isin(labels, np.arange(len(characters))).all():
        return f"labels must be numbers of {len(characters)} characters"
    return ""


def accuracies(record: Record) -> NDArray[np.float64]:
    """Of every test line; none if the run did not leave them."""
    found = load(record, accuracies=1)
    if found is None:
        return np.zeros(0)
    if found[0].dtype.kind not in "fiu" or not np.isfinite(found[0]).all():
        raise damaged(record, "accuracies must be numbers")
    return found[0].astype(float)
