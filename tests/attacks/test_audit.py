"""The statistics of an audit, on Gaussian mechanisms whose epsilon is known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fednh.attacks.audit import Guesses, epsilon_bound, guess, p_value
from fednh.attacks.canaries import audited, gaussian_distance
from fednh.privacy.accounting import gaussian_noise

DELTA = 1e-5
CANARIES = 10_000


def released(noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of canaries of sensitivity 1 under Gaussian noise, and which were in."""
    rng = np.random.default_rng(seed)
    included = rng.random(CANARIES) < 0.5
    return included + noise * rng.normal(size=CANARIES), included


def test_the_highest_scores_are_guessed_in_and_the_lowest_out():
    scores = np.array([5.0, 1.0, 2.0, -3.0, 0.0, 4.0])
    included = np.array([True, False, False, False, True, False])
    assert guess(scores, included, 2) == Guesses(6, 2, 2)
    assert guess(scores, included, 4) == Guesses(6, 4, 2)  # sample 4 was in, sample 5 was not


def test_without_delta_the_p_value_is_a_binomial_tail():
    epsilon = math.log(3)  # right with chance 3/4
    assert p_value(Guesses(100, 3, 3), epsilon, 0.0) == pytest.approx(27 / 64)
    assert p_value(Guesses(100, 3, 2), epsilon, 0.0) == pytest.approx(27 / 64 + 27 / 64)
    assert p_value(Guesses(100, 3, 0), epsilon, 0.0) == 1.0


def test_delta_adds_its_share():
    """v = r = 1: P[1 > B >= 0] = P[B = 0] = 1/4, so beta = 3/4 and alpha = 1/4."""
    assert p_value(Guesses(10, 1, 1), math.log(3), 1e-3) == pytest.approx(3 / 4 + 2 * 10 * 1e-3 / 4)


def test_all_right_of_many_refute_what_their_number_allows():
    bound = epsilon_bound(Guesses(1000, 100, 100), 0.0)
    share = 0.05 ** (1 / 100)
    assert bound == pytest.approx(math.log(share / (1 - share)), abs=1e-3)
    assert epsilon_bound(Guesses(1000, 100, 50), 0.0) == 0.0


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 4.0, 8.0])
def test_an_honest_gaussian_passes_and_half_its_noise_is_noticed(epsilon):
    noise = gaussian_noise(epsilon, DELTA)
    honest = [audited("sums", *released(noise, seed), epsilon, DELTA) for seed in range(5)]
    broken = [audited("sums", *released(noise / 2, seed), epsilon, DELTA) for seed in range(5)]
    assert all(a.passed for a in honest)
    assert all(a.one_run <= epsilon for a in honest)
    assert not any(a.passed for a in broken)


def test_no_signal_refutes_nothing():
    scores, included = released(1.0, 0)
    assert gaussian_distance(scores, np.roll(included, 1)) < 0.1


def test_the_gaussian_bound_is_below_the_true_distance_and_near_it():
    found = [gaussian_distance(*released(0.6, seed)) for seed in range(20)]
    assert max(found) < 1 / 0.6
    assert min(found) > 0.9 / 0.6
