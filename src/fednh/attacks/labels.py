"""Which classes a client has, and how many samples of each.

Some uploads say it: a row by class is zero where the client lacks the class, a mark is 0, the length of a counted row
is the number. Where they do not, the server makes up clients with many class mixtures, computes their uploads, and
learns by ridge regression how mixtures and uploads go together; the regularisation is the one with the least
leave-one-out error. The class counts that come out are rounded such that they add up to the client's number of samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednh.attacks.simulate import Simulator, drawn
from fednh.attacks.target import Target
from fednh.data.partitions import Indices
from fednh.seeding import numpy_rng

RIDGE = tuple(10.0**-k for k in range(0, 11))  # times the largest eigenvalue
ROUNDING = 1e-9  # a row that is shorter than this is zero


@dataclass(frozen=True)
class Labels:
    """What the server believes of a client's labels."""

    counts: NDArray[np.int64]  # (C,)
    read: bool  # the classes stand in the upload; otherwise all is estimated

    @property
    def classes(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.counts)

    def recovered(self, true: NDArray[np.int64]) -> float:
        """The share of the client's labels that are right, whatever their order."""
        return float(np.minimum(self.counts, true).sum() / true.sum())

    def classes_right(self, true: NDArray[np.int64]) -> float:
        """The share of all classes of which the server knows whether the client has them."""
        return float(((self.counts > 0) == (true > 0)).mean())


def infer(target: Target, simulator: Simulator, pool: Indices, shadows: int) -> Labels:
    """The client's class counts, from its upload and public samples."""
    n, y = len(target.part), target.fed.train.y.numpy(force=True)
    present = read_classes(target)
    if (told := _read_counts(target, n)) is not None:
        return Labels(told, True)
    rng = numpy_rng(simulator.seed, "attack labels", target.client)
    possible = np.ones(target.fed.train.num_classes, bool) if present is None else present
    possible &= np.bincount(y[pool], minlength=len(possible)) > 0
    if possible.sum() == 1:
        return Labels(np.where(possible, n, 0), present is not None)
    mixtures = np.stack([_mixture(n, possible, rng) for _ in range(shadows)])
    made = simulator.uploads([drawn(mixture, pool, y, rng) for mixture in mixtures], private=True)
    estimate = regressed(made, torch.from_numpy(mixtures).double(), simulator.vector(target.upload))
    sure = present is not None and present.sum() <= n
    least = present.astype(np.int64) if present is not None and sure else np.zeros(len(possible), np.int64)
    return Labels(rounded(np.where(possible, estimate.numpy(), 0.0), n, least), present is not None)


def read_classes(target: Target) -> NDArray[np.bool_] | None:
    """The classes that the upload says a client has; None if it does not."""
    spec, classes = target.method_upload, target.fed.train.num_classes
    for name in (*spec.marks, *spec.by_class):
        value = target.upload[name].reshape(len(target.upload[name]), -1).double() if name in target.upload else None
        if value is None or len(value) != classes:
            continue
        has: NDArray[np.bool_] = (value.norm(dim=1) > ROUNDING).numpy(force=True)
        if has.any() and not has.all():
            return has
    return None


def _read_counts(target: Target, n: int) -> NDArray[np.int64] | None:
    """The class counts that an upload says outright: a vector of them, or the lengths of counted rows."""
    spec, classes = target.method_upload, target.fed.train.num_classes
    for name in sorted(target.upload):
        value = target.upload[name].double()
        if name in spec.counted and len(value) == classes:
            value = value.reshape(classes, -1).norm(dim=1)
        elif value.shape != (classes,) or name in spec.marks or name in target.received:
            continue
        counts = value.numpy(force=True)
        if np.abs(counts - counts.round()).max() < 1e-2 and round(float(counts.sum())) == n:
            told: NDArray[np.int64] = counts.round().astype(np.int64)
            return told
    return None


def _mixture(n: int, possible: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.int64]:
    """Class counts of a made-up client, from one class to all of them alike."""
    share = np.zeros(len(possible))
    share[possible] = rng.dirichlet(np.full(int(possible.sum()), rng.choice([0.1, 0.3, 1.0, 10.0])))
    counts: NDArray[np.int64] = rng.multinomial(n, share)
    return counts


def regressed(rows: Tensor, values: Tensor, seen: Tensor) -> Tensor:  # (S, P), (S, C), (P,) -> (C,)
    """Ridge regression of `values` on `rows`, at `seen`; in the space of the samples, which are fewer than columns."""
    centre, level = rows.mean(0), values.mean(0)
    rows, seen, values = rows - centre, seen - centre, values - level
    heat, basis = torch.linalg.eigh(rows @ rows.T)
    heat = heat.clamp(min=0)
    errors = []
    for ridge in RIDGE:
        hat = basis @ torch.diag(heat / (heat + ridge * heat[-1] + 1e-300)) @ basis.T
        residual = (values - hat @ values) / (1 - hat.diag() - 1 / len(rows)).clamp(min=1e-6)[:, None]
        errors.append(float(residual.square().mean()))
    ridge = RIDGE[int(np.argmin(errors))]
    weights = basis @ torch.diag(1 / (heat + ridge * heat[-1] + 1e-300)) @ basis.T @ values
    found: Tensor = level + (rows @ seen) @ weights
    return found


def rounded(estimate: NDArray[np.float64], n: int, least: NDArray[np.int64]) -> NDArray[np.int64]:
    """The whole numbers nearest to an estimate that add up to n, none below `least`."""
    level = estimate.astype(float)
    low, high = level.min() - n, level.max()
    for _ in range(100):  # how much to take from all such that the sum is n
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(level - middle, least).sum() > n else (low, middle)
    wanted = np.maximum(level - high, least)
    counts = np.maximum(np.floor(wanted + 1e-9).astype(np.int64), least)
    order = np.argsort(counts - wanted, kind="stable")
    for place in range(n - int(counts.sum())):
        counts[order[place % len(order)]] += 1
    whole: NDArray[np.int64] = counts
    return whole
