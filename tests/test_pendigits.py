"""Pendigits: digits of a file come back, joined to strings of one writer; what is damaged is named."""

import gzip
import re
import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mslmn.data import pendigits
from mslmn.data.handwriting import SPLITS

COUNTS = dict(pendigits.FILES)
HEADER = '.INCLUDE        dene.doc\n\n.LEXICON "0" "1"\n.HIERARCHY      DIGIT\n\n'


def segment(number, digit, writer, strokes):
    last = number + len(strokes) - 1
    name = f"{number}" if last == number else f"{number}-{last}"
    text = f'.SEGMENT DIGIT {name:>4} ? "{digit}"\n.COMMENT {digit} {writer:2}  117\n'
    for stroke in strokes:
        text += ".PEN_DOWN\n" + "".join(f" {x:3}  {y:3}\n" for x, y in stroke) + ".PEN_UP\n.DT 100\n"
    return text + "\n"


def unipen(writers, each=12, seed=0):
    rng = np.random.default_rng(seed)
    text, number = HEADER, 0
    for writer in writers:
        for _ in range(each):
            strokes = [rng.integers(100, 400, (int(rng.integers(2, 9)), 2)) for _ in range(int(rng.integers(1, 3)))]
            text += segment(number, int(rng.integers(10)), writer, strokes)
            number += len(strokes)
    return text


@pytest.fixture(autouse=True)
def counts(monkeypatch):
    monkeypatch.setattr(pendigits, "FILES", {"tra": 13 * 12, "tes": 4 * 12})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pendigits-orig.tra").write_text(unipen(range(1, 14)))
    (tmp_path / "pendigits-orig.tes.gz").write_bytes(gzip.compress(unipen(range(1, 5), seed=1).encode()))
    return tmp_path


def test_the_counts_are_those_of_the_corpus():
    assert COUNTS == {"tra": 7494, "tes": 3498}


def test_digits_come_back_point_by_point_y_downwards(folder):
    text = HEADER + segment(0, 4, 12, [[(1, 2), (3, 4)], [(5, 6)]]) + segment(2, 7, 3, [[(7, 8)]])
    (folder / "pendigits-orig.tra").write_text(text)
    with pytest.warns(UserWarning, match=r"pendigits-orig\.tra has 2 digits of 156; training goes on with them"):
        four, seven = pendigits.digits(folder, "tra")
    assert four[:2] == ("4", "tra-12") and seven[:2] == ("7", "tra-03")
    assert [stroke.tolist() for stroke in four.strokes] == [[[1, -2], [3, -4]], [[5, -6]]]


def test_strings_have_3_to_8_digits_of_one_writer_and_every_digit_once(folder):
    lines = pendigits.lines(folder)
    assert all(3 <= len(line.text) <= 8 for line in lines)
    digits = {name: pendigits.digits(folder, name) for name in ("tra", "tes")}
    for line in lines:
        own = [d for d in digits[line.writer[:3]] if d.writer == line.writer]
        assert set(line.text) <= {d.digit for d in own}
    used = sum(len(line.text) for line in lines)
    assert 17 * 10 <= used <= 17 * 12  # at most two of a writer's twelve are left over


def test_no_two_splits_share_a_writer(folder):
    lines = pendigits.lines(folder)
    writers = {split: {line.writer for line in lines if line.split == split} for split in SPLITS}
    assert writers["validation"] == {"tra-06", "tra-12"}
    assert len(writers["train"]) == 11 and not writers["train"] & writers["validation"]
    assert writers["test"] == {f"tes-0{i}" for i in range(1, 5)}


def test_digits_go_from_left_to_right_with_the_pen_lifted_between_them(folder):
    for line in pendigits.lines(folder):
        t, x, _, end = line.points.T
        assert (np.diff(t) > 0).all() and end[-1] == 1 and end.sum() >= len(line.text)
        gaps = np.flatnonzero(np.diff(t) > 0.35)  # from digit to digit
        assert len(gaps) == len(line.text) - 1 and (end[gaps] == 1).all()
        parts = np.split(x, gaps + 1)
        assert all(a.max() < b.min() for a, b in pairwise(parts))


def test_a_number_of_strings_may_be_asked_for_and_the_seed_decides(folder):
    lines = pendigits.lines(folder, 100, seed=3)
    assert [sum(line.split == split for line in lines) for split in SPLITS] == [100, 20, 20]
    again, other = pendigits.lines(folder, 100, seed=3), pendigits.lines(folder, 100, seed=4)
    assert all(a[:4] == b[:4] and np.array_equal(a.points, b.points) for a, b in zip(lines, again, strict=True))
    assert [line.text for line in lines] != [line.text for line in other]
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        pendigits.lines(folder, 0)


def test_each_writer_tests_in_one_fold(folder):
    tested = []
    for number in range(1, 5):
        writers = {split: set() for split in SPLITS}
        for line in pendigits.lines(folder, fold=f"{number}/4"):
            writers[line.split].add(line.writer)
        assert len(set.union(*writers.values())) == sum(map(len, writers.values())) == 17  # none is in two splits
        assert {writer[:3] for writer in writers["train"]} == {"tra", "tes"}
        tested += writers["test"]
    assert len(tested) == len(set(tested)) == 17


@pytest.mark.parametrize("fold", ["0/4", "5/4", "1/1", "a/b", "", "1/99999", 2])
def test_a_fold_that_is_none_is_refused(folder, fold):
    with pytest.raises(ValueError, match=f"fold must be one of several, 1/4 to 4/4, for instance, got {fold!r}; or"):
        pendigits.lines(folder, fold=fold)
    with pytest.raises(ValueError, match="fold 1/18 needs a writer for each, got 17; take fewer folds"):
        pendigits.lines(folder, fold="1/18")


GOOD = segment(0, 3, 1, [[(1, 2), (3, 4)]])
DAMAGED = {
    "cut off": (GOOD.split(".PEN_UP")[0], r"must have 1 strokes from \.PEN_DOWN to \.PEN_UP, got 1, the last cut off"),
    "no strokes": (GOOD.split(".PEN_DOWN")[0], r"must have 1 strokes from .*, got 0; restore"),
    "a stroke missing": (GOOD.replace("   0 ?", " 0-1 ?"), r"must have 2 strokes from .*, got 1; restore"),
    "no writer": (re.sub(r"\.COMMENT.*\n", "", GOOD), r"must have a writer, \.COMMENT digit writer place, got none"),
    "words": (GOOD.replace("  1    2", " one two"), r"must be \.PEN_DOWN, points, \.PEN_UP, got 'one two'; restore"),
    "NaN": (GOOD.replace("  1    2", " nan nan"), r"got 'nan nan'"),
    "a huge number": (GOOD.replace("  1    2", " 1 " + "9" * 5000), r"got '1 9{38}'; restore"),
    "an empty stroke": (GOOD.replace("   1    2\n   3    4\n", ""), r"points, \.PEN_UP, got '\.PEN_UP'"),
    "points without a pen": (GOOD.replace(".PEN_DOWN\n", ""), r"got '1    2'"),
    "no digit": (GOOD.replace('"3"', '"x"'), r"must begin with \.SEGMENT DIGIT n \? \"d\", got '\.SEGMENT"),
    "zeros": (GOOD.replace("  1    2", "\0\0\0"), r"got '\\x00\\x00\\x00'"),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_digit_is_skipped_and_named(folder, content, message):
    path = folder / "pendigits-orig.tra"
    whole = path.read_text()
    path.write_text(whole.rstrip() + "\n\n" + content)
    with pytest.warns(
        UserWarning, match=rf"^skipped 1:\n  .*pendigits-orig\.tra, the digit of line \d+: .*{message}"
    ) as told:
        assert len(pendigits.digits(folder, "tra")) == 156
    assert len(told) == 1


def test_a_file_without_digits_is_refused(folder):
    for content in (b"", b"\xff\x00" * 50, b"<html>"):
        (folder / "pendigits-orig.tra").write_bytes(content)
        with pytest.raises(ValueError, match=r"pendigits-orig\.tra must have digits, .*, got none; restore it"):
            pendigits.lines(folder)


@given(st.integers(0, 3000))
def test_a_file_cut_anywhere_never_ends_in_another_error(tmp_path_factory, at):
    folder = tmp_path_factory.mktemp("cut")
    (folder / "pendigits-orig.tra").write_text(unipen([1, 2, 3], each=5)[:at])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert pendigits.digits(folder, "tra")
        except ValueError as error:
            assert "must have digits, .SEGMENT and .PEN_DOWN, got none" in str(error)  # noqa: PT017


def test_a_damaged_archive_is_named(folder, monkeypatch):
    path = folder / "pendigits-orig.tes.gz"
    whole = path.read_bytes()
    for content in (whole[:-20], b"no gzip", whole[:30] + bytes(20) + whole[50:]):
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"pendigits-orig\.tes\.gz must be a gzip file, got a damaged one \(.*\); rest"
        ):
            pendigits.lines(folder)
    monkeypatch.setattr(pendigits, "MOST", 10_000_000)
    path.write_bytes(gzip.compress(bytes(20_000_000)))
    with pytest.raises(ValueError, match=r"must have at most 10,000,000 bytes unpacked, got more; restore"):
        pendigits.lines(folder)


def test_what_is_missing_is_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"gone is not a folder; pass the one with pendigits-orig\.tra and"):
        pendigits.lines(tmp_path / "gone")
    (folder / "pendigits-orig.tra").unlink()
    with pytest.raises(
        ValueError, match=r"must have pendigits-orig\.tra or pendigits-orig\.tra\.gz, got neither; unpack"
    ):
        pendigits.lines(folder)


@pytest.mark.filterwarnings("ignore:.*training goes on")
def test_too_few_writers_or_digits_are_refused(folder):
    path = folder / "pendigits-orig.tra"
    path.write_text(unipen([1]))
    with pytest.raises(ValueError, match="must have digits of two writers at least in tra, got 1; restore it"):
        pendigits.lines(folder)
    path.write_text(unipen([1, 2], each=2))
    with pytest.raises(
        ValueError, match="must have a writer with 3 digits at least for train, got 2 digits; restore it"
    ):
        pendigits.lines(folder)
    path.write_text(unipen([1, 2], each=3))
    assert {line.split for line in pendigits.lines(folder)} == set(SPLITS)
