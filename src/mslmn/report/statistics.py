"""Means over splits, and how sure they are."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95


class Interval(NamedTuple):
    mean: float
    low: float
    high: float


def interval(values: Sequence[float], ratio: float = 0.0) -> Interval:
    """The mean of one value per split and its 95 % confidence interval, by Student's t.

    Splits share training clips, so their results are not independent. Nadeau and Bengio (2003) make up for it:
    the variance of the mean is ``s^2 (1/n + ratio)``, ``ratio`` being test clips per training clip. With ratio 0 it
    is the plain interval, too narrow for splits that overlap. A single split has no interval: infinite.
    """
    n = len(values)
    mean = float(np.mean(values))
    if n < 2:
        return Interval(mean, -math.inf, math.inf)
    quantile = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2))
    half = quantile * math.sqrt(float(np.var(values, ddof=1)) * (1 / n + ratio))
    return Interval(mean, mean - half, mean + half)
