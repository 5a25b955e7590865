"""Handwriting: features and labels say what the pen and the text said, and come back from disk as they were."""

import math
import string
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mslmn.data import handwriting, store
from mslmn.data.handwriting import PAPER, Alphabet, Line

numbers = st.floats(-1e6, 1e6)


@st.composite
def points_strategy(draw):
    """(T, 4): any pen, any clock."""
    rows = draw(st.lists(st.tuples(numbers, numbers, numbers, st.sampled_from([0.0, 1.0])), min_size=1, max_size=30))
    return np.array(rows)


def made_up(n=6, seed=0):
    rng = np.random.default_rng(seed)
    lines = []
    for i in range(n):
        T = int(rng.integers(12, 30))
        xy = rng.normal(0, 100, (T, 2)).cumsum(0)
        ends = rng.random(T) < 0.2
        ends[-1] = True
        points = np.column_stack([rng.uniform(0, 0.1, T).cumsum(), xy, ends])
        split = handwriting.SPLITS[i % 3]
        lines.append(Line(f"line-{i}", split, f"writer-{i % 3}", f"Don't {'abc'[i % 3]}, é{i}.", points))
    return lines


def equal(a, b):
    return (
        (a.name, a.kind, a.alphabet, a.names, a.splits, a.writers, a.texts)
        == (b.name, b.kind, b.alphabet, b.names, b.splits, b.writers, b.texts)
        and len(a.features) == len(b.features)
        and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a.features, b.features, strict=True))
    )


# Features


@given(points_strategy())
def test_absolute_features_are_in_0_to_1_and_time_never_goes_back(points):
    x = handwriting.absolute(points)
    assert x.shape == points.shape and x.dtype == np.float32
    assert (x >= 0).all() and (x <= 1).all()
    assert (np.diff(x[:, 0]) >= 0).all()
    for k in (1, 2):
        if np.ptp(points[:, k]) > 0:
            assert x[:, k].min() == 0 and x[:, k].max() == 1
    np.testing.assert_array_equal(x[:, 3], points[:, 3])


def test_absolute_features_scale_each_coordinate_over_the_line():
    points = np.array([[10, 100, 7, 0], [12, 300, 5, 1], [11, 200, 9, 0], [16, 150, 5, 1.0]])
    expected = [[0, 0, 0.5, 0], [2 / 7, 1, 0, 1], [2 / 7, 0.5, 1, 0], [1, 0.25, 0, 1]]  # the clock stands once
    np.testing.assert_allclose(handwriting.absolute(points), expected, atol=1e-7)


def test_offsets_are_tenths_of_the_height_and_seconds():
    points = np.array([[10, 100, 7, 0], [10.5, 300, 5, 1], [10.2, 200, 9, 0], [99, 200, 5, 1.0]])
    expected = [[0, 0, 0, 0], [0.5, 500, -5, 1], [0, -250, 10, 0], [1, 0, -10, 1]]  # a long pause is one second
    np.testing.assert_allclose(handwriting.offsets(points), expected, rtol=1e-6)


@given(points_strategy(), st.floats(0.01, 100), numbers, numbers)
def test_offsets_do_not_depend_on_size_or_place(points, scale, x, y):
    points = points.round()
    moved = points * [1, scale, scale, 1] + [0, x, y, 0]
    if np.ptp(points[:, 2]) > 10:
        a, b = handwriting.offsets(points), handwriting.offsets(moved)
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * (1 + np.abs(a).max()))


@settings(max_examples=100)
@given(points_strategy())
def test_offsets_invert_to_the_strokes(points):
    extent = np.ptp(points[:, 1:3], axis=0)
    height = extent[1] or extent[0] or 1.0
    strokes = handwriting.strokes(handwriting.offsets(points), "offsets")
    xy = np.concatenate(strokes) * height + points[0, 1:3]
    np.testing.assert_allclose(xy, points[:, 1:3], atol=1e-4 * max(extent.max(), 1e-3))
    ends = [i + 1 for i, end in enumerate(points[:, 3]) if end]
    assert [len(stroke) for stroke in strokes] == [b - a for a, b in zip([0, *ends], [*ends, len(points)]) if b > a]  # noqa: B905


def test_strokes_of_absolute_features_fill_the_unit_square():
    (line, *_) = made_up()
    strokes = handwriting.strokes(handwriting.absolute(line.points), "absolute")
    assert len(strokes) == line.points[:, 3].sum()
    xy = np.concatenate(strokes)
    assert xy.min(0).tolist() == [0, 0] and xy.max(0).tolist() == [1, 1]


@pytest.mark.parametrize("compute", [handwriting.absolute, handwriting.offsets])
@pytest.mark.parametrize("T", [1, 5])
def test_a_pen_that_stands_still_has_features(compute, T):
    x = compute(np.tile([3.0, 5, 7, 1], (T, 1)))
    assert x.shape == (T, 4) and np.array_equal(x, np.tile([0, 0, 0, 1], (T, 1)))


# Labels


def test_the_papers_alphabet_has_58_outputs():
    alphabet = Alphabet()
    assert alphabet.outputs == 58
    assert set(alphabet.characters) == set(string.ascii_letters + " ',.")
    assert alphabet.encode("Az .") == [2, 53, 54, 57] and alphabet.encode("é-3") == [1, 1, 1]


@given(st.text(PAPER))
def test_texts_of_the_alphabet_come_back(text):
    labels = Alphabet().encode(text)
    assert Alphabet().decode(labels) == text and all(2 <= label < 58 for label in labels)


@given(st.text())
def test_other_characters_come_back_as_unknown(text):
    decoded = Alphabet().decode(Alphabet().encode(text))
    assert decoded == "".join(c if c in PAPER else "\N{REPLACEMENT CHARACTER}" for c in text)


def test_blanks_vanish():
    assert Alphabet("ab").decode([0, 2, 0, 3, 0]) == "ab"


@pytest.mark.parametrize("characters", ["", "aba"])
def test_an_alphabet_has_characters_each_once(characters):
    with pytest.raises(ValueError, match=r"at least one character, and each once, got .*; drop the others"):
        Alphabet(characters)


def test_all_characters_are_those_of_the_texts_that_train():
    data = handwriting.prepare(made_up(), "made up", alphabet="all")
    assert data.alphabet.characters == "".join(sorted(set("Don't a, é0.3")))
    (_, labels), *_ = data.pairs("validation")
    assert data.alphabet.decode(labels.tolist()) == "Don't �, é�."  # b and 1 are not in it


def test_pairs_are_what_fit_takes():
    data = handwriting.prepare(made_up(), "made up")
    pairs = data.pairs("test")
    assert [len(x) for x, _ in pairs] == [
        len(x) for x, s in zip(data.features, data.splits, strict=True) if s == "test"
    ]
    x, labels = pairs[0]
    assert x.dtype == torch.float32 and x.shape[1] == 4 and labels.dtype == torch.int64
    with pytest.raises(ValueError, match="split must be one of 'train', 'validation', 'test', got 'tset'"):
        data.pairs("tset")


def test_ctc_needs_a_step_between_equal_characters():
    assert [handwriting.steps_needed(text) for text in ("", "a", "ab", "aab", "aaa")] == [0, 1, 2, 4, 5]


# What cannot be prepared


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "dev"}, r"the split of line 'line-0' must be one of 'train', .* got 'dev'"),
        ({"points": np.zeros((0, 4))}, r"points of line 'line-0' must be \(T, 4\) .*, got \(0, 4\); drop the line"),
        ({"points": np.zeros((5, 3))}, r"must be \(T, 4\) finite numbers, T at least 1, got \(5, 3\); drop"),
        ({"points": np.full((5, 4), np.nan)}, r"got \(5, 4\) with NaN or infinity; drop the line"),
        ({"text": "a\0b"}, r"the text of line 'line-0' must have no NUL, got 'a\\x00b'; drop the line"),
    ],
)
def test_a_wrong_line_is_named(change, message):
    first, *others = made_up()
    with pytest.raises(ValueError, match=message):
        handwriting.prepare([first._replace(**change), *others], "made up")


def test_texts_that_cannot_train_are_refused():
    lines = [line._replace(text="123", split="train") for line in made_up()]
    with pytest.raises(
        ValueError, match=r"the paper's alphabet has none of the characters of x, '123'; choose .* 'all'"
    ):
        handwriting.prepare(lines, "x")
    with pytest.raises(ValueError, match=r"x has 6 lines, none with text that trains; add some"):
        handwriting.prepare([line._replace(split="test") for line in lines], "x")
    with pytest.raises(ValueError, match="features must be one of 'absolute', 'offsets', got 'deltas'"):
        handwriting.prepare(lines, "x", features="deltas")


def test_lines_that_cannot_be_learnt_are_left_out_and_named():
    first, second, *others = made_up()
    flat = np.array([[0, 0, 0, 0], [1, 5, 0, 0], [2, 9, 1e-36, 1.0]])  # infinite in units of its height
    lines = [first._replace(points=flat, text="a"), second._replace(points=second.points[:3], text="1234"), *others]
    with pytest.warns(UserWarning, match="left out 2 lines") as told:
        data = handwriting.prepare(lines, "made up", features="offsets")
    (message,) = [str(w.message) for w in told]
    assert message.startswith("left out 2 lines:\n")
    assert "line-0: the pen moves 1000 times the height of the line in a step" in message
    assert "line-1: CTC needs 7 points for '1234', got 3" in message  # digits have one label in the paper's alphabet
    assert data.names == [line.name for line in others] and all(np.isfinite(x).all() for x in data.features)
    assert len(handwriting.prepare(lines[:1] + others, "made up").names) == 1 + len(others)  # coordinates are scaled
    with pytest.warns(UserWarning, match="left out 1 line:"), pytest.raises(ValueError, match="no line is left"):
        handwriting.prepare([lines[0]._replace(split="train")], "made up", features="offsets")


# Prepared lines


@pytest.mark.parametrize("kind", handwriting.KINDS)
@pytest.mark.parametrize("alphabet", ["paper", "all"])
def test_prepared_lines_come_back_as_they_were(tmp_path, kind, alphabet):
    data = handwriting.prepare(made_up(), "made up", features=kind, alphabet=alphabet)
    path = handwriting.keep(tmp_path / "new" / "lines.npz", data)
    assert equal(handwriting.load(path), data) and not list(path.parent.glob("*.tmp"))
    assert handwriting.keep(path, data) == path
    with np.load(path, allow_pickle=False) as stored:
        offsets = stored["offsets"]
        assert np.array_equal(stored["features"][offsets[2] : offsets[3]], data.features[2])


def test_other_lines_never_replace_those_that_are_there(tmp_path):
    path = handwriting.keep(tmp_path / "lines.npz", handwriting.prepare(made_up(), "made up"))
    with pytest.raises(ValueError, match=r"lines\.npz has other data, made up; choose another --out"):
        handwriting.keep(path, handwriting.prepare(made_up(seed=1), "made up"))


def test_other_files_are_not_prepared_handwriting(tmp_path):
    store.save(tmp_path / "music.npz", {"target": np.zeros(3)})
    with pytest.raises(
        ValueError, match=r"music\.npz has no 'offsets', so it is not prepared handwriting; make it with"
    ):
        handwriting.load(tmp_path / "music.npz")
    with pytest.raises(ValueError, match=r"gone\.npz cannot be read as prepared data .*; make it again"):
        handwriting.load(tmp_path / "gone.npz")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("offsets", np.array([0, 5])),
        ("offsets", np.array(3)),
        ("offsets", np.array([], dtype=int)),
        ("offsets", np.array(["a"] * 7)),
        ("features", np.zeros((7, 4), np.float32)),
        ("features", np.zeros(7, np.float32)),
        ("texts", np.array(["a"])),
        ("texts", np.array("a")),
        ("splits", np.array(["dev"] * 6)),
        ("kind", np.array("deltas")),
        ("characters", np.array(["a", "a"])),
        ("characters", np.array([1, 2])),
    ],
)
def test_arrays_that_do_not_fit_together_are_no_handwriting(tmp_path, name, value):
    arrays = store.load(handwriting.keep(tmp_path / "lines.npz", handwriting.prepare(made_up(), "made up")))
    store.save(tmp_path / "cut.npz", arrays | {name: value})
    with pytest.raises(
        ValueError, match=r"cut\.npz has .*, so it is not prepared handwriting; make it with mslmn prepare"
    ):
        handwriting.load(tmp_path / "cut.npz")


def test_features_that_are_not_finite_are_no_handwriting(tmp_path):
    arrays = store.load(handwriting.keep(tmp_path / "lines.npz", handwriting.prepare(made_up(), "made up")))
    arrays["features"][3, 1] = math.nan
    store.save(tmp_path / "nan.npz", arrays)
    with pytest.raises(ValueError, match=r"nan\.npz has features that are NaN or infinite"):
        handwriting.load(tmp_path / "nan.npz")


def test_nothing_is_unpickled(tmp_path):
    arrays = store.load(handwriting.keep(tmp_path / "lines.npz", handwriting.prepare(made_up(), "made up")))
    np.savez(tmp_path / "trap.npz", **arrays | {"texts": np.array([object()] * 6, dtype=object)})
    with pytest.raises(ValueError, match=r"trap\.npz cannot be read as prepared data"):
        handwriting.load(tmp_path / "trap.npz")


@settings(max_examples=60)
@given(st.data())
def test_damage_anywhere_is_noticed_or_does_no_harm(data):
    with TemporaryDirectory() as folder:
        whole = handwriting.prepare(made_up(3), "made up")
        path = handwriting.keep(Path(folder) / "lines.npz", whole)
        content = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        else:
            for _ in range(data.draw(st.integers(1, 3))):
                content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        try:
            found = handwriting.load(path)
        except ValueError as error:
            assert "lines.npz" in str(error)  # noqa: PT017
        else:
            assert equal(found, whole)
