"""Spoken words: the clips of the package, splits by speaker, other words from other trees."""

import hashlib
import re
import tomllib
from collections import Counter
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mslmn.data import store
from mslmn.data import words as spoken
from mslmn.data.audio import mfcc
from test_timit import pcm, put, riff, sphere, utter

ASSETS = files("mslmn.data") / "assets"
VOICES = ["annie", "awb", "caribbean", "received", "rms", "scotland", "us"]
SPLITS = [  # published: who tests
    ("awb", "us"),
    ("annie", "caribbean"),
    ("received", "rms"),
    ("annie", "scotland"),
    ("caribbean", "us"),
    ("awb", "received"),
    ("rms", "scotland"),
    ("annie", "us"),
    ("awb", "caribbean"),
    ("received", "scotland"),
]


@pytest.fixture(scope="module")
def embedded():
    return spoken.embedded()


def made_up(speakers=7, classes=("cat", "dog", "eel"), lengths=(4, 9), seed=0):
    """Random features, without any sound."""
    rng = np.random.default_rng(seed)
    n = speakers * len(classes)
    return spoken.Words(
        "made up",
        [rng.normal(i // speakers, 1, (int(rng.integers(*lengths)), 13)).astype(np.float32) for i in range(n)],
        [label for label in range(len(classes)) for _ in range(speakers)],
        [f"S{i}" for _ in classes for i in range(speakers)],
        list(classes),
        [-1] * len(classes),
    )


def tree(root, counts):
    """Sentences in which the first n of nine speakers say a word."""
    for speaker in range(max(counts.values())):
        said = [word for word, n in counts.items() if speaker < n]
        utter(
            root,
            f"TRAIN/DR1/FAA{speaker}0/SX1",
            speaker,
            "".join(f"{5 * i} {5 * i + 5} {w}\n" for i, w in enumerate(said)),
        )
    return root


def equal(a, b):
    return all(
        getattr(a, name) == getattr(b, name) for name in ("name", "labels", "speakers", "classes", "suffixes")
    ) and all(np.array_equal(x, y) for x, y in zip(a.features, b.features, strict=True))


# The clips of the package


def test_there_are_25_words_by_7_voices(embedded):
    assert len(embedded.features) == 175 and embedded.longest == 107
    assert embedded.labels == [label for label in range(25) for _ in range(7)]
    assert embedded.speakers == VOICES * 25
    assert embedded.classes == list(spoken.COMMON_SUFFIX) and len(set(embedded.classes)) == 25
    assert all(x.shape[1] == 13 and x.dtype == np.float32 and np.isfinite(x).all() for x in embedded.features)


def test_words_that_end_alike_have_the_same_suffix(embedded):
    assert embedded.suffixes == [i for i in range(5) for _ in range(5)]
    ends = {0: "king", 1: "ical", 2: "ition", 3: "ns", 4: "way"}
    assert all(word.endswith(ends[i]) for word, i in zip(embedded.classes, embedded.suffixes, strict=True))


def test_the_samples_are_those_that_the_readme_lists():
    section = (ASSETS / "README.md").read_text().split("## Words")[1].split("\n## ")[0]
    listed = dict(re.findall(r"^    (\w+) +[01]\.\d\d +([0-9a-f]{64})$", section, re.MULTILINE))
    assert sorted(listed) == VOICES
    for voice, expected in listed.items():
        samples, rate = soundfile.read(ASSETS / "words" / f"{voice}.flac", dtype="int16")
        assert rate == 16000 and hashlib.sha256(samples.astype("<i2").tobytes()).hexdigest() == expected, voice
    assert "Carnegie Mellon University" in (ASSETS / "LICENSE-flite").read_text()


def test_every_asset_is_in_the_package():
    """Patterns of package data do not enter folders by themselves."""
    content = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    package = Path(str(ASSETS)).parent.parent
    patterns = content["tool"]["setuptools"]["package-data"]["mslmn"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    assert {path for path in Path(str(ASSETS)).rglob("*") if path.is_file()} <= packed


# Splits


def test_the_ten_splits_are_fixed(embedded):
    for split, testers in enumerate(SPLITS):
        train, test = spoken.split_indices(embedded, split)
        assert {embedded.speakers[i] for i in test} == set(testers)
        assert {embedded.speakers[i] for i in train} == set(VOICES) - set(testers)  # whole speakers are held out
        assert sorted(train + test) == list(range(175)) and len(test) == 50
        assert Counter(embedded.labels[i] for i in train) == dict.fromkeys(range(25), 5)
    assert all(2 <= n <= 3 for n in Counter(v for testers in SPLITS for v in testers).values())


@pytest.mark.parametrize("split", [-1, 10])
def test_there_is_no_eleventh_split(split):
    with pytest.raises(ValueError, match="split must be between 0 and 9"):
        spoken.split_indices(made_up(), split)


@given(st.integers(2, 40), st.integers(0, 9))
def test_any_number_of_speakers_is_split(speakers, split):
    out = spoken.held_out(speakers, split)
    assert out == sorted(set(out)) and 1 <= len(out) < speakers and set(out) <= set(range(speakers))
    assert out == spoken.held_out(speakers, split)
    assert abs(len(out) - speakers * 2 / 7) <= 1


def test_features_are_normalised_on_the_frames_that_train():
    words = made_up()
    train, test = spoken.split_indices(words, 0)
    inside, outside = spoken.normalised(words, train, test)
    frames = torch.cat([x for x, _ in inside])
    torch.testing.assert_close(frames.mean(0), torch.zeros(13), atol=1e-5, rtol=0)
    torch.testing.assert_close(frames.std(0, correction=0), torch.ones(13), atol=1e-5, rtol=0)
    assert [int(label) for _, label in outside] == [words.labels[i] for i in test]
    for i in test:
        words.features[i][:] = 1e3  # what tests has no say
    for (x, _), (y, _) in zip(inside, spoken.normalised(words, train)[0], strict=True):
        assert torch.equal(x, y)


def test_a_feature_that_never_changes_stays_finite():
    words = made_up()
    for x in words.features:
        x[:, 3] = 7
    (pairs,) = spoken.normalised(words, range(21))
    assert all((x[:, 3] == 0).all() and torch.isfinite(x).all() for x, _ in pairs)


# Other words, from a TIMIT tree


@settings(max_examples=15)
@given(st.lists(st.integers(2, 9), min_size=2, max_size=4), st.sampled_from([0, 3, 9]))
def test_every_word_of_a_list_trains_and_tests_by_its_own_speakers(counts, split):
    said = {f"word{chr(97 + i)}": n for i, n in enumerate(counts)}
    with TemporaryDirectory() as root:
        words = spoken.from_timit(tree(root, said), list(said))
    assert words.classes == list(said) and words.suffixes == [-1] * len(said)
    assert Counter(words.labels) == dict(enumerate(counts))
    train, test = spoken.split_indices(words, split)
    assert sorted(train + test) == list(range(sum(counts)))
    for label in range(len(said)):
        mine = [[i for i in part if words.labels[i] == label] for part in (train, test)]
        assert all(mine) and len({words.speakers[i] for part in mine for i in part}) == counts[label]


@pytest.mark.parametrize("encode", [sphere, riff])
def test_either_letter_case_and_both_formats_give_the_same_words(tmp_path, encode):
    for i in range(3):
        utter(tmp_path / "upper", f"TRAIN/DR1/FAA{i}0/SX1", i)
        utter(tmp_path / "lower", f"train/dr1/faa{i}0/sx1", i, encode=encode)
    upper, lower = (spoken.from_timit(tmp_path / case, ["she", "water"]) for case in ("upper", "lower"))
    assert upper.speakers == lower.speakers == ["FAA00", "FAA10", "FAA20"] * 2
    assert all(np.array_equal(a, b) for a, b in zip(upper.features, lower.features, strict=True))


def test_the_papers_words_are_said_by_seven_and_fewer_are_warned_of(tmp_path):
    counts = dict.fromkeys(spoken.COMMON_SUFFIX, 9) | {"walking": 6}
    said = [f"{i} {i + 2} {word}" for i, word in enumerate(counts)]
    for speaker in range(9):
        lines = [line for line in said if speaker < counts[line.split()[2]]]
        utter(tmp_path, f"TRAIN/DR1/FAA{speaker}0/SX1", speaker, "\n".join(lines))
    with pytest.warns(UserWarning, match=r"fewer than 7 speakers say walking \(6\); training goes on"):
        words = spoken.from_timit(tmp_path)
    assert Counter(words.labels) == dict.fromkeys(range(25), 7) | {1: 6}
    assert sorted(set(words.speakers)) == [f"FAA{i}0" for i in range(7)]
    assert words.suffixes == [i for i in range(5) for _ in range(5)]


def test_words_that_are_missing_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no clip of 'accusations', 'addition', .*; choose words that the corpus has"):
        spoken.from_timit(tree(tmp_path, {"she": 3}))


def test_a_damaged_file_is_named_and_the_others_are_used(tmp_path):
    tree(tmp_path, {"she": 4, "had": 4})
    put(tmp_path, "TRAIN/DR1/FAA10/SX1.WAV", sphere(pcm())[:-3])
    put(tmp_path, "TRAIN/DR1/FAA20/SX1.WRD", "0 ten she\n")
    with pytest.warns(UserWarning, match=r"skipped: .*FAA[12]0.SX1\.W") as caught:
        words = spoken.from_timit(tmp_path, ["she", "had"])
    assert len(caught) == 2 and words.speakers == ["FAA00", "FAA30"] * 2


def test_a_word_that_one_speaker_says_cannot_be_tested(tmp_path):
    words = spoken.from_timit(tree(tmp_path, {"she": 3, "had": 1}), ["she", "had"])
    with pytest.raises(ValueError, match=r"'had' was said by 1 speaker.*at least 2 are needed.*; drop the word"):
        spoken.split_indices(words, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must have at least two different words, a word a line, got 0 words; correct the file"),
        (b"she\n", "got 1 words"),
        (b"she\nhad\nshe\n", "got she repeated; correct the file"),
        (b"\xff\xfe\x00", "cannot be read as a list of words"),
        (None, "cannot be read as a list of words .*; pass a text file, a word a line"),
    ],
)
def test_a_wrong_word_list_is_named(tmp_path, content, message):
    path = tmp_path / "list.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"list\.txt.*{message}"):
        spoken.word_list(path)


def test_words_of_a_list_are_separated_by_space_or_lines(tmp_path):
    (tmp_path / "list.txt").write_text("she had\n\n  water\r\n")
    assert spoken.word_list(tmp_path / "list.txt") == ["she", "had", "water"]


# Prepared words


def test_prepared_words_come_back_as_they_were(tmp_path, embedded):
    for name, words in (("a", embedded), ("b", made_up())):
        path = spoken.keep(tmp_path / "new" / f"{name}.npz", words)
        assert equal(spoken.load(path), words) and not list(path.parent.glob("*.tmp"))
        assert spoken.keep(path, words) == path


def test_other_words_never_replace_those_that_are_there(tmp_path):
    path = spoken.keep(tmp_path / "words.npz", made_up())
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"words\.npz has other data, made up; choose another --out"):
        spoken.keep(path, made_up(seed=1))
    assert path.read_bytes() == before


def test_other_files_are_not_prepared_words(tmp_path):
    store.save(tmp_path / "music.npz", {"target": np.zeros(3)})
    with pytest.raises(ValueError, match=r"music\.npz has no 'lengths', so it is not prepared words; make it with"):
        spoken.load(tmp_path / "music.npz")
    with pytest.raises(ValueError, match=r"gone\.npz cannot be read as prepared data .*; make it again"):
        spoken.load(tmp_path / "gone.npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"array\.npy cannot be read as prepared data"):
        spoken.load(tmp_path / "array.npy")


@pytest.mark.parametrize("name", ["lengths", "labels", "speakers", "suffixes", "features"])
def test_arrays_that_do_not_fit_together_are_no_words(tmp_path, name):
    arrays = store.load(spoken.keep(tmp_path / "words.npz", made_up()))
    for changed in (arrays[name][:-1], np.array(3)):
        store.save(tmp_path / "cut.npz", arrays | {name: changed})
        with pytest.raises(ValueError, match=r"cut\.npz has .*, so it is not prepared words; make it with mslmn prep"):
            spoken.load(tmp_path / "cut.npz")


def test_nothing_is_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    arrays = store.load(spoken.keep(tmp_path / "words.npz", made_up()))
    np.savez(tmp_path / "trap.npz", **arrays | {"name": np.array([Trap()], dtype=object)})
    with pytest.raises(ValueError, match=r"trap\.npz cannot be read as prepared data"):
        spoken.load(tmp_path / "trap.npz")
    assert not (tmp_path / "sprung").exists()


@settings(max_examples=60)
@given(st.data())
def test_damage_anywhere_is_noticed_or_does_no_harm(data):
    with TemporaryDirectory() as folder:
        words = made_up(speakers=2, classes=("a", "b"))
        path = spoken.keep(Path(folder) / "words.npz", words)
        content = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        else:
            for _ in range(data.draw(st.integers(1, 3))):
                content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        try:
            found = spoken.load(path)
        except ValueError as error:
            assert "words.npz" in str(error)  # noqa: PT017
        else:
            assert equal(found, words)


def test_an_encrypted_archive_is_named(tmp_path):
    path = spoken.keep(tmp_path / "words.npz", made_up())
    content = bytearray(path.read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # at each file, and in the directory
        for match in re.finditer(signature, bytes(content)):
            content[match.start() + flags] |= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"words\.npz cannot be read as prepared data \(.*encrypted"):
        spoken.load(path)


def test_the_features_of_a_clip_do_not_depend_on_the_other_clips(embedded):
    rows = [line.split(",") for line in (ASSETS / "words" / "words.csv").read_text().splitlines()[1:]]
    assert len(rows) == 175 and len({(voice, word) for voice, word, *_ in rows}) == 175
    samples, rate = soundfile.read(ASSETS / "words" / "us.flac")
    start, end = next((int(a), int(b)) for voice, word, a, b in rows if (voice, word) == ("us", "highway"))
    expected = mfcc(samples[start:end], rate).astype(np.float32)
    mine = embedded.features[embedded.classes.index("highway") * 7 + VOICES.index("us")]
    np.testing.assert_array_equal(mine, expected)
