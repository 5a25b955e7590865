"""The arrays of a run, checked before they are used."""

from typing import Any

from numpy.typing import NDArray

from ..experiments.records import ARRAYS, Record, RecordError


def load(record: Record, **dimensions: int) -> list[NDArray[Any]] | None:
    """The arrays of these names, each with its number of dimensions; None if the run did not leave all of them."""
    found = record.arrays()
    if not dimensions.keys() <= found.keys():
        return None
    for name, expected in dimensions.items():
        if found[name].ndim != expected:
            raise damaged(record, f"{name} has {found[name].ndim} dimensions instead of {expected}")
    return [found[name] for name in dimensions]


def damaged(record: Record, why: str) -> RecordError:
    return RecordError(f"{record.folder / ARRAYS} is damaged ({why}); delete its folder and run again")
