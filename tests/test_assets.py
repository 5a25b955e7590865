"""The sounds that the package carries, and how it reads sound."""

import hashlib
import math
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import python_speech_features
import soundfile
from hypothesis import example, given
from hypothesis import strategies as st

from mslmn.data import audio

ROOT = Path(__file__).parent.parent
ASSETS = files("mslmn.data") / "assets"


def sha256(path):
    """Of the samples, not of the file: encoders differ."""
    samples, _ = soundfile.read(path, dtype="int16")
    return hashlib.sha256(samples.astype("<i2").tobytes()).hexdigest()


# Music


def test_the_music_is_the_second_that_its_readme_describes():
    info = soundfile.info(audio.music())
    assert (info.samplerate, info.channels, info.frames, info.subtype) == (44100, 1, 44100, "PCM_16")
    section = (ASSETS / "README.md").read_text().split("## Music")[1].split("\n## ")[0]
    assert re.findall(r"\b[0-9a-f]{64}\b", section) == [sha256(audio.music())]
    assert "Frank Wen" in (ASSETS / "LICENSE-FluidR3").read_text()


def test_the_script_makes_the_music(tmp_path):
    if shutil.which("fluidsynth") is None:
        pytest.skip("no fluidsynth here")
    command = [sys.executable, ROOT / "tools" / "make_music.py", "--out", tmp_path / "again.flac"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "warning: " in result.stderr:
        pytest.skip(f"other packages than the asset's: {result.stderr.splitlines()[0]}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == sha256(tmp_path / "again.flac")
    again, _ = soundfile.read(tmp_path / "again.flac", dtype="int16")
    kept, _ = soundfile.read(audio.music(), dtype="int16")
    np.testing.assert_allclose(again, kept, atol=1, rtol=0)  # another processor may round otherwise


def test_the_excerpt_is_300_samples_that_fill_the_range():
    excerpt = audio.excerpt()
    assert excerpt.shape == (300,) and excerpt.dtype == np.float64
    assert (excerpt.min(), excerpt.max()) == (-1, 1)
    samples, rate = audio.read(audio.music())
    part = samples[rate // 2 : rate // 2 + 300]
    np.testing.assert_allclose(excerpt, np.interp(part, [part.min(), part.max()], [-1, 1]), atol=1e-12)


def test_the_excerpt_is_many_tones_not_one():
    """Slow and fast: no fewer than 20 dimensions hold 99.9 % of the energy of its windows of 100 samples."""
    windows = np.lib.stride_tricks.sliding_window_view(audio.excerpt(), 100)
    energies = np.linalg.svd(windows - windows.mean(), compute_uv=False) ** 2
    assert (energies.cumsum() / energies.sum() < 0.999).sum() + 1 >= 20


def test_the_last_excerpt_ends_with_the_music():
    last = audio.excerpt(offset=(44100 - 300) / 44100)
    samples, _ = audio.read(audio.music())
    assert np.corrcoef(last, samples[-300:])[0, 1] == pytest.approx(1)


# Any recording


def test_channels_are_averaged(tmp_path):
    left, right = np.random.default_rng(0).integers(-1000, 1000, (2, 500)) / 2**15
    soundfile.write(tmp_path / "stereo.wav", np.stack([left, right], 1), 8000, subtype="PCM_16")
    samples, rate = audio.read(tmp_path / "stereo.wav")
    assert rate == 8000
    np.testing.assert_array_equal(samples, (left + right) / 2)


@pytest.mark.parametrize("kind", ["flac", "wav", "aiff", "au"])
def test_files_of_several_kinds_give_the_same_excerpt(kind, tmp_path):
    samples, rate = audio.read(audio.music())
    soundfile.write(tmp_path / f"music.{kind}", samples, rate, subtype="PCM_16")
    np.testing.assert_array_equal(audio.excerpt(tmp_path / f"music.{kind}"), audio.excerpt())
    np.testing.assert_array_equal(audio.excerpt(str(tmp_path / f"music.{kind}")), audio.excerpt())


@pytest.fixture
def wav(tmp_path):
    """A second at 8 kHz, silent in its first half."""
    samples = np.concatenate([np.zeros(4000), np.sin(np.arange(4000))])
    soundfile.write(tmp_path / "half.wav", samples, 8000, subtype="PCM_16")
    return tmp_path / "half.wav"


def test_a_file_that_is_not_there_or_not_sound_is_named(tmp_path):
    missing, text = tmp_path / "missing.flac", tmp_path / "text.flac"
    text.write_text("do re mi")
    for read in (audio.read, audio.excerpt):
        with pytest.raises(ValueError, match=re.escape(f"{missing} is not a file; pass a recording, FLAC or WAV")):
            read(missing)
        with pytest.raises(ValueError, match=re.escape(f"{tmp_path} is not a file; pass a recording")):
            read(tmp_path)
        with pytest.raises(ValueError, match=re.escape(f"{text} cannot be read as sound (") + ".+; convert it to FLAC"):
            read(text)


@pytest.mark.parametrize("offset", [-0.1, math.nan, math.inf])
def test_offsets_that_are_no_time(offset, wav):
    message = f"offset must be at least 0 seconds, got {offset}; pass where the excerpt starts"
    with pytest.raises(ValueError, match=re.escape(message)):
        audio.excerpt(wav, offset)


@pytest.mark.parametrize("offset", [0.97, 1.0, 1e9])
def test_offsets_too_close_to_the_end(offset, wav):
    message = f"{wav} has 8000 samples, 1 s, too few for 300 from {offset} s on; choose a smaller offset"
    with pytest.raises(ValueError, match=re.escape(message)):
        audio.excerpt(wav, offset)


def test_a_sample_that_is_no_number_is_named(tmp_path):
    sound = np.ones(600)
    sound[7] = np.nan
    soundfile.write(tmp_path / "nan.wav", sound, 8000, subtype="FLOAT")
    with pytest.raises(ValueError, match=r"nan\.wav has a sample that is NaN or infinite, the first at 7; repair"):
        audio.excerpt(tmp_path / "nan.wav", 0.0)


def test_a_silent_part_has_no_scale(wav):
    with pytest.raises(ValueError, match=re.escape(f"{wav} is silent from 0.1 s on; choose another offset")):
        audio.excerpt(wav, 0.1)
    assert np.ptp(audio.excerpt(wav, 0.5)) == 2


# MFCCs

SIGNALS = {
    "noise": lambda n, rng: rng.normal(size=n),
    "tone": lambda n, rng: np.sin(rng.uniform(0.01, 3) * np.arange(n)),
    "click": lambda n, rng: np.eye(1, n, rng.integers(n))[0],
    "constant": lambda n, rng: np.full(n, 0.5),
    "silence": lambda n, rng: np.zeros(n),
}


@given(
    st.integers(1, 3000),
    st.sampled_from([8000, 16000, 22050, 44100]),
    st.sampled_from(list(SIGNALS)),
    st.integers(0, 9),
)
@example(400, 16000, "noise", 0)  # one window, and one sample more
@example(401, 16000, "noise", 0)
@example(560, 16000, "noise", 0)  # a window and a step, and one sample more
@example(561, 16000, "noise", 0)
@example(1103, 44100, "noise", 0)  # 25 ms are 1102.5 samples
def test_mfccs_are_those_of_python_speech_features(length, rate, kind, seed):
    samples = SIGNALS[kind](length, np.random.default_rng(seed))
    n_fft = 2 ** math.ceil(math.log2(math.floor(0.025 * rate + 0.5)))
    expected = python_speech_features.mfcc(
        samples, rate, winlen=0.025, winstep=0.01, numcep=13, nfilt=26, nfft=n_fft, preemph=0.97, ceplifter=22,
        appendEnergy=True,
    )  # fmt: skip
    np.testing.assert_allclose(audio.mfcc(samples, rate), expected, rtol=1e-10, atol=1e-10)


def test_mfccs_of_the_music_are_those_of_python_speech_features():
    samples, rate = audio.read(audio.music())
    expected = python_speech_features.mfcc(samples, rate, nfft=2048)
    assert expected.shape == (99, 13)
    np.testing.assert_allclose(audio.mfcc(samples, rate), expected, rtol=1e-10, atol=1e-10)
