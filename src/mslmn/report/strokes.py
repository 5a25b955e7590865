"""A line of handwriting, stroke by stroke, in the colours of what was read, with both texts beneath. In inches."""

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .drawing import INK, SOFT, drawing, svg
from .formats import clean
from .lines import Emission, Line, Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RIGHT, WRONG = ("#14578a", "#3f9fd8"), ("#b3261e", "#ec6a5e")  # two shades each, in turn, part the characters
UNREAD, TINT = "#9aa5b1", "#fde7e4"
SPACE, NOTHING = "\N{OPEN BOX}", "\N{MIDDLE DOT}"  # a space that must be seen; a character that is not there
WIDTH, MARGIN = 9.6, 0.1
TALLEST = 0.9  # of the strokes
LETTERS, LEADER, TOP = 0.12, 0.22, 0.4  # the letters that are emitted, below them, and where strokes begin
APART = 0.105  # letters that are emitted side by side
NAMES, COLUMN, ROW = 0.68, 0.118, 0.22  # the texts: what stands before them, a character, a row
BETWEEN = 0.3  # strokes and texts
ROWS = 2.3 * ROW  # both texts, and some room
GAP = np.full((1, 2), np.nan)  # the pen is up
DOT = np.array([[0, 0], [0.004, 0]])  # a stroke of one point, which else would not be seen
COLUMNS = int((WIDTH - 2 * MARGIN - NAMES) / COLUMN)


def picture(line: Line, name: str, alt: str) -> str:
    """As SVG, under a name that is unique on the page."""
    xy = placed(line.xy)
    emissions = line.emissions
    rows = [line.pairs[i : i + COLUMNS] for i in range(0, len(line.pairs), COLUMNS)] or [[]]
    bottom = float(xy[:, 1].max()) + BETWEEN
    with drawing(WIDTH, bottom + ROWS * len(rows)) as (figure, axes):
        axes.set_position((0, 0, 1, 1))
        axes.set(xlim=(0, WIDTH), ylim=(bottom + ROWS * len(rows), 0))
        axes.set_axis_off()
        _draw_ink(axes, xy, line.ends, emissions)
        _draw_letters(axes, xy, emissions)
        for i, pairs in enumerate(rows):
            _draw_texts(axes, pairs, bottom + ROWS * i)
        return svg(figure, name, alt)


def placed(xy: NDArray[np.float64]) -> NDArray[np.float64]:
    """As large as there is room for, in its proportions, at the left."""
    low, extent = xy.min(0), np.ptp(xy, axis=0)
    room = np.array([WIDTH - 4 * MARGIN, TALLEST])
    scale = min((space / size for space, size in zip(room, extent, strict=True) if size > 0), default=1.0)
    found: NDArray[np.float64] = (xy - low) * scale + np.array([2 * MARGIN, TOP])
    return found


def owners(steps: int, emissions: list[Emission]) -> NDArray[np.int64]:
    """Which emission each step belongs to: the nearest in time. A space leaves no trace; -1 where there is none."""
    visible = [i for i, emission in enumerate(emissions) if emission.character != " "]
    if not visible:
        return np.full(steps, -1)
    middles = [(emissions[i].last + emissions[j].first) / 2 for i, j in pairwise(visible)]
    return np.array(visible)[np.searchsorted(middles, np.arange(steps))]


def shades(emissions: list[Emission]) -> list[str]:
    """The colour of each emission. Two that follow each other, spaces apart, never look the same."""
    found, turn = [], False
    for emission in emissions:
        found.append((RIGHT if emission.right else WRONG)[turn])
        turn ^= emission.character != " "
    return found


def _draw_ink(axes: "Axes", xy: NDArray[np.float64], ends: NDArray[np.bool_], emissions: list[Emission]) -> None:
    paints = np.array([*shades(emissions), UNREAD])[owners(len(xy), emissions)]  # of each step; the last one is for -1
    cuts = np.flatnonzero(ends[:-1] | (paints[1:] != paints[:-1])) + 1
    pieces: dict[str, list[NDArray[np.float64]]] = {}
    for a, b in pairwise([0, *cuts.tolist(), len(xy)]):
        joined = int(b < len(xy) and not ends[b - 1])  # to the next piece of the stroke
        piece = xy[a : b + joined]
        pieces.setdefault(str(paints[a]), []).extend([piece if len(piece) > 1 else piece + DOT, GAP])
    for paint, parts in pieces.items():
        axes.plot(*np.concatenate(parts).T, color=paint, linewidth=1.9, solid_capstyle="round", solid_joinstyle="round")


def _draw_letters(axes: "Axes", xy: NDArray[np.float64], emissions: list[Emission]) -> None:
    """What was emitted, above where it was."""
    at = xy[[(emission.first + emission.last) // 2 for emission in emissions]] if emissions else xy[:0]
    for emission, paint, (x, y), place in zip(emissions, shades(emissions), at, spread(at[:, 0]), strict=True):
        colour = SOFT if emission.character == " " and emission.right else paint
        axes.plot([place, x, x], [LEADER, TOP - 0.06, y], color=colour, linewidth=0.5, alpha=0.45, zorder=1)
        axes.plot([x], [y], "o", color=colour, markersize=3.4, markeredgecolor="white", markeredgewidth=0.6, zorder=3)
        axes.text(place, LETTERS, _shown(emission.character), color=colour, ha="center", va="center", weight="bold")


def spread(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same places, in the same order, but so far apart that letters do not cover each other, if there is room."""
    order = np.argsort(x, kind="stable")
    steps = np.arange(len(x)) * min(APART, (WIDTH - 2 * MARGIN) / max(1, len(x)))
    pushed = np.maximum.accumulate(x[order] - steps) + steps  # to the right
    back = np.minimum.accumulate((np.minimum(pushed, WIDTH - MARGIN) - steps)[::-1])[::-1] + steps
    found = np.empty_like(x)
    found[order] = back
    return found


def _draw_texts(axes: "Axes", pairs: list[Pair], top: float) -> None:
    """Each character that was read below the one it stands for; a tint is behind those that differ."""
    left = 2 * MARGIN + NAMES
    for column, pair in enumerate(pairs):
        if not pair.right:
            x = left + COLUMN * np.array([column - 0.5, column + 0.5])
            axes.fill_between(x, top - 0.55 * ROW, top + 1.55 * ROW, color=TINT, linewidth=0)
    for row, name in enumerate(("written", "read")):
        y = top + ROW * row
        axes.text(2 * MARGIN, y, name, color=SOFT, ha="left", va="center")
        for column, pair in enumerate(pairs):
            letter = pair.read if row else pair.expected
            if letter == " " and pair.right:
                continue
            colour, weight = (WRONG[0], "bold") if row and not pair.right else (INK, "normal")
            look = {"color": colour, "weight": weight, "family": "DejaVu Sans Mono", "size": 11.5}
            shown = _shown(letter) if letter else NOTHING
            axes.text(left + COLUMN * column, y, shown, look, ha="center", va="center")


def _shown(letter: str) -> str:
    return SPACE if clean(letter).isspace() else clean(letter)
