"""How sure a figure of one site is: the interval of an accuracy, and of a difference on the same samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from fednh.core.seeding import numpy_rng

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
