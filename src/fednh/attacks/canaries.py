"""The audit of this implementation: canaries in a real client's data, its real upload, and what can be told from it.

A canary is a sample (e_j, c): the j-th unit vector with class c, on a network that is a head alone. Its unit
representation is e_j, so in the class sums it is one coordinate, at the full sensitivity of 1; its gradient is large in
one coordinate of the head, and clipped to the full norm. So no other sample hides it, and its score is the upload along
its own part. Half of all canaries, drawn by a fair coin each, are the client's data.

Two bounds come out. Steinke et al.'s (audit.py) assumes nothing about the noise; it needs many canaries and stays far
below a large epsilon. The second is tight: scores of canaries that were in and out are compared at one threshold, and
with exact intervals of both error rates the mean of a Gaussian mechanism is bounded from below (Nasr et al., "Tight
Auditing of Differentially Private Machine Learning", USENIX Security 2023). It assumes that each canary's noise is its
own and that the mechanism is Gaussian, as this one claims to be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta, norm

from fednh.attacks.audit import Guesses, epsilon_bound, guess
from fednh.config import Config
from fednh.data.batches import ClientData, Samples
from fednh.errors import UserError
from fednh.federated.client import private_update
from fednh.methods.base import Method
from fednh.methods.fedavg import FedAvg
from fednh.methods.fednh import FedNH
from fednh.methods.fit import Sgd
from fednh.models import build_net
from fednh.privacy.accounting import Release, epsilon
from fednh.privacy.noise import SeededNoise
from fednh.privacy.private_data import GRADIENTS, SUMS, Mechanisms
from fednh.seeding import numpy_rng
from fednh.tree import Tree

CONFIDENCE = 0.95
SHARE = 0.1  # of the canaries that are guessed about, in the first bound
SIDE = 100  # classes, and features, of the data that canaries make
STEPS = 2  # of DP-SGD, in each of which all canaries take part
LENGTH = 10.0  # of a canary's features, times the clip: its gradient is far above it
WEAKEST = 1e-3  # a difference of means that is not told from none


@dataclass(frozen=True)
class Audit:
    """What one run of a mechanism showed, against what it claims."""

    what: str  # "gradients", "prototypes"
    canaries: int
    claimed: float  # epsilon, by the account
    delta: float
    guesses: Guesses
    one_run: float  # lower bound of epsilon that assumes nothing about the noise
    gaussian: float  # lower bound of epsilon of a Gaussian mechanism with noise of its own for each canary
    confidence: float = CONFIDENCE

    @property
    def passed(self) -> bool:
        """Whether nothing contradicts the claim."""
        return max(self.one_run, self.gaussian) <= self.claimed


def audited(what: str, scores: NDArray[np.float64], included: NDArray[np.bool_], claimed: float, delta: float) -> Audit:
    """The audit of one release: every canary's score, and whether it was in."""
    guesses = guess(scores, included, max(2, int(SHARE * len(scores))))
    one_run = epsilon_bound(guesses, delta, CONFIDENCE)
    distance = gaussian_distance(scores, included)
    tight = epsilon([Release(what, 1 / distance)], delta) if distance > WEAKEST else 0.0
    return Audit(what, len(scores), claimed, delta, guesses, one_run, tight)


def gaussian_distance(scores: NDArray[np.float64], included: NDArray[np.bool_]) -> float:
    """A lower bound of the distance of the two means in standard deviations, at the middle of the scores' range.

    The threshold is half of the canaries' known signal, 1: it does not depend on the scores.
    """
    above = scores > 0.5
    hits, ins = np.count_nonzero(above & included), np.count_nonzero(included)
    false, outs = np.count_nonzero(above & ~included), np.count_nonzero(~included)
    wrong = (1 - CONFIDENCE) / 2
    least_hits = float(beta.ppf(wrong, hits, ins - hits + 1)) if hits else 0.0
    most_false = float(beta.ppf(1 - wrong, false + 1, outs - false)) if false < outs else 1.0
    if least_hits <= most_false:
        return 0.0
    return float(norm.ppf(least_hits) - norm.ppf(most_false))


def audit(config: Config, mechanisms: Mechanisms | None, seed: int, side: int = SIDE) -> list[Audit]:
    """Both releases of a client under privacy.level = "sample", with a run's noise: a step's gradients and class sums.

    Every canary takes part in every step, so that the claim is exact; Poisson sampling itself is not audited.
    """
    if mechanisms is None:
        raise UserError(
            f"privacy.level = {config.privacy.level!r} adds no noise to what a client releases, so there is nothing to "
            f"audit; give a run with privacy.level = 'sample'"
        )
    delta = config.privacy.delta
    all_in = Mechanisms(mechanisms.clip, 1.0, mechanisms.gradients, mechanisms.sums, mechanisms.counts)
    both = (
        (GRADIENTS, mechanisms.gradients, STEPS, _gradient_scores),
        (SUMS, mechanisms.sums, 1, _sum_scores),
    )
    out = []
    for what, noise, count, scores in both:
        included = numpy_rng(seed, f"audit {what}").random(side * side) < 0.5
        claimed = epsilon([Release(what, noise, 1.0, count)], delta)
        out.append(audited(what, scores(all_in, included, seed, side), included, claimed, delta))
    return out


def _gradient_scores(mechanisms: Mechanisms, included: NDArray[np.bool_], seed: int, side: int) -> NDArray[np.float64]:
    upload = _upload(FedAvg(), mechanisms, included, seed, side, LENGTH * mechanisms.clip)
    move = upload["head.weight"].double()  # it starts at zero, where all classes are equally likely
    move = move - move.mean(0)  # every canary pushes the other classes of its feature alike
    number = included.sum() / (STEPS * mechanisms.clip)  # a step is the sum over samples divided by their number
    return np.asarray((move * float(number)).numpy().reshape(-1), np.float64)


def _sum_scores(mechanisms: Mechanisms, included: NDArray[np.bool_], seed: int, side: int) -> NDArray[np.float64]:
    upload = _upload(FedNH(aggregation="sum", head_init="means"), mechanisms, included, seed, side, 1.0)
    return np.asarray(upload["prototypes"].double().numpy().reshape(-1), np.float64)


def _upload(
    method: Method, mechanisms: Mechanisms, included: NDArray[np.bool_], seed: int, side: int, length: float
) -> Tree:
    """What a client uploads that has these canaries; canary c * side + j is (length * e_j, c)."""
    places = np.flatnonzero(included)
    label, feature = places // side, places % side
    one, zero = torch.ones(1), torch.zeros(1)
    x = length * torch.eye(side)[torch.from_numpy(feature)]
    samples = Samples(x, torch.from_numpy(label), side, one, zero, augment=False)
    net = build_net("linear", (side,), side)
    start = method.init(net, torch.Generator().manual_seed(0))
    start = {name: torch.zeros_like(value) if name == "head.weight" else value for name, value in start.items()}
    settings = Sgd(lr=1.0, momentum=0.0, weight_decay=0.0, clip=0.0, batch_size=256, steps=STEPS)
    noise = SeededNoise(int(numpy_rng(seed, "audit noise").integers(2**31)), 1, 0)
    data = ClientData(samples, np.arange(len(label)))
    result = private_update(method, net, method.enroll(start), start, data, settings, mechanisms, noise)
    assert result.upload is not None
    return result.upload
