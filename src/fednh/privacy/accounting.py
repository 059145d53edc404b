"""What releases cost: (epsilon, delta) of a composition of Gaussian mechanisms, and the noise that a budget asks for.

Adjacency is adding or removing one record: one sample at the level "sample", one client at the level "client". A
`Release` with noise multiplier m adds Gaussian noise of standard deviation m times the L2 sensitivity; with rate q
every record takes part in it with chance q, drawn independently (Poisson sampling).

Releases without sampling compose to one Gaussian mechanism, whose epsilon is exact: with mu^2 the sum of 1 / m^2,
    delta = Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu)
(Balle & Wang, ICML 2018, Theorem 8). Others are composed by dp-accounting's privacy loss distributions, on a grid that
errs upwards. This is the only module that knows that package (extra `privacy`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from fednh.errors import ConfigError
from fednh.extras import need

GRID = 1e-3  # of privacy losses: epsilon comes out at most a few thousandths too large
LARGEST = 100.0  # a larger epsilon promises nothing, and is not told apart
DIGITS = 3  # noise multipliers that are found are rounded up to so many significant digits, the same on all machines


@dataclass(frozen=True)
class Release:
    """One Gaussian mechanism, `count` times."""

    name: str  # what leaves: "gradients", "prototypes", "class counts"
    noise: float  # noise multiplier: standard deviation over L2 sensitivity
    rate: float = 1.0  # the chance of a record to take part in it; 1: all do
    count: int = 1

    def __post_init__(self) -> None:
        if not self.noise > 0 or not 0 < self.rate <= 1 or self.count < 0:
            raise ValueError(f"not a mechanism that can be accounted for: {self}")


def epsilon(releases: Sequence[Release], delta: float) -> float:
    """The epsilon of all releases together at this delta; infinite above `LARGEST`."""
    kinds = Counter[tuple[float, float]]()
    for release in releases:
        kinds[release.noise, release.rate] += release.count
    return _epsilon(tuple(sorted((*kind, count) for kind, count in kinds.items() if count)), delta)


def gaussian_noise(epsilon: float, delta: float) -> float:
    """The noise multiplier with which one release is (epsilon, delta)-private, exactly.

    >>> [round(gaussian_noise(e, 1e-5), 2) for e in (0.5, 1, 2, 4, 8)]
    [7.03, 3.73, 1.99, 1.08, 0.6]
    """
    multiplier: float = 1 / _root(lambda mu: _delta(mu, epsilon) - delta, 1e-9, 1e3, xtol=1e-12, rtol=1e-12)
    return multiplier


def noise_for(plan: Callable[[float], Sequence[Release]], epsilon_: float, delta: float) -> float:
    """The smallest noise multiplier, up to rounding, with which the plan's releases stay within (epsilon_, delta).

    `plan` says what is released with a multiplier; more noise must never cost more. Rounded up to `DIGITS` digits.
    """

    def excess(log_noise: float) -> float:
        return math.log(min(max(epsilon(plan(math.exp(log_noise)), delta), 1e-6), 1e6) / epsilon_)

    low, high = _bracket(excess, math.log(_guess(plan, epsilon_, delta)), epsilon_)
    found = float(_root(excess, low, high, xtol=2e-4))
    noise = _rounded_up(math.exp(found))
    while excess(math.log(noise)) > 0:  # the search ends on either side of the budget
        noise = _rounded_up(noise * (1 + 10.0**-DIGITS))
    return noise


def _bracket(excess: Callable[[float], float], start: float, epsilon_: float) -> tuple[float, float]:
    """Logarithms of a multiplier that costs too much and of one that does not."""
    low = high = start
    step = 0.05
    while excess(high) > 0:
        low, high, step = high, high + step, 2 * step
        if high > math.log(1e6):
            raise ConfigError(
                f"privacy.epsilon = {epsilon_:g} is out of reach for the planned rounds; plan fewer rounds or epochs, "
                f"or raise privacy.epsilon"
            )
    while excess(low) <= 0:
        high, low, step = low, low - step, 2 * step
    return low, high


def _guess(plan: Callable[[float], Sequence[Release]], epsilon_: float, delta: float) -> float:
    """Near the multiplier, by the central limit of many small releases."""
    aim = 1 / gaussian_noise(epsilon_, delta)

    def excess(log_noise: float) -> float:
        return math.log(max(_gaussian_mu(plan(math.exp(log_noise))), 1e-12) / aim)

    least, most = math.log(0.1), math.log(1e5)
    if excess(least) <= 0 or excess(most) >= 0:
        return 1.0
    return math.exp(float(_root(excess, least, most, xtol=1e-3)))


def _gaussian_mu(releases: Sequence[Release]) -> float:
    """The mu of the one Gaussian mechanism that the releases resemble: Bu et al. 2020, Corollary 5.4."""
    return math.sqrt(
        sum(r.count * (1 / r.noise**2 if r.rate == 1 else r.rate**2 * math.expm1(1 / r.noise**2)) for r in releases)
    )


def _rounded_up(noise: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(noise)) - DIGITS + 1)
    return round(math.ceil(noise / unit - 1e-9) * unit, 12)


@cache
def _epsilon(kinds: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """Of (multiplier, rate, count) rows."""
    mu = math.sqrt(sum(count / noise**2 for noise, rate, count in kinds if rate == 1))
    sampled = [kind for kind in kinds if kind[1] < 1]
    if not sampled:
        return _gaussian_epsilon(mu, delta) if mu else 0.0
    need("privacy", "an account of sampled releases")
    bound = _by_moments(mu, sampled, delta)
    return bound if bound > LARGEST else min(bound, _by_loss_distribution(mu, sampled, delta))


def _gaussian_epsilon(mu: float, delta: float) -> float:
    if _delta(mu, 0.0) <= delta:
        return 0.0
    if _delta(mu, LARGEST) > delta:
        return math.inf
    return float(_root(lambda epsilon: _delta(mu, epsilon) - delta, 0.0, LARGEST, xtol=1e-10))


def _delta(mu: float, epsilon: float) -> float:
    """Of one Gaussian mechanism of sensitivity mu and standard deviation 1."""
    from scipy.stats import norm

    lost = math.exp(epsilon + float(norm.logcdf(-mu / 2 - epsilon / mu)))
    return float(norm.cdf(mu / 2 - epsilon / mu)) - lost


def _by_loss_distribution(mu: float, sampled: list[tuple[float, float, int]], delta: float) -> float:
    from dp_accounting.pld import privacy_loss_distribution as pld

    total = pld.identity(GRID)
    if mu:
        total = total.compose(pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=GRID))
    for noise, rate, count in sampled:
        one = pld.from_gaussian_mechanism(noise, value_discretization_interval=GRID, sampling_prob=rate)
        total = total.compose(one.self_compose(count))
    return float(total.get_epsilon_for_delta(delta))


def _by_moments(mu: float, sampled: list[tuple[float, float, int]], delta: float) -> float:
    """By Renyi differential privacy of whole orders: a valid bound, cheap, somewhat loose; infinite above LARGEST."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    account = RdpAccountant([*range(2, 65), 80, 96, 128, 192, 256, 384, 512])
    if mu:
        account.compose(GaussianDpEvent(1 / mu))
    for noise, rate, count in sampled:
        account.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), count)
    found = float(account.get_epsilon(delta))
    return found if found <= LARGEST else math.inf


def _root(function: Callable[[float], float], low: float, high: float, xtol: float, rtol: float = 8.9e-16) -> float:
    """Where the function is 0 between two points. SciPy is imported only where it is needed: it takes a while."""
    from scipy.optimize import brentq

    return float(brentq(function, low, high, xtol=xtol, rtol=rtol))
