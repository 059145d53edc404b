"""Samples sorted by label, cut into shards of equal size, dealt at random (McMahan et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fednh.data.partitions.base import Count, Drawn, Indices
from fednh.errors import UserError


@dataclass(frozen=True)
class Shards(Drawn):
    name = "shards"
    help = "samples sorted by label, cut into shards, the same number for every client (shards_per_client)"
    shown = ("shards_per_client",)

    shards_per_client: Count = 2

    def column(self) -> str:
        return f"{self.shards_per_client} shards"

    def _draw(self, labels: Indices, rng: np.random.Generator) -> list[Indices]:
        count = self.clients * self.shards_per_client
        if count > len(labels):
            raise UserError(
                f"partition: {len(labels)} samples cannot be cut into {count} shards; "
                f"lower --clients or partition.shards_per_client"
            )
        by_label = np.lexsort((rng.random(len(labels)), labels))
        pieces = np.array_split(by_label, count)
        order = rng.permutation(len(pieces)).reshape(self.clients, self.shards_per_client)
        return self._large_enough([np.sort(np.concatenate([pieces[i] for i in row])) for row in order])
