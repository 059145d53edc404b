"""Long-tailed class sizes, then a Dirichlet draw: the setting of CReFF, FedETF and FedLoGe.

The sizes are those of long-tailed CIFAR (Cao et al., NeurIPS 2019): class c of C keeps n_c = n_max * IF^(-c / (C - 1))
samples, rounded down, so that the imbalance factor IF is the largest class size over the smallest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fednh.data.partitions.base import Indices
from fednh.data.partitions.dirichlet import Dirichlet
from fednh.errors import UserError


@dataclass(frozen=True)
class LongTail(Dirichlet):
    """A seeded subset whose class sizes fall exponentially in the order of the classes; the other samples are left out.

    n_max is the largest for which every class has the samples that it should keep: of a balanced set, all of class 0.
    """

    name = "longtail"
    help = "class sizes that fall exponentially (imbalance = largest / smallest), then dealt as dirichlet does"
    shown = ("beta", "imbalance")

    imbalance: Annotated[float, Field(ge=1)] = 100.0  # IF

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
            raise UserError(f"{error} ({tail})") from error
        return [kept[part] for part in parts]

    def subset(self, labels: Indices, rng: np.random.Generator) -> Indices:
        """The samples that are kept, in their order."""
        present, there = np.unique(labels, return_counts=True)
        if len(present) < 2:
            raise UserError(f"partition: a long tail needs at least 2 classes, but the data has {len(present)}")
        kept = [
            rng.choice(np.flatnonzero(labels == label), size, replace=False)
            for label, size in zip(present, self.sizes(there), strict=True)
        ]
        return np.sort(np.concatenate(kept))

    def sizes(self, there: NDArray[np.int64]) -> NDArray[np.int64]:  # (C,) -> (C,)
        """How many samples of each class are kept, of those that are there."""
        share = self.imbalance ** (-np.arange(len(there)) / (len(there) - 1))
        largest = float((there / share).min())
        sizes = np.floor(largest * share + 1e-9).astype(np.int64)
        if sizes[-1] < 1:
            raise UserError(
                f"partition.imbalance = {self.imbalance:g} leaves the smallest class without a sample, since the "
                f"largest has {int(largest):,}; lower it to {int(largest):,} or less"
            )
        return sizes
