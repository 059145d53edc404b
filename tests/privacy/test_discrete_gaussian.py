"""The discrete Gaussian sampler against its distribution, and its exactness: whole numbers only."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from fednh.privacy import discrete_gaussian as module
from fednh.privacy.discrete_gaussian import LARGEST, discrete_gaussian


def stream(seed: int = 0) -> Callable[[int], bytes]:
    return np.random.default_rng(seed).bytes


@pytest.mark.parametrize("sigma", [1, 2, 7])
def test_every_value_is_as_frequent_as_the_formula_says(sigma: int) -> None:
    drawn = discrete_gaussian(sigma, 200_000, stream())
    values = np.arange(-4 * sigma, 4 * sigma + 1)
    weights = np.exp(-(values**2) / (2 * sigma**2))
    everything = sum(math.exp(-(x**2) / (2 * sigma**2)) for x in range(-20 * sigma, 20 * sigma + 1))
    expected = len(drawn) * weights / everything
    counts = np.array([(drawn == value).sum() for value in values])
    statistic = ((counts - expected) ** 2 / expected)[expected > 10].sum()
    assert statistic < stats.chi2.ppf(1 - 1e-6, int((expected > 10).sum()))


@pytest.mark.parametrize("sigma", [1000, 1 << 20, LARGEST])
def test_large_ones_look_like_the_normal_distribution(sigma: int) -> None:
    drawn = discrete_gaussian(sigma, 100_000, stream()) / sigma
    assert stats.kstest(drawn, "norm").pvalue > 1e-4
    assert abs(drawn.std() - 1) < 0.01


def test_far_proposals_are_decided_by_long_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is rare with a usual sigma happens always here, and changes nothing in the distribution."""
    monkeypatch.setattr(module, "_FAR", 3)
    monkeypatch.setattr(module, "_LONG", 2)
    drawn = discrete_gaussian(4, 3000, stream())
    assert abs(drawn.std() - 4) < 0.3
    assert stats.kstest((drawn + np.random.default_rng(0).uniform(-0.5, 0.5, 3000)) / 4, "norm").pvalue > 1e-3


@pytest.mark.parametrize("ratio", [Fraction(0), Fraction(1, 3), Fraction(1), Fraction(5, 2)])
def test_marks_come_with_chance_exp_of_minus_the_ratio(ratio: Fraction) -> None:
    above = np.full(40_000, ratio.numerator, np.uint64)
    marks = module._exp_marks(above, np.uint64(ratio.denominator), stream())
    chance = math.exp(-ratio)
    assert abs(marks.mean() - chance) < 5 * math.sqrt(chance * (1 - chance) / len(marks)) + 1e-12


def test_no_floating_point_number_decides_anything() -> None:
    """The module has no constant with a point, no division that is not whole, no function of real numbers."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        assert not (isinstance(node, ast.Constant) and isinstance(node.value, float))
        assert not isinstance(node, ast.Div)
        assert not (isinstance(node, ast.Attribute) and node.attr in ("exp", "log", "sqrt", "random", "float64"))


def test_deployments_draw_from_the_operating_system() -> None:
    import os

    assert inspect.signature(discrete_gaussian).parameters["random"].default is os.urandom
    assert not np.array_equal(discrete_gaussian(1 << 20, 10), discrete_gaussian(1 << 20, 10))


def test_numbers_below_a_bound_are_equally_likely() -> None:
    drawn = module._uniform(np.full(60_000, 6, np.uint64), stream())
    assert stats.chisquare(np.bincount(drawn.astype(int), minlength=6)).pvalue > 1e-4
    largest = (1 << 64) - 1
    near = module._uniform(np.array([largest // 2 + 2] * 1000, np.uint64), stream())  # half of all words are drawn anew
    assert near.max() < largest // 2 + 2
