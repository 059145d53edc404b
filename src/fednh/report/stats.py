"""The statistics behind the tables.

Over seeds: spread, paired tests and Holm's correction. Of one site: the interval of an accuracy, and of the difference
of two models on the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

from fednh.seeding import numpy_rng

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


def sd(values: Sequence[float] | NDArray[np.float64]) -> float:
    """The sample standard deviation (n - 1); 0 for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


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


# --- one site ------------------------------------------------------------------------------------------------------

Z = 1.959963984540054  # 95% of a normal distribution lie within this many standard deviations
RESAMPLES = 10_000
# Two models that are equally good disagree in favour of one by chance: with five disagreements, all of them in
# favour of the same one has a probability of 2 / 2^5 = 6%. From six on an answer is possible at all.
FEWEST_DISAGREEMENTS = 6
ALIKE = 3.0  # points: a difference that is surely smaller than this does not matter to the choice of a model
FEWEST_FOR_ALIKE = 100  # samples: with fewer, two models that agree on all of them may still differ by ALIKE points


@dataclass(frozen=True)
class Difference:
    """The accuracy of one model minus that of another on the same samples, in points, with a 95% interval."""

    points: float
    low: float
    high: float
    n: int
    disagreements: int  # samples that one of them gets right and the other does not

    @property
    def clear(self) -> bool:
        """Whether one model is better: the interval leaves out zero, and enough samples tell the two apart."""
        return (self.low > 0 or self.high < 0) and self.disagreements >= FEWEST_DISAGREEMENTS

    @property
    def alike(self) -> bool:
        """Whether the difference is surely too small to matter."""
        return not self.clear and self.low > -ALIKE and self.high < ALIKE and self.n >= FEWEST_FOR_ALIKE


def wilson(correct: int, n: int) -> tuple[float, float]:
    """Wilson's 95% interval of an accuracy, in percent; n >= 1."""
    share, more = correct / n, Z * Z / n
    centre = (share + more / 2) / (1 + more)
    half = Z * sqrt(share * (1 - share) / n + more / (4 * n)) / (1 + more)
    return 0.0 if correct == 0 else 100 * (centre - half), 100.0 if correct == n else 100 * (centre + half)


def difference(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> Difference:
    """Paired bootstrap over samples: where `one` and `other` say which samples each model gets right; n >= 1.

    A resample is made of samples that only one model gets right, that only the other does, and the rest: how many
    there are of each is all that its difference depends on, so a resample is one draw of a multinomial distribution.
    The draws are seeded: the same outcomes always have the same interval.
    """
    return _difference(len(one), int((one & ~other).sum()), int((other & ~one).sum()))


@lru_cache(maxsize=10_000)
def _difference(n: int, gained: int, lost: int) -> Difference:
    shares = [gained / n, lost / n, (n - gained - lost) / n]
    drawn = numpy_rng(0, "paired bootstrap").multinomial(n, shares, RESAMPLES)
    low, high = np.percentile(100 * (drawn[:, 0] - drawn[:, 1]) / n, [2.5, 97.5])
    return Difference(100 * (gained - lost) / n, float(low), float(high), n, gained + lost)
