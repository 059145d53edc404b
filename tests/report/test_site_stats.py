"""Intervals of one site's figures, against values computed by other means."""

from math import comb, sqrt

import numpy as np
import pytest

from fednh.report.stats import Difference, difference, wilson


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        # Solutions p of (share - p)^2 = z^2 p (1 - p) / n, z = 1.96: by hand, with the quadratic formula.
        (8, 10, 49.0, 94.3),
        (81, 263, 25.5, 36.6),  # Newcombe 1998, Table I, method 3
        (15, 148, 6.2, 16.0),
        (0, 20, 0.0, 16.1),
        (1, 29, 0.6, 17.2),
        (29, 29, 88.3, 100.0),
    ],
)
def test_wilsons_interval(correct: int, n: int, low: float, high: float) -> None:
    assert wilson(correct, n) == (pytest.approx(low, abs=0.05), pytest.approx(high, abs=0.05))


def outcomes(both: int, one: int, other: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    """Two models' hits: samples that both, only the first, only the second and none of them get right."""
    first = np.repeat([True, True, False, False], [both, one, other, neither])
    second = np.repeat([True, False, True, False], [both, one, other, neither])
    mixed = np.random.default_rng(3).permutation(len(first))
    return first[mixed], second[mixed]


def test_the_paired_bootstrap_has_the_width_of_paired_differences() -> None:
    """n differences of +1 (60), -1 (35) and 0: the normal interval of their mean, which pairing makes narrow."""
    n, gained, lost = 400, 60, 35
    found = difference(*outcomes(280, gained, lost, 25))
    half = 1.96 * sqrt((gained + lost) / n - ((gained - lost) / n) ** 2) / sqrt(n)
    assert found.points == pytest.approx(6.25)
    assert (found.low, found.high) == (
        pytest.approx(6.25 - 100 * half, abs=0.3),
        pytest.approx(6.25 + 100 * half, abs=0.3),
    )
    unpaired = 1.96 * sqrt(0.85 * 0.15 / n + 0.7875 * 0.2125 / n)
    assert found.high - found.low < 200 * unpaired - 1
    assert found.clear


def test_one_sided_disagreements_follow_the_binomial_distribution() -> None:
    """With 10 of 50 gained and none lost, the number gained in a resample is binomial(50, 0.2): its quantiles."""
    share, n = 0.2, 50
    mass = np.cumsum([comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(n + 1)])
    low, high = int(np.searchsorted(mass, 0.025)), int(np.searchsorted(mass, 0.975))
    found = difference(*outcomes(20, 10, 0, 20))
    assert (found.points, found.low, found.high) == (20.0, 100 * low / n, 100 * high / n)


def test_the_same_samples_always_have_the_same_interval_and_the_order_does_not_matter() -> None:
    one, other = outcomes(30, 12, 5, 3)
    first, back = difference(one, other), difference(other, one)
    assert first == difference(one[::-1], other[::-1])
    assert (back.points, back.disagreements) == (-first.points, 17)
    assert back.low == pytest.approx(-first.high, abs=1)


@pytest.mark.parametrize(
    ("counts", "clear", "alike"),
    [
        ((0, 5, 0, 0), False, False),  # five samples, all for one model: 2 / 2^5 = 6% by chance
        ((0, 6, 0, 0), True, False),  # six: 3%
        ((95, 5, 0, 0), False, False),  # the bootstrap alone would call this sure
        ((30, 0, 0, 0), False, False),  # no difference in 30 samples: up to 10% may still differ
        ((200, 0, 0, 0), False, True),
        ((900, 20, 20, 60), False, True),
        ((30, 10, 10, 10), False, False),
    ],
)
def test_what_is_clear_and_what_is_alike(counts: tuple[int, ...], clear: bool, alike: bool) -> None:
    found = difference(*outcomes(*counts))
    assert (found.clear, found.alike) == (clear, alike)


def test_an_interval_on_the_other_side_is_clear_too() -> None:
    assert Difference(-8.0, -12.0, -4.0, 400, 50).clear
    assert not Difference(-8.0, -17.0, 1.0, 40, 50).clear
