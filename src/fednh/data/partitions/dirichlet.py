"""Every class dealt to the clients by a Dirichlet draw, as the paper does: the scheme of FedDF (Lin et al. 2020).

With long-tailed class sizes before the draw it is the setting of CReFF, FedETF and FedLoGe. The sizes
are those of long-tailed CIFAR (Cao et al., NeurIPS 2019): class c of C keeps n_c = n_max * IF^(-c / (C - 1)) samples,
rounded down, so that the imbalance factor IF is the largest class size over the smallest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fednh.data.partitions.base import Beta, Count, Drawn, Indices, by_owner, class_table
from fednh.errors import DataError, UserError

HOPELESS = 20, 30  # give up when each of 20 draws left 30 or more clients short: success is then as rare as e^-30


@dataclass(frozen=True)
class Dirichlet(Drawn):
    """A client that already holds its fair share N/K gets no more of the later classes.

    Drawn again until every client has `min_samples` samples of at least `min_classes` classes.
    """

    name = "dirichlet"
    help = "every class dealt by a Dirichlet(beta) draw; smaller beta is more uneven"
    shown: ClassVar[tuple[str, ...]] = ("beta",)

    beta: Beta = 0.3
    min_classes: Count = 2  # of every client

    def column(self) -> str:
        return f"Dir({self.beta:g})"

    def words(self) -> str:
        return f"Dirichlet({self.beta:g})"

    def slug(self) -> str:
        return f"{self.name}{self.beta:g}"

    def _draw(self, labels: Indices, rng: np.random.Generator) -> list[Indices]:
        present, clients, least = np.unique(labels), self.clients, self.min_samples
        if len(present) < self.min_classes:
            raise DataError(
                f"partition: every client should have {self.min_classes} classes, but the data has only "
                f"{len(present)}; lower partition.min_classes"
            )
        fewest = clients
        for tried in range(1, self.tries + 1):
            owner = self._owner(labels, present, rng)
            table = class_table(labels, owner, clients)
            short = int(self._short(table).sum())
            if short == 0:
                return by_owner(owner, clients)
            fewest = min(fewest, short)
            if tried >= HOPELESS[0] and fewest >= HOPELESS[1]:
                break
        raise DataError(
            f"partition: no Dirichlet({self.beta:g}) draw in {tried} gave all {clients} clients at least {least} "
            f"samples of {self.min_classes} classes; use fewer clients, a larger beta, or lower partition.min_samples"
        )

    def _easier(self) -> Self:
        return replace(self, min_samples=1, min_classes=1)

    def _short(self, table: NDArray[np.int64]) -> NDArray[np.bool_]:
        few: NDArray[np.bool_] = (table > 0).sum(axis=1) < self.min_classes
        return super()._short(table) | few

    def _owner(self, labels: Indices, present: Indices, rng: np.random.Generator) -> Indices:
        owner, held = np.empty(len(labels), np.int64), np.zeros(self.clients, np.int64)
        fair = len(labels) / self.clients
        for label in present:
            members = rng.permutation(np.flatnonzero(labels == label))
            share = rng.dirichlet(np.full(self.clients, self.beta)) * (held < fair)
            if share.sum() <= 0:  # a tiny beta put everything on clients that are full
                share = (held < fair).astype(float)
            cuts = (np.cumsum(share / share.sum())[:-1] * len(members)).astype(np.int64)
            sizes = np.diff(cuts, prepend=0, append=len(members))
            owner[members] = np.repeat(np.arange(self.clients), sizes)
            held += sizes
        return owner


@dataclass(frozen=True)
class LongTail(Dirichlet):
    """A seeded subset whose class sizes fall exponentially in the order of the classes; the other samples are left out.

    n_max is the largest for which every class has the samples that it should keep: of a balanced set, all of class 0.
    """

    name = "longtail"
    help = "class sizes that fall exponentially (imbalance = largest / smallest), then dealt as dirichlet does"
    shown = ("beta", "imbalance")

    imbalance: Annotated[float, Field(ge=1)] = 100.0  # IF: the largest class over the smallest

    def column(self) -> str:
        return f"Dir({self.beta:g}), IF {self.imbalance:g}"

    def words(self) -> str:
        return f"long tail (IF {self.imbalance:g}), Dirichlet({self.beta:g})"

    def slug(self) -> str:
        return f"{self.name}{self.imbalance:g}-dir{self.beta:g}"

    def draw(self, labels: Indices, rng: np.random.Generator, groups: Indices | None = None) -> list[Indices]:
        kept = self.subset(labels, rng)
        try:
            parts = super().draw(labels[kept], rng, None if groups is None else groups[kept])
        except UserError as error:
            tail = f"partition.imbalance = {self.imbalance:g} keeps {len(kept):,} of {len(labels):,} training samples"
            raise DataError(f"{error} ({tail})") from error
        return [kept[part] for part in parts]

    def subset(self, labels: Indices, rng: np.random.Generator) -> Indices:
        """The samples that are kept, in their order."""
        present, counts = np.unique(labels, return_counts=True)
        if len(present) < 2:
            raise DataError(f"partition: a long tail needs at least 2 classes, but the data has {len(present)}")
        kept = [
            rng.choice(np.flatnonzero(labels == label), size, replace=False)
            for label, size in zip(present, self.sizes(counts), strict=True)
        ]
        return np.sort(np.concatenate(kept))

    def sizes(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:  # (C,) -> (C,)
        """How many samples of each class are kept, given how many it has."""
        share = self.imbalance ** (-np.arange(len(counts)) / (len(counts) - 1))
        largest = float((counts / share).min())
        sizes = np.floor(largest * share + 1e-9).astype(np.int64)
        if sizes[-1] < 1:
            raise DataError(
                f"partition.imbalance = {self.imbalance:g} leaves the smallest class without a sample, since the "
                f"largest has {int(largest):,}; lower it to {int(largest):,} or less"
            )
        return sizes
