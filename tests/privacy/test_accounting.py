"""Accounts against closed forms and against another accountant."""

import math
import warnings

import pytest

from fednh.errors import ConfigError
from fednh.privacy import accounting
from fednh.privacy.accounting import Release, epsilon, gaussian_noise, noise_for

DELTA = 1e-5


@pytest.mark.parametrize(("budget", "noise"), [(0.5, 7.03), (1, 3.73), (2, 1.99), (4, 1.08), (8, 0.60)])
def test_the_noise_of_one_release_is_that_of_the_analytic_gaussian_mechanism(budget: float, noise: float) -> None:
    assert gaussian_noise(budget, DELTA) == pytest.approx(noise, abs=0.005)
    assert epsilon([Release("sums", gaussian_noise(budget, DELTA))], DELTA) == pytest.approx(budget, abs=1e-6)


def test_releases_of_all_samples_compose_to_one_gaussian_mechanism() -> None:
    """mu^2 adds up: four releases with twice the noise cost what one costs."""
    four = [Release("a", 2.0, count=3), Release("b", 2.0)]
    assert epsilon(four, DELTA) == pytest.approx(epsilon([Release("c", 1.0)], DELTA), abs=1e-9)


@pytest.mark.parametrize(("noise", "rate", "count"), [(1.0, 0.1, 100), (0.7, 0.01, 3000), (4.0, 0.4, 40)])
def test_sampled_releases_cost_what_another_accountant_says(noise: float, rate: float, count: int) -> None:
    prv = pytest.importorskip("opacus.accountants").PRVAccountant()
    prv.history = [(noise, rate, count)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = prv.get_epsilon(DELTA)
    ours = epsilon([Release("gradients", noise, rate, count)], DELTA)
    assert 0.5 < ours == pytest.approx(theirs, abs=0.02)


def test_sampling_all_samples_costs_as_much_as_no_sampling() -> None:
    almost = epsilon([Release("gradients", 2.0, 0.999999, 3)], DELTA)
    assert almost == pytest.approx(epsilon([Release("gradients", 2.0, 1.0, 3)], DELTA), abs=0.01)


def test_a_mixture_costs_more_than_its_parts_and_less_than_their_sum() -> None:
    gradients, sums = Release("gradients", 1.2, 0.1, 50), Release("prototypes", 6.0, count=5)
    together, parts = epsilon([gradients, sums], DELTA), [epsilon([each], DELTA) for each in (gradients, sums)]
    assert max(parts) < together < sum(parts)


def test_the_loss_distribution_is_never_above_the_moments() -> None:
    sampled = [(1.0, 0.1, 100)]
    assert accounting._by_loss_distribution(0.0, sampled, DELTA) < accounting._by_moments(0.0, sampled, DELTA)


def test_found_noise_keeps_to_the_budget_and_hardly_less_would() -> None:
    budget = 4.0

    def plan(noise: float) -> list[Release]:
        return [Release("gradients", noise, 0.1, 200), Release("prototypes", 4 * noise, count=10)]

    noise = noise_for(plan, budget, DELTA)
    assert epsilon(plan(noise), DELTA) <= budget < epsilon(plan(noise * 0.99), DELTA)


def test_found_noise_of_one_release_is_the_closed_form_rounded_up() -> None:
    assert noise_for(lambda noise: [Release("sums", noise)], 1.0, DELTA) == 3.74  # 3.7306...


def test_nothing_released_costs_nothing_and_hopeless_noise_costs_infinitely_much() -> None:
    assert epsilon([], DELTA) == 0 == epsilon([Release("sums", 1.0, count=0)], DELTA)
    assert epsilon([Release("sums", 0.01)], DELTA) == math.inf
    assert epsilon([Release("gradients", 0.1, 0.5, 1000)], DELTA) == math.inf


def test_a_plan_that_no_noise_can_afford_is_refused() -> None:
    with pytest.raises(ConfigError, match="out of reach"):
        noise_for(lambda noise: [Release("fixed", 1.0, count=100)], 1.0, DELTA)


@pytest.mark.parametrize("wrong", [{"noise": 0.0}, {"noise": math.nan}, {"noise": 1.0, "rate": 0.0}])
def test_a_release_without_noise_cannot_be_spelled(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="mechanism"):
        Release("gradients", **wrong)
