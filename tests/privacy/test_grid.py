"""Uploads on the grid: the sum within half a step a site, and any t shares of noise are what the account names."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fednh.federated.checks import form_of
from fednh.privacy.discrete_gaussian import LARGEST
from fednh.privacy.grid import FINE, LONGER, STEP, Grid, NoisySum, share_of_noise
from fednh.privacy.private_data import short

RANDOM = np.random.default_rng(0).bytes


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_sums_are_those_of_the_numbers_within_half_a_step_a_site(values: list[float], sites: int) -> None:
    trees = [
        {"a": torch.tensor(values, dtype=torch.float64) * (k + 1), "b": torch.tensor(float(k))} for k in range(sites)
    ]
    grid = Grid.of(form_of(trees[0]), sites, sites)
    total = grid.tree(sum((grid.words(tree, RANDOM) for tree in trees), np.zeros(grid.size, np.uint64)))
    exact = sum(tree["a"] for tree in trees)
    assert torch.all((total["a"] - exact).abs() <= sites * STEP / 2 + exact.abs() * 1e-15)
    assert total["b"].dtype == torch.float32
    assert total["b"] == sum(range(sites))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**32, -1e300])
def test_numbers_beyond_the_grid_are_refused(value: float) -> None:
    grid = Grid.of({"a": ((1,), torch.float64)}, 3, 2)
    with pytest.raises(ValueError, match=r"a number of a is beyond 1\.43e\+09, the end of the grid, or not finite"):
        grid.words({"a": torch.tensor([value], dtype=torch.float64)}, RANDOM)


@given(st.floats(0.1, 50), st.floats(0.01, 100), st.integers(1, 10**7), st.integers(2, 30))
@settings(max_examples=200, deadline=None)
def test_any_t_shares_reach_the_deviation_that_the_account_names(
    noise: float, sensitivity: float, numbers: int, needed: int
) -> None:
    """Together at least noise * (sensitivity + rounding), and not much more than noise * sensitivity."""
    step, sigma = share_of_noise(NoisySum(("a",), noise, sensitivity), numbers, needed)
    moved = sensitivity * (1 + LONGER) / step + math.sqrt(numbers)  # the largest change of rounded numbers, in steps
    together = math.sqrt(needed) * sigma
    assert together >= noise * moved
    assert math.log2(step).is_integer()
    assert FINE <= sigma <= LARGEST
    assert together * step <= noise * sensitivity * (1 + 1e-5) + 2 * noise * math.sqrt(numbers) * step


def test_rounding_moves_a_vector_by_at_most_the_root_of_its_length() -> None:
    """Two inputs that differ by the sensitivity: their rounded values by no more than is accounted for."""
    rng = np.random.default_rng(1)
    grid = Grid.of({"a": ((400,), torch.float64)}, 1, 1)
    for _ in range(50):
        one = rng.normal(size=400) * 20 * STEP
        move = rng.normal(size=400)
        move *= 30 * STEP / np.linalg.norm(move)
        pair = [grid.words({"a": torch.from_numpy(x)}, RANDOM).view(np.int64) for x in (one, one + move)]
        assert np.linalg.norm(pair[1] - pair[0]) <= 30 + math.sqrt(400)


def test_noise_of_t_sites_has_the_deviation_that_is_named() -> None:
    size, needed, noise = 20_000, 3, 2.0
    zeros = {"sums": torch.zeros(size), "plain": torch.ones(4)}
    grid = Grid.of(form_of(zeros), 5, needed, [NoisySum(("sums",), noise, 1.0)])
    total = sum((grid.words(zeros, RANDOM) for _ in range(needed)), np.zeros(grid.size, np.uint64))
    tree = grid.tree(total)
    assert abs(float(tree["sums"].double().std()) / noise - 1) < 0.03
    assert torch.equal(tree["plain"], torch.full((4,), 3.0)), "what is not noisy is exact"
    fewer = sum((grid.words(zeros, RANDOM) for _ in range(needed - 1)), np.zeros(grid.size, np.uint64))
    assert float(grid.tree(fewer)["sums"].double().std()) < noise * 0.9


def test_too_many_numbers_for_the_noise_are_refused() -> None:
    with pytest.raises(ValueError, match="too many for a noise multiplier"):
        share_of_noise(NoisySum(("a",), 1e6, 1.0), 10**6, 2)


def test_every_site_adds_its_share() -> None:
    """Of zeros a site sends noise, every time, of the deviation of one share."""
    zeros = {"sums": torch.zeros(500)}
    grid = Grid.of(form_of(zeros), 3, 2, [NoisySum(("sums",), 1.0, 1.0)])
    for _ in range(30):
        told = grid.tree(grid.words(zeros, RANDOM))["sums"].double()
        assert abs(float(told.std()) * math.sqrt(2) - 1) < 0.2


@pytest.mark.parametrize("sites", [1, 3])
@pytest.mark.parametrize("sigma", [4, 16])
def test_sums_of_discrete_noise_are_nearly_rounded_gaussian_noise(sigma: int, sites: int) -> None:
    """Total variation and Hellinger distance, exactly; both fall with sigma^2, to 3e-14 at the grid's 2^20 steps."""
    x = np.arange(-14 * sigma, 14 * sigma + 1)
    one = np.exp(-(x**2) / (2 * sigma**2))
    total = one = one / one.sum()
    for _ in range(sites - 1):
        total = np.convolve(total, one)
    ends, together = np.arange(-(len(total) // 2), len(total) // 2 + 1), sigma * math.sqrt(sites)
    rounded = stats.norm.cdf((ends + 0.5) / together) - stats.norm.cdf((ends - 0.5) / together)
    assert np.abs(total - rounded).sum() / 2 < 0.03 / together**2
    assert math.sqrt(2 * (1 - np.sqrt(total * rounded).sum())) < 0.03 / together**2, "of d numbers: sqrt(d) times this"


@pytest.mark.parametrize("size", [2, 64, 4096])
def test_features_of_length_one_are_no_longer_than_is_accounted_for(size: int) -> None:
    x = torch.randn(2000, size, generator=torch.Generator().manual_seed(size)) * 3
    for features in (lambda z: z, lambda z: z / z.norm(dim=1, keepdim=True)):
        longest = float(short(features)(x).double().norm(dim=1).max())
        assert 1 - 1e-6 < longest <= 1 + LONGER
