"""Makes the word clips of the package: 25 words spoken by 7 synthetic voices.

Needs Debian's speech synthesisers, in these versions for the same samples:

    apt-get install espeak-ng=1.51+dfsg-10+deb12u2 flite=2.2-5
    pip install -e '.[experiments]'
    python tools/make_words.py

One FLAC file for each voice, 16 kHz, with the words one after the other, and words.csv, which says where each begins
and ends. Prints a checksum for each voice, and how far the voices are apart: the accuracy of the nearest neighbour by
dynamic time warping, each voice recognised by the other six. Seven speakers of TIMIT's own SA sentences give 0.94.
"""

import argparse
import csv
import hashlib
import subprocess
import tempfile
import warnings
from pathlib import Path

import librosa
import numpy as np
import soundfile
from scipy.signal import resample_poly
from scipy.spatial.distance import cdist

from mslmn.data.audio import mfcc
from mslmn.data.words import COMMON_SUFFIX

RATE = 16_000
PACKAGES = {"espeak-ng": "1.51+dfsg-10+deb12u2", "flite": "2.2-5"}
VOICES = {  # the program's arguments; espeak-ng: accent + variant, words per minute, pitch
    "annie": ["espeak-ng", "-v", "en-us+Annie", "-s", "170", "-p", "50"],
    "awb": ["flite", "-voice", "awb"],
    "caribbean": ["espeak-ng", "-v", "en-029+m5", "-s", "155", "-p", "50"],
    "received": ["espeak-ng", "-v", "en-gb-x-rp+f4", "-s", "160", "-p", "60"],
    "rms": ["flite", "-voice", "rms"],
    "scotland": ["espeak-ng", "-v", "en-gb-scotland+m7", "-s", "150", "-p", "35"],
    "us": ["espeak-ng", "-v", "en-us+f2", "-s", "150", "-p", "55"],
}
QUIET = 1e-4  # of the loudest power: silence, to be cut off at both ends
FRAME = 80  # samples
LEVEL = 0.5  # of the loudest sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "src/mslmn/data/assets/words")
    out = parser.parse_args().out
    check_packages()
    out.mkdir(parents=True, exist_ok=True)
    clips = {voice: [say(command, word) for word in COMMON_SUFFIX] for voice, command in VOICES.items()}
    rows = []
    for voice, sounds in clips.items():
        end = 0
        for word, sound in zip(COMMON_SUFFIX, sounds, strict=True):
            rows.append((voice, word, end, end := end + len(sound)))
        samples = np.concatenate(sounds)
        soundfile.write(out / f"{voice}.flac", samples, RATE, subtype="PCM_16")
        print(f"{voice:10} {len(samples) / RATE:5.1f} s  {hashlib.sha256(samples.tobytes()).hexdigest()}")
    with (out / "words.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("voice", "word", "start", "end"))
        writer.writerows(rows)
    for voice, accuracy in zip(VOICES, nearest_neighbours(list(clips.values())), strict=True):
        print(f"{voice:10} {accuracy:.2f} of the words recognised by the other voices")


def check_packages() -> None:
    for name, wanted in PACKAGES.items():
        query = ["dpkg-query", "-W", "-f", "${Version}", name]
        found = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        if found != wanted:
            warnings.warn(f"{name} is {found or 'not installed'}, the clips were made with {wanted}", stacklevel=1)


def say(command: list[str], word: str) -> np.ndarray:
    """16-bit samples at 16 kHz, without the silence around them."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/word.wav"
        arguments = ["-t", word, "-o", file] if command[0] == "flite" else ["-w", file, word]
        subprocess.run([*command, *arguments], check=True)
        samples, rate = soundfile.read(file)
    if rate != RATE:
        samples = resample_poly(samples, RATE, rate)
    starts = range(0, len(samples) - 2 * FRAME, FRAME)
    power = np.array([np.mean(samples[i : i + 2 * FRAME] ** 2) for i in starts])
    loud = np.flatnonzero(power > QUIET * power.max())
    samples = samples[loud[0] * FRAME : (loud[-1] + 2) * FRAME]
    return np.round(LEVEL * samples / np.abs(samples).max() * 2**15).astype(np.int16)


def nearest_neighbours(voices: list[list[np.ndarray]]) -> list[float]:
    features = [[mfcc(sound / 2**15, RATE) for sound in voice] for voice in voices]
    everything = np.concatenate([x for voice in features for x in voice])
    mean, scale = everything.mean(0), everything.std(0)
    features = [[(x - mean) / scale for x in voice] for voice in features]
    accuracies = []
    for voice in features:
        others = [(word, x) for other in features if other is not voice for word, x in enumerate(other)]
        nearest = [min(others, key=lambda other: distance(x, other[1]))[0] for x in voice]
        accuracies.append(float(np.mean(np.arange(len(voice)) == nearest)))
    return accuracies


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(librosa.sequence.dtw(C=cdist(a, b), backtrack=False)[-1, -1] / (len(a) + len(b)))


if __name__ == "__main__":
    main()
