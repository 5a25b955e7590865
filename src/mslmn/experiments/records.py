"""What a run found, on disk: result.json, and arrays.npz with what figures need, in the folder of the run."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..checkpoint import write_text
from ..data import store

RESULT, ARRAYS = "result.json", "arrays.npz"
KINDS = {"case": dict, "sizes": dict, "settings": dict, "history": list, "value": float | int, "seconds": float | int}


class RecordError(ValueError):
    """A result that cannot be read."""


@dataclass(frozen=True)
class Record:
    """One run.

    Its arrays: ``memory`` (T, g, M) of one sequence, in the forward direction; of generation also ``target`` and
    ``generated`` (T,), of words ``expected`` and ``predicted`` (clips,), ``names`` (classes,) and ``suffixes``
    (classes,), -1 where there is none. Of handwriting ``accuracies`` of all test lines, and for k of them, N steps in
    all: ``starts`` (k + 1,), ``points`` (N, 3), x, y downwards and end of stroke, ``labels`` (N,) of the best path,
    ``characters`` of all labels, "" for the blank, ``expected`` and ``recognised`` (k,).
    """

    experiment: str  # "generation", "words", "handwriting"
    preset: str
    data: str  # in words
    model: str
    case: dict[str, int]  # {"budget": 1000}, {"split": 0}, {"lines": 5000}
    seed: int
    sizes: dict[str, int]  # hidden, memory, modules: those that the model has
    parameters: int
    settings: dict[str, Any]
    epochs: int  # passes over the training data
    seconds: float
    metric: str  # "NMSE", "accuracy"
    value: float
    history: list[dict[str, Any]]  # epoch, modules, train_loss, validation_loss, and the metric of the validation data
    reason: str  # why training ended
    folder: Path = field(default=Path(), compare=False)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Empty if the run left none."""
        path = self.folder / ARRAYS
        if not path.exists():
            return {}
        try:
            return store.load(path)
        except ValueError:
            raise RecordError(f"{path} is damaged; delete its folder and run again") from None


def write(record: Record, arrays: dict[str, NDArray[Any]]) -> None:
    """Both files, the JSON last: a run with a result is done."""
    store.save(record.folder / ARRAYS, arrays)
    values = {name: value for name, value in asdict(record).items() if name != "folder"}
    write_text(record.folder / RESULT, json.dumps(values, indent=1))


def read(folder: Path) -> Record:
    path = folder / RESULT
    try:
        values = json.loads(path.read_text())
        missing = {f.name for f in fields(Record)} - {"folder"} - set(values)
        if missing:
            raise ValueError(f"{', '.join(sorted(missing))} missing")
        wrong = [name for name, kind in KINDS.items() if not isinstance(values[name], kind)]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} of the wrong type")
        return Record(**values, folder=folder)
    except (ValueError, TypeError, OSError) as error:
        raise RecordError(f"{path} is damaged ({error}); delete its folder and run again") from None


def find(folder: Path) -> list[Record]:
    """All results under a folder, in the order of their paths."""
    return [read(path.parent) for path in sorted(folder.glob(f"**/{RESULT}"))]
