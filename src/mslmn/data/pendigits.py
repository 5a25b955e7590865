"""Strings of digits joined from pendigits (UCI, Alpaydin and Alimoglu 1996): 44 writers, some 250 digits each.

``pendigits-orig.tra`` has the digits of 30 writers, ``pendigits-orig.tes`` those of 14 others, plain or gzipped, in
UNIPEN's text:

    .SEGMENT DIGIT   6-7 ? "4"     the digit, and which strokes of the file are its own
    .COMMENT 4  1  117             the digit, its writer, and where it was written
    .PEN_DOWN                      a stroke: x and y, upwards, a step of the tablet a line
     231  309
    .PEN_UP
    .DT 100                        milliseconds until the next one
"""

import gzip
import re
import warnings
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import checks
from . import folders
from .handwriting import HELD_OUT, Array, Line

FILES = {"tra": 7494, "tes": 3498}  # and how many digits they have
SEGMENT = re.compile(r'\.SEGMENT\s+DIGIT\s+(\d{1,6})(?:-(\d{1,6}))?\s+\?\s+"(\d)"', re.ASCII)
COMMENT = re.compile(r"\.COMMENT\s+\d+\s+(\d{1,6})\s+\d+", re.ASCII)
POINT = re.compile(r"(-?\d{1,5})\s+(-?\d{1,5})", re.ASCII)
FOLD = re.compile(r"(\d{1,2})/(\d{1,2})", re.ASCII)
MOST = 50_000_000  # bytes, unpacked; the larger file has 4 MB
SHORTEST, LONGEST = 3, 8  # digits of a string
STEP, LIFT = 0.1, 0.1  # seconds: between steps, as the corpus says, and between strokes
BETWEEN = (0.3, 0.8)  # seconds from digit to digit
GAP = (0.1, 0.5)  # from digit to digit, in heights of the higher of the two
VALIDATES = 6  # every so many-th writer of tra


class Digit(NamedTuple):
    """A digit, written once."""

    digit: str
    writer: str
    strokes: list[Array]  # (n, 2): x, y downwards


@dataclass
class _Segment:
    """A digit while it is read."""

    line: int  # of the file
    digit: str
    strokes: int  # as announced
    writer: str = ""
    read: list[list[tuple[float, float]]] = field(default_factory=list)
    down: bool = False
    wrong: str = ""


def lines(folder: str | Path, count: int | None = None, seed: int = 0, fold: str | None = None) -> list[Line]:
    """Strings of 3 to 8 digits, each by one writer; no two splits share a writer.

    Args:
        count: strings that train; a fifth as many validate, and test. By default as many as use every digit once.
        seed: draws the strings.
        fold: ``"2/4"``: the second fourth of all 44 writers test, so that each does in one of four. By default the 14
            of ``tes`` do.
    """
    if count is not None:
        count = checks.size("count", count)
    seed = checks.size("seed", seed, 0)
    number, folds = _fold(fold)
    train, test = (digits(folder, name) for name in FILES)
    if folds > 1:
        everyone = sorted({digit.writer for digit in [*train, *test]})
        if len(everyone) < folds:
            raise ValueError(f"fold {fold} needs a writer for each, got {len(everyone)}; take fewer folds")
        tests = set(everyone[number - 1 :: folds])
        train, test = (
            [digit for digit in [*train, *test] if (digit.writer in tests) == tested] for tested in (False, True)
        )
    writers = sorted({digit.writer for digit in train})
    if len(writers) < 2:
        of = "to train and validate" if folds > 1 else "in tra"
        raise ValueError(f"{folder} must have digits of two writers at least {of}, got {len(writers)}; restore it")
    held_out = set(writers[VALIDATES - 1 :: VALIDATES] or writers[-1:])
    parts = {
        "train": [digit for digit in train if digit.writer not in held_out],
        "validation": [digit for digit in train if digit.writer in held_out],
        "test": test,
    }
    found: list[Line] = []
    for number, (split, of_split) in enumerate(parts.items()):
        wanted = None if count is None else count if split == "train" else max(1, count // HELD_OUT)
        rng = np.random.default_rng([seed, number])
        strings = _strings(of_split, wanted, rng)
        if not strings:
            raise ValueError(
                f"{folder} must have a writer with {SHORTEST} digits at least for {split}, got {len(of_split)} digits; "
                "restore it"
            )
        found += [_joined(f"{split}-{i}", split, string, rng) for i, string in enumerate(strings)]
    return found


def _fold(fold: str | None) -> tuple[int, int]:
    """ "2/4" -> (2, 4); (1, 1) where there is none."""
    match = FOLD.fullmatch("1/1" if fold is None else str(fold))
    number, folds = (int(match[1]), int(match[2])) if match else (0, 0)
    if fold is not None and not 1 <= number <= folds >= 2:
        raise ValueError(f"fold must be one of several, 1/4 to 4/4, for instance, got {fold!r}; or leave it out")
    return number, folds


def digits(folder: str | Path, name: str) -> list[Digit]:
    """The digits of ``pendigits-orig.tra`` or ``.tes``; damaged ones are skipped, with a warning."""
    text, path = _text(Path(folder), name)
    skipped: list[str] = []
    found: list[Digit] = []
    segment: _Segment | None = None
    for number, line in enumerate([*text.split("\n"), ".SEGMENT"], 1):
        if line.startswith(".SEGMENT"):
            if segment is not None:
                _close(segment, path, name, found, skipped)
            segment = _opened(number, line)
        elif segment is not None and not segment.wrong:
            _take(segment, line.strip())
    if not found:
        raise ValueError(
            f"{path} must have digits, .SEGMENT and .PEN_DOWN, got none; restore it{folders.because(skipped)}"
        )
    if skipped:
        warnings.warn(f"skipped {len(skipped)}:{folders.listed(skipped)}", stacklevel=2)
    if len(found) != FILES[name]:
        warnings.warn(f"{path} has {len(found):,} digits of {FILES[name]:,}; training goes on with them", stacklevel=2)
    return found


def _text(folder: Path, name: str) -> tuple[str, Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; pass the one with pendigits-orig.tra and pendigits-orig.tes")
    plain = folder / f"pendigits-orig.{name}"
    packed = plain.with_name(plain.name + ".gz")
    if plain.exists():
        return folders.content(plain, MOST).decode("latin-1"), plain
    if not packed.exists():
        raise ValueError(f"{folder} must have {plain.name} or {packed.name}, got neither; unpack or put it there")
    folders.content(packed, MOST)  # a plain file, and not a large one
    try:
        with gzip.open(packed) as file:
            content = file.read(MOST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{packed} must be a gzip file, got a damaged one ({error}); restore it") from None
    if len(content) > MOST:
        raise ValueError(f"{packed} must have at most {MOST:,} bytes unpacked, got more; restore it")
    return content.decode("latin-1"), packed


def _opened(number: int, line: str) -> _Segment:
    match = SEGMENT.fullmatch(line.strip())
    if match is None:
        return _Segment(number, "", 0, wrong=f'a digit must begin with .SEGMENT DIGIT n ? "d", got {line[:40]!r}')
    first, last = int(match[1]), int(match[2] or match[1])
    return _Segment(number, match[3], last - first + 1)


def _take(segment: _Segment, line: str) -> None:
    """The next line of a digit."""
    comment, point = COMMENT.fullmatch(line), POINT.fullmatch(line)
    if comment is not None:
        segment.writer = comment[1]
    elif line == ".PEN_DOWN" and not segment.down:
        segment.down = True
        segment.read.append([])
    elif line == ".PEN_UP" and segment.down and segment.read[-1]:
        segment.down = False
    elif point is not None and segment.down:
        segment.read[-1].append((float(point[1]), -float(point[2])))
    elif line and not (line.startswith(".DT") and not segment.down):
        segment.wrong = f"a stroke must be .PEN_DOWN, points, .PEN_UP, got {line[:40]!r}"


def _close(segment: _Segment, path: Path, name: str, found: list[Digit], skipped: list[str]) -> None:
    wrong = segment.wrong
    if not wrong and (segment.down or len(segment.read) != segment.strokes):
        wrong = f"a digit must have {segment.strokes} strokes from .PEN_DOWN to .PEN_UP, got {len(segment.read)}" + (
            ", the last cut off" if segment.down else ""
        )
    if not wrong and not segment.writer:
        wrong = "a digit must have a writer, .COMMENT digit writer place, got none"
    if wrong:
        skipped.append(f"{path}, the digit of line {segment.line}: {wrong}; restore it")
    else:
        found.append(
            Digit(segment.digit, f"{name}-{segment.writer:>02}", [np.array(stroke) for stroke in segment.read])
        )


def _strings(digits: list[Digit], count: int | None, rng: np.random.Generator) -> list[list[Digit]]:
    """Every digit of a writer is used once before one is used again."""
    by_writer: dict[str, list[Digit]] = {}
    for digit in digits:
        by_writer.setdefault(digit.writer, []).append(digit)
    found: list[list[Digit]] = []
    while True:
        round_: list[list[Digit]] = []
        for writer in sorted(by_writer):
            own = by_writer[writer]
            shuffled = [own[i] for i in rng.permutation(len(own))]
            while len(shuffled) >= SHORTEST:
                length = int(rng.integers(SHORTEST, LONGEST + 1))
                round_.append(shuffled[:length])
                del shuffled[:length]
        found += [round_[i] for i in rng.permutation(len(round_))]
        if count is None or not round_ or len(found) >= count:
            return found[:count]


def _joined(name: str, split: str, digits: list[Digit], rng: np.random.Generator) -> Line:
    """Digits from left to right, each at the height where it was written."""
    rows, right, time, height = [], 0.0, 0.0, 1.0
    for digit in digits:
        xy = np.concatenate(digit.strokes)
        before, height = height, max(1.0, float(np.ptp(xy[:, 1])))
        shift = right + rng.uniform(*GAP) * max(before, height) - xy[:, 0].min()
        right = float(xy[:, 0].max() + shift)
        for stroke in digit.strokes:
            steps = np.arange(len(stroke))
            rows.append(
                np.column_stack([time + STEP * steps, stroke[:, 0] + shift, stroke[:, 1], steps == len(stroke) - 1])
            )
            time += STEP * (len(stroke) - 1) + LIFT
        time += rng.uniform(*BETWEEN)
    return Line(name, split, digits[0].writer, "".join(digit.digit for digit in digits), np.concatenate(rows))
