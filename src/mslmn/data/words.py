"""Spoken words: clips -> MFCC sequences with classes, split into training and test speakers.

Five of seven speakers' examples of each word train, two test. Where the same speakers say every word, as in the clips
of the package, whole speakers are held out.
"""

import csv
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import checks
from . import audio, store, timit
from .audio import Clip

COMMON_SUFFIX = {  # word -> its class of the paper, by suffix
    word: suffix
    for suffix, words in {
        "-king": ("making", "walking", "cooking", "looking", "working"),
        "-ical": ("biblical", "cyclical", "technical", "classical", "critical"),
        "-ition": ("tradition", "addition", "audition", "recognition", "competition"),
        "-ions": ("musicians", "discussions", "regulations", "accusations", "conditions"),
        "-way": ("subway", "leeway", "freeway", "highway", "hallway"),
    }.items()
    for word in words
}
SPEAKERS, TEST_SPEAKERS = 7, 2  # the paper's
# Who tests, of a word's seven speakers in the order of their names: the first split is the published one, the others
# are there to compare over. Each speaker tests two or three times.
SPLITS = ((1, 6), (0, 2), (3, 4), (0, 5), (2, 6), (1, 3), (4, 5), (0, 6), (1, 2), (3, 5))
Pair = tuple[Tensor, Tensor]  # (T, 13) and the class


@dataclass(frozen=True)
class Words:
    """Spoken words as sequences of features, not yet normalised. Clips are sorted by word, then speaker."""

    name: str  # where they are from
    features: list[NDArray[np.float32]]  # (T, 13) of each clip
    labels: list[int]  # the class of each clip
    speakers: list[str]  # of each clip
    classes: list[str]  # the words
    suffixes: list[int]  # of each class; -1 if unknown

    @property
    def longest(self) -> int:
        return max(map(len, self.features))


def embedded() -> Words:
    """The 25 words of the paper, by the 7 synthetic voices that the package carries."""
    folder = Path(str(files(__package__) / "assets" / "words"))
    sounds: dict[str, tuple[audio.Array, int]] = {}
    clips = []
    with (folder / "words.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            voice = row["voice"]
            if voice not in sounds:
                sounds[voice] = audio.read(folder / f"{voice}.flac")
            samples, rate = sounds[voice]
            clips.append(Clip(row["word"], voice, samples[int(row["start"]) : int(row["end"])], rate))
    return prepare(clips, list(COMMON_SUFFIX), "the 25 words by 7 synthetic voices")


def from_timit(folder: str | Path, words: Sequence[str] | None = None) -> Words:
    """Words of a TIMIT tree: the paper's 25 by 7 speakers each, or any others by as many as said them."""
    wanted = list(COMMON_SUFFIX) if words is None else list(words)
    clips = timit.clips(folder, wanted)
    if words is None:
        counts = {word: sum(clip.word == word for clip in clips) for word in wanted}
        few = [f"{word} ({count})" for word, count in counts.items() if count < SPEAKERS]
        if few:
            warnings.warn(f"fewer than {SPEAKERS} speakers say {', '.join(few)}; training goes on", stacklevel=2)
        clips = [clip for word in wanted for clip in [c for c in clips if c.word == word][:SPEAKERS]]
    return prepare(clips, wanted, f"{len(wanted)} words of {folder}")


def word_list(path: str | Path) -> list[str]:
    """The words of a file, separated by space or lines."""
    try:
        words = Path(path).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} cannot be read as a list of words ({error}); pass a text file, a word a line"
        ) from None
    repeated = sorted({word for word in words if words.count(word) > 1})
    if len(words) < 2 or repeated:
        found = f"{', '.join(repeated)} repeated" if repeated else f"{len(words)} words"
        raise ValueError(f"{path} must have at least two different words, a word a line, got {found}; correct the file")
    return words


def prepare(clips: Sequence[Clip], classes: Sequence[str], name: str) -> Words:
    number = {word: i for i, word in enumerate(classes)}
    known = list(dict.fromkeys(COMMON_SUFFIX.values()))
    clips = sorted(clips, key=lambda clip: (number[clip.word], clip.speaker))
    return Words(
        name,
        [audio.mfcc(clip.samples, clip.rate).astype(np.float32) for clip in clips],
        [number[clip.word] for clip in clips],
        [clip.speaker for clip in clips],
        list(classes),
        [known.index(COMMON_SUFFIX[word]) if word in COMMON_SUFFIX else -1 for word in classes],
    )


def labels(words: Words) -> store.Arrays:
    """What the classes are called, and which suffix they have."""
    return {"names": np.array(words.classes), "suffixes": np.array(words.suffixes)}


def keep(path: Path, words: Words) -> Path:
    """Write the words to a file that bare machines can train from; if there is one, it must be the same."""
    arrays = labels(words) | {
        "name": np.array(words.name),
        "features": np.concatenate(words.features),
        "lengths": np.array([len(x) for x in words.features]),
        "labels": np.array(words.labels),
        "speakers": np.array(words.speakers),
    }
    return store.keep(path, arrays)


def load(path: str | Path) -> Words:
    """What `keep` wrote."""
    stored = store.load(path)
    try:
        lengths, features, names = stored["lengths"], stored["features"], stored["names"]
        words = Words(
            str(stored["name"]),
            np.split(features, lengths.cumsum()[:-1]),
            stored["labels"].tolist(),
            stored["speakers"].tolist(),
            names.tolist(),
            stored["suffixes"].tolist(),
        )
        clips = {len(words.features), len(words.labels), len(words.speakers)}
        if len(clips) > 1 or lengths.sum() != len(features) or len(names) != len(words.suffixes):
            raise ValueError("lengths that do not fit")
    except (KeyError, ValueError, TypeError, IndexError) as error:
        missing = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} has {missing}, so it is not prepared words; make it with mslmn prepare") from None
    return words


def held_out(speakers: int, split: int) -> list[int]:
    """Which of a word's speakers, in the order of their names, test in a split: two of seven, or about that share."""
    checks.size("split", split, 0, len(SPLITS) - 1)
    if speakers == SPEAKERS:
        return list(SPLITS[split])
    count = min(max(1, round(TEST_SPEAKERS * speakers / SPEAKERS)), speakers - 1)
    return sorted(random.Random(split).sample(range(speakers), count))


def split_indices(words: Words, split: int) -> tuple[list[int], list[int]]:
    """Clips that train and clips that test."""
    train, test = [], []
    for label, word in enumerate(words.classes):
        clips = [i for i, found in enumerate(words.labels) if found == label]
        if len(clips) < 2:
            raise ValueError(
                f"{word!r} was said by {len(clips)} speaker(s), at least 2 are needed to train and test; drop the word"
            )
        out = held_out(len(clips), split)
        train += [i for position, i in enumerate(clips) if position not in out]
        test += [i for position, i in enumerate(clips) if position in out]
    return train, test


def normalised(words: Words, train: Sequence[int], *others: Sequence[int]) -> list[list[Pair]]:
    """Sequences and classes of the clips, each feature with mean 0 and variance 1 over the frames that train."""
    frames = np.concatenate([words.features[i] for i in train]).astype(np.float64)
    mean, scale = frames.mean(0), np.maximum(frames.std(0), 1e-6)

    def pair(i: int) -> Pair:
        x = ((words.features[i] - mean) / scale).astype(np.float32)
        return torch.from_numpy(x), torch.tensor(words.labels[i])

    return [[pair(i) for i in indices] for indices in (train, *others)]
