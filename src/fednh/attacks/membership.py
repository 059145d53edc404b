"""Whether a sample was among a client's: tests of one upload, and how well they tell members from others.

`gradient`: the whitened test. Phi(x) is by how much an upload changes when x takes the place of a public sample of its
class in a made-up client, less the mean of its class. An upload of n samples is then nearly m + sum_i Phi(x_i), other
samples are noise with covariance n C, and of all linear tests
    s(x) = Phi(x)' (C + lambda)^-1 (upload - m) / sqrt(Phi(x)' (C + lambda)^-1 Phi(x))
tells a member best: leave-one-out, since the sample's own part in C is not counted. C is that of public samples, m the
mean of made-up clients with the class counts that labels.py found. `prototypes`: the same on the rows by class alone
(distance to the prototype and to the class sums). The regularisation lambda is chosen where it matters least to
honesty: on made-up clients, with the noise that the run's clients add, whose members the server knows.

`loss`: by how much the uploaded model's loss on x is below that of the received one (Yeom et al. 2018). `lira`: the
same against what made-up clients without x reach, in their standard deviations (Carlini et al., "Membership Inference
Attacks From First Principles", 2022, offline: a model for each candidate is not trained). They need a whole model in
the upload.

Members are compared with samples of the same classes that no one trained on: that a client lacks a class is counted
elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor

from fednh.attacks.labels import Labels
from fednh.attacks.simulate import Simulator, drawn
from fednh.attacks.target import Target
from fednh.data.partitions import Indices
from fednh.seeding import numpy_rng
from fednh.tree import Tree

RIDGE = tuple(10.0**-k for k in range(1, 8))  # times the largest eigenvalue
TRIALS = 12  # made-up clients on which the regularisation is chosen
LEVELS = (0.01, 0.001)  # rates of false positives


@dataclass(frozen=True)
class MemberScores:
    """What one test gives members and others; larger: more likely a member."""

    members: NDArray[np.float64]
    others: NDArray[np.float64]

    @property
    def auc(self) -> float:
        ranks = rankdata(np.concatenate([self.members, self.others]))[: len(self.members)]
        n, m = len(self.members), len(self.others)
        return float((ranks.sum() - n * (n + 1) / 2) / (n * m))

    def true_positives(self, level: float) -> float | None:
        """The share of members above all but a share `level` of the others; None: there are too few others for it."""
        if level * len(self.others) < 1:
            return None
        bound = np.sort(self.others)[::-1][int(level * len(self.others))]
        return float((self.members > bound).mean())


def pooled(rows: list[MemberScores]) -> MemberScores:
    """The scores of several clients, as one test with one threshold."""
    return MemberScores(np.concatenate([r.members for r in rows]), np.concatenate([r.others for r in rows]))


@dataclass(frozen=True)
class Candidates:
    """Which samples the attack looks at: the client's own, those it must be told from, and what the server has."""

    members: Indices
    others: Indices
    known: Indices

    @property
    def candidates(self) -> Indices:
        return np.concatenate([self.members, self.others])


def split(target: Target, seed: int, most: int) -> Candidates:
    """Public samples, half to be told from members and half the server's, at most `most` of each."""
    y = target.fed.train.y.numpy(force=True)
    rest = np.setdiff1d(np.arange(len(y)), target.part)
    rest = numpy_rng(seed, "attack public", target.client).permutation(rest)
    half = len(rest) // 2
    others = rest[:half]
    return Candidates(target.part, others[target.counts[y[others]] > 0][:most], rest[half:][:most])


def whitened(target: Target, simulator: Simulator, samples: Candidates, labels: Labels) -> MemberScores:
    """The whitened test on the parts of the upload that the simulator looks at."""
    y = target.fed.train.y.numpy(force=True)
    rng = numpy_rng(simulator.seed, "attack membership", target.client)
    counts, known = labels.counts, samples.known
    base = drawn(counts, known, y, rng)
    mean = simulator.uploads([drawn(counts, known, y, rng) for _ in range(4 * TRIALS)]).mean(0)
    looked_at = np.concatenate([samples.candidates, known])
    phi = simulator.uploads([_with(base, x, y) for x in looked_at]) - simulator.uploads([base])
    mine = torch.arange(len(looked_at)) >= len(samples.candidates)  # the server's own
    for label in range(len(counts)):
        same = torch.from_numpy(y[looked_at] == label)
        if (same & mine).any():
            phi[same] -= phi[same & mine].mean(0)
    seen = simulator.vector(target.upload) - mean
    hidden = rng.permutation(len(known))[: max(len(known) // 6, 2)]  # stand for members where lambda is chosen
    whitening = Whitening(phi[mine], _others(len(known), hidden))
    best = _regularisation(target, simulator, whitening, phi[mine], hidden, samples, labels, mean)
    outside = whitening.scores(phi[mine][hidden], seen[None], best)[:, 0]  # no members: they set the scale
    score = ((whitening.scores(phi[~mine], seen[None], best)[:, 0] - outside.mean()) / (outside.std() + 1e-150)).numpy()
    return MemberScores(score[: len(samples.members)], score[len(samples.members) :])


def _with(base: Indices, x: int, y: NDArray[np.int64]) -> Indices:
    """A made-up client's samples with x in place of one of its class, or in addition if it has none."""
    same = np.flatnonzero(y[base] == y[x])
    changed = base.copy() if len(same) else np.append(base, x)
    changed[same[0] if len(same) else -1] = x
    return changed


def _others(total: int, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.setdiff1d(np.arange(total), chosen)


class Whitening:
    """(C + lambda)^-1 in the space of the public samples' changes, of which there are fewer than coordinates."""

    def __init__(self, phi: Tensor, rows: NDArray[np.int64]):
        self.rows = phi[torch.from_numpy(rows)]
        self.heat, self.basis = torch.linalg.eigh(self.rows @ self.rows.T / len(self.rows))

    def scores(self, phi: Tensor, seen: Tensor, ridge: float) -> Tensor:  # (N, P), (K, P) -> (N, K)
        """s(x) for every sample and upload; 0 where a sample changes nothing."""
        floor = float(ridge * self.heat[-1].clamp(min=0)) + 1e-300
        # (R'R / r + floor)^-1 = (1 - R' (R R' / r + floor)^-1 R / r) / floor
        inner = self.basis @ torch.diag(1 / (self.heat.clamp(min=0) + floor)) @ self.basis.T / len(self.rows)
        across = phi @ self.rows.T  # (N, R)
        product = phi @ seen.T - (across @ inner) @ (self.rows @ seen.T)
        length = phi.square().sum(1) - ((across @ inner) * across).sum(1)
        found: Tensor = product / (length.clamp(min=0) * floor).sqrt().clamp(min=1e-150)[:, None]
        return found


def _regularisation(
    target: Target,
    simulator: Simulator,
    whitening: Whitening,
    phi: Tensor,
    hidden: NDArray[np.int64],
    samples: Candidates,
    labels: Labels,
    mean: Tensor,
) -> float:
    """The ridge with which the test works best on made-up clients of samples that the whitening has not seen."""
    y = target.fed.train.y.numpy(force=True)
    rng = numpy_rng(simulator.seed, "attack trials", target.client)
    pool = samples.known[hidden]
    present = [label for label in labels.classes if (y[pool] == label).any()]
    counts = np.where(np.isin(np.arange(len(labels.counts)), present), labels.counts, 0)
    if not counts.any():
        return RIDGE[len(RIDGE) // 2]
    parts = [drawn(counts, pool, y, rng) for _ in range(TRIALS)]
    seen = simulator.uploads(parts, private=True) - mean
    candidates = [k for k in hidden if y[samples.known[k]] in present]
    best: list[float] = []
    for ridge in RIDGE:
        score = whitening.scores(phi[candidates], seen, ridge).numpy()
        marks = np.stack([np.isin(samples.known[candidates], part) for part in parts], 1)
        if marks.all() or not marks.any():
            return RIDGE[len(RIDGE) // 2]
        best.append(MemberScores(score[marks], score[~marks]).auc)
    return RIDGE[int(np.argmax(best))]


def by_loss(
    target: Target, samples: Candidates, labels: Labels, seed: int, shadows: int
) -> tuple[MemberScores, MemberScores] | None:
    """The tests `loss` and `lira`; None where the upload has no whole model."""
    model = _model(target, target.upload)
    if model is None:
        return None
    y = target.fed.train.y.numpy(force=True)
    rng = numpy_rng(seed, "attack losses", target.client)
    received = _model(target, {})
    assert received is not None
    looked_at = samples.candidates
    fall = _losses(target, received, looked_at) - _losses(target, model, looked_at)
    names = [name for name in target.upload if name in model]
    simulator = Simulator(target, seed, names)
    made = [
        _losses(target, received, looked_at) - _losses(target, tree, looked_at)
        for tree in _models(target, simulator, [drawn(labels.counts, samples.known, y, rng) for _ in range(shadows)])
    ]
    out = torch.stack(made)
    calibrated = (fall - out.mean(0)) / (out.std(0) + 1e-3 * out.std() + 1e-12)
    n = len(samples.members)
    return MemberScores(fall[:n].numpy(), fall[n:].numpy()), MemberScores(
        calibrated[:n].numpy(), calibrated[n:].numpy()
    )


def _model(target: Target, upload: Tree) -> Tree | None:
    """The global model that this upload alone would make of what the client received."""
    method = target.fed.method
    moved = {name: value for name, value in upload.items() if name in target.received}
    if upload and not any(name.startswith(("body.", "head.")) for name in moved):
        return None
    model = method.global_model({**target.before.server, **moved})
    return None if model is None or set(method.model) - {name.partition(".")[0] for name in model} else model


def _models(target: Target, simulator: Simulator, parts: list[Indices]) -> list[Tree]:
    return [model for upload in simulator.trees(parts, private=True) if (model := _model(target, upload)) is not None]


@torch.no_grad()
def _losses(target: Target, model: Tree, rows: Indices) -> Tensor:  # (N,)
    """Every sample's cross-entropy under a model."""
    data, net, method = target.fed.train, target.fed.net, target.fed.method
    out = []
    for some in np.array_split(rows, max(1, len(rows) // 256)):
        index = torch.from_numpy(some)
        logits = method.scores(net, model, data.floats(data.x[index])).double()
        out.append(F.cross_entropy(logits, data.y[index], reduction="none"))
    return torch.cat(out)
