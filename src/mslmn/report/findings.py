"""What the numbers say, in sentences."""

import math
from itertools import pairwise

import numpy as np

from ..experiments import paper
from .runs import Runs, value
from .statistics import interval
from .tables import MILLI, PERCENT, ratio, significant, split_differences, split_means


def findings(runs: Runs) -> list[str]:
    """The headlines of one section, most important first."""
    found = _generation(runs) if runs.experiment == "generation" else _words(runs)
    return [sentence[0].upper() + sentence[1:] for sentence in found]


def effort(runs: Runs) -> str:
    """How much was run, and how long it took."""
    name = runs.case_name
    cases = f"{name} {runs.cases[0]:,}" if len(runs.cases) == 1 else f"{len(runs.cases)} {name}s"
    seconds = sum(record.seconds for record in runs.records)
    complete = len(runs.records) == len(runs.models) * len(runs.cases) * runs.seeds
    return (
        f"{_count(len(runs.records), 'run')}: {_count(len(runs.models), 'model')}, {cases}, "
        f"{'' if complete else 'up to '}{_count(runs.seeds, 'seed')}; {duration(seconds)} of training in all"
    )


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
