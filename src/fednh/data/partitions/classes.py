"""Every client holds the same number of classes; a class is divided evenly among those who hold it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fednh.data.partitions.base import Count, Drawn, Indices, by_owner
from fednh.errors import UserError


@dataclass(frozen=True)
class ClassesPerClient(Drawn):
    name = "classes"
    help = "the same number of classes for every client (classes_per_client)"
    shown = ("classes_per_client",)

    classes_per_client: Count = 2

    def column(self) -> str:
        return f"{self.classes_per_client} classes"

    def _draw(self, labels: Indices, rng: np.random.Generator) -> list[Indices]:
        present, clients, each = np.unique(labels), self.clients, self.classes_per_client
        if each > len(present):
            raise UserError(f"partition.classes_per_client = {each}, but the data has only {len(present)} classes")
        if clients * each < len(present):
            raise UserError(
                f"partition: {clients} clients of {each} classes each cannot cover {len(present)} classes; "
                f"raise partition.classes_per_client or --clients"
            )
        holders: list[list[int]] = [[] for _ in present]
        load = np.zeros(len(present))
        for client in range(clients):  # the classes with the fewest holders so far, ties broken at random
            for c in np.lexsort((rng.random(len(present)), load))[:each]:
                holders[c].append(client)
                load[c] += 1
        owner = np.empty(len(labels), np.int64)
        for label, who in zip(present, holders, strict=True):
            members = rng.permutation(np.flatnonzero(labels == label))
            for client, part in zip(rng.permutation(who), np.array_split(members, len(who)), strict=True):
                owner[part] = client
        return self._large_enough(by_owner(owner, clients))
