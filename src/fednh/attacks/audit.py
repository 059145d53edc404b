"""A lower bound of epsilon from one run: Steinke, Nasr, Jagielski,
"Privacy Auditing with One (1) Training Run", NeurIPS 2023.

Each of m canaries is in the data with probability 1/2. The auditor guesses, from what was released, for r of them
whether they were in, and abstains from the others; v guesses are right. If the release is (epsilon, delta)-private,
    P[v or more are right] <= beta + 2 m delta alpha,
    beta = P[B >= v],   alpha = max over i = 1, ..., v of P[v > B >= v - i] / i,
with B of Binomial(r, e^epsilon / (1 + e^epsilon)) (their Theorem 5.2). The largest epsilon for which this is less than
1 - confidence is refuted: with that confidence the true one is larger.

How many guesses to make is decided before the release is looked at: choosing the best number afterwards would need a
correction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

MOST = 200.0  # an epsilon that is not looked beyond
EXACT = 1e-4  # how closely the bound is computed


@dataclass(frozen=True)
class Guesses:
    """What an auditor guessed: `right` of `made` guesses, among `canaries`."""

    canaries: int
    made: int
    right: int


def guess(scores: NDArray[np.float64], included: NDArray[np.bool_], number: int) -> Guesses:
    """Guess that the canaries with the highest scores were in, and those with the lowest not: `number` in all."""
    m = len(scores)
    if not 0 < number <= m:
        raise ValueError(f"{number} guesses about {m} canaries")
    order = np.argsort(scores, kind="stable")
    low = number // 2
    right = np.count_nonzero(~included[order[:low]]) + np.count_nonzero(included[order[m - (number - low) :]])
    return Guesses(m, number, int(right))


def p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are, at most, if the release is (epsilon, delta)-private."""
    m, r, v = guesses.canaries, guesses.made, guesses.right
    share = 1 / (1 + math.exp(-epsilon))
    beta = float(binom.sf(v - 1, r, share))
    below = np.cumsum(binom.pmf(np.arange(v - 1, -1, -1), r, share))  # P[v > B >= v - i], i = 1, ..., v
    alpha = float(np.max(below / np.arange(1, v + 1))) if v else 0.0
    return min(1.0, beta + 2 * m * delta * alpha)


def epsilon_bound(guesses: Guesses, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that these guesses refute; 0 if they refute none."""
    if p_value(guesses, 0.0, delta) > 1 - confidence:
        return 0.0
    low, high = 0.0, MOST
    while high - low > EXACT:
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(guesses, middle, delta) < 1 - confidence else (low, middle)
    return low
