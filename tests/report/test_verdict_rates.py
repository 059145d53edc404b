"""The verdict as a statistician would test it: sites whose truth is known, drawn many times.

A model is right on a sample where a normal number falls below a threshold. A part of it is the sample's difficulty,
which all models share, a part the group, a part the run, and the rest the model's own. So every model's accuracy,
over samples, groups and seeds, is what the scenario says. A false verdict at a site may come in 5% of draws, and so may
any of its intervals that miss the truth.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
import pytest

from fednh.report.sites import Held, ModelKind, SiteRow
from fednh.report.verdicts import SiteVerdict, verdict

CLASSES = ("cat", "dog", "horse")
EQUAL = {"FedAvg personal": 0.75, "FedAvg global": 0.75, "local only": 0.75}
METHODS = ("FedAvg", "FedNH", "Ditto", "FedRep", "FedPer", "FedRoD")


@dataclass(frozen=True)
class Scenario:
    """A site whose truth is known."""

    accuracy: dict[str, float] = field(default_factory=lambda: dict(EQUAL))
    n: int = 60  # samples of the site
    seeds: int = 1
    folds: int = 1
    share: float = 1.0  # of the samples that every seed holds out
    group: int = 1  # samples in one
    of_group: float = 0.0  # shares of the variance: of what a group does to a model,
    of_run: float = 0.0  # of what a seed or a fold does to a model,
    of_sample: float = 0.5  # and of the sample's difficulty
    gain: float = 0.0  # the truth: best federated minus alone

    def row(self, rng: np.random.Generator) -> SiteRow:
        """The site as it would be measured."""
        label = rng.choice(3, self.n, p=[0.5, 0.3, 0.2])
        fold_of = rng.permutation(self.n) % self.folds
        runs = [(seed, fold) for seed in range(self.seeds) for fold in range(self.folds)]
        seen = [np.flatnonzero((fold_of == fold) & (rng.permutation(self.n) < self.share * self.n)) for _, fold in runs]
        rows, groups = np.concatenate(seen), np.arange(self.n) // self.group
        run = np.repeat(np.arange(len(runs)), [len(part) for part in seen])
        seed, fold = np.array(runs)[run].T
        held = Held(label[rows].astype(np.int32), rows, groups[rows], seed, fold)
        difficulty = rng.normal(0, self.of_sample**0.5, self.n)[rows]
        own = 1 - self.of_sample - self.of_group - self.of_run
        models = []
        for name, accuracy in self.accuracy.items():
            luck = (
                rng.normal(0, self.of_run**0.5, len(runs))[run]
                + rng.normal(0, self.of_group**0.5, self.n)[groups[rows]]
            )
            lasting, fresh = rng.normal(0, (own / 2) ** 0.5, self.n)[rows], rng.normal(0, (own / 2) ** 0.5, len(rows))
            right = difficulty + luck + lasting + fresh < NormalDist().inv_cdf(accuracy)
            kind: ModelKind = "local" if name == "local only" else "personal" if "personal" in name else "global"
            models.append(held.measured(name, kind, np.where(right, held.label, (held.label + 1) % 3).astype(np.int32)))
        return SiteRow(0, "site", tuple(models), held, (50, 30, 20))


MANY = {f"{method} {kind}": 0.75 for method in METHODS for kind in ("personal", "global")} | {"local only": 0.75}
BETTER = {"FedAvg personal": 0.82, "FedAvg global": 0.82, "local only": 0.75}
SCENARIOS = {
    "no effect": Scenario(),
    "no effect, large": Scenario(n=400),
    "no effect, twelve models": Scenario(MANY),
    "no effect, twelve models, three seeds": Scenario(MANY, seeds=3, n=200, share=0.2, of_run=0.02),
    "small effect": Scenario(BETTER, gain=0.07),
    "small effect, large": Scenario(BETTER, n=400, gain=0.07),
    "harm": Scenario(BETTER | {"local only": 0.92}, gain=-0.10),
    "one bad method": Scenario(EQUAL | {"FedPrior personal": 0.5, "FedPrior global": 0.45}),
    "few samples": Scenario(n=8),
    "groups": Scenario(n=80, group=5, of_group=0.3),
    "large groups": Scenario(n=120, group=15, of_group=0.3),
    "two seeds": Scenario(n=300, share=0.2, seeds=2, of_run=0.01),
    "three seeds": Scenario(n=300, share=0.2, seeds=3, of_run=0.02),
    "five seeds, the same samples": Scenario(n=60, seeds=5, of_run=0.02),
    "five folds": Scenario(n=150, folds=5, of_run=0.02),
    "five folds, three seeds": Scenario(n=150, folds=5, seeds=3, of_run=0.02),
}


@dataclass
class Rates:
    """How often, of all draws, what was said was wrong."""

    draws: int = 0
    false: int = 0  # verdicts
    missed: int = 0  # the truth, by at least one of the two intervals of the gain
    right: int = 0  # verdicts that say what is true, where there is an effect

    def add(self, found: SiteVerdict, truth: float) -> None:
        assert found.gain is not None
        assert found.balanced_gain is not None
        self.draws += 1
        wrong = {0: ("federate", "alone"), 1: ("alone",), -1: ("federate",)}[int(np.sign(truth))]
        self.false += found.kind in wrong
        self.right += found.kind == {0: "", 1: "federate", -1: "alone"}[int(np.sign(truth))]
        self.missed += not all(gain.low <= 100 * truth <= gain.high for gain in (found.gain, found.balanced_gain))


def drawn(name: str, draws: int) -> Rates:
    rates, rng = Rates(), np.random.default_rng(sorted(SCENARIOS).index(name))
    for _ in range(draws):
        rates.add(verdict(SCENARIOS[name].row(rng), CLASSES), SCENARIOS[name].gain)
    return rates


def most(draws: int, rate: float = 0.05) -> float:
    """More than this many of the draws would happen once in a thousand times at the stated rate."""
    return draws * rate + 3.09 * (draws * rate * (1 - rate)) ** 0.5


@pytest.mark.parametrize("name", ["no effect", "no effect, twelve models", "one bad method", "few samples", "groups"])
def test_a_false_verdict_is_as_rare_as_stated(name: str) -> None:
    rates = drawn(name, 60)
    assert rates.false <= most(60)
    assert rates.missed <= most(60)


def test_the_choice_among_many_equal_models_is_paid_for() -> None:
    """Twelve equal models: the best of them seems to gain a few points on the samples that it was chosen by."""
    rng, naive, fair = np.random.default_rng(1), list[float](), list[float]()
    for _ in range(40):
        row = SCENARIOS["no effect, twelve models"].row(rng)
        *joint, own = (model.accuracy for model in row.models)
        gain = verdict(row, CLASSES).gain
        assert gain is not None
        naive.append(max(joint) - own)
        fair.append(gain.points)
    assert np.mean(naive) > 5
    assert abs(np.mean(fair)) < 2.5


def test_an_effect_is_found_where_there_are_samples_enough() -> None:
    assert drawn("small effect, large", 30).right >= 15
    assert drawn("harm", 30).false == 0


@pytest.mark.soak
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_thousand_sites_of_every_kind(name: str) -> None:
    rates = drawn(name, 1000)
    assert rates.false <= most(1000)
    assert rates.missed <= most(1000)
