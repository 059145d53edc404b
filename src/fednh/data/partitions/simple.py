"""Partitions of a few lines: equal parts, classes or shards per client, uneven sizes, and the natural sites."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fednh.data.dataset import Dataset
from fednh.data.partitions.base import Beta, Count, Drawn, Indices, Partition, by_owner
from fednh.errors import DataError
from fednh.text import name_problem


@dataclass(frozen=True)
class Iid(Drawn):
    """A random split into equal parts."""

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


@dataclass(frozen=True)
class ClassesPerClient(Drawn):
    """Every client holds the same number of classes; a class is divided evenly among those who hold it."""

    name = "classes"
    help = "the same number of classes for every client (classes_per_client)"
    shown = ("classes_per_client",)

    classes_per_client: Count = 2  # of how many classes a client has samples

    def column(self) -> str:
        return f"{self.classes_per_client} classes"

    def _draw(self, labels: Indices, rng: np.random.Generator) -> list[Indices]:
        present, clients, each = np.unique(labels), self.clients, self.classes_per_client
        if each > len(present):
            raise DataError(f"partition.classes_per_client = {each}, but the data has only {len(present)} classes")
        if clients * each < len(present):
            raise DataError(
                f"partition: {clients} clients of {each} classes each cannot cover {len(present)} classes; "
                f"raise partition.classes_per_client or partition.clients"
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


@dataclass(frozen=True)
class Shards(Drawn):
    """Samples sorted by label, cut into shards of equal size, dealt at random (McMahan et al. 2017)."""

    name = "shards"
    help = "samples sorted by label, cut into shards, the same number for every client (shards_per_client)"
    shown = ("shards_per_client",)

    shards_per_client: Count = 2  # pieces of the samples sorted by class

    def column(self) -> str:
        return f"{self.shards_per_client} shards"

    def _draw(self, labels: Indices, rng: np.random.Generator) -> list[Indices]:
        count = self.clients * self.shards_per_client
        if count > len(labels):
            raise DataError(
                f"partition: {len(labels)} samples cannot be cut into {count} shards; "
                f"lower partition.clients or partition.shards_per_client"
            )
        by_label = np.lexsort((rng.random(len(labels)), labels))
        pieces = np.array_split(by_label, count)
        order = rng.permutation(len(pieces)).reshape(self.clients, self.shards_per_client)
        return self._large_enough([np.sort(np.concatenate([pieces[i] for i in row])) for row in order])


@dataclass(frozen=True)
class Quantity(Drawn):
    """Sizes by one Dirichlet draw, labels at random: clients differ in amount, not in kind."""

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
        raise DataError(
            f"partition: no Dirichlet({self.beta:g}) draw of sizes in {self.tries} gave all {self.clients} clients at "
            f"least {self.min_samples} samples; use fewer clients, a larger beta, or lower partition.min_samples"
        )


@dataclass(frozen=True)
class BySite(Partition):
    """The natural sites: client k holds what the k-th site of the data holds."""

    name = "site"
    help = "the sites that the data names: a column, or a folder a site"
    natural = True

    def column(self) -> str:
        return "sites"

    def words(self) -> str:
        return "natural sites"

    def divide(self, data: Dataset, rng: np.random.Generator) -> list[Indices]:
        if data.site_train is None:
            raise DataError(f"partition.name = 'site', but {data.name} does not say which site a sample comes from")
        for site in data.sites:
            if problem := name_problem(site):
                raise DataError(f"{data.name} names a site {site!r}: {problem}; rename it")
        parts = by_owner(data.site_train, len(data.sites))
        for site, part in zip(data.sites, parts, strict=True):
            if len(part) < self.min_samples:
                raise DataError(
                    f"partition: the site {site!r} has only {len(part)} training samples, fewer than "
                    f"{self.min_samples}; leave it out or lower partition.min_samples"
                )
        return parts
