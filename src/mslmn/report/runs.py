"""The runs that may stand in one table: one experiment, one preset, the same data."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..experiments import paper
from ..experiments.records import RESULT, Record, RecordError
from .confusion import Confusion, confusion

CASES = {"generation": "budget", "words": "split", "handwriting": "lines"}  # what tells an experiment's cases apart
MODELS: dict[str, list[str]] = {
    "generation": list(paper.GENERATION),
    "words": list(paper.WORDS),
    "handwriting": list(paper.WORDS),  # with the LMN, which the paper leaves out there
}


@dataclass(frozen=True)
class Runs:
    experiment: str
    preset: str
    data: str
    records: list[Record]

    @property
    def case_name(self) -> str:
        return CASES[self.experiment]

    @property
    def cases(self) -> list[int]:
        return sorted({case(record) for record in self.records})

    @property
    def main_case(self) -> int:
        """The one that the paper's results are of: the largest budget, the published split (0), the most lines."""
        return self.cases[0] if self.experiment == "words" else self.cases[-1]

    @property
    def main_name(self) -> str:
        """The main case, in words."""
        if self.experiment == "handwriting":
            return f"{self.main_case:,} training line{'s' * (self.main_case != 1)}"
        return f"{self.case_name} {self.main_case:,}"

    @property
    def models(self) -> list[str]:
        """In the paper's order, then the others."""
        order = MODELS[self.experiment]
        present = {record.model for record in self.records}
        return [model for model in order if model in present] + sorted(present - set(order))

    @property
    def seeds(self) -> int:
        """The most that one model has in one case."""
        return max(len(self.of(model, one)) for model in self.models for one in self.cases)

    @cached_property
    def confusions(self) -> dict[str, Confusion]:
        """Of the models whose runs left predictions, over all cases and seeds."""
        found = {model: confusion(self.of(model)) for model in self.models}
        return {model: matrix for model, matrix in found.items() if matrix is not None}

    def of(self, model: str, one: int | None = None) -> list[Record]:
        """Those of a model, in one case or in all."""
        return [r for r in self.records if r.model == model and one in (None, case(r))]

    def typical(self, model: str) -> Record | None:
        """The run to draw: of the main case, or of the next one there is, the seed with the median result."""
        cases = self.cases if self.experiment == "words" else self.cases[::-1]
        runs = next((found for one in cases if (found := self.of(model, one))), [])
        ordered = sorted(runs, key=lambda record: (value(record), record.seed))
        return ordered[(len(ordered) - 1) // 2] if ordered else None

    def chosen(self, model: str) -> Record | None:
        """Of the seeds of the main case, the one that validation (not the test) finds best."""
        runs = self.of(model, self.main_case)
        return min(runs, key=lambda r: (-validation_accuracy(r), validation_loss(r), r.seed), default=None)


def group(records: Iterable[Record]) -> list[Runs]:
    """One entry per experiment, preset and data; runs of experiments without a table here are left out."""
    groups: dict[tuple[int, str, str], Runs] = {}
    seen: dict[tuple[Any, ...], Path] = {}
    for record in records:
        if record.experiment not in CASES:
            continue
        name = CASES[record.experiment]
        if name not in record.case:
            raise RecordError(f"{record.folder / RESULT} is damaged (its case has no {name}); delete it and run again")
        key = (list(CASES).index(record.experiment), record.preset, record.data)
        run = (*key, record.model, case(record), record.seed)
        if run in seen:
            raise ValueError(
                f"{seen[run]} and {record.folder} hold the same run ({record.model}, {name} {case(record)}, seed "
                f"{record.seed}), which must not count twice; delete one, or report on one folder at a time"
            )
        seen[run] = record.folder
        groups.setdefault(key, Runs(record.experiment, record.preset, record.data, [])).records.append(record)
    return [groups[key] for key in sorted(groups)]


def case(record: Record) -> int:
    return record.case[CASES[record.experiment]]


def value(record: Record) -> float:
    """What the run found; a training that diverged, at the latest in its first epoch, has an infinite error, or
    recognises nothing."""
    if math.isnan(record.value) or record.epochs == 0:
        return math.inf if record.metric == "NMSE" else 0.0
    return record.value


def validation_loss(record: Record) -> float:
    """Of the weights that the run ended with; infinite if it tells none."""
    loss = number(record.settings.get("validation_loss"))
    return math.inf if math.isnan(loss) else loss


def validation_accuracy(record: Record) -> float:
    """Of the same weights; minus infinite if it tells none."""
    accuracy = number(record.settings.get("validation_accuracy"))
    return -math.inf if math.isnan(accuracy) else accuracy


def epochs(record: Record) -> NDArray[np.float64]:
    """Of each row of the history."""
    return np.array([entry.get("epoch", i + 1) for i, entry in enumerate(record.history)], dtype=float)


def history(record: Record, name: str) -> NDArray[np.float64]:
    """A column of the history, NaN where there is no number."""
    return np.array([number(entry.get(name)) for entry in record.history], dtype=float)


def number(entry: Any) -> float:
    """NaN if it is none."""
    return float(entry) if isinstance(entry, int | float) else math.nan
