"""Make src/mslmn/data/assets/bwv846.flac: one second of Bach's Prelude in C major, BWV 846, on a sampled piano.

Needs FluidSynth and the FluidR3 soundfont from Debian 12, and numpy and soundfile (pip install 'mslmn[experiments]'):

    apt-get install fluidsynth=2.3.1-2 libfluidsynth3=2.3.1-2 fluid-soundfont-gm=3.1-5.3
    python tools/make_music.py

It prints the SHA-256 of the samples, 16-bit little-endian: with the same versions, the one in the assets' README.
"""

import argparse
import hashlib
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

PACKAGES = {"fluidsynth": "2.3.1-2", "libfluidsynth3": "2.3.1-2", "fluid-soundfont-gm": "3.1-5.3"}
SOUNDFONT = Path("/usr/share/sounds/sf2/FluidR3_GM.sf2")
ASSET = Path(__file__).parents[1] / "src/mslmn/data/assets/bwv846.flac"
RATE = 44100
START = 2.52  # seconds: the end of bar 1, all five notes sounding, and the first two notes of bar 2
PEAK = 0.9  # of full scale

BARS = "C4 E4 G4 C5 E5", "C4 D4 A4 D5 F5", "B3 D4 G4 D5 F5", "C4 E4 G4 C5 E5"
PATTERN = (0, 1, 2, 3, 4, 2, 3, 4) * 2  # which of its five notes a bar plays, in sixteenths
SIXTEENTH, QUARTER = 24, 96  # ticks
TEMPO = 800_000  # microseconds per quarter: 75 a minute, a sixteenth is 0.2 s
VELOCITY = 80
PIANO, PEDAL = 0, 64


def midi() -> bytes:
    """A standard MIDI file, format 0; the pedal is down from bar to bar, so that a bar's notes sound together."""
    track = b"\0\xff\x51\x03" + TEMPO.to_bytes(3, "big") + bytes([0, 0xC0, PIANO])
    for bar in BARS:
        keys = [key(name) for name in bar.split()]
        track += bytes([0, 0xB0, PEDAL, 0, 0, 0xB0, PEDAL, 127])
        for i in PATTERN:
            track += bytes([0, 0x90, keys[i], VELOCITY, SIXTEENTH, 0x80, keys[i], 0])
    track += bytes([0, 0xB0, PEDAL, 0]) + b"\0\xff\x2f\0"
    return b"MThd" + struct.pack(">IHHH", 6, 0, 1, QUARTER) + b"MTrk" + struct.pack(">I", len(track)) + track


def key(name: str) -> int:
    """The number of a white key: C4 is 60."""
    return 12 * (int(name[1]) + 1) + {"C": 0, "D": 2, "E": 4, "F": 5, "G": 7, "A": 9, "B": 11}[name[0]]


def render(score: bytes) -> NDArray[np.float64]:
    """(n, 2), in floating point, to be rounded once; no configuration of the user's, one thread."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "score.mid"), Path(folder, "score.wav")
        source.write_bytes(score)
        command = ["fluidsynth", "-q", "-n", "-i", "-f", "/dev/null", "-o", "synth.cpu-cores=1"]
        command += ["-R", "0", "-C", "0", "-r", str(RATE), "-T", "wav", "-O", "float", "-F", str(target)]
        command += [str(SOUNDFONT), str(source)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        samples, rate = soundfile.read(target, dtype="float64", always_2d=True)
    if rate != RATE:
        raise RuntimeError(f"fluidsynth wrote {rate} samples per second, {RATE} were asked for")
    return np.asarray(samples, dtype=np.float64)


def second(samples: NDArray[np.float64]) -> NDArray[np.int16]:
    """(44100,): one second, mono, 16 bits."""
    begin = round(START * RATE)
    mono = samples[begin : begin + RATE].mean(1)
    pcm: NDArray[np.int16] = np.round(mono / np.abs(mono).max() * PEAK * 32767).astype(np.int16)
    return pcm


def warn_of_other_versions() -> None:
    for package, made_with in PACKAGES.items():
        query = ["dpkg-query", "-W", "-f", "${Version}", package]
        try:
            version = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        except (FileNotFoundError, subprocess.CalledProcessError):
            version = "not a Debian package here"
        if version != made_with:
            message = f"warning: {package} is {version}, the asset was made with {made_with}; samples may differ"
            print(message, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSET, help="FLAC file to write (default: the asset)")
    out = parser.parse_args().out
    warn_of_other_versions()
    if shutil.which("fluidsynth") is None or not SOUNDFONT.is_file():
        sys.exit(f"needs the program fluidsynth and {SOUNDFONT}; install the packages that --help names")
    pcm = second(render(midi()))
    soundfile.write(out, pcm, RATE, subtype="PCM_16", format="FLAC")
    decoded, _ = soundfile.read(out, dtype="int16")
    print(hashlib.sha256(decoded.astype("<i2").tobytes()).hexdigest())


if __name__ == "__main__":
    main()
