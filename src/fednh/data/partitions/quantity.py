"""Sizes by one Dirichlet draw, labels at random: clients differ in amount, not in kind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fednh.data.partitions.base import Beta, Drawn, Indices
from fednh.errors import UserError


@dataclass(frozen=True)
class Quantity(Drawn):
    name = "quantity"
    help = "sizes by a Dirichlet(beta) draw, labels at random"
    shown = ("beta",)

    beta: Beta = 0.3

    def column(self) -> str:
        return f"Dir sizes({self.beta:g})"

    def words(self) -> str:
        return f"Dirichlet sizes({self.beta:g})"

    def slug(self) -> str:
        return f"{self.name}{self.beta:g}"

    def _draw(self, labels: Indices, rng: np.random.Generator) -> list[Indices]:
        for _ in range(self.tries):
            cuts = (np.cumsum(rng.dirichlet(np.full(self.clients, self.beta)))[:-1] * len(labels)).astype(np.int64)
            if np.diff(cuts, prepend=0, append=len(labels)).min() >= self.min_samples:
                return [np.sort(part) for part in np.split(rng.permutation(len(labels)), cuts)]
        raise UserError(
            f"partition: no Dirichlet({self.beta:g}) draw of sizes in {self.tries} gave all {self.clients} clients at "
            f"least {self.min_samples} samples; use fewer clients, a larger beta, or lower partition.min_samples"
        )
