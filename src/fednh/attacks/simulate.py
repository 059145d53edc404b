"""Uploads that the server computes for itself, of clients that it makes up from public samples.

The client's own work is repeated by the executor that the run has, so an attack needs to know nothing about a method:
what it looks at are vectors. A vector holds the steps of what the client received and trained, and the rest of the
upload as it is. Long ones are sketched: coordinates are added up in `LONGEST` buckets with random signs, which keeps
inner products (Charikar, Chen, Farach-Colton, "Finding Frequent Items in Data Streams", 2002).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednh.attacks.target import Before, Target, computed
from fednh.config.schema import ParticipationConfig
from fednh.data.partitions import Indices
from fednh.methods.optimizers import FitSettings
from fednh.privacy.private_data import Mechanisms
from fednh.seeding import numpy_rng
from fednh.tree import Tree

LONGEST = 1 << 15
SILENT = 1e-9  # a noise multiplier that changes nothing
TOGETHER = 128  # clients that are computed in one call


@dataclass(frozen=True)
class Expected(Mechanisms):
    """A run's mechanisms without their noise: every sample is in every step, of which there are as many."""

    drawn: float  # the chance of a sample to be in a step of the run

    def steps(self, settings: FitSettings, epochs: float | None) -> int:
        return Mechanisms(self.clip, self.drawn, SILENT, SILENT, SILENT).steps(settings, epochs)


def expected(mechanisms: Mechanisms) -> Expected:
    """What these mechanisms give on average."""
    return Expected(mechanisms.clip, 1.0, SILENT, SILENT, SILENT, drawn=mechanisms.rate)


class Simulator:
    """Made-up clients before the round that is attacked."""

    def __init__(self, target: Target, seed: int, names: Sequence[str] | None = None):
        """`names`: the parts of the upload that are looked at; None: all."""
        self.target, self.seed, self.calls = target, seed, 0
        self.names = sorted(target.upload if names is None else names)
        self.size = sum(target.upload[name].numel() for name in self.names)
        rng = numpy_rng(seed, "attack sketch")
        self.sketched = self.size > LONGEST
        if self.sketched:
            self.bucket = torch.from_numpy(rng.integers(LONGEST, size=self.size))
            self.sign = torch.from_numpy(rng.choice([-1.0, 1.0], self.size))

    def vector(self, upload: Tree) -> Tensor:  # (P,)
        """An upload as the attacks see it."""
        down = self.target.received
        rows = []
        for name in self.names:
            value = upload[name]
            here = name in down and down[name].shape == value.shape
            rows.append((value.double() - down[name].double() if here else value.double()).flatten())
        whole = torch.cat(rows)
        if not self.sketched:
            return whole
        return torch.zeros(LONGEST, dtype=whole.dtype).index_add_(0, self.bucket, whole * self.sign)

    def uploads(self, parts: Sequence[Indices], private: bool = False) -> Tensor:  # (K, P)
        """The uploads of clients with these samples; `private`: with the noise that the run's clients add.

        Without it clients clip as those of the run do: it is what their uploads are on average.
        """
        return torch.stack([self.vector(upload) for upload in self.trees(parts, private)])

    def trees(self, parts: Sequence[Indices], private: bool = False) -> Iterator[Tree]:
        """The same as they are sent, one after the other."""
        target = self.target
        self.calls += 1  # draws of its own, never those of a client: a site's noise is not the server's to know
        seed = int(numpy_rng(self.seed, "attack simulated", target.client, self.calls).integers(2**31))
        everybody = ParticipationConfig(rate=1.0)
        config = target.config.model_copy(update={"participation": everybody, "seed": seed})
        # What clients keep the server does not know: made-up ones are newcomers.
        mechanisms = target.before.mechanisms
        if mechanisms is not None and not private:
            mechanisms = expected(mechanisms)
        start = Before(target.before.round, target.before.initial, target.before.server, mechanisms=mechanisms)
        for first in range(0, len(parts), TOGETHER):
            some = list(parts[first : first + TOGETHER])
            fed = replace(target.fed, parts=some, held_out=[part[:0] for part in some], sites=())
            fed = replace(fed, dealt=target.fed.dealt[:1] * len(some))  # runs of several networks are refused
            made = computed(config, fed, start, range(len(some)))
            yield from (made[client] for client in range(len(some)))


def drawn(
    counts: NDArray[np.int64],
    pool: Indices,
    y: NDArray[np.int64],
    rng: np.random.Generator,
) -> Indices:
    """Samples of the pool with these class counts; with repetition where the pool has too few of a class."""
    rows = []
    for label, number in enumerate(counts):
        those = pool[y[pool] == label]
        if number and len(those):
            rows.append(rng.choice(those, int(number), replace=len(those) < number))
    if not rows:
        raise ValueError("no class has a sample")
    return np.concatenate(rows).astype(np.int64)
