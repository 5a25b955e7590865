"""Sound: files of any kind that libsndfile reads, excerpts to memorise, MFCCs to classify."""

import math
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.fft import dct

from ..extras import need

Array = NDArray[np.float64]
EXCERPT = 300  # samples, the paper's
STEP, WINDOW = 0.010, 0.025  # seconds
COEFFICIENTS, FILTERS, LIFTER, PREEMPHASIS = 13, 26, 22, 0.97


class Clip(NamedTuple):
    """A word, said once."""

    word: str
    speaker: str
    samples: Array  # (n,), in [-1, 1]
    rate: int  # samples per second


def music() -> Path:
    """The recording that the package carries."""
    return Path(str(files(__package__) / "assets" / "bwv846.flac"))


def read(path: str | Path) -> tuple[Array, int]:
    """The samples of a file (channels are averaged) and their rate."""
    soundfile = need("soundfile", "experiments")
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file; pass a recording, FLAC or WAV for example")
    try:
        samples, rate = soundfile.read(str(path), dtype="float64", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{path} cannot be read as sound ({error.error_string}); convert it to FLAC or WAV") from None
    if not np.isfinite(samples).all():
        where = np.flatnonzero(~np.isfinite(samples).all(1))[0]
        raise ValueError(f"{path} has a sample that is NaN or infinite, the first at {where}; repair the recording")
    return samples.mean(1), int(rate)


def excerpt(path: str | Path | None = None, offset: float = 0.5, length: int = EXCERPT) -> Array:
    """``length`` samples of a recording, ``offset`` seconds from its start, scaled to [-1, 1]."""
    path = music() if path is None else path
    samples, rate = read(path)
    if not 0 <= offset < math.inf:
        raise ValueError(f"offset must be at least 0 seconds, got {offset}; pass where the excerpt starts")
    start = round(offset * rate)
    part = samples[start : start + length]
    if len(part) < length:
        raise ValueError(
            f"{path} has {len(samples)} samples, {len(samples) / rate:.3g} s, too few for {length} from {offset} s on; "
            "choose a smaller offset"
        )
    low, high = part.min(), part.max()
    if not low < high:
        raise ValueError(f"{path} is silent from {offset} s on; choose another offset")
    scaled: Array = 2 * (part - low) / (high - low) - 1
    return scaled


def mfcc(samples: Array, rate: int) -> Array:
    """(frames, 13): 25 ms windows every 10 ms, pre-emphasis, log energy in place of the zeroth coefficient.

    The conventions are python_speech_features', which the paper's preprocessing follows: rectangular windows, the last
    frame filled up with zeros, 26 triangular filters on whole FFT bins.
    """
    librosa = need("librosa", "experiments")
    window, step = round_half_up(WINDOW * rate), round_half_up(STEP * rate)
    n_fft = 1 << (window - 1).bit_length()
    frames = 1 if len(samples) <= window else 1 + math.ceil((len(samples) - window) / step)
    before = (
        n_fft - window
    ) // 2  # librosa centres the window in the FFT; a shift leaves the spectrum's power as it is
    padded = np.zeros((frames - 1) * step + n_fft)
    emphasised = librosa.effects.preemphasis(np.asarray(samples, dtype=np.float64), coef=PREEMPHASIS, zi=[0.0])
    covered = emphasised[: (frames - 1) * step + window]
    padded[before : before + len(covered)] = covered
    spectrum = librosa.stft(
        padded, n_fft=n_fft, hop_length=step, win_length=window, window="boxcar", center=False, dtype=np.complex128
    )
    power = np.abs(spectrum) ** 2 / n_fft  # (bins, frames)
    energy = power.sum(0)
    mel = triangles(rate, n_fft) @ power
    logs = np.log(np.where(mel == 0, np.finfo(float).eps, mel))
    cepstra = dct(logs, type=2, axis=0, norm="ortho")[:COEFFICIENTS]
    n = np.arange(COEFFICIENTS)
    cepstra *= (1 + LIFTER / 2 * np.sin(np.pi * n / LIFTER))[:, None]
    cepstra[0] = np.log(np.where(energy == 0, np.finfo(float).eps, energy))
    features: Array = cepstra.T
    return features


def triangles(rate: int, n_fft: int) -> Array:
    """(26, bins): filters whose corners are equally spaced in mel, at whole bins."""
    top = 2595 * np.log10(1 + rate / 2 / 700)
    hertz = 700 * (10 ** (np.linspace(0, top, FILTERS + 2) / 2595) - 1)
    corners = np.floor((n_fft + 1) * hertz / rate)
    bins = np.arange(n_fft // 2 + 1)
    bank = np.zeros((FILTERS, len(bins)))
    for row, (left, middle, right) in zip(bank, zip(corners, corners[1:], corners[2:], strict=False), strict=True):
        rising, falling = (bins >= left) & (bins < middle), (bins >= middle) & (bins < right)
        row[rising] = (bins[rising] - left) / (middle - left)
        row[falling] = (right - bins[falling]) / (right - middle)
    return bank


def round_half_up(x: float) -> int:
    return math.floor(x + 0.5)
