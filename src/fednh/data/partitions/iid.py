"""A random split into equal parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fednh.data.partitions.base import Drawn, Indices, by_owner


@dataclass(frozen=True)
class Iid(Drawn):
    name = "iid"
    help = "equal parts at random"

    def column(self) -> str:
        return "IID"

    def _draw(self, labels: Indices, rng: np.random.Generator) -> list[Indices]:
        order = rng.permutation(len(labels))
        owner = np.empty(len(labels), np.int64)
        sizes = [len(part) for part in np.array_split(order, self.clients)]
        owner[order] = np.repeat(np.arange(self.clients), sizes)
        return by_owner(owner, self.clients)
