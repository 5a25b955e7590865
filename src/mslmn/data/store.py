"""Prepared data: plain .npz files, which bare machines train from."""

import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
DAMAGE = (  # numpy's ways, and zipfile's
    ValueError, TypeError, KeyError, OSError, EOFError, RuntimeError, MemoryError,
    struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def save(path: Path, arrays: Arrays) -> None:
    """Replace a file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    temporary.replace(path)


def load(path: str | Path) -> Arrays:
    """Nothing is unpickled."""
    try:
        with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return dict(stored)
    except DAMAGE as error:
        raise ValueError(f"{path} cannot be read as prepared data ({error}); make it again") from None


def keep(path: Path, arrays: Arrays) -> Path:
    """Write the data of a folder of runs; if there are some, they must be the same."""
    if not path.exists():
        save(path, arrays)
        return path
    there = load(path)
    if there.keys() != arrays.keys() or not all(np.array_equal(there[key], arrays[key]) for key in arrays):
        raise ValueError(f"{path} has other data, {there.get('name', 'unnamed')}; choose another --out")
    return path
