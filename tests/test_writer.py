"""The synthetic writer: legible letters, no two hands alike, the same lines from the same seed."""

import string
import sys
import time

import numpy as np
import pytest

from mslmn.data import handwriting, writer

LINES = writer.lines(60, seed=5)


def words_of(lines):
    return {word.strip(".,").lower() for line in lines for word in line.text.split()}


def of(split):
    return [line for line in LINES if line.split == split]


def test_a_fifth_as_many_validate_and_test():
    assert [len(of(split)) for split in handwriting.SPLITS] == [60, 12, 12]
    assert [len([line for line in writer.lines(1) if line.split == s]) for s in handwriting.SPLITS] == [1, 1, 1]


def test_no_two_splits_share_a_word_or_a_writer():
    train, validation, test = (set(map(str.lower, writer.vocabulary(split))) for split in handwriting.SPLITS)
    assert not train & validation and not train & test and not validation & test
    for split, vocabulary in zip(handwriting.SPLITS, (train, validation, test), strict=True):
        assert words_of(of(split)) <= vocabulary
        assert all(line.writer.startswith(split) for line in of(split))
    assert len({line.writer for line in LINES}) == 3 + 1 + 1


def test_words_are_listed_once_and_written_in_the_papers_alphabet():
    words = [word for split in handwriting.SPLITS for word in writer.vocabulary(split)]
    assert len(words) > 1000 and len({word.lower() for word in words}) == len(words)
    assert set("".join(words)) <= set(handwriting.PAPER)
    for split in handwriting.SPLITS:
        vocabulary = writer.vocabulary(split)
        assert set("".join(vocabulary).lower()) == set(string.ascii_lowercase + "'")
        assert {word[0].upper() for word in vocabulary} >= set(string.ascii_uppercase) - {"X", "Z"}
    assert {word[0].upper() for word in writer.vocabulary("train")} == set(string.ascii_uppercase)


def test_texts_have_capitals_commas_full_stops_and_apostrophes():
    assert set("".join(line.text for line in writer.lines(300, words=(20, 20)) if line.split == "train")) == set(
        handwriting.PAPER
    )
    assert all(3 <= len(line.text.split()) <= 8 for line in LINES)


def test_lines_are_as_the_tablet_of_iam_ondb_gives_them():
    for line in LINES:
        t, x, y, end = line.points.T
        assert (np.diff(t) >= 0).all() and np.allclose(t, t.round(2)) and t[-1] - t[0] < 120
        assert np.array_equal(x, x.round()) and np.array_equal(y, y.round())
        assert set(end) == {0.0, 1.0} and end[-1] == 1
        assert len(line.points) >= handwriting.steps_needed(line.text)
    steps = [len(line.points) / len(line.text) for line in LINES]
    assert 10 < np.mean(steps) < 30
    assert np.mean([np.ptp(line.points[:, 1]) > 2 * np.ptp(line.points[:, 2]) for line in LINES]) > 0.8


def test_the_same_seed_gives_the_same_lines_however_many():
    again = writer.lines(60, seed=5)
    assert all(a[:4] == b[:4] and np.array_equal(a.points, b.points) for a, b in zip(LINES, again, strict=True))
    fewer = [line for line in writer.lines(7, seed=5) if line.split == "train"]
    assert all(a[:4] == b[:4] and np.array_equal(a.points, b.points) for a, b in zip(fewer, LINES, strict=False))
    other = writer.lines(60, seed=6)
    assert not any(np.array_equal(a.points, b.points) for a, b in zip(LINES, other, strict=True))
    assert np.mean([a.text == b.text for a, b in zip(LINES, other, strict=True)]) < 0.1


def test_writers_differ_in_everything():
    hands = [writer.writer(np.random.default_rng(i)) for i in range(300)]
    assert {hand.font for hand in hands} == {*writer.PRINT, *writer.SCRIPT}
    for values in zip(*(hand[4:] for hand in hands), strict=True):
        assert len(set(values)) == 300


@pytest.mark.parametrize("font", [*writer.PRINT, *writer.SCRIPT])
def test_every_character_of_a_font_is_a_few_single_strokes(font):
    for character in handwriting.PAPER.replace(" ", ""):
        glyph = writer._font(font)[character]
        assert 1 <= glyph.first.sum() <= 8 and glyph.first[0] == 1
        assert glyph.width > 0 and np.ptp(glyph.points, axis=0).max() < 2
        assert (glyph.seconds >= 0).all() and np.isfinite(glyph.seconds).all()
        assert (glyph.seconds == 0).sum() == glyph.first.sum()


def test_second_lines_of_thick_strokes_are_left_out():
    line = np.column_stack([np.zeros(30), np.linspace(0, 1, 30)])
    beside, cross = line + np.array([0.06, 0]), line[:, ::-1] - np.array([0.5, -0.5])
    kept = writer._single([beside[5:], line, cross])
    assert len(kept) == 2 and kept[0] is line and kept[1] is cross


def test_the_pen_is_slow_where_it_bends():
    """The power law: v = k curvature^(-1/3), so a circle eight times as tight is half as fast, if it is tight."""
    speeds = []
    for radius in (0.4, 0.05):
        angle = np.arange(400) * writer.GRID / radius
        circle = radius * np.column_stack([np.cos(angle), np.sin(angle)])
        length = np.hypot(*np.diff(circle, axis=0).T)
        speeds.append(length[200] / writer._seconds(circle)[201])
    assert 1.6 < speeds[0] / speeds[1] < 2.0


def test_scripts_are_joined_and_print_is_not():
    hand = writer.writer(np.random.default_rng(0))._replace(mixed=0.0, spacing=0.0, uneven=0.01)
    count = {}
    for font in ("rowmans", "scripts"):
        points = writer.write("one man", hand._replace(font=font, slant=0.0), np.random.default_rng(0))
        count[font] = points[:, 3].sum()
    assert count == {"rowmans": 11, "scripts": 2}


def test_a_dot_is_a_stroke_of_at_least_one_point():
    points = writer.write(".", writer.writer(np.random.default_rng(0)), np.random.default_rng(0))
    assert len(points) >= 1 and points[-1, 3] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"words": (0, 3)}, "the fewest words must be at least 1, got 0"),
        ({"words": (4, 3)}, "the most words must be at least 4, got 3"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        writer.lines(**arguments)


@pytest.mark.parametrize(
    ("text", "message"), [(" ", "a character that leaves a trace"), ("né", "ASCII, got 'é'; leave")]
)
def test_a_text_that_cannot_be_written_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        writer.write(text, writer.writer(np.random.default_rng(0)), np.random.default_rng(0))


def test_without_the_fonts_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "HersheyFonts", None)
    writer._font.cache_clear()
    with pytest.raises(ImportError, match=r"this needs HersheyFonts: pip install 'mslmn\[experiments\]'"):
        writer.lines(1)


def test_writing_is_fast():
    """5,000 lines in well under a minute: 5 ms a line is half of that, with room for a busy machine."""
    writer.lines(5)
    began = time.process_time()
    writer.lines(100)
    assert time.process_time() - began < 140 * 0.02
