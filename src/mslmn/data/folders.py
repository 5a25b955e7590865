"""Folders and files that nobody vouches for: links in circles, pipes, files that fill the memory, no permission."""

import os
import stat
from pathlib import Path

SHOWN = 5  # skipped files in a message


def walk(root: Path, skipped: list[str]) -> list[tuple[Path, list[str]]]:
    """Every folder in and below ``root``, with the names of its files; one that cannot be listed is skipped."""

    def unlisted(error: OSError) -> None:
        skipped.append(f"{error.filename} cannot be listed ({error.strerror}); check its permissions")

    found: list[tuple[Path, list[str]]] = []
    seen: set[str] = set()  # links are followed, never in circles
    for where, folders, names in os.walk(root, onerror=unlisted, followlinks=True):
        folders.sort()
        if os.path.realpath(where) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(where))
        found.append((Path(where), sorted(name for name in names if not name.startswith("."))))  # macOS: ._SX127.WRD
    return found


def content(path: Path, most: int | None = None) -> bytes:
    """The bytes of a file, at most so many; never those of a pipe or a device, which may not end."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(f"{path} must be a plain file, got a folder, pipe or device; restore it from the corpus")
        with path.open("rb") as file:
            found = file.read() if most is None else file.read(most + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); check the file and its permissions") from None
    if most is not None and len(found) > most:
        raise ValueError(f"{path} must have at most {most:,} bytes, got more; restore it from the corpus")
    return found


def listed(skipped: list[str], shown: int = SHOWN) -> str:
    """What was skipped, a line each; nothing if nothing was."""
    more = [f"and {len(skipped) - shown} more"] if len(skipped) > shown else []
    return "".join(f"\n  {message}" for message in [*skipped[:shown], *more])


def because(skipped: list[str]) -> str:
    """The end of an error: what may be behind it."""
    return f"; or repair what was skipped:{listed(skipped)}" if skipped else ""
