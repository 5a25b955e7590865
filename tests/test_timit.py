"""TIMIT: what is written into a tree comes back, clip by clip, and what is damaged is named."""

import io
import os
import shutil
import wave
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mslmn.data import timit

SAY = "0 10 she\n10 25 had\n25 40 water\n"
DAMAGED_WRD = {
    "two columns": b"0 10\n",
    "four columns": b"0 10 she had\n",
    "words for numbers": b"zero ten she\n",
    "fractions": b"0.0 10.0 she\n",
    "a negative start": b"-5 10 she\n",
    "end before start": b"10 5 she\n",
    "end at start": b"10 10 she\n",
    "too long a number": b"0 " + b"9" * 5000 + b" she\n",
    "bytes that are no text": b"\xff\xfe0 10 she\n",
    "zeros": bytes(30),
    "nothing": b"",
}


def pcm(seed=0, n=50):
    return np.random.default_rng(seed).integers(-32768, 32768, n).astype("<i2")


def sphere(data, count=None, coding=None):
    """A file as TIMIT has them: 1024 bytes of header, then 16-bit samples, the low byte first."""
    fields = [
        "NIST_1A",
        "   1024",
        "database_id -s5 TIMIT",
        "database_version -s3 1.0",
        "utterance_id -s10 cjf0_sx127",
        "channel_count -i 1",
        f"sample_count -i {len(data) if count is None else count}",
        "sample_rate -i 16000",
        f"sample_min -i {data.min(initial=0)}",
        f"sample_max -i {data.max(initial=0)}",
        "sample_n_bytes -i 2",
        "sample_byte_format -s2 01",
        "sample_sig_bits -i 16",
        *([f"sample_coding -s{len(coding)} {coding}"] if coding else []),
        "end_head",
    ]
    return ("\n".join(fields) + "\n").encode().ljust(1024) + data.tobytes()


def riff(data):
    file = io.BytesIO()
    with wave.open(file, "wb") as w:
        w.setnchannels(1)
        w.setsampwidth(2)
        w.setframerate(16000)
        w.writeframes(data.tobytes())
    return file.getvalue()


def put(root, name, content):
    path = Path(root) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def utter(root, name, seed=0, say=SAY, encode=sphere):
    """An utterance of 50 samples: .WRD and .WAV, or both in lower case."""
    lower = name.islower()
    put(root, name + (".wrd" if lower else ".WRD"), say)
    return put(root, name + (".wav" if lower else ".WAV"), encode(pcm(seed)))


def same(a, b):
    return [c[:2] for c in a] == [c[:2] for c in b] and all(
        np.array_equal(x.samples, y.samples) and x.rate == y.rate for x, y in zip(a, b, strict=True)
    )


@pytest.fixture
def tree(tmp_path):
    """Two speakers whose files are whole, and one in TEST."""
    utter(tmp_path, "TRAIN/DR1/FCJF0/SX127", 1)
    utter(tmp_path, "TRAIN/DR2/MABC0/SX9", 2)
    utter(tmp_path, "TEST/DR1/FAKS0/SX43", 3)
    return tmp_path


def test_a_clip_is_what_the_segmentation_says(tree):
    (clip,) = [c for c in timit.clips(tree, ["had"]) if c.speaker == "FCJF0"]
    assert clip.word == "had" and clip.rate == 16000 and clip.samples.dtype == np.float64
    assert np.array_equal(clip.samples, pcm(1)[10:25] / 32768)


def test_clips_come_by_word_then_speaker_from_train_and_test(tree):
    got = [(c.word, c.speaker) for c in timit.clips(tree, ["water", "had"])]
    assert got == [(word, s) for word in ("had", "water") for s in ("FAKS0", "FCJF0", "MABC0")]


def test_either_letter_case_gives_the_same_clips(tree, tmp_path_factory):
    lower = tmp_path_factory.mktemp("lower")
    for path in tree.rglob("*.*"):
        content = path.read_bytes()
        put(lower, str(path.relative_to(tree)).lower(), content.upper() if path.suffix == ".WRD" else content)
    assert same(timit.clips(tree, ["She", "water"]), timit.clips(lower, ["She", "water"]))


def test_labels_are_as_the_caller_wrote_them(tree):
    assert {c.word for c in timit.clips(tree, ["SHE", "Water"])} == {"SHE", "Water"}


@pytest.mark.parametrize("inside", ["TIMIT", "lisa/data/timit/raw/TIMIT"])
def test_any_folder_above_the_root_will_do(tree, tmp_path_factory, inside):
    above = tmp_path_factory.mktemp("above")
    shutil.copytree(tree, above / inside)
    assert same(timit.clips(tree, ["she"]), timit.clips(str(above), ["she"]))


def test_the_folder_of_a_speaker_will_do(tree, monkeypatch):
    monkeypatch.chdir(tree / "TRAIN/DR1/FCJF0")
    assert [c.speaker for c in timit.clips(".", ["she"])] == ["FCJF0"]


def test_links_are_followed_but_not_in_circles(tree, tmp_path_factory):
    above = tmp_path_factory.mktemp("above")
    (above / "corpus").symlink_to(tree, target_is_directory=True)
    (tree / "TRAIN" / "again").symlink_to(tree, target_is_directory=True)
    assert [c.speaker for c in timit.clips(above, ["she"])] == ["FAKS0", "FCJF0", "MABC0"]


def test_riff_and_sphere_give_the_same_clips(tree, tmp_path_factory):
    other = tmp_path_factory.mktemp("riff")
    shutil.copytree(tree, other, dirs_exist_ok=True)
    for path, seed in [("TRAIN/DR1/FCJF0/SX127", 1), ("TRAIN/DR2/MABC0/SX9", 2), ("TEST/DR1/FAKS0/SX43", 3)]:
        utter(other, path, seed, encode=riff)
    assert same(timit.clips(tree, ["she", "had"]), timit.clips(other, ["she", "had"]))


def test_a_conversion_beside_the_original_is_taken_in_its_place(tmp_path):
    utter(tmp_path, "FCJF0/SX127", encode=lambda data: sphere(data, coding="pcm,embedded-shorten-v2.00"))
    put(tmp_path, "FCJF0/SX127.WAV.wav", riff(pcm(5)))
    (clip,) = timit.clips(tmp_path, ["she"])
    assert np.array_equal(clip.samples, pcm(5)[:10] / 32768)


def test_the_original_is_taken_where_the_conversion_is_damaged(tmp_path):
    utter(tmp_path, "FCJF0/SX127", 5)
    put(tmp_path, "FCJF0/SX127.WAV.wav", riff(pcm(5))[:-1])
    with pytest.warns(UserWarning, match=r"SX127\.WAV\.wav must have 100 bytes of sound.* got 99"):
        (clip,) = timit.clips(tmp_path, ["she"])
    assert np.array_equal(clip.samples, pcm(5)[:10] / 32768)


def test_a_speaker_says_a_word_once_and_it_is_the_first_in_order(tmp_path):
    """SA1 before SX127, then the earliest line; two copies of a tree are still one speaker."""
    utter(tmp_path, "a/FCJF0/SX127", 1)
    utter(tmp_path, "a/FCJF0/SA1", 2, "30 40 she\n5 9 SHE\n")
    utter(tmp_path, "b/fcjf0/sa1", 3)
    clips = timit.clips(tmp_path, ["she", "had"])
    assert [(c.word, c.speaker) for c in clips] == [("had", "FCJF0"), ("she", "FCJF0")]
    assert np.array_equal(clips[0].samples, pcm(1)[10:25] / 32768)
    assert np.array_equal(clips[1].samples, pcm(2)[5:9] / 32768)


def test_the_order_of_the_file_system_does_not_matter(tree, monkeypatch):
    utter(tree, "TRAIN/DR1/FCJF0/SI5", 7)
    utter(tree, "TRAIN/DR1/fcjf0/SI5", 8)
    before = timit.clips(tree, ["she", "had"])
    scandir = os.scandir

    class Backwards:
        def __init__(self, path):
            with scandir(path) as entries:
                self.entries = iter(sorted(entries, key=lambda e: e.name, reverse=True))

        def __iter__(self):
            return self.entries

        def __next__(self):
            return next(self.entries)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        close = __exit__

    monkeypatch.setattr(os, "scandir", Backwards)
    assert same(before, timit.clips(tree, ["she", "had"]))


def test_only_sounds_of_wanted_words_are_opened(tree, monkeypatch):
    utter(tree, "TRAIN/DR1/FCJF0/SX200", say="0 10 dog\n", encode=lambda data: b"damaged")
    opened = []
    read = timit.read
    monkeypatch.setattr(timit, "read", lambda path: opened.append(path.name) or read(path))
    timit.clips(tree, ["she", "had"])
    assert sorted(opened) == ["SX127.WAV", "SX43.WAV", "SX9.WAV"]


def test_what_macos_leaves_behind_is_no_segmentation(tree):
    put(tree, "TRAIN/DR1/FCJF0/._SX127.WRD", b"\x00\x05\x16\x07")
    assert len(timit.clips(tree, ["she"])) == 3


@given(st.data())
def test_any_tree_comes_back_exactly(data):
    words = st.sampled_from(["she", "had", "don't", "mid-day"])
    speakers = data.draw(st.sets(st.sampled_from(["FCJF0", "MABC0", "FAKS0", "MDAB0"]), min_size=1))
    expected = {}
    with TemporaryDirectory() as root:
        for speaker in sorted(speakers):
            for sentence in sorted(data.draw(st.sets(st.sampled_from(["SA1", "SI1027", "SX127"]), min_size=1))):
                sound = np.array(data.draw(st.lists(st.integers(-32768, 32767), min_size=1, max_size=40)), dtype="<i2")
                cuts = data.draw(st.lists(st.integers(0, len(sound)), min_size=2, max_size=5, unique=True).map(sorted))
                lines = [(a, b, data.draw(words)) for a, b in pairwise(cuts)]
                encode = data.draw(st.sampled_from([sphere, riff]))
                put(root, f"TRAIN/DR1/{speaker}/{sentence}.WRD", "".join(f"{a} {b} {word}\n" for a, b, word in lines))
                put(root, f"TRAIN/DR1/{speaker}/{sentence}.WAV", encode(sound))
                for a, b, word in lines:
                    expected.setdefault((word, speaker), sound[a:b] / 32768)
        clips = timit.clips(root, {word for word, _ in expected})
    assert [(c.word, c.speaker) for c in clips] == sorted(expected)
    assert all(np.array_equal(c.samples, expected[c.word, c.speaker]) for c in clips)


@pytest.mark.parametrize("content", DAMAGED_WRD.values(), ids=DAMAGED_WRD)
def test_a_damaged_segmentation_is_skipped_and_named(tree, content):
    put(tree, "TRAIN/DR1/FCJF0/SX127.WRD", content)
    with pytest.warns(UserWarning, match=r"FCJF0.SX127\.WRD.* must .*, got .*; restore the file") as caught:
        assert [c.speaker for c in timit.clips(tree, ["she"])] == ["FAKS0", "MABC0"]
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("name", ["SX127.WRD", "SX127.WAV"])
def test_a_file_that_cannot_be_opened_is_skipped_and_named(tree, name):
    path = tree / "TRAIN/DR1/FCJF0" / name
    path.unlink()
    path.symlink_to(tree / "gone")
    with pytest.warns(UserWarning, match=rf"FCJF0.{name} cannot be read \(.+\); check the file"):
        assert len(timit.clips(tree, ["she"])) == 2


def test_a_folder_that_cannot_be_listed_is_named(tree, monkeypatch):
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("DR2"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.warns(UserWarning, match=r"DR2 cannot be listed \(Permission denied\); check"):
        assert len(timit.clips(tree, ["she"])) == 2


DAMAGED_SOUND = {
    "sphere, cut": (sphere(pcm())[:-40], r"must have 50 samples, by its header, got 30; restore"),
    "sphere, one byte short": (sphere(pcm())[:-1], r"must have 50 samples, by its header, got 49; restore"),
    "sphere, no sound": (sphere(pcm())[:1024], r"must have 50 samples, by its header, got 0; restore"),
    "sphere, too long": (sphere(pcm()) + bytes(20), r"must have 50 samples, by its header, got 60; restore"),
    "sphere, header cut": (sphere(pcm())[:60], r"SPHERE header with a sample_count.* got no end_head; restore"),
    "sphere, no count": (sphere(pcm()).replace(b"sample_c", b"sample_k"), r"got sample_count none; restore"),
    "sphere, bad count": (sphere(pcm(), count="1_0"), r"got sample_count 1_0; restore"),
    "sphere, no rate": (sphere(pcm()).replace(b"16000", b"00000"), r"cannot be read as sound \(.*\); convert it"),
    "sphere, compressed": (
        sphere(pcm(), coding="pcm,embedded-shorten-v2.00"),
        r"got compressed sound \(pcm,embedded-shorten-v2\.00\).*: sph2pipe -f wav SX127\.WAV SX127\.WAV\.wav",
    ),
    "riff, cut": (riff(pcm())[:-40], r"must have 100 bytes of sound, by its header, got 60; copy"),
    "riff, header cut": (riff(pcm())[:30], r"must have a RIFF data chunk, got none; copy"),
    "riff, not wave": (riff(pcm()).replace(b"WAVEfmt ", b"AVI fmt "), r"cannot be read as sound \(.*\); convert it"),
    "nothing": (b"", r"must be NIST SPHERE or RIFF, got a file that starts with b''; restore"),
    "a web page": (b"<!DOCTYPE html>", r"must be NIST SPHERE or RIFF, got a file that starts with b'<!DOCTYP'"),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED_SOUND.values(), ids=DAMAGED_SOUND)
def test_a_damaged_sound_is_skipped_and_named(tree, content, message):
    put(tree, "TRAIN/DR1/FCJF0/SX127.WAV", content)
    with pytest.warns(UserWarning, match=rf"FCJF0.SX127\.WAV .*?{message}") as caught:
        assert [c.speaker for c in timit.clips(tree, ["she", "had"])] == ["FAKS0", "MABC0"] * 2
    assert len(caught) == 1 and caught[0].filename == __file__


@given(st.sampled_from([sphere, riff]), st.data())
def test_a_sound_cut_anywhere_is_noticed(encode, data):
    whole = encode(pcm())
    with TemporaryDirectory() as root:
        utter(root, "FCJF0/SX127").write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        with pytest.raises(ValueError, match=r"no clip of 'she' in 1 \.WRD.*\n  .*SX127\.WAV "):
            timit.clips(root, ["she"])


@given(st.sampled_from([sphere, riff]), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1))
def test_a_header_damaged_anywhere_never_ends_in_another_error(encode, changes):
    content = bytearray(encode(pcm()))
    for at, value in changes:
        content[min(at, len(content) - 1)] = value
    with TemporaryDirectory() as root:
        utter(root, "FCJF0/SX127").write_bytes(content)
        try:
            (clip,) = timit.clips(root, ["she"])
        except ValueError as error:
            assert "SX127.W" in str(error)  # noqa: PT017
        else:
            assert len(clip.samples) == 10


def test_a_sound_that_is_not_there_is_named(tree):
    (tree / "TRAIN/DR1/FCJF0/SX127.WAV").unlink()
    with pytest.warns(
        UserWarning, match=r"SX127\.WRD must have its sound.* SX127\.WAV or SX127\.WAV\.wav, got neither"
    ):
        assert len(timit.clips(tree, ["she"])) == 2


def test_a_segment_beyond_the_sound_is_skipped_and_the_others_are_used(tree):
    put(tree, "TRAIN/DR1/FCJF0/SX127.WRD", "0 10 she\n10 51 had\n")
    with pytest.warns(
        UserWarning, match=r"SX127\.WRD: 'had' must end within the 50 samples of the sound, got 51; rest"
    ):
        clips = timit.clips(tree, ["she", "had"])
    assert [(c.word, c.speaker) for c in clips if c.speaker == "FCJF0"] == [("she", "FCJF0")]


def test_where_a_clip_is_damaged_the_speakers_next_one_is_taken(tree):
    put(tree, "TRAIN/DR1/FCJF0/SX127.WAV", b"")
    utter(tree, "TRAIN/DR1/FCJF0/SX217", 9)
    with pytest.warns(UserWarning, match=r"SX127\.WAV"):
        clips = timit.clips(tree, ["had"])
    assert np.array_equal(clips[1].samples, pcm(9)[10:25] / 32768) and clips[1].speaker == "FCJF0"


def test_all_words_that_are_missing_are_named_at_once(tree):
    with pytest.raises(
        ValueError, match=r"no clip of 'Cat', 'dog' in 3 \.WRD files; choose words that the corpus has$"
    ):
        timit.clips(tree, ["she", "dog", "Cat"])


def test_the_error_names_what_was_skipped(tmp_path):
    for i in range(7):
        utter(tmp_path, f"FAA{i}0/SX1", encode=lambda data: sphere(data)[:-2])
    with pytest.raises(ValueError, match=r"'she' in 7 .*; or repair what was skipped:\n.*FAA00.SX1\.WAV must") as error:
        timit.clips(tmp_path, ["she"])
    assert str(error.value).count("SX1.WAV") == 5 and str(error.value).endswith("and 2 more")


def test_a_folder_without_segmentations_says_what_was_looked_for(tmp_path):
    put(tmp_path, "FCJF0/SX127.WAV", sphere(pcm()))
    with pytest.raises(
        ValueError, match=r"must hold \.WRD files.* got none in 2 folders; .*TRAIN/DR1/FCJF0/SX127\.WRD$"
    ):
        timit.clips(tmp_path, ["she"])


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"gone is not a folder; pass the root of TIMIT"):
        timit.clips(tmp_path / "gone", ["she"])


@pytest.mark.parametrize("words", [[], ["she", "She"]])
def test_words_must_be_some_and_different(tree, words):
    with pytest.raises(ValueError, match=r"words must be at least one and differ in more than case, got \["):
        timit.clips(tree, words)


@pytest.mark.parametrize("words", ["she", ["she", 7]])
def test_words_must_be_a_list_of_strings(tree, words):
    with pytest.raises(TypeError, match=r"words must be a list of strings, got .*she"):
        timit.clips(tree, words)
