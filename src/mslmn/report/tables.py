"""The numbers, as tables that the console, Markdown, JSON and the page all show."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..experiments import paper
from ..experiments.records import Record
from .runs import Runs, case, epochs, history, validation_accuracy, value
from .statistics import Interval, interval

MILLI, PERCENT = 1e3, 1e2
PLATEAU = 0.5  # of the characters: a model that reads more has left the plateau
MISSING = "-"
PAIRS = [
    ("incremental MS-LMN", "MS-LMN"),
    ("MS-LMN", "CW-RNN"),
    ("MS-LMN", "LSTM"),
    ("CW-RNN", "LSTM"),
    ("CW-RNN", "LMN"),
]


class Cell(NamedTuple):
    text: str
    value: Any = None  # for JSON: not rounded, in the unit of the column
    score: float | None = None  # by which the best of the column is found


@dataclass(frozen=True)
class Column:
    name: str
    source: str = ""  # "ours" or "paper" where both appear
    number: bool = True
    grouped: bool = False  # said once for the rows that share it
    better: Callable[[Sequence[float]], float] | None = None  # min or max


@dataclass(frozen=True)
class Table:
    key: str
    title: str
    caption: str
    columns: list[Column]
    rows: list[list[Cell]]

    def starts_group(self, row: int) -> bool:
        return row == 0 or not self.columns[0].grouped or self.rows[row][0].text != self.rows[row - 1][0].text

    def text(self, row: int, column: int) -> str:
        """What to show: nothing where the row above has said it."""
        return "" if column == 0 and not self.starts_group(row) else self.rows[row][column].text

    def is_best(self, row: int, column: int) -> bool:
        """Also of those that look the same after rounding; nothing is best of one."""
        better = self.columns[column].better
        cells = [line[column] for line in self.rows if line[column].score is not None]
        if better is None or len(cells) < 2:
            return False
        best = better([cell.score for cell in cells if cell.score is not None])
        if not math.isfinite(best):
            return False
        return self.rows[row][column].text in {cell.text for cell in cells if cell.score == best}


def tables(runs: Runs) -> list[Table]:
    """All that the runs have numbers for, the results first."""
    if runs.experiment == "generation":
        found = [generation_results(runs), generation_budgets(runs), generation_sizes(runs)]
    elif runs.experiment == "words":
        found = [word_results(runs), word_splits(runs), word_pairs(runs), word_errors(runs)]
    else:
        found = [handwriting_results(runs), handwriting_plateau(runs), handwriting_lines(runs)]
    return [table for table in found if table is not None]


# Generation


def generation_results(runs: Runs) -> Table:
    budget = runs.main_case
    rows = []
    for model in runs.models:
        records = runs.of(model, budget)
        if not records:
            continue
        published = paper.GENERATION.get(model) if budget == paper.BUDGETS[-1] else None
        rates = [record.settings.get("learning_rate") for record in records]
        rows.append(
            [
                Cell(model, model),
                nmse(records),
                _nmse_paper(published.nmse if published else None),
                _units(records),
                _span([rate for rate in rates if isinstance(rate, int | float)], lambda rate: f"{rate:g}"),
                *_effort(records),
            ]
        )
    return Table(
        "generation_results",
        f"Error with {budget:,} parameters (Table 2 of the paper)",
        f"How far the generated signal is from the target: NMSE, mean squared error over the target's variance; lower "
        f"is better. Ours: {_over_seeds(runs, 'median')}. Epochs and seconds are medians of one training run. "
        + (
            "The paper's errors are on its own music."
            if budget == paper.BUDGETS[-1]
            else f"The paper gives errors only for {paper.BUDGETS[-1]:,} parameters."
        ),
        [
            Column("model", number=False),
            Column("NMSE, 10^-3", "ours", better=min),
            Column("NMSE, 10^-3", "paper", better=min),
            Column("units", "ours", number=False),
            Column("learning rate", "ours"),
            *EFFORT,
        ],
        rows,
    )


def generation_budgets(runs: Runs) -> Table | None:
    if len(runs.cases) < 2:
        return None
    rows = []
    for model in runs.models:
        published = paper.GENERATION.get(model)
        cells = [nmse(records) if (records := runs.of(model, budget)) else Cell(MISSING) for budget in runs.cases]
        rows.append([Cell(model, model), *cells, _nmse_paper(published.nmse if published else None)])
    return Table(
        "generation_budgets",
        "Error by number of parameters",
        f"NMSE, 10^-3. Ours: {_over_seeds(runs, 'median')}. "
        f"The paper gives errors only for {paper.BUDGETS[-1]:,} parameters.",
        [
            Column("model", number=False),
            *(Column(f"{budget:,}", "ours", better=min) for budget in runs.cases),
            Column(f"{paper.BUDGETS[-1]:,}", "paper", better=min),
        ],
        rows,
    )


def generation_sizes(runs: Runs) -> Table:
    rows = []
    for budget in runs.cases:
        for model in runs.models:
            records = runs.of(model, budget)
            if records:
                units = _paper_units(model, budget)
                rows.append(
                    [Cell(f"{budget:,}", budget), Cell(model, model), _units(records), units, _parameters(records)]
                )
    return Table(
        "generation_sizes",
        "Units and parameters (Table 1 of the paper)",
        f"Units of each model at each budget; {paper.GENERATION_MODULES} x 4 means 4 units in each of "
        f"{paper.GENERATION_MODULES} modules. The paper tells the budget only; ours are exact and count everything "
        "that is trained.",
        [
            Column("budget", grouped=True),
            Column("model", number=False),
            Column("units", "ours", number=False),
            Column("units", "paper", number=False),
            Column("parameters", "ours"),
        ],
        rows,
    )


def nmse(records: Sequence[Record]) -> Cell:
    """The median of seeds, and their range."""
    values = [value(record) * MILLI for record in records]
    median = float(np.median(values))
    content = {"median": _plain(median), "lowest": _plain(min(values)), "highest": _plain(max(values))}
    text = significant(median)
    if len(values) > 1:
        text += f" ({significant(min(values))} to {significant(max(values))})"
    return Cell(text, {**content, "seeds": len(values)}, median)


def _nmse_paper(published: float | None) -> Cell:
    if published is None:
        return Cell(MISSING)
    return Cell(significant(published * MILLI), _plain(published * MILLI), published)


def _paper_units(model: str, budget: int) -> Cell:
    published = paper.GENERATION.get(model)
    if published is None or budget not in paper.BUDGETS:
        return Cell(MISSING)
    at = paper.BUDGETS.index(budget)
    sizes = {"hidden": published.hidden[at]}
    if published.memory:
        sizes["memory"] = published.memory[at]
    if model in ("CW-RNN", "MS-LMN"):
        sizes["modules"] = paper.GENERATION_MODULES
    return Cell(units(sizes), sizes)


# Words


def word_results(runs: Runs) -> Table:
    split = runs.main_case
    rows = []
    for model in runs.models:
        records = runs.of(model, split)
        if not records:
            continue
        published = paper.WORDS.get(model)
        rows.append(
            [
                Cell(model, model),
                _accuracy([value(record) for record in records]),
                _accuracy([published.accuracy], published.deviation) if published else Cell(MISSING),
                _units(records),
                _published_units(model, published, paper.WORD_MODULES),
                *_effort(records),
            ]
        )
    which = "the published split, 0" if split == 0 else f"split {split}; the published one, 0, was not run"
    return Table(
        "word_results",
        f"Words told apart on split {split} (Table 3 of the paper)",
        f"Share of test clips whose word is recognised; higher is better. Ours: {which}; "
        f"{_over_seeds(runs, 'mean ± standard deviation')}. Epochs and seconds are medians of one training run. "
        "The paper's accuracies are over 5 seeds, on TIMIT.",
        [
            Column("model", number=False),
            Column("accuracy %", "ours", better=max),
            Column("accuracy %", "paper", better=max),
            Column("units", "ours", number=False),
            Column("units", "paper", number=False),
            *EFFORT,
        ],
        rows,
    )


def word_splits(runs: Runs) -> Table | None:
    if len(runs.cases) < 2:
        return None
    rows = []
    for model in runs.models:
        means = split_means(runs, model)
        mean, low, high = interval([accuracy * PERCENT for accuracy in means.values()], ratio(runs))
        found = Interval(mean, max(low, 0.0), min(high, PERCENT)) if len(means) > 1 else Interval(mean, low, high)
        splits, count = len(means), len(runs.of(model))
        low_high = _interval_cell(found)
        rows.append(
            [Cell(model, model), Cell(str(splits), splits), Cell(str(count), count), _one(found.mean), low_high]
        )
    return Table(
        "word_splits",
        "Words told apart, all splits",
        f"Ours, {len(runs.cases)} splits: the mean over splits, seeds averaged within a split first, and its 95 % "
        f"confidence interval with the split as the unit. {_interval_note(runs)}",
        [
            Column("model", number=False),
            Column("splits"),
            Column("runs"),
            Column("accuracy %", better=max),
            Column("95 % interval"),
        ],
        rows,
    )


def word_pairs(runs: Runs) -> Table | None:
    rows = []
    for first, second in PAIRS:
        differences = split_differences(runs, first, second)
        if len(differences) > 1:
            found = interval(differences, ratio(runs))
            wins = sum(difference > 0 for difference in differences)
            rows.append(
                [
                    Cell(f"{first} against {second}", [first, second]),
                    Cell(f"{found.mean:+.1f}", _plain(found.mean)),
                    _interval_cell(found, "+"),
                    Cell(f"{wins} of {len(differences)}", {"better": wins, "splits": len(differences)}),
                    Cell(*(("no", False) if found.low <= 0 <= found.high else ("yes", True))),
                ]
            )
    if not rows:
        return None
    return Table(
        "word_pairs",
        "Who is better than whom",
        "Ours: differences in accuracy on the same splits, in points, seeds averaged within a split first. An interval "
        "without 0 is a clear difference. Intervals are computed as those over all splits.",
        [
            Column("models", number=False),
            Column("difference, points"),
            Column("95 % interval"),
            Column("splits on which it is better"),
            Column("clear", number=False),
        ],
        rows,
    )


def word_errors(runs: Runs) -> Table | None:
    """None without predictions, or where no two words share a suffix."""
    rows = []
    chance = 0.0
    for model, found in runs.confusions.items():
        if not found.has_suffixes:
            continue
        within, across, chance = found.within, found.across, found.chance
        errors = within + across
        rows.append(
            [
                Cell(model, model),
                Cell(f"{found.clips:,}", found.clips),
                Cell(f"{errors:,}", errors),
                Cell(f"{within:,}", within),
                Cell(f"{across:,}", across),
                Cell(f"{PERCENT * within / errors:.0f} %", _plain(within / errors * PERCENT))
                if errors
                else Cell(MISSING),
            ]
        )
    if not rows:
        return None
    return Table(
        "word_errors",
        "Errors within and across suffixes",
        "Ours, test clips of all splits and seeds. Words with a common suffix must be told apart by how they begin: "
        "an error within the suffix is what a model makes that forgot the beginning. If errors fell on "
        f"the other words at random, {chance * PERCENT:.0f} % would be within.",
        [
            Column("model", number=False),
            Column("test clips"),
            Column("errors"),
            Column("same suffix"),
            Column("other suffix"),
            Column("share of same suffix"),
        ],
        rows,
    )


def split_means(runs: Runs, model: str) -> dict[int, float]:
    """Accuracy per split, seeds averaged."""
    records = runs.of(model)
    splits = sorted({case(record) for record in records})
    return {split: float(np.mean([value(r) for r in records if case(r) == split])) for split in splits}


def split_differences(runs: Runs, first: str, second: str) -> list[float]:
    """Points by which the first is better, one per split that both have."""
    one, other = split_means(runs, first), split_means(runs, second)
    return [(one[split] - other[split]) * PERCENT for split in one if split in other]


def ratio(runs: Runs) -> float:
    """Test clips per training clip, 0 if no run tells."""
    ratios = [
        record.settings["test_clips"] / record.settings["train_clips"]
        for record in runs.records
        if record.settings.get("train_clips") and record.settings.get("test_clips")
    ]
    return float(np.mean(ratios)) if ratios else 0.0


def _interval_note(runs: Runs) -> str:
    if clips := ratio(runs):
        return (
            "Splits share training clips, so the plain interval would be too narrow; this is the corrected one of "
            f"Nadeau and Bengio (2003), variance x (1/n + {clips:.2f}), {clips:.2f} being test clips per training clip."
        )
    return (
        "Splits share training clips, so this plain interval is too narrow (the runs do not tell how many clips they "
        "trained on, which the correction of Nadeau and Bengio, 2003, needs)."
    )


def _accuracy(values: Sequence[float], deviation: float | None = None) -> Cell:
    """Mean ± deviation, in percent: the one given, or that of the values if there are several."""
    mean = float(np.mean(values)) * PERCENT
    if deviation is None and len(values) > 1:
        deviation = float(np.std(values, ddof=1))
    if deviation is None:
        return Cell(f"{mean:.1f}", {"mean": _plain(mean), "deviation": None}, mean)
    spread = deviation * PERCENT
    return Cell(f"{mean:.1f} ± {spread:.1f}", {"mean": _plain(mean), "deviation": _plain(spread)}, mean)


def _interval_cell(found: Interval, sign: str = "") -> Cell:
    if not math.isfinite(found.low):
        return Cell(MISSING)
    return Cell(f"{found.low:{sign}.1f} to {found.high:{sign}.1f}", [_plain(found.low), _plain(found.high)])


def _published_units(model: str, published: paper.Words | paper.Handwriting | None, modules: int) -> Cell:
    if published is None:
        return Cell(MISSING)
    sizes = {"hidden": published.hidden}
    if published.memory:
        sizes["memory"] = published.memory
    if model not in ("LSTM", "LMN"):
        sizes["modules"] = modules
    return Cell(units(sizes), sizes)


# Handwriting


def handwriting_results(runs: Runs) -> Table:
    lines = runs.main_case
    several = runs.seeds > 1
    rows = []
    for model in runs.models:
        records, chosen = runs.of(model, lines), runs.chosen(model)
        if not records or chosen is None:
            continue
        published = paper.HANDWRITING.get(model)
        mean = [_accuracy([value(record) for record in records])] if several else []
        rows.append(
            [
                Cell(model, model),
                _chosen(chosen),
                *mean,
                _one(published.accuracy * PERCENT) if published else Cell(MISSING),
                _units(records),
                _published_units(model, published, paper.HANDWRITING_MODULES),
                _modules(chosen),
                *_effort(records),
            ]
        )
    return Table(
        "handwriting_results",
        f"Characters read, with {runs.main_name} (Table 4 of the paper)",
        f"Accuracy of the best path{_test_lines(runs)}; higher is better: the likeliest label at each step, repeats "
        "collapsed, blanks dropped; 1 - edit distance / length of the text, mean over lines. It is below 0 if more is "
        f"wrong than there is text. Ours: {_chosen_note(runs)}. Units are those of one of the two directions, with all "
        "modules; modules are those of the weights that validation chose, as growth may end early, or go too far. "
        "Epochs and seconds are medians of one training run. The paper's accuracies are on IAM-OnDB, without the LMN.",
        [
            Column("model", number=False),
            Column("accuracy %", "ours", better=max),
            *([Column("mean of seeds %", "ours", better=max)] if several else []),
            Column("accuracy %", "paper", better=max),
            Column("units", "ours", number=False),
            Column("units", "paper", number=False),
            Column("modules", "ours"),
            *EFFORT,
        ],
        rows,
    )


def handwriting_plateau(runs: Runs) -> Table | None:
    """None if no run tells how it went."""
    rows = []
    for model in runs.models:
        records = runs.of(model, runs.main_case)
        best = [accuracy * PERCENT for record in records if (accuracy := reached(record)) is not None]
        left = [epoch for record in records if (epoch := left_plateau(record)) is not None]
        if not best:
            continue
        rows.append(
            [
                Cell(model, model),
                Cell(f"{len(left)} of {len(best)}", {"left": len(left), "seeds": len(best)}),
                _median(left, lambda epoch: f"{epoch:,.0f}"),
                _median(best, lambda percent: f"{percent:.1f}"),
            ]
        )
    if not rows:
        return None
    return Table(
        "handwriting_plateau",
        "Leaving the plateau",
        "Trained with CTC, a network first learns to answer blanks and stays there, sometimes for good. Ours: how many "
        f"seeds reach {PLATEAU * PERCENT:.0f} % of the characters of the validation lines, the first epoch at which "
        f"they do, and the highest accuracy on these lines; {_over_seeds(runs, 'median')}.",
        [
            Column("model", number=False),
            Column("seeds that left it"),
            Column("epoch", better=min),
            Column("best validation accuracy %", better=max),
        ],
        rows,
    )


def handwriting_lines(runs: Runs) -> Table | None:
    if len(runs.cases) < 2:
        return None
    rows = []
    for model in runs.models:
        found = [runs.of(model, lines) for lines in runs.cases]
        rows.append(
            [
                Cell(model, model),
                *(_accuracy([value(r) for r in records]) if records else Cell(MISSING) for records in found),
            ]
        )
    return Table(
        "handwriting_lines",
        "Characters read by number of training lines",
        f"Accuracy of the best path, %. Ours: {_over_seeds(runs, 'mean ± standard deviation')}.",
        [Column("model", number=False), *(Column(f"{lines:,} lines", better=max) for lines in runs.cases)],
        rows,
    )


def left_plateau(record: Record) -> float | None:
    """The first epoch at which the run reads half of the characters of the validation lines; None if it never does."""
    above = np.flatnonzero(history(record, "character_accuracy") >= PLATEAU)
    return float(epochs(record)[above[0]]) if len(above) else None


def reached(record: Record) -> float | None:
    """The best accuracy on validation lines; None if the run tells none."""
    found = history(record, "character_accuracy")
    return float(np.nanmax(found)) if np.isfinite(found).any() else None


def _chosen(record: Record) -> Cell:
    percent, validation = value(record) * PERCENT, validation_accuracy(record) * PERCENT
    content = {"accuracy": _plain(percent), "seed": record.seed, "validation_accuracy": _plain(validation)}
    return Cell(f"{percent:.1f}" if record.epochs else "diverged", content, percent)


def _chosen_note(runs: Runs) -> str:
    if runs.seeds == 1:
        return "one seed"
    return f"of {runs.seeds} seeds the one with the highest validation accuracy, then mean ± standard deviation of all"


def _test_lines(runs: Runs) -> str:
    records = [record for record in runs.records if case(record) == runs.main_case]
    counts = sorted({n for record in records if isinstance(n := record.settings.get("test_lines"), int)})
    return f" on {' or '.join(f'{count:,}' for count in counts)} test lines" if counts else " on test lines"


def _modules(record: Record) -> Cell:
    """Of the weights with the highest validation accuracy, and how far growth went."""
    counts, accuracies = history(record, "modules"), history(record, "character_accuracy")
    known = np.isfinite(counts)
    if "modules" not in record.sizes or not known.any():
        return Cell(MISSING)
    best = record.settings.get("best_modules")  # it may be that of growth, before any epoch
    if not isinstance(best, int):
        best = int(counts[known][np.argmax(np.where(np.isfinite(accuracies), accuracies, -np.inf)[known])])
    last = int(counts[known][-1])
    text = f"{best}" if best == last else f"{best} (grew to {last})"
    return Cell(text, {"chosen": best, "grown": last})


def _median(values: Sequence[float], show: Callable[[float], str]) -> Cell:
    """And the range, if there are several."""
    if not values:
        return Cell(MISSING)
    median, low, high = float(np.median(values)), min(values), max(values)
    text = show(median) + (f" ({show(low)} to {show(high)})" if len(values) > 1 else "")
    return Cell(text, {"median": _plain(median), "lowest": _plain(low), "highest": _plain(high)}, median)


# All

EFFORT = [Column("parameters", "ours"), Column("epochs", "ours"), Column("seconds", "ours")]


def _effort(records: Sequence[Record]) -> list[Cell]:
    epochs = float(np.median([record.epochs for record in records]))
    seconds = float(np.median([record.seconds for record in records]))
    return [_parameters(records), Cell(f"{epochs:,.0f}", _plain(epochs)), Cell(significant(seconds), _plain(seconds))]


def _parameters(records: Sequence[Record]) -> Cell:
    return _span([record.parameters for record in records], lambda count: f"{count:,}")


def _span(values: Sequence[Any], show: Callable[[Any], str]) -> Cell:
    """A value, or the lowest and the highest if runs differ: growth may end at different sizes."""
    if not values:
        return Cell(MISSING)
    low, high = min(values), max(values)
    return Cell(show(low), low) if low == high else Cell(f"{show(low)} to {show(high)}", [low, high])


def _units(records: Sequence[Record]) -> Cell:
    different = sorted({tuple(record.sizes.items()) for record in records})
    return Cell(" or ".join(units(dict(sizes)) for sizes in different), [dict(sizes) for sizes in different])


def units(sizes: Mapping[str, int]) -> str:
    """In words.

    >>> units({"hidden": 1, "memory": 4, "modules": 9}), units({"hidden": 4, "modules": 9}), units({"hidden": 31})
    ('1 hidden, 9 x 4 memory', '9 x 4 hidden', '31 hidden')
    >>> units({"hidden": 31, "layers": 2})
    '2 layers of 31 hidden'
    """
    if "layers" in sizes:
        return f"{sizes['layers']} layers of {units({name: n for name, n in sizes.items() if name != 'layers'})}"
    modules = f"{sizes['modules']} x " if "modules" in sizes else ""
    if "memory" in sizes:
        return f"{sizes['hidden']} hidden, {modules}{sizes['memory']} memory"
    return f"{modules}{sizes['hidden']} hidden"


def significant(number: float) -> str:
    """Three digits that count.

    >>> [significant(x) for x in (79.5, 0.116, 1234.5, 0.1, 0.000012)]
    ['79.5', '0.116', '1,234', '0.100', '1.2e-05']
    """
    if not math.isfinite(number):
        return "diverged"
    if number != 0 and abs(number) < 1e-3:
        return f"{number:.2g}"
    digits = 2 if number == 0 else max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:,.{digits}f}"


def _one(percent: float) -> Cell:
    return Cell(f"{percent:.1f}", _plain(percent), percent)


def _over_seeds(runs: Runs, how: str) -> str:
    if runs.seeds == 1:
        return "one seed"
    spread = " (lowest to highest)" if how == "median" else ""
    return f"{how}{spread} of {runs.seeds} seeds"


def _plain(number: float) -> float | None:
    """For JSON: without the noise of the last bits, and without infinity, which JSON has not."""
    return float(f"{number:.12g}") if math.isfinite(number) else None
