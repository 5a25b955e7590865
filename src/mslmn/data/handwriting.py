"""Online handwriting: lines of text as the pen wrote them -> features and labels for CTC.

The lines come from iam_ondb.py, pendigits.py or writer.py. All have the same form: seconds, x, y (downwards) of the pen
at each step, and whether it is lifted after it.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import checks
from . import folders, store

Array = NDArray[np.float64]
Features = NDArray[np.float32]
SPLITS = ("train", "validation", "test")
KINDS = ("absolute", "offsets")
PAPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz ',."  # with blank and unknown the 58 outputs of its code
BLANK, UNKNOWN = 0, 1
UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"
HELD_OUT = 5  # lines that train for each that validates, and each that tests, where there is a choice
TENTH = 10.0  # offsets are in tenths of the line's height: about 1 a step
LONGEST_PAUSE = 1.0  # seconds; what is beyond says nothing about the text
MOST_OFFSET = 1e4  # tenths of the line's height in one step: a thousand lines high


class Line(NamedTuple):
    """A line of text, written once."""

    name: str  # a01-000u-01, for instance
    split: str  # one of SPLITS
    writer: str  # "" if unknown
    text: str
    points: Array  # (T, 4): seconds, x, y downwards, 1 where a stroke ends, else 0


@dataclass(frozen=True)
class Alphabet:
    """Which characters have a label. 0 is CTC's blank, 1 every other character."""

    characters: str = PAPER

    def __post_init__(self) -> None:
        if not self.characters or len(set(self.characters)) < len(self.characters):
            raise ValueError(
                f"an alphabet must have at least one character, and each once, got {self.characters!r}; drop the others"
            )

    @property
    def outputs(self) -> int:
        return len(self.characters) + 2

    def encode(self, text: str) -> list[int]:
        labels = {character: label for label, character in enumerate(self.characters, UNKNOWN + 1)}
        return [labels.get(character, UNKNOWN) for character in text]

    def decode(self, labels: Iterable[int]) -> str:
        """Blanks vanish; they are not collapsed here, but by `mslmn.objectives.best_path`."""
        known = ["", UNKNOWN_CHARACTER, *self.characters]
        return "".join(known[label] for label in labels)


@dataclass(frozen=True)
class Handwriting:
    """Lines as sequences of features, with their texts."""

    name: str  # where they are from
    kind: str  # of features, one of KINDS
    alphabet: Alphabet
    names: list[str]  # of each line
    splits: list[str]
    writers: list[str]
    texts: list[str]
    features: list[Features]  # (T, 4)

    def pairs(self, split: str) -> list[tuple[Tensor, Tensor]]:
        """(T, 4) and the labels of each line of a split, for `mslmn.fit`."""
        checks.choice("split", split, SPLITS)
        return [
            (torch.from_numpy(x), torch.tensor(self.alphabet.encode(text)))
            for x, text, where in zip(self.features, self.texts, self.splits, strict=True)
            if where == split
        ]


# Features


def absolute(points: Array) -> Features:
    """The paper's features: time, x and y, each scaled to [0, 1] over the line, and end of stroke.

    Where a line has no extent, as a dash has in y, the feature is 0.
    """
    scaled = np.column_stack([_elapsed(points).cumsum(), points[:, 1:]])
    low, extent = scaled[:, :3].min(0), np.ptp(scaled[:, :3], axis=0)
    scaled[:, :3] = (scaled[:, :3] - low) / np.where(extent > 0, extent, 1)
    return scaled.astype(np.float32)


def offsets(points: Array) -> Features:
    """How the pen moved since the step before: seconds, dx, dy, and end of stroke; 0, 0, 0 at the first step.

    dx and dy are in tenths of the line's height (of its width, if it has no height), so that the size of the writing
    and the resolution of the tablet do not matter; seconds are at most 1.
    """
    extent = np.ptp(points[:, 1:3], axis=0)
    height = extent[1] or extent[0] or 1.0
    moved = np.diff(points[:, 1:3], axis=0, prepend=points[:1, 1:3]) * TENTH / height
    return np.column_stack([_elapsed(points).clip(max=LONGEST_PAUSE), moved, points[:, 3]]).astype(np.float32)


def _elapsed(points: Array) -> Array:
    """Seconds since the step before; clocks that go back stand still."""
    return np.diff(points[:, 0], prepend=points[0, 0]).clip(min=0)


def places(features: Features, kind: str) -> Array:
    """(T, 2): x and y of the pen, y downwards, to draw. Size and place of the line are lost."""
    checks.choice("kind", kind, KINDS)
    xy = features[:, 1:3].astype(np.float64)
    return xy.cumsum(0) / TENTH if kind == "offsets" else xy


def strokes(features: Features, kind: str) -> list[Array]:
    """`places` of each stroke."""
    xy = places(features, kind)
    ends = np.flatnonzero(features[:, 3] > 0.5) + 1
    return [stroke for stroke in np.split(xy, ends) if len(stroke)]


def steps_needed(labels: Sequence[object]) -> int:
    """By CTC: a step for each label, and one between two of the same."""
    return len(labels) + sum(a == b for a, b in pairwise(labels))


# Prepared lines


def prepare(
    lines: Sequence[Line],
    name: str,
    *,
    features: str = "absolute",
    alphabet: str = "paper",
) -> Handwriting:
    """Features and alphabet of lines. Those that cannot be learnt are left out, with a warning that names them.

    Args:
        features: ``"absolute"`` (the paper's) or ``"offsets"``.
        alphabet: ``"paper"`` for its 58 outputs, ``"all"`` for every character of the texts that train.
    """
    checks.choice("features", features, KINDS)
    checks.choice("alphabet", alphabet, ("paper", "all"))
    for line in lines:
        _check(line)
    trains = set("".join(line.text for line in lines if line.split == "train"))
    if not trains:
        raise ValueError(f"{name} has {len(lines)} lines, none with text that trains; add some to the split 'train'")
    if alphabet == "paper" and not trains & set(PAPER):
        raise ValueError(
            f"the paper's alphabet has none of the characters of {name}, {''.join(sorted(trains))[:40]!r}; "
            "choose alphabet 'all'"
        )
    letters = Alphabet(PAPER if alphabet == "paper" else "".join(sorted(trains)))
    kept, computed = _learnable(lines, letters, absolute if features == "absolute" else offsets)
    return Handwriting(
        name,
        features,
        letters,
        [line.name for line in kept],
        [line.split for line in kept],
        [line.writer for line in kept],
        [line.text for line in kept],
        computed,
    )


def _learnable(
    lines: Sequence[Line], alphabet: Alphabet, compute: Callable[[Array], Features]
) -> tuple[list[Line], list[Features]]:
    kept, computed, left_out = [], [], []
    for line in lines:
        steps = steps_needed(alphabet.encode(line.text))
        with np.errstate(over="ignore"):
            features = compute(line.points)
        if len(line.points) < steps:
            left_out.append(f"{line.name}: CTC needs {steps} points for {line.text[:40]!r}, got {len(line.points)}")
        elif not (np.abs(features) <= MOST_OFFSET).all():
            left_out.append(
                f"{line.name}: the pen moves {MOST_OFFSET / TENTH:g} times the height of the line in a step"
            )
        else:
            kept.append(line)
            computed.append(features)
    if left_out:
        several = "s" * (len(left_out) > 1)
        warnings.warn(f"left out {len(left_out)} line{several}:{folders.listed(left_out)}", stacklevel=3)
    if not kept:
        raise ValueError("no line is left; look at what the warning says of them")
    return kept, computed


def _check(line: Line) -> None:
    checks.choice(f"the split of line {line.name!r}", line.split, SPLITS)
    points = line.points
    if points.ndim != 2 or points.shape[1] != 4 or not len(points) or not np.isfinite(points).all():
        raise ValueError(
            f"the points of line {line.name!r} must be (T, 4) finite numbers, T at least 1, got {points.shape}"
            f"{'' if np.isfinite(points).all() else ' with NaN or infinity'}; drop the line"
        )
    if "\0" in line.text:
        raise ValueError(f"the text of line {line.name!r} must have no NUL, got {line.text[:40]!r}; drop the line")


def keep(path: Path, data: Handwriting) -> Path:
    """Write the lines to a file that bare machines can train from; if there is one, it must be the same."""
    arrays = {
        "name": np.array(data.name),
        "kind": np.array(data.kind),
        "characters": np.array(list(data.alphabet.characters)),
        "names": np.array(data.names),
        "splits": np.array(data.splits),
        "writers": np.array(data.writers),
        "texts": np.array(data.texts),
        "features": np.concatenate(data.features),
        "offsets": np.cumsum([0, *map(len, data.features)]),  # of line i: features[offsets[i] : offsets[i + 1]]
    }
    return store.keep(path, arrays)


def load(path: str | Path) -> Handwriting:
    """What `keep` wrote."""
    stored = store.load(path)
    try:
        bounds, features = stored["offsets"], stored["features"]
        if bounds.ndim != 1 or features.ndim != 2 or features.shape[1] != 4 or features.dtype != np.float32:
            raise ValueError(f"features {features.shape} of {features.dtype}")
        if bounds[0] != 0 or bounds[-1] != len(features) or (np.diff(bounds) < 1).any():
            raise ValueError("lengths that do not fit")
        if not np.isfinite(features).all():
            raise ValueError("features that are NaN or infinite")
        lists = {key: [str(text) for text in stored[key].tolist()] for key in ("names", "splits", "writers", "texts")}
        if {len(found) for found in lists.values()} != {len(bounds) - 1}:
            raise ValueError("lists that do not fit")
        data = Handwriting(
            str(stored["name"]),
            checks.choice("kind", str(stored["kind"]), KINDS),
            Alphabet("".join(stored["characters"].tolist())),
            features=np.split(features, bounds[1:-1]),
            **lists,
        )
        for split in set(data.splits):
            checks.choice("split", split, SPLITS)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        missing = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{path} has {missing}, so it is not prepared handwriting; make it with mslmn prepare"
        ) from None
    return data
