"""Words cut from TIMIT (LDC93S1): ``TRAIN/DR1/FCJF0/SX127.WAV``, and ``SX127.WRD`` with what is said where.

Copies of the corpus differ: letters of either case, NIST SPHERE or RIFF, conversions beside the originals, files that
broke on the way. One that is damaged is skipped, with a warning, as long as there are other clips of its words.
"""

import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from . import folders
from .audio import Array, Clip, read

LINE = re.compile(r"(\d{1,12})\s+(\d{1,12})\s+(\S+)", re.ASCII)
FIELD = re.compile(rb"^(\w+) -\w+ (.*?)\s*$", re.MULTILINE)  # of a SPHERE header: sample_count -i 46797


class Utterance(NamedTuple):
    """A sentence, said once."""

    segmentation: Path
    sounds: list[Path]  # the same sound, in the order to try

    @property
    def speaker(self) -> str:
        return self.segmentation.parent.name.upper()


class Segment(NamedTuple):
    """Where a word is, in samples."""

    start: int
    end: int
    word: str


def clips(folder: str | Path, words: Iterable[str]) -> list[Clip]:
    """Every speaker's first clip of each word, from TRAIN and TEST, sorted by word, then speaker.

    ``folder`` is the root of TIMIT or any folder above it. First is the first .WRD in alphabetical order of the path,
    whatever its letter case (TEST before TRAIN, SA1 before SX127), and in it the line that starts first. Speakers are
    folders, in capitals; words are matched in any letter case and labelled as the caller wrote them.
    """
    labels, skipped = _labels(words), list[str]()
    utterances = _utterances(folder, skipped)
    found: dict[tuple[str, str], Clip] = {}
    for utterance in utterances:
        try:
            segments = _segments(utterance.segmentation)
        except ValueError as error:
            skipped.append(str(error))
            continue
        speaker = utterance.speaker
        new = [s for s in segments if s.word in labels and (labels[s.word], speaker) not in found]
        sound = _sound(utterance, skipped) if new else None
        if sound is None:
            continue
        samples, rate = sound
        for start, end, word in new:
            label = labels[word]
            if end <= len(samples):
                found.setdefault((label, speaker), Clip(label, speaker, samples[start:end].copy(), rate))
            else:
                skipped.append(
                    f"{utterance.segmentation}: {word!r} must end within the {len(samples)} samples of the sound, "
                    f"got {end}; restore both files from the corpus"
                )
    missing = set(labels.values()).difference(label for label, _ in found)
    if missing:
        raise ValueError(
            f"{folder} has no clip of {', '.join(map(repr, sorted(missing)))} in {len(utterances)} .WRD files; "
            f"choose words that the corpus has{folders.because(skipped)}"
        )
    for message in skipped:
        warnings.warn(f"skipped: {message}", stacklevel=2)
    return [found[key] for key in sorted(found)]


def _labels(words: Iterable[str]) -> dict[str, str]:
    """What to look for -> how the caller wrote it."""
    given = [words] if isinstance(words, str) else list(words)
    if isinstance(words, str) or not all(isinstance(word, str) for word in given):
        raise TypeError(f"words must be a list of strings, got {words!r}; pass ['she', 'water'], for instance")
    labels = {word.lower(): word for word in given}
    if not given or len(labels) < len(given):
        raise ValueError(f"words must be at least one and differ in more than case, got {given}; name each once")
    return labels


def _utterances(folder: str | Path, skipped: list[str]) -> list[Utterance]:
    """Every .WRD below the folder, in the order that ``clips`` promises, with the sounds beside it."""
    root = Path(os.path.abspath(folder))  # not resolved: a link may be what carries the speaker's name
    if not root.is_dir():
        raise ValueError(f"{folder} is not a folder; pass the root of TIMIT (LDC93S1)")

    walked = folders.walk(root, skipped)
    found = [utterance for where, names in walked for utterance in _in_folder(where, names)]
    if not found:
        raise ValueError(
            f"{folder} must hold .WRD files, in it or below, got none in {len(walked)} folders; pass the root of TIMIT "
            f"(LDC93S1), with files like TRAIN/DR1/FCJF0/SX127.WRD{folders.because(skipped)}"
        )
    found.sort(key=lambda u: ([part.upper() for part in u.segmentation.parts], u.segmentation))
    return found


def _in_folder(where: Path, names: list[str]) -> list[Utterance]:
    """The .WRD files among the names; a RIFF conversion (SX127.WAV.wav) goes before the original."""
    by_capitals: dict[str, list[Path]] = {}
    for name in names:
        by_capitals.setdefault(name.upper(), []).append(where / name)
    return [
        Utterance(where / name, [*by_capitals.get(f"{stem}.WAV.WAV", []), *by_capitals.get(f"{stem}.WAV", [])])
        for name in names
        for stem, extension in [os.path.splitext(name.upper())]
        if extension == ".WRD"
    ]


def _segments(path: Path) -> list[Segment]:
    """The words of a .WRD file, in lower case, from the first to the last."""
    remedy = "restore the file from the corpus"
    try:
        text = folders.content(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text, got {error.object[error.start :][:8]!r}; {remedy}") from None
    segments = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = LINE.fullmatch(line.strip())
        if match is None or not int(match[1]) < int(match[2]):
            raise ValueError(
                f"{path}, line {number} must be 'start end word', sample numbers with start < end, "
                f"got {line[:60]!r}; {remedy}"
            )
        segments.append(Segment(int(match[1]), int(match[2]), match[3].lower()))
    if not segments:
        raise ValueError(f"{path} must have a line 'start end word' for each word, got none; {remedy}")
    return sorted(segments)


def _sound(utterance: Utterance, skipped: list[str]) -> tuple[Array, int] | None:
    """The first of the sounds that is whole, and its rate."""
    path = utterance.segmentation
    if not utterance.sounds:
        skipped.append(
            f"{path} must have its sound beside it, {path.stem}.WAV or {path.stem}.WAV.wav, got neither; "
            "restore it from the corpus"
        )
    for sound in utterance.sounds:
        try:
            return _whole(sound)
        except ValueError as error:
            skipped.append(str(error))
    return None


def _whole(path: Path) -> tuple[Array, int]:
    """Samples and rate, if there are as many samples as the header announces: libsndfile does not mind."""
    content = folders.content(path)
    if content.startswith(b"RIFF"):
        _check_riff(path, content)
        return read(path)
    if not content.startswith(b"NIST_1A"):
        raise ValueError(
            f"{path} must be NIST SPHERE or RIFF, got a file that starts with {content[:8]!r}; "
            "restore it from the corpus"
        )
    announced = _sphere_count(path, content)
    samples, rate = read(path)
    if len(samples) != announced:
        raise ValueError(
            f"{path} must have {announced} samples, by its header, got {len(samples)}; restore it from the corpus"
        )
    return samples, rate


def _sphere_count(path: Path, content: bytes) -> int:
    """``sample_count`` of a SPHERE header, which is text; sound that is compressed stops here."""
    header, end, _ = content.partition(b"end_head")
    fields = {name: value.decode("latin-1") for name, value in FIELD.findall(header)}
    coding, count = fields.get(b"sample_coding", "pcm"), fields.get(b"sample_count", "none")
    if "embedded" in coding:
        raise ValueError(
            f"{path} must be plain SPHERE, got compressed sound ({coding}), which libsndfile cannot read; "
            f"convert it: sph2pipe -f wav {path.name} {path.name}.wav"
        )
    if not end or re.fullmatch(r"[0-9]{1,12}", count) is None:
        raise ValueError(
            f"{path} must have a SPHERE header with a sample_count, up to end_head, got "
            f"{f'sample_count {count}' if end else 'no end_head'}; restore it from the corpus"
        )
    return int(count)


def _check_riff(path: Path, content: bytes) -> None:
    """The data chunk must be as long as it says."""
    at = 12  # after RIFF, its size, WAVE
    while at + 8 <= len(content):
        size, start = int.from_bytes(content[at + 4 : at + 8], "little"), at + 8
        if content[at : at + 4] == b"data":
            if start + size > len(content):
                raise ValueError(
                    f"{path} must have {size} bytes of sound, by its header, got {len(content) - start}; "
                    "copy or convert it again"
                )
            return
        at = start + size + (size & 1)  # chunks start at even bytes
    raise ValueError(f"{path} must have a RIFF data chunk, got none; copy or convert it again")
