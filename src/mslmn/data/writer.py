"""Synthetic handwriting: lines of common words by as many writers as are wanted, no two alike.

Letters are those of six of the Hershey fonts (A. V. Hershey 1967; PyPI ``Hershey-Fonts``). Two of its 32 are Latin
letters of single strokes: rowmans, and scripts, whose letters are joined (futural and cursive have the same letters).
Four draw thick strokes as two lines, side by side, and become single strokes when the second is left out: futuram,
timesr, timesi, scriptc. The others are Greek, Cyrillic, Japanese, symbols, heavier copies of these (rowmand, rowmant,
timesrb, timesib; astrology, music, meteorology in their letters), or black letter, whose outlines are no strokes.

A writer has a font, and some letters of another; slant, width, spacing; a baseline that climbs or sinks, and waves;
unsteadiness; a pace. The pen goes along a stroke as hands do, slowly where it bends: its speed is k curvature^(-1/3),
the two-thirds power law (Lacquaniti, Terzuolo and Viviani 1983), and sinks towards the ends of strokes. The tablet
takes a point every 10 to 16 ms, in whole units, with stamps of hundredths of a second, some of them late.

Every number is drawn from the seed, the split and the number of the line or writer, so a line is the same however many
there are.
"""

import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import checks
from ..extras import need
from .handwriting import HELD_OUT, SPLITS, Array, Line

PRINT, SCRIPT = ("rowmans", "futuram", "timesr", "timesi"), ("scripts", "scriptc")
LINES_OF_A_WRITER = 20
VALIDATES, TESTS = 5, 6  # of seven words, in the order of the list; the others train
CAP = 21.0  # height of a capital, in the fonts' units
BASELINE = 9.0  # y, in the fonts' units
TWIN = 2.3  # units: a stroke that is nowhere farther from another is its second line
GRID = 0.5 / CAP  # between points of a glyph; lengths are in heights of a capital from here on
ROUNDING = 2.0  # points: how far corners are rounded
STRAIGHT = 1.5  # curvature below which the pen does not get faster
BRAKING = 0.12  # length over which a stroke begins and ends slowly
WITHIN, REACH = 0.2, 0.55  # how far scripts go on without a lift: in a letter, to the next (an a begins at its right)


class Glyph(NamedTuple):
    """A character. n points on all its strokes, close to each other."""

    points: Array  # (n, 2): x from its left edge, y from the baseline, downwards
    seconds: Array  # (n,) from the point before, at the pace 1; 0 at the first of a stroke
    first: Array  # (n,) 1 at the first point of a stroke, else 0
    width: float


class Writer(NamedTuple):
    """A hand. Lengths are in heights of a capital."""

    font: str
    other: str  # where some letters are from
    mixed: float  # how many
    taste: int  # which: a seed
    size: float  # units of the tablet
    width: float
    slant: float  # to the right, per height
    spacing: float  # between letters
    gap: float  # between words
    slope: float  # of the baseline, upwards
    wave: float  # of the baseline
    period: float  # of the wave
    unsteady: float  # of strokes
    uneven: float  # of letters: size, turn, height above the baseline
    pace: float  # lengths a second, where a stroke is straight
    lift: float  # seconds between strokes, at least
    step: float  # seconds between points
    late: float  # stamps, as a share


def lines(count: int = 1000, seed: int = 0, words: tuple[int, int] = (3, 8)) -> list[Line]:
    """Lines of common words. No two splits share a writer or a word.

    Args:
        count: lines that train; a fifth as many validate, and test.
        words: the fewest and the most in a line.
    """
    count, seed = checks.size("count", count), checks.size("seed", seed, 0)
    fewest = checks.size("the fewest words", words[0])
    most = checks.size("the most words", words[1], fewest)
    found = []
    for number, split in enumerate(SPLITS):
        for i in range(count if split == "train" else max(1, count // HELD_OUT)):
            whose = i // LINES_OF_A_WRITER
            rng = np.random.default_rng([seed, number, 0, i])
            text = sentence(vocabulary(split), int(rng.integers(fewest, most + 1)), rng)
            points = write(text, writer(np.random.default_rng([seed, number, 1, whose])), rng)
            found.append(Line(f"{split}-{i}", split, f"{split}-{whose}", text, points))
    return found


@cache
def vocabulary(split: str) -> tuple[str, ...]:
    """The words of a split, of the list that the package carries."""
    checks.choice("split", split, SPLITS)
    words = (files(__package__) / "assets" / "common-words.txt").read_text().split()
    every = TESTS + 1
    held_out = {"validation": words[VALIDATES::every], "test": words[TESTS::every]}
    if split in held_out:
        return tuple(held_out[split])
    return tuple(word for word in words if word not in {*held_out["validation"], *held_out["test"]})


def sentence(words: Sequence[str], length: int, rng: np.random.Generator) -> str:
    """So many words, with commas, full stops and capitals; a line begins where a sentence does, or not."""
    text: list[str] = []
    begins = rng.random() < 0.5
    for i in rng.integers(len(words), size=length):
        word = words[i]
        if begins or rng.random() < 0.15:
            word = word[0].upper() + word[1:]
        mark = rng.choice(["", ",", "."], p=[0.8, 0.1, 0.1])
        begins = mark == "."
        text.append(word + mark)
    return " ".join(text)


def writer(rng: np.random.Generator) -> Writer:
    fonts = PRINT if rng.random() < 0.6 else SCRIPT
    font, other = rng.choice(fonts, 2)
    return Writer(
        font=str(font),
        other=str(other),
        mixed=rng.uniform(0, 0.5),
        taste=int(rng.integers(2**32)),
        size=rng.uniform(120, 300),
        width=rng.uniform(0.65, 1.15),
        slant=rng.normal(0.1 if fonts is PRINT else 0.0, 0.15),  # scripts are slanted as they are
        spacing=rng.uniform(-0.12, 0.08) if fonts is PRINT else rng.uniform(-0.02, 0.02),
        gap=rng.uniform(0.45, 1.0),
        slope=rng.normal(0, 0.02),
        wave=abs(rng.normal(0, 0.08)),
        period=rng.uniform(6, 20),
        unsteady=rng.uniform(0.008, 0.03),
        uneven=rng.uniform(0.01, 0.07),
        pace=rng.uniform(9, 15),
        lift=rng.uniform(0.04, 0.15),
        step=rng.uniform(0.010, 0.016),
        late=rng.uniform(0, 0.1),
    )


def write(text: str, hand: Writer, rng: np.random.Generator) -> Array:
    """(T, 4): seconds, x, y downwards, end of stroke, as the tablet gives them."""
    glyphs = [(i, _chosen(character, hand)) for i, character in enumerate(text) if character != " "]
    if not glyphs:
        raise ValueError(f"a line must have a character that leaves a trace, got {text!r}; pass some text")
    sizes = [len(glyph.points) for _, glyph in glyphs]
    letter = np.repeat(np.arange(len(glyphs)), sizes)  # of each point
    xy = np.concatenate([glyph.points for _, glyph in glyphs])
    first = np.concatenate([glyph.first for _, glyph in glyphs]) > 0
    seconds = np.concatenate([glyph.seconds for _, glyph in glyphs])
    xy = _placed(xy, letter, _lefts(text, glyphs, hand, rng), hand, rng)
    starts = np.cumsum([0, *sizes[:-1]])
    leap = np.r_[0, np.hypot(*np.diff(xy, axis=0).T)]  # from the point before
    if hand.font in SCRIPT:
        joined = np.array([i > 0 and text[i - 1 : i + 1].isalpha() for i, _ in glyphs])  # with the letter before
        reach = np.full(len(leap), WITHIN)
        reach[starts] = joined * REACH
        first &= leap >= reach
    seconds = seconds * rng.lognormal(0, 0.15, len(glyphs))[letter] / hand.pace
    seconds[starts] = leap[starts] / hand.pace
    seconds[first] = leap[first] / hand.pace / 2 + hand.lift * rng.lognormal(0, 0.4, int(first.sum()))
    seconds[0] = 0
    return _sampled(xy, seconds.cumsum(), first, hand, rng)


def _chosen(character: str, hand: Writer) -> Glyph:
    """The writer's form of a character, always the same."""
    other = np.random.default_rng([hand.taste, ord(character)]).random() < hand.mixed
    glyphs = _font(hand.other if other else hand.font)
    if character not in glyphs:
        raise ValueError(f"a writer knows the printable characters of ASCII, got {character!r}; leave it out")
    return glyphs[character]


def _lefts(text: str, glyphs: list[tuple[int, Glyph]], hand: Writer, rng: np.random.Generator) -> Array:
    """Where each glyph begins."""
    x, lefts, widths = 0.0, [], {i: glyph.width for i, glyph in glyphs}
    jitter = rng.normal(0, hand.uneven / 2, len(text))
    for i, character in enumerate(text):
        if character == " ":
            x += hand.gap * (1 + 2 * abs(jitter[i]))
        else:
            lefts.append(x)
            x += widths[i] * hand.width + hand.spacing + (0 if hand.font in SCRIPT else jitter[i])
    return np.array(lefts)


def _placed(xy: Array, letter: NDArray[np.int64], lefts: Array, hand: Writer, rng: np.random.Generator) -> Array:
    """Letters, each a little larger, turned and lifted, on a baseline; then the unsteadiness of the hand."""
    size, turn, up = rng.normal(0, hand.uneven, (3, len(lefts)))
    x, y = (xy * (1 + size)[letter, None]).T
    x, y = x * hand.width - y * hand.slant, y
    x, y = x - turn[letter] * y, y + turn[letter] * x + up[letter] / 2
    x = x + lefts[letter]
    phase = rng.uniform(0, math.tau)
    y = y - hand.slope * x - hand.wave * np.sin(math.tau * x / hand.period + phase)
    knots = np.arange(0, len(x) + 24, 12)
    noise = rng.normal(0, hand.unsteady, (2, len(knots)))
    along = np.arange(len(x))
    return np.column_stack([v + np.interp(along, knots, n) for v, n in zip((x, y), noise, strict=True)])


def _sampled(xy: Array, times: Array, first: NDArray[np.bool_], hand: Writer, rng: np.random.Generator) -> Array:
    """What the tablet sees: a point every ``step`` seconds from the beginning of each stroke on."""
    begin = np.flatnonzero(first)
    starts, ends = times[begin], times[np.r_[begin[1:] - 1, len(times) - 1]]
    counts = 1 + ((ends - starts) / hand.step).astype(int)
    number = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # of a point in its stroke
    at = np.repeat(starts, counts) + number * hand.step
    x, y = (np.interp(at, times, v) for v in xy.T)
    late = rng.exponential(2 * hand.step, len(at)) * (rng.random(len(at)) < hand.late)
    stamps = np.maximum.accumulate(at + late) + rng.uniform(0, 1000)
    noise = rng.normal(0, 0.5, (2, len(at)))  # units
    corner = rng.uniform(500, 3000, 2)
    x, y = ((v * hand.size + n + c).round() for v, n, c in zip((x, y), noise, corner, strict=True))
    last = number == np.repeat(counts, counts) - 1
    return np.column_stack([stamps.round(2), x, y, last])


@cache
def _font(name: str) -> dict[str, Glyph]:
    font = need("HersheyFonts", "experiments").HersheyFonts()
    font.load_default_font(name)
    return {
        character: _glyph([np.array(stroke, dtype=np.float64) for stroke in glyph.strokes], glyph)
        for character, glyph in font.all_glyphs.items()
        if " " < character <= "~"
    }


def _glyph(strokes: list[Array], glyph: Any) -> Glyph:
    dense = [_dense((stroke - [glyph.left_offset, BASELINE]) / CAP) for stroke in strokes]
    smooth = [_smooth(stroke) for stroke in _single(dense)]
    seconds = [_seconds(stroke) for stroke in smooth]
    first = [np.r_[1.0, np.zeros(len(stroke) - 1)] for stroke in smooth]
    return Glyph(np.concatenate(smooth), np.concatenate(seconds), np.concatenate(first), glyph.char_width / CAP)


def _dense(stroke: Array) -> Array:
    """Points at equal distances along the stroke."""
    along = np.r_[0, np.hypot(*np.diff(stroke, axis=0).T).cumsum()]
    at = np.linspace(0, along[-1], max(2, round(along[-1] / GRID) + 1))
    return np.column_stack([np.interp(at, along, v) for v in stroke.T])


def _single(strokes: list[Array]) -> list[Array]:
    """Without the second lines of thick strokes: of two that go together the shorter one."""
    kept: list[int] = []
    for i in sorted(range(len(strokes)), key=lambda i: -len(strokes[i])):
        near = [np.hypot(*(strokes[i][:, None] - strokes[k]).transpose(2, 0, 1)).min(1) for k in kept]
        if not near or (np.min(near, axis=0) * CAP >= TWIN).any():
            kept.append(i)
    return [strokes[i] for i in sorted(kept)]


def _smooth(stroke: Array) -> Array:
    """Corners of the font rounded; ends stay where they are."""
    reach = min(len(stroke) - 1, round(3 * ROUNDING))
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / ROUNDING) ** 2)
    padded = np.pad(stroke, ((reach, reach), (0, 0)), mode="reflect", reflect_type="odd")
    return np.column_stack([np.convolve(v, weights / weights.sum(), mode="valid") for v in padded.T])


def _seconds(stroke: Array) -> Array:
    """From point to point, where the speed is 1 on straight lines."""
    steps = np.diff(stroke, axis=0)
    length = np.hypot(*steps.T)
    turn = np.abs(np.diff(np.unwrap(np.arctan2(steps[:, 1], steps[:, 0]))))
    curvature = np.r_[turn, turn[-1:]] / np.maximum(length, GRID / 4) if len(turn) else np.zeros(len(length))
    speed = (1 + curvature / STRAIGHT) ** (-1 / 3)
    from_end = np.minimum(length.cumsum(), length[::-1].cumsum()[::-1])
    speed *= 0.4 + 0.6 * np.minimum(1, from_end / BRAKING)
    seconds: Array = np.r_[0, length / speed]
    return seconds
