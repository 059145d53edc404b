"""The statistics behind the tables.

Over seeds: spread and paired tests. Of one site: the interval of an accuracy, and of the difference of two models on
the same samples. Where several comparisons are made, interval and p are corrected alike (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.05  # of all comparisons that are made together
ENOUGH_SEEDS = 6  # with fewer, a test rests on the assumption that differences are normal


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
    p: float | None  # corrected as the interval is; None: the differences do not vary, so nothing can be tested


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


def paired(differences: Sequence[float], comparisons: int = 1) -> Paired:
    """Student's paired t-test and its interval, as one of several comparisons; n >= 2."""
    from scipy.special import stdtr, stdtrit  # takes a moment to import; the table of a single run tests nothing

    d = np.asarray(differences, dtype=np.float64)
    n, mean, std = len(d), float(d.mean()), float(d.std(ddof=1))
    if std <= 1e-9 * max(1.0, float(np.abs(d).max())):
        alike = bool(np.abs(d).max() <= 1e-9)
        return Paired(n, mean, mean, mean, 0.0 if alike else None, 1.0 if alike else None)
    error = std / n**0.5
    half = float(stdtrit(n - 1, 1 - LEVEL / 2 / comparisons)) * error
    p = min(1.0, 2 * comparisons * float(stdtr(n - 1, -abs(mean) / error)))
    return Paired(n, mean, mean - half, mean + half, mean / std, p)


# --- one site ------------------------------------------------------------------------------------------------------

Z = 1.959963984540054  # 95% of a normal distribution lie within this many standard deviations
ALIKE = 3.0  # points: a difference that is surely smaller than this does not matter to the choice of a model

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Gain:
    """One model's accuracy minus another's on the same samples, in points; interval and p are corrected alike."""

    points: float
    low: float
    high: float
    p: float = 1.0

    @property
    def clear(self) -> bool:
        """Whether one model is better: the interval leaves out zero."""
        return self.low > 0 or self.high < 0

    @property
    def alike(self) -> bool:
        """Whether the difference is surely too small to matter."""
        return not self.clear and self.low > -ALIKE and self.high < ALIKE


@dataclass(frozen=True, eq=False)
class Design:
    """Which observations belong together: one is what a model made of one sample in one run.

    A sample that several runs measured is one sample: its observations share its weight. Samples are independent, or
    their groups are; and so are runs, by their seeds. Strata count alike: classes, for the balanced accuracy.
    """

    sample: Numbers  # (M,), numbered from 0, as are the others
    unit: Numbers  # (M,), the sample, or the group that it belongs to
    run: Numbers  # (M,), the seed; of a single seed the fold
    stratum: Numbers  # (M,)

    @cached_property
    def _share(self) -> Floats:  # (M,)
        """An observation's share in its sample."""
        return np.asarray(1 / np.bincount(self.sample)[self.sample])

    @cached_property
    def weight(self) -> Floats:  # (M,)
        """What an observation counts for; they add up to one."""
        total = np.bincount(self.stratum, self._share)
        return np.asarray(self._share / total[self.stratum] / len(total))

    @cached_property
    def units(self) -> Floats:  # (H,)
        """The number of units in every stratum."""
        pairs = np.unique(self.stratum * (int(self.unit.max()) + 1) + self.unit)
        return np.bincount(pairs // (int(self.unit.max()) + 1)).astype(np.float64)

    def means(self, x: Floats) -> Floats:  # (H,)
        """The mean of x in every stratum."""
        return np.asarray(np.bincount(self.stratum, self._share * x) / np.bincount(self.stratum, self._share))

    def mean(self, x: Floats) -> float:
        return float(self.means(x).mean())


@dataclass(frozen=True, eq=False)
class Estimate:
    """A mean difference with its standard error, and the degrees of freedom of that."""

    mean: float
    centre: float  # of the interval: a little nearer to zero
    error: float
    freedom: float
    of_runs: float  # the share of the variance that comes from runs


def estimate(x: Floats, design: Design) -> Estimate:
    """The mean of x, differences from -1 to 1, over samples and runs that could have been others.

    Samples: the sum of squares of what each unit contributes (a cluster-robust variance), with one more unit at +1 and
    one at -1 in every stratum, so that few samples, or models that agree on all, do not look sure (Bonett and Price,
    "Adjusted Wald confidence interval for a difference of binomial proportions based on paired data", 2012). Runs: how
    much their totals vary beyond what the samples in them explain. Degrees of freedom by Satterthwaite.
    """
    strata, units = len(design.units), design.units
    means = design.means(x)
    near = means * units / (units + 2)
    pull = (units / (units + 2))[design.stratum]
    added = float((2 * (1 + near**2) / (strata * (units + 2)) ** 2).sum())
    of_samples = added + _of_samples(pull * design.weight * (x - near[design.stratum]), design)
    of_runs, runs = _of_runs(design.weight * (x - means[design.stratum]), design)
    whole, several = of_samples + of_runs, int(design.unit.max()) + 1
    freedom = whole**2 / (of_samples**2 / (several + 1) + of_runs**2 / max(runs - 1, 1))
    return Estimate(float(means.mean()), float(near.mean()), sqrt(whole), freedom, of_runs / whole)


def _of_samples(each: Floats, design: Design) -> float:
    """The variance of a mean that comes from samples, or their groups; `each` observation's part of the mean."""
    parts = np.bincount(design.unit, each)
    return float(parts @ parts) * len(parts) / max(len(parts) - 1, 1)


def _of_runs(each: Floats, design: Design) -> tuple[float, int]:
    """The variance of the same mean that comes from runs, and how many runs there are."""
    runs, units = int(design.run.max()) + 1, int(design.unit.max()) + 1
    if runs == 1:
        return 0.0, 1
    share = np.bincount(design.run, design.weight, runs)
    table = np.bincount(design.unit * runs + design.run, each, units * runs).reshape(units, runs)
    apart = table - table.sum(axis=1, keepdims=True) * share  # what a unit does to the difference between runs
    total = apart.sum(axis=0)
    return float(max(0.0, total @ total - (apart**2).sum()) * runs / (runs - 1)), runs


def together(estimates: Sequence[Estimate], level: float = LEVEL) -> list[Gain]:
    """Simultaneous intervals, in points: the chance that any of them misses its true value is at most `level`."""
    from scipy.special import stdtr, stdtrit  # takes a moment to import

    gains = []
    for each in estimates:
        p = min(1.0, 2 * len(estimates) * float(stdtr(each.freedom, -abs(each.centre) / each.error)))
        half = float(stdtrit(each.freedom, 1 - level / 2 / len(estimates))) * each.error
        low, high = max(-1.0, each.centre - half), min(1.0, each.centre + half)
        gains.append(Gain(100 * each.mean, 100 * low, 100 * high, p))
    return gains


def wilson(correct: float, n: float) -> tuple[float, float]:
    """Wilson's 95% interval of an accuracy, in percent; n > 0."""
    share, more = correct / n, Z * Z / n
    centre = (share + more / 2) / (1 + more)
    half = Z * sqrt(share * (1 - share) / n + more / (4 * n)) / (1 + more)
    return 0.0 if correct == 0 else 100 * (centre - half), 100.0 if correct == n else 100 * (centre + half)


def accuracy_interval(right: Floats, design: Design) -> tuple[float, float]:
    """95% interval of an accuracy in percent: Wilson's, with as many samples as independent ones would tell as much."""
    samples, units = int(design.sample.max()) + 1, int(design.unit.max()) + 1
    share = design.mean(right)
    if len(right) == units and len(design.units) == 1:
        return wilson(share * samples, samples)
    each = design.weight * (right - design.means(right)[design.stratum])
    error = _of_samples(each, design) + _of_runs(each, design)[0]
    worth = min(share * (1 - share) / error if error else units, samples)
    return wilson(share * worth, worth)
