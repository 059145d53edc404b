"""The statistics behind the tables: spread over seeds, paired tests, and Holm's correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

# With n pairs the smallest two-sided p of a Wilcoxon test is 2 / 2^n: from six pairs on it can fall below 0.05.
WILCOXON_FROM = 6


@dataclass(frozen=True)
class Spread:
    """A mean with the sample standard deviation (n - 1), which a single value does not have."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class Paired:
    """Statistics of the differences seed by seed."""

    n: int
    mean: float
    low: float  # 95% confidence interval of the mean difference, by Student's t
    high: float
    effect: float | None  # Cohen's d of paired differences: mean / standard deviation
    test: str
    p: float | None  # None: the differences do not vary, so nothing can be tested


def spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    return Spread(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None, len(values))


def lowest_tenth(values: Sequence[float]) -> NDArray[np.bool_]:
    """Mark the lowest 10% of one run's clients, at least one; ties are broken by order."""
    marked = np.zeros(len(values), bool)
    marked[np.argsort(np.asarray(values), kind="stable")[: ceil(len(values) / 10)]] = True
    return marked


def worst_tenth(values: Sequence[float]) -> float:
    """The mean of the lowest 10% of one run's clients; it is averaged over seeds like every other metric."""
    return float(np.mean(np.asarray(values)[lowest_tenth(values)]))


def paired(differences: Sequence[float]) -> Paired:
    """Wilcoxon's signed-rank test from six non-zero differences on, Student's paired t-test below; n >= 2."""
    from scipy import stats  # takes a second to import; the table of a single run tests nothing

    d = np.asarray(differences, dtype=np.float64)
    n, mean, std = len(d), float(d.mean()), float(d.std(ddof=1))
    if std <= 1e-9 * max(1.0, float(np.abs(d).max())):
        alike = bool(np.abs(d).max() <= 1e-9)
        return Paired(n, mean, mean, mean, 0.0 if alike else None, "none", 1.0 if alike else None)
    half = float(stats.t.ppf(0.975, n - 1)) * std / n**0.5
    if np.count_nonzero(d) >= WILCOXON_FROM:
        test, p = "Wilcoxon", float(stats.wilcoxon(d).pvalue)
    else:
        test, p = "t", float(stats.ttest_1samp(d, 0.0).pvalue)
    return Paired(n, mean, mean - half, mean + half, mean / std, test, p)


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction; comparisons without a test stay None and do not count."""
    tested = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    highest = 0.0
    for rank, (p, i) in enumerate(tested):
        highest = max(highest, min(1.0, p * (len(tested) - rank)))
        corrected[i] = highest
    return corrected
