"""What the numbers say, in sentences."""

import math
from itertools import pairwise

import numpy as np

from ..experiments import paper
from .formats import listed
from .runs import Runs, value
from .statistics import interval
from .tables import MILLI, PERCENT, PLATEAU, left_plateau, ratio, reached, significant, split_differences, split_means


def findings(runs: Runs) -> list[str]:
    """The headlines of one section, most important first."""
    found = FINDERS[runs.experiment](runs)
    return [sentence[0].upper() + sentence[1:] for sentence in found]


def effort(runs: Runs) -> str:
    """How much was run, and how long it took."""
    seconds = sum(record.seconds for record in runs.records)
    complete = len(runs.records) == len(runs.models) * len(runs.cases) * runs.seeds
    return (
        f"{_count(len(runs.records), 'run')}: {_count(len(runs.models), 'model')}, {_cases(runs)}, "
        f"{'' if complete else 'up to '}{_count(runs.seeds, 'seed')}; {duration(seconds)} of training in all"
    )


def _cases(runs: Runs) -> str:
    if len(runs.cases) == 1:
        return runs.main_name
    if runs.experiment == "handwriting":
        return f"{' or '.join(f'{lines:,}' for lines in runs.cases)} training lines"
    return f"{len(runs.cases)} {runs.case_name}s"


def duration(seconds: float) -> str:
    """
    >>> duration(42.4), duration(754), duration(9000)
    ('42 s', '13 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _generation(runs: Runs) -> list[str]:
    budget = runs.main_case
    ours = {m: float(np.median([value(r) for r in runs.of(m, budget)])) for m in runs.models if runs.of(m, budget)}
    order = sorted(ours, key=lambda model: ours[model])
    published = {m: paper.GENERATION[m].nmse for m in order if m in paper.GENERATION}
    if len(order) < 2:
        return [f"{order[0]} reaches an NMSE of {_milli(ours[order[0]])} with {budget:,} parameters."]
    first, second = order[:2]
    found = []
    if math.isfinite(ours[second]) and ours[first] > 0:
        found.append(
            f"With {budget:,} parameters {first} has the lowest error, {_times(ours[second] / ours[first])} lower than "
            f"the next best, {second} ({_milli(ours[first])} against {_milli(ours[second])})."
        )
    if budget == paper.BUDGETS[-1] and len(published) > 1:
        best, next_best = sorted(published, key=lambda model: published[model])[:2]
        times = _times(published[next_best] / published[best])
        found.append(f"In the paper {best} has the lowest error of these models, {times} lower than {next_best}.")
        found += _order([m for m in order if m in published], published, lower=True)
    return found


def _words(runs: Runs) -> list[str]:
    ours = {model: float(np.mean(list(split_means(runs, model).values()))) for model in runs.models}
    order = sorted(ours, key=lambda model: -ours[model])
    where = f"split {runs.main_case}" if len(runs.cases) == 1 else f"{len(runs.cases)} splits"
    scores = ", ".join(f"{model} {ours[model] * PERCENT:.1f} %" for model in order)
    found = [f"Words recognised, mean over {where}: {scores}."]
    found += [_difference(runs, *pair) for pair in (("incremental MS-LMN", "MS-LMN"), ("MS-LMN", "LSTM"))]
    published = {model: paper.WORDS[model].accuracy for model in order if model in paper.WORDS}
    if len(published) > 1:
        found += _order([model for model in order if model in published], published, lower=False)
    errors = runs.confusions.get(order[0])
    if errors and errors.has_suffixes and errors.within + errors.across:
        share = errors.within / (errors.within + errors.across)
        found.append(
            f"Of the errors of {order[0]}, {share * PERCENT:.0f} % confuse words with the same suffix; "
            f"at random it would be {errors.chance * PERCENT:.0f} %."
        )
    return [sentence for sentence in found if sentence]


def _difference(runs: Runs, first: str, second: str) -> str:
    differences = split_differences(runs, first, second)
    if len(differences) < 2:
        return ""
    mean, low, high = interval(differences, ratio(runs))
    sure = "not a clear difference" if low <= 0 <= high else "a clear difference"
    return (
        f"{first} is {abs(mean):.1f} points {'above' if mean >= 0 else 'below'} {second} on the same splits "
        f"(95 % interval {low:+.1f} to {high:+.1f}): {sure}."
    )


def _handwriting(runs: Runs) -> list[str]:
    ours = {model: value(record) for model in runs.models if (record := runs.chosen(model))}
    order = sorted(ours, key=lambda model: -ours[model])
    scores = ", ".join(f"{model} {ours[model] * PERCENT:.1f} %" for model in order)
    best = f"{order[0]} reads best" if len(order) > 1 else f"{order[0]} was trained alone"
    found = [f"{best}. Characters of the test lines read, with {runs.main_name}: {scores}."]
    published = {model: paper.HANDWRITING[model].accuracy for model in order if model in paper.HANDWRITING}
    found.append(_points(ours, published, "incremental MS-LMN", "MS-LMN"))
    if compared := _points(ours, published, "MS-LMN", "LSTM"):
        found += [compared, _time(runs, "MS-LMN", "LSTM")]
    if len(published) > 1:
        found += _order([model for model in order if model in published], published, lower=False)
    found.append(_stuck(runs))
    return [sentence for sentence in found if sentence]


def _points(ours: dict[str, float], published: dict[str, float], first: str, second: str) -> str:
    """How far one is above another, here and in the paper."""
    if first not in ours or second not in ours:
        return ""
    here, there = ((of[first] - of[second]) * PERCENT for of in (ours, published))
    return f"{first} is {_above(here)} {second}; in the paper it is {_above(there)}."


def _above(points: float) -> str:
    return f"{abs(points):.1f} points {'above' if points >= 0 else 'below'}"


def _time(runs: Runs, first: str, second: str) -> str:
    one, other = (float(np.median([r.seconds for r in runs.of(m, runs.main_case)])) for m in (first, second))
    if not one > 0 or not other > 0:
        return ""
    how = f"{_times(other / one)} shorter" if other >= one else f"{_times(one / other)} longer"
    return f"A training run of {first} took {duration(one)}, one of {second} {duration(other)}: {first}'s is {how}."


def _stuck(runs: Runs) -> str:
    """Models of which no seed reads half of what it validates on."""
    tries = {model: [r for r in runs.of(model, runs.main_case) if reached(r) is not None] for model in runs.models}
    stuck = [m for m, records in tries.items() if records and not any(left_plateau(r) is not None for r in records)]
    if not stuck:
        return ""
    never = f"never read{'s' * (len(stuck) == 1)} {PLATEAU * PERCENT:.0f} % of the characters"
    return f"{listed(stuck)} {never} of the validation lines."


def _order(order: list[str], published: dict[str, float], lower: bool) -> list[str]:
    theirs = [published[model] if lower else -published[model] for model in order]
    ranked = sorted(order, key=lambda model: published[model] if lower else -published[model])
    if all(one <= other for one, other in pairwise(theirs)):
        return ["From best to worst, the models come in the paper's order."]
    return [f"From best to worst: {', '.join(order)}; in the paper: {', '.join(ranked)}."]


def _times(factor: float) -> str:
    return f"{factor:.0f} times" if factor >= 10 else f"{factor:.1f} times"


def _milli(nmse: float) -> str:
    return f"{significant(nmse * MILLI)} x 10^-3" if math.isfinite(nmse) else "diverged"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


FINDERS = {"generation": _generation, "words": _words, "handwriting": _handwriting}
