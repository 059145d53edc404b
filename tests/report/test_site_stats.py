"""Intervals of one site's figures, against values computed by other means."""

from math import sqrt

import numpy as np
import pytest

from fednh.report.stats import Design, Gain, accuracy_interval, estimate, together, wilson


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


def plain(n: int) -> Design:
    """n samples, measured once each."""
    return Design(np.arange(n), np.arange(n), np.zeros(n, int), np.zeros(n, int))


def differences(gained: int, lost: int, n: int) -> np.ndarray:
    return np.repeat([1.0, -1.0, 0.0], [gained, lost, n - gained - lost])


def test_a_difference_has_bonett_and_prices_interval() -> None:
    """60 gained and 35 lost of 400, one more each of 402: the variance of 402 differences, 0.061692 - 0.0622^2."""
    (gain,) = together([estimate(differences(60, 35, 400), plain(400))])
    near, half = 25 / 402, 1.966 * sqrt((97 / 402 - (25 / 402) ** 2) / 401)
    assert gain.points == pytest.approx(6.25)
    assert (gain.low, gain.high) == (
        pytest.approx(100 * (near - half), abs=0.02),
        pytest.approx(100 * (near + half), abs=0.02),
    )
    assert gain.clear
    assert gain.p < 0.05


@pytest.mark.parametrize(
    ("gained", "lost", "n", "clear", "alike"),
    [
        (4, 0, 4, False, False),
        (8, 0, 8, True, False),
        (5, 0, 100, False, False),  # five to none happens to one of 16 pairs of equal models
        (0, 0, 30, False, False),  # no difference in 30 samples: up to 10% may still differ
        (0, 0, 200, False, True),
        (20, 20, 1500, False, True),
        (10, 10, 60, False, False),
        (0, 20, 60, True, False),
    ],
)
def test_what_is_clear_and_what_is_alike(gained: int, lost: int, n: int, clear: bool, alike: bool) -> None:
    (gain,) = together([estimate(differences(gained, lost, n), plain(n))])
    assert (gain.clear, gain.alike) == (clear, alike)


def test_interval_and_p_are_corrected_alike() -> None:
    """p is below 5% if and only if the interval leaves out zero, for one question and for four."""
    for gained in range(4, 40):
        one = estimate(differences(gained, 4, 90), plain(90))
        for times in (1, 4):
            for gain in together([one] * times):
                assert (gain.p < 0.05) == gain.clear
    assert together([one] * 4)[0].low < together([one])[0].low


def test_samples_that_recur_count_once() -> None:
    """Sample 0 is right in two runs of two, samples 1 and 2 are measured once: (1 + 1 + 0) / 3, not 3 of 4."""
    design = Design(np.array([0, 0, 1, 2]), np.array([0, 0, 1, 2]), np.array([0, 1, 0, 1]), np.zeros(4, int))
    assert design.mean(np.array([1.0, 1, 1, 0])) == pytest.approx(2 / 3)
    n, x = 80, differences(30, 10, 80)
    (once,) = together([estimate(x, plain(n))])
    twice = Design(np.tile(np.arange(n), 3), np.tile(np.arange(n), 3), np.repeat([0, 1, 2], n), np.zeros(3 * n, int))
    (same,) = together([estimate(np.tile(x, 3), twice)])
    assert (same.points, same.low, same.high) == pytest.approx((once.points, once.low, once.high))


def test_samples_of_a_group_tell_as_much_as_one() -> None:
    """Ten groups of eight samples with one fate: the interval of ten samples."""
    x = differences(7, 1, 10)
    (alone,) = together([estimate(x, plain(10))])
    design = Design(np.arange(80), np.repeat(np.arange(10), 8), np.zeros(80, int), np.zeros(80, int))
    (grouped,) = together([estimate(np.repeat(x, 8), design)])
    assert (grouped.low, grouped.high) == pytest.approx((alone.low, alone.high))
    assert accuracy_interval(np.repeat(np.maximum(x, 0), 8), design) == pytest.approx(wilson(7, 10), abs=2)


def test_runs_that_differ_widen_the_interval() -> None:
    """Three seeds on the same 60 samples, one of which gains everywhere: that is no proof for the next seed."""
    x = np.concatenate([differences(60, 0, 60), differences(0, 0, 60), differences(0, 0, 60)])
    sample = np.tile(np.arange(60), 3)
    seeds = Design(sample, sample, np.repeat([0, 1, 2], 60), np.zeros(180, int))
    (gain,) = together([estimate(x, seeds)])
    (no_seeds,) = together([estimate(x, Design(sample, sample, np.zeros(180, int), np.zeros(180, int)))])
    assert gain.points == no_seeds.points == pytest.approx(100 / 3)
    assert estimate(x, seeds).error == pytest.approx(1 / 3, abs=0.01)  # the means 1, 0 and 0: sqrt((1 / 3) / 3)
    assert no_seeds.clear
    assert not gain.clear


def test_classes_count_alike_in_balanced_accuracy() -> None:
    design = Design(np.arange(10), np.arange(10), np.zeros(10, int), np.repeat([0, 1], [8, 2]))
    assert design.mean(np.repeat([1.0, 0.0], [8, 2])) == pytest.approx(0.5)


def test_an_interval_on_the_other_side_is_clear_too() -> None:
    assert Gain(-8.0, -12.0, -4.0).clear
    assert not Gain(-8.0, -17.0, 1.0).clear
