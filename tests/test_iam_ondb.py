"""IAM-OnDB: what is written into a tree comes back, line by line; what is hostile or damaged is named, and no more."""

import os
import re
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mslmn.data import folders, handwriting, iam_ondb

LISTS = {
    "trainset.txt": "a01-000u",
    "testset_v.txt": "b02-011",
    "testset_t.txt": "c03-100z",
    "testset_f.txt": "d04-021x",
}
HEADER = """<?xml version="1.0" encoding="ISO-8859-1"?>
<WhiteboardCaptureSession>
 <WhiteboardDescription><SensorLocation corner="top_left"/></WhiteboardDescription>
 <StrokeSet>
"""
FOOTER = " </StrokeSet>\n</WhiteboardCaptureSession>\n"


def strokes_of(seed=0, sizes=(20, 15, 1)):
    """Lists of (time, x, y), as the corpus has them: seconds in hundredths, whole coordinates."""
    rng = np.random.default_rng(seed)
    times = 769 + rng.integers(0, 4, sum(sizes)).cumsum() / 100
    xy = rng.integers(500, 6000, (sum(sizes), 2))
    points = [(round(float(t), 2), int(x), int(y)) for t, (x, y) in zip(times, xy, strict=True)]
    ends = np.cumsum(sizes)
    return [points[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def xml(strokes):
    body = "".join(
        '<Stroke colour="black">\n'
        + "".join(f'<Point x="{x}" y="{y}" time="{t}"/>\n' for t, x, y in stroke)
        + "</Stroke>\n"
        for stroke in strokes
    )
    return HEADER + body + FOOTER


def put(root, name, content):
    path = Path(root) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def line_file(form, number):
    return f"lineStrokes/{form[:3]}/{form[:7]}/{form}-{number:02}.xml"


def put_form(root, form, texts, strokes=None):
    put(root, f"ascii/{form[:3]}/{form[:7]}/{form}.txt", "OCR:\n\nwrong\n\nCSR:\n\n" + "\n".join(texts) + "\n")
    for number in range(1, len(texts) + 1):
        put(root, line_file(form, number), xml(strokes or strokes_of(number)))


def put_corpus(root):
    """Each list has one form, of two lines."""
    for name, form in LISTS.items():
        put(root, name, f"{form}\n")
        put_form(root, form, ["By Trevor,", "don't go."])


def read(root):
    """The lines, and what was warned of but for the counts, which never fit here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines = iam_ondb.lines(root)
    messages = [str(w.message) for w in caught]
    assert all(w.filename == __file__ for w in caught)
    assert messages.pop(0).startswith("not as many lines as the task t1 has: trainset.txt ")
    return lines, messages


@pytest.fixture
def corpus(tmp_path):
    put_corpus(tmp_path)
    return tmp_path


VICTIM = line_file("a01-000u", 1)


def test_a_line_is_what_its_files_say(corpus):
    lines, messages = read(corpus)
    assert not messages
    assert [line.name for line in lines] == [f"{form}-0{number}" for form in LISTS.values() for number in (1, 2)]
    assert [line.split for line in lines] == ["train"] * 2 + ["validation"] * 4 + ["test"] * 2
    assert [line.text for line in lines] == ["By Trevor,", "don't go."] * 4
    expected = [(*p, float(p is stroke[-1])) for stroke in strokes_of(2) for p in stroke]
    np.testing.assert_array_equal(lines[1].points, expected)
    assert lines[1].points[:, 3].sum() == 3 and lines[1].points.dtype == np.float64


def test_the_counts_are_those_of_the_task_and_others_are_told(corpus, monkeypatch):
    assert [count for _, count in iam_ondb.LISTS.values()] == [5364, 1438, 1518, 3859]
    with pytest.warns(
        UserWarning, match=r"trainset.txt 2 of 5,364, testset_v.txt 2 of 1,438, testset_t.txt 2 of 1,518, "
    ):
        iam_ondb.lines(corpus)
    monkeypatch.setattr(iam_ondb, "LISTS", {name: (split, 2) for name, (split, _) in iam_ondb.LISTS.items()})
    assert len(iam_ondb.lines(corpus)) == 8  # without a warning


def test_any_folder_above_and_either_letter_case_will_do(corpus, tmp_path_factory):
    above = tmp_path_factory.mktemp("above")
    for path in corpus.rglob("*.*"):
        put(above, f"IAM/{str(path.relative_to(corpus)).upper()}", path.read_bytes())
    there, here = read(above)[0], read(corpus)[0]
    assert [line[:4] for line in there] == [line[:4] for line in here]
    assert all(np.array_equal(a.points, b.points) for a, b in zip(there, here, strict=True))


def test_forms_of_no_list_and_other_files_are_left_alone(corpus):
    put_form(corpus, "z01-000z", ["nobody asked"])
    put(corpus, "original/a01/a01-000/strokesu.xml", "<broken")
    put(corpus, "lineStrokes/a01/a01-000/._a01-000u-01.xml", "macOS")
    lines, messages = read(corpus)
    assert len(lines) == 8 and not messages


def test_lines_joined_by_percent_signs_are_two(corpus):
    put_form(corpus, "a01-000u", ["one 5% two", "three", "four"])
    put(corpus, "ascii/a01/a01-000/a01-000u.txt", "CSR:\none 5% two%%%%%%%%%%% three\r\nfour%%\r\n")
    lines, messages = read(corpus)
    assert [line.text for line in lines[:3]] == ["one 5% two", "three", "four"] and not messages


def test_time_that_goes_back_is_told_and_held_in_the_features(corpus):
    strokes = strokes_of(3)
    strokes[1] = [(t - 5, x, y) for t, x, y in strokes[1]]
    put(corpus, VICTIM, xml(strokes))
    lines, messages = read(corpus)
    assert messages == ["time goes back in 1 line, where the clock is held: a01-000u-01"]
    for features in (handwriting.absolute, handwriting.offsets):
        x = features(lines[0].points)
        assert np.isfinite(x).all() and (x[:, 0] >= 0).all()
    assert (np.diff(handwriting.absolute(lines[0].points)[:, 0]) >= 0).all()


# Hostile and damaged strokes

BOMB = (
    '<?xml version="1.0"?><!DOCTYPE b [<!ENTITY a "ha">'
    + "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefghi", "bcdefghij", strict=True))
    + "]><WhiteboardCaptureSession>&j;</WhiteboardCaptureSession>"
)
WHOLE = xml(strokes_of())
ONE = '<Point x="1" y="2" time="3"/>'


def with_point(**attributes):
    """A line whose fifth point is another one."""
    point = "<Point " + " ".join(f'{name}="{value}"' for name, value in attributes.items()) + "/>"
    points = re.findall("<Point[^>]*>", WHOLE)
    return WHOLE.replace(points[4], point, 1)


HOSTILE = {
    "entity bomb": (BOMB, r"must be plain XML, got a document type or entities \(DTDForbidden\); restore"),
    "external entity": (
        '<!DOCTYPE r [<!ENTITY x SYSTEM "file:///etc/passwd">]><r>&x;</r>',
        r"must be plain XML, got a document type or entities",
    ),
    "external document type": ('<!DOCTYPE r SYSTEM "file:///dev/zero"><r/>', r"must be plain XML"),
    "attribute defaults": ('<!DOCTYPE r [<!ATTLIST r x CDATA "1">]><r/>', r"must be plain XML"),
    "undefined entity": (WHOLE.replace("769", "&seconds;", 1), r"must be XML, got .*undefined entity"),
    "cut off": (WHOLE[: len(WHOLE) // 2], r"must be XML, got b'<\?xml version=\"1.0\" ' and so on \(.*\); restore"),
    "nothing": ("", r"must be XML, got b'' and so on \(no element found"),
    "zeros": (bytes(100), r"must be XML, got"),
    "no XML": ("RIFF....WAVE", r"must be XML, got b'RIFF\.\.\.\.WAVE' and so on"),
    "unknown encoding": (WHOLE.replace("ISO-8859-1", "ISO-8859-99"), r"must be XML, got .*encoding"),
    "wrong encoding": (WHOLE.replace("ISO-8859-1", "UTF-16"), r"must be XML, got"),
    "bytes of no encoding": (
        WHOLE.replace("ISO-8859-1", "UTF-8").encode().replace(b"black", b"\xff\xfe"),
        "must be XML",
    ),
    "another document": (
        "<html><body/></html>",
        r"must have strokes of points, StrokeSet/Stroke/Point, got none; rest",
    ),
    "no strokes": (HEADER + FOOTER, r"must have strokes of points, .*got none"),
    "strokes without points": (HEADER + "<Stroke/><Stroke/>" + FOOTER, r"must have strokes of points, .*got none"),
    "one point": (HEADER + f"<Stroke>{ONE}</Stroke>" + FOOTER, r"must have a point for each character of .*, got 1;"),
    "no x": (
        with_point(y=2, time=3),
        r", stroke 1, point 5: x must be a number, at most 1e\+06 in size, got none; rest",
    ),
    "no time": (with_point(x=1, y=2), r"point 5: time must be a number, at most 1e\+12 in size, got none"),
    "words": (with_point(x="left", y=2, time=3), r"point 5: x must be a number, .* got 'left'; restore"),
    "empty": (with_point(x=1, y="", time=3), r"point 5: y must be a number, .* got ''"),
    "NaN": (with_point(x="nan", y=2, time=3), r"x must be a number, .* got 'nan'"),
    "infinity": (with_point(x=1, y="-inf", time=3), r"y must be a number, .* got '-inf'"),
    "1e300": (with_point(x=1, y="1e300", time=3), r"y must be a number, .* got '1e300'"),
    "1e999": (with_point(x=1, y=2, time="1e999"), r"time must be a number, .* got '1e999'"),
    "a huge int": (with_point(x="9" * 6000, y=2, time=3), r"x must be a number, .* got '9{40}';"),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_line_is_skipped_and_named(corpus, content, message):
    put(corpus, VICTIM, content)
    began = time.perf_counter()
    lines, (told,) = read(corpus)
    assert time.perf_counter() - began < 20
    assert [line.name for line in lines][:2] == ["a01-000u-02", "b02-011-01"] and len(lines) == 7
    assert re.search(rf"^skipped 1:\n  .*a01-000u-01\.xml.*{message}", told)


def test_a_file_that_would_fill_the_memory_is_not_read(corpus):
    with (corpus / VICTIM).open("wb") as file:
        file.truncate(1 << 30)  # sparse
    began = time.perf_counter()
    _, (told,) = read(corpus)
    assert time.perf_counter() - began < 20
    assert re.search(r"a01-000u-01\.xml must have at most 4,000,000 bytes, got more; restore", told)


@pytest.mark.parametrize("tag", ["Stroke", "Point"])
def test_tags_inside_tags_end_soon(corpus, tag):
    deep = iam_ondb.MOST_XML // (2 * len(tag) + 5) - 100
    put(corpus, VICTIM, HEADER + "<Stroke>" + f"<{tag}>" * deep + f"</{tag}>" * deep + "</Stroke>" + FOOTER)
    began = time.perf_counter()
    _, (told,) = read(corpus)
    assert time.perf_counter() - began < 20
    assert "a01-000u-01.xml" in told


def test_a_pipe_is_not_read(corpus):
    (corpus / VICTIM).unlink()
    os.mkfifo(corpus / VICTIM)
    _, (told,) = read(corpus)
    assert re.search(r"a01-000u-01\.xml must be a plain file, got a folder, pipe or device; restore", told)


def test_a_file_that_cannot_be_opened_is_named(corpus):
    (corpus / VICTIM).unlink()
    (corpus / VICTIM).symlink_to(corpus / "gone")
    _, (told,) = read(corpus)
    assert re.search(r"a01-000u-01\.xml cannot be read \(.+\); check the file and its permissions", told)


@settings(max_examples=100)
@given(st.data())
def test_damage_anywhere_never_ends_in_another_error(data):
    content = bytearray(WHOLE.encode())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    for _ in range(data.draw(st.integers(0, 5)) if content else 0):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with TemporaryDirectory() as root:
        path = put(root, "a01-000u-01.xml", bytes(content))
        try:
            points = iam_ondb._points(path)
        except ValueError as error:
            assert "a01-000u-01.xml" in str(error) and "restore it from the corpus" in str(error)  # noqa: PT017
        else:
            assert points.ndim == 2 and points.shape[1] == 4 and np.isfinite(points).all()


@settings(max_examples=30)
@given(st.data())
def test_any_strokes_come_back_exactly(data):
    numbers = st.integers(-5000, 9000)
    stroke = st.lists(st.tuples(st.integers(0, 10**9).map(lambda t: t / 100), numbers, numbers), min_size=1, max_size=8)
    strokes = data.draw(st.lists(stroke, min_size=1, max_size=5))
    with TemporaryDirectory() as root:
        points = iam_ondb._points(put(root, "line.xml", xml(strokes)))
    expected = [(*p, float(i == len(s) - 1)) for s in strokes for i, p in enumerate(s)]
    np.testing.assert_array_equal(points, expected)


# Transcripts and lists

DAMAGED_TEXT = {
    "no CSR": (
        b"OCR:\n\nBy Trevor\n",
        r"a01-000u\.txt must have the text of each line after CSR:, got no CSR: in 16 ch",
    ),
    "nothing after CSR": (
        b"OCR:\n\nBy\n\nCSR:\n\n \n",
        r"must have the text of each line after CSR:, got none after CSR:",
    ),
    "nothing": (b"", r"got no CSR: in 0 characters"),
    "no text": (b"CSR:\n\xff\xfe", r"must be text, got b'\\xff\\xfe'; restore"),
    "zeros": (b"CSR:\n" + bytes(9), r"must be text, got b'\\x00"),
    "an endless line": (b"CSR:\n" + b"x" * 5000, r"must have lines of at most 1000 characters, got 5000; restore"),
    "an endless file": (b"CSR:\n" + b"x\n" * 60_000, r"must have at most 100,000 bytes, got more"),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED_TEXT.values(), ids=DAMAGED_TEXT)
def test_a_damaged_transcript_costs_its_form_and_is_named(corpus, content, message):
    put_form(corpus, "a01-001w", ["spare"])
    put(corpus, "trainset.txt", "a01-000u\n\n  a01-001w  \r\n")
    put(corpus, "ascii/a01/a01-000/a01-000u.txt", content)
    lines, (told,) = read(corpus)
    assert [line.name for line in lines][:2] == ["a01-001w-01", "b02-011-01"]
    assert re.search(rf"^skipped 1:\n  .*{message}.*\(2 lines\)$", told)


def test_a_missing_transcript_is_named(corpus):
    put_form(corpus, "a01-001w", ["spare"])
    put(corpus, "trainset.txt", "a01-000u a01-001w")
    (corpus / "ascii/a01/a01-000/a01-000u.txt").unlink()
    lines, (told,) = read(corpus)
    assert len(lines) == 7
    assert re.search(r"a01-000u must have a transcript, a01-000u\.txt, got none; restore .*\(2 lines\)$", told)


def test_more_lines_than_transcripts_and_the_reverse_are_named(corpus):
    put(corpus, line_file("a01-000u", 3), xml(strokes_of(9)))
    put(corpus, line_file("a01-000u", 0), xml(strokes_of(9)))
    (corpus / line_file("b02-011", 1)).unlink()
    lines, (told,) = read(corpus)
    assert [(line.name, line.text) for line in lines[:3]] == [
        ("a01-000u-01", "By Trevor,"), ("a01-000u-02", "don't go."), ("b02-011-02", "don't go."),
    ]  # fmt: skip
    assert told.startswith("skipped 3:\n")
    assert re.search(r"a01-000u-03\.xml must have a transcript, got 2 lines in a01-000u\.txt; restore", told)
    assert re.search(r"b02-011-01\.xml must have the strokes of 'By Trevor,', got no file; restore", told)


def test_empty_lines_of_a_transcript_are_spacing_if_the_others_are_as_many_as_strokes(corpus):
    path = "ascii/a01/a01-000/a01-000u.txt"
    put(corpus, path, "CSR:\n\n\none\n\n \ntwo\n\n")
    lines, messages = read(corpus)
    assert [line.text for line in lines[:2]] == ["one", "two"] and not messages
    put_form(corpus, "a01-001w", ["spare"])
    put(corpus, "trainset.txt", "a01-000u a01-001w")
    put(corpus, line_file("a01-000u", 3), xml(strokes_of(9)))
    lines, (told,) = read(corpus)
    assert lines[0].name == "a01-001w-01"
    assert re.search(
        r"a01-000u\.txt must have a text for each of 3 lines, got 2 with empty ones between: .*3 lines", told
    )
    put(corpus, path, "CSR:\none\ntwo\n")  # nothing is missing between them
    assert [line.text for line in read(corpus)[0][:2]] == ["one", "two"]


def test_a_second_file_of_the_same_name_is_named(corpus):
    put(corpus, "aaa/a01-000u-01.xml", xml(strokes_of(7)))
    put(corpus, "zzz/A01-000U.txt", "CSR:\nwrong\nwrong\n")
    lines, (told,) = read(corpus)
    assert len(lines) == 8 and lines[0].text == "By Trevor," and told.startswith("skipped 2:\n")
    assert re.search(r"lineStrokes.*01\.xml must be the only a01-000u-01\.xml, got .*aaa.* too, which is read", told)
    assert re.search(r"zzz/A01-000U\.txt must be the only a01-000u\.txt, got .*ascii", told)


def test_a_list_that_names_nothing_is_told_from_missing_lines(corpus):
    put(corpus, "testset_v.txt", "\n")
    with pytest.raises(ValueError, match=r"must name forms, got none in testset_v\.txt; restore them from the corpus"):
        iam_ondb.lines(corpus)


def test_a_form_trains_or_tests_but_not_both(corpus):
    put(corpus, "testset_f.txt", "d04-021x\na01-000u\nd04-021x\n../../etc/passwd\n")
    lines, (told,) = read(corpus)
    assert [line.split for line in lines if line.name.startswith("a01-000u")] == ["train"] * 2
    assert told.startswith("skipped 3:\n")
    assert re.search(r"testset_f\.txt: a01-000u must be in one list, once, got it in trainset\.txt too; restore", told)
    assert re.search(r"testset_f\.txt: an entry must be a form, like a01-020x, got '\.\./\.\./etc/passwd'", told)


def test_many_skipped_lines_are_one_warning(corpus):
    put_form(corpus, "a01-001w", [f"line {i}" for i in range(30)], [[(1, 2, 3)]])
    put(corpus, "trainset.txt", "a01-000u a01-001w")
    _, (told,) = read(corpus)
    assert told.startswith("skipped 30:\n") and told.endswith("\n  and 10 more") and told.count("\n") == 21


@pytest.mark.parametrize("name", LISTS)
def test_without_a_list_nothing_is_read(corpus, name):
    (corpus / name).unlink()
    with pytest.raises(ValueError, match=rf"must have the lists of the task t1, .*, got no {name}; put them there$"):
        iam_ondb.lines(corpus)


def test_a_list_whose_lines_are_all_damaged_is_refused_with_reasons(corpus):
    for number in (1, 2):
        put(corpus, line_file("d04-021x", number), "<")
    with pytest.raises(
        ValueError, match=r"got none of testset_f\.txt; unpack .*; or repair what was skipped:\n  .*d04-0"
    ):
        iam_ondb.lines(corpus)


def test_what_is_no_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"gone is not a folder; pass the root of IAM-OnDB"):
        iam_ondb.lines(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"must have the lists of the task t1"):
        iam_ondb.lines(tmp_path)


def test_links_in_circles_end(corpus):
    (corpus / "lineStrokes" / "again").symlink_to(corpus, target_is_directory=True)
    assert len(read(corpus)[0]) == 8


def test_without_defusedxml_the_extra_is_named(corpus, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "defusedxml", None)
    with pytest.raises(ImportError, match=r"this needs defusedxml: pip install 'mslmn\[experiments\]'"):
        iam_ondb.lines(corpus)


def test_content_is_never_more_than_was_asked_for(tmp_path):
    path = put(tmp_path, "file", b"12345")
    assert folders.content(path, 5) == folders.content(path) == b"12345"
    with pytest.raises(ValueError, match="must have at most 4 bytes, got more"):
        folders.content(path, 4)
