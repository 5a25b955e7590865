"""Lines of IAM-OnDB (Liwicki and Bunke 2005): pen strokes on a whiteboard, and what they say.

``lineStrokes/a01/a01-020/a01-020x-01.xml`` has the strokes of the first line of form a01-020x,
``ascii/a01/a01-020/a01-020x.txt`` the text of its lines, after ``CSR:``; the lists of the task t1, ``trainset.txt`` and
so on, say which form trains. Files are found by their names, so any folder above them will do. XML comes from anywhere,
so entities are never expanded and large files never read. What is damaged is skipped, with a warning that names it.
"""

import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..extras import need
from . import folders
from .handwriting import Array, Line, steps_needed

LISTS = {  # of the task t1: list -> what its forms are for, and how many lines they have
    "trainset.txt": ("train", 5364),
    "testset_v.txt": ("validation", 1438),
    "testset_t.txt": ("validation", 1518),
    "testset_f.txt": ("test", 3859),
}
FORM = re.compile(r"[a-z]\d\d-\d{3}[a-z]?", re.ASCII)
STROKES = re.compile(rf"({FORM.pattern})-(\d\d)\.xml", re.ASCII)
NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*", re.ASCII | re.IGNORECASE)
JOINED = re.compile("%%+")  # what stands between two lines in a08-551z.txt
MOST_XML, MOST_TEXT = 4_000_000, 100_000  # bytes of a file; the corpus' own are far below
MOST_CHARACTERS = 1000  # of a line
MOST_XY, MOST_SECONDS = 1e6, 1e12  # in size; the corpus has thousands, and seconds since the machine was started
SHOWN = 20  # files in a warning
RESTORE = "restore it from the corpus"


@dataclass
class _Found:
    """The files of a corpus, by name, and what is wrong with it."""

    lists: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, Path] = field(default_factory=dict)  # by form
    strokes: dict[str, dict[int, Path]] = field(default_factory=dict)  # by form, then number of the line
    skipped: list[str] = field(default_factory=list)
    back: list[str] = field(default_factory=list)  # lines whose time goes back


def lines(folder: str | Path) -> list[Line]:
    """The lines of the task t1, in the order of its lists; both validation lists are one split, as in the paper.

    Line n of a form belongs to line n of its transcript. Where one is missing, the other is skipped. Time stamps that
    go back (47 lines of the corpus) stay as they are; features hold the clock instead. Writers are not told.
    """
    need("defusedxml", "experiments")
    found = _files(folder)
    read: list[Line] = []
    counts = {}
    forms = _forms(found)
    for name, (split, _) in LISTS.items():
        before = len(read)
        for form in forms[name]:
            read += _form(form, split, found)
        counts[name] = len(read) - before
    unnamed = [name for name in LISTS if not forms[name]]
    if unnamed:
        raise ValueError(
            f"the lists of {folder} must name forms, got none in {', '.join(unnamed)}; restore them from the corpus"
            f"{folders.because(found.skipped)}"
        )
    empty = [name for name, count in counts.items() if not count]
    if empty:
        raise ValueError(
            f"{folder} must have lines of every list, got none of {', '.join(empty)}; unpack "
            f"lineStrokes-all.tar.gz and ascii-all.tar.gz into it{folders.because(found.skipped)}"
        )
    _warn(counts, found)
    return read


def _files(folder: str | Path) -> _Found:
    root, found = Path(os.path.abspath(folder)), _Found()
    if not root.is_dir():
        raise ValueError(f"{folder} is not a folder; pass the root of IAM-OnDB")
    for where, names in folders.walk(root, found.skipped):
        for name in names:
            _sort(where / name, name.lower(), found)
    missing = [name for name in LISTS if name not in found.lists]
    if missing:
        raise ValueError(
            f"{folder} must have the lists of the task t1, {', '.join(LISTS)}, in it or below, got no "
            f"{', '.join(missing)}; put them there{folders.because(found.skipped)}"
        )
    return found


def _sort(path: Path, name: str, found: _Found) -> None:
    """Where a file of the corpus belongs; of two with the same name the first counts."""
    match = STROKES.fullmatch(name)
    first = path
    if match is not None:
        first = found.strokes.setdefault(match[1], {}).setdefault(int(match[2]), path)
    elif name in LISTS:
        first = found.lists.setdefault(name, path)
    elif name.endswith(".txt") and FORM.fullmatch(name[:-4]):
        first = found.texts.setdefault(name[:-4], path)
    if first is not path:
        found.skipped.append(f"{path} must be the only {name}, got {first} too, which is read; remove one")


def _forms(found: _Found) -> dict[str, list[str]]:
    """The forms of each list. One that two lists have is for the first: else it would train and test."""
    forms: dict[str, list[str]] = {}
    seen: dict[str, str] = {}
    for name in LISTS:
        path, forms[name] = found.lists[name], []
        try:
            entries = _text(path).split()
        except ValueError as error:
            found.skipped.append(str(error))
            continue
        for entry in entries:
            form = entry.lower()
            if not FORM.fullmatch(form):
                found.skipped.append(f"{path}: an entry must be a form, like a01-020x, got {entry[:40]!r}; {RESTORE}")
            elif form in seen:
                found.skipped.append(f"{path}: {form} must be in one list, once, got it in {seen[form]} too; {RESTORE}")
            else:
                seen[form] = name
                forms[name].append(form)
    return forms


def _form(form: str, split: str, found: _Found) -> Iterator[Line]:
    """The lines of a form that have strokes and text."""
    strokes = found.strokes.get(form, {})
    try:
        texts = _transcript(form, len(strokes), found)
    except ValueError as error:
        found.skipped.append(f"{error} ({len(strokes)} lines)")
        return
    for number, text in enumerate(texts, 1):
        if number not in strokes:
            found.skipped.append(
                f"{form}-{number:02}.xml must have the strokes of {text[:40]!r}, got no file; {RESTORE}"
            )
    for number, path in sorted(strokes.items()):
        if not 1 <= number <= len(texts):
            found.skipped.append(f"{path} must have a transcript, got {len(texts)} lines in {form}.txt; {RESTORE}")
            continue
        try:
            points = _points(path)
            text = texts[number - 1]
            if len(points) < steps_needed(text):
                raise ValueError(
                    f"{path} must have a point for each character of {text[:40]!r}, got {len(points)}; {RESTORE}"
                )
        except ValueError as error:
            found.skipped.append(str(error))
            continue
        name = f"{form}-{number:02}"
        if (np.diff(points[:, 0]) < 0).any():
            found.back.append(name)
        yield Line(name, split, "", text, points)


def _transcript(form: str, count: int, found: _Found) -> list[str]:
    """The text of each line. Empty lines are spacing, if the others are as many as lines have strokes."""
    if form not in found.texts:
        raise ValueError(f"{form} must have a transcript, {form}.txt, got none; {RESTORE}")
    path = found.texts[form]
    before, mark, after = _text(path).partition("CSR:")
    every = [text.strip() for text in JOINED.sub("\n", after).strip().split("\n")]
    texts = [text for text in every if text]
    if not texts:
        got = "none after CSR:" if mark else f"no CSR: in {len(before)} characters"
        raise ValueError(f"{path} must have the text of each line after CSR:, got {got}; {RESTORE}")
    if len(texts) < len(every) and len(texts) != count:
        raise ValueError(
            f"{path} must have a text for each of {count} lines, got {len(texts)} with empty ones between: "
            f"which is whose cannot be told; {RESTORE}"
        )
    longest = max(map(len, texts))
    if longest > MOST_CHARACTERS:
        raise ValueError(f"{path} must have lines of at most {MOST_CHARACTERS} characters, got {longest}; {RESTORE}")
    return texts


def _text(path: Path) -> str:
    content = folders.content(path, MOST_TEXT)
    try:
        text = content.decode("utf-8-sig")
        if "\0" in text:
            raise UnicodeDecodeError("utf-8", content, content.index(0), content.index(0) + 1, "NUL")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text, got {content[error.start :][:8]!r}; {RESTORE}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _points(path: Path) -> Array:
    """(T, 4) of the strokes of a line."""
    root = _parsed(path)
    points: list[tuple[float, float, float, float]] = []
    for i, stroke in enumerate(root.iterfind("StrokeSet/Stroke"), 1):
        of_stroke = stroke.findall("Point")
        for j, point in enumerate(of_stroke, 1):
            place = f"{path}, stroke {i}, point {j}"
            x, y = _number(place, point, "x", MOST_XY), _number(place, point, "y", MOST_XY)
            points.append((_number(place, point, "time", MOST_SECONDS), x, y, float(j == len(of_stroke))))
    if not points:
        raise ValueError(f"{path} must have strokes of points, StrokeSet/Stroke/Point, got none; {RESTORE}")
    return np.array(points)


def _parsed(path: Path) -> Any:
    defused, tree = need("defusedxml", "experiments"), need("defusedxml.ElementTree", "experiments")
    content = folders.content(path, MOST_XML)
    try:
        return tree.fromstring(content, forbid_dtd=True)
    except defused.DefusedXmlException as error:
        raise ValueError(
            f"{path} must be plain XML, got a document type or entities ({type(error).__name__}); {RESTORE}"
        ) from None
    except (tree.ParseError, ValueError, LookupError, RecursionError) as error:  # LookupError: an unknown encoding
        raise ValueError(f"{path} must be XML, got {content[:20]!r} and so on ({error}); {RESTORE}") from None


def _number(place: str, point: Any, name: str, most: float) -> float:
    text = point.get(name)
    value = float(text) if text is not None and NUMBER.fullmatch(text) else np.nan
    if not abs(value) <= most:
        got = "none" if text is None else repr(text[:40])
        raise ValueError(f"{place}: {name} must be a number, at most {most:g} in size, got {got}; {RESTORE}")
    return value


def _warn(counts: dict[str, int], found: _Found) -> None:
    if any(count != LISTS[name][1] for name, count in counts.items()):
        numbers = ", ".join(f"{name} {counts[name]:,} of {expected:,}" for name, (_, expected) in LISTS.items())
        warnings.warn(f"not as many lines as the task t1 has: {numbers}; training goes on with them", stacklevel=3)
    if found.skipped:
        warnings.warn(f"skipped {len(found.skipped)}:{folders.listed(found.skipped, SHOWN)}", stacklevel=3)
    if found.back:
        names = ", ".join(found.back[:SHOWN]) + (", and so on" if len(found.back) > SHOWN else "")
        several = "s" * (len(found.back) > 1)
        warnings.warn(
            f"time goes back in {len(found.back)} line{several}, where the clock is held: {names}", stacklevel=3
        )
