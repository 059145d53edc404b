"""The kinds of partitions. Settings, their ranges, the command line, tables and tests derive from PARTITIONS.

Dirichlet is the paper's: every class dealt by a Dirichlet draw, the scheme of FedDF (Lin et al. 2020). With long-tailed
class sizes before the draw it is the setting of CReFF, FedETF and FedLoGe. The sizes are those of long-tailed CIFAR
(Cao et al., NeurIPS 2019): class c of C keeps n_c = n_max * IF^(-c / (C - 1)) samples, rounded down, so that the
imbalance factor IF is the largest class size over the smallest.

To add a kind: a frozen dataclass here, and its name in PARTITIONS.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fednh.data import declared_settings
from fednh.data.dataset import Dataset
from fednh.data.partitions import Beta, Count, Drawn, Indices, Partition, by_owner, class_table
from fednh.errors import DataError, UserError
from fednh.text import name_problem

HOPELESS = 20, 30  # give up when each of 20 draws left 30 or more clients short: success is then as rare as e^-30


@dataclass(frozen=True)
class Dirichlet(Drawn):
    """A client that already holds its fair share N/K gets no more of the later classes.

    Drawn again until every client has `min_samples` samples of at least `min_classes` classes.
    """

    name = "dirichlet"
    help = "every class dealt by a Dirichlet(beta) draw; smaller beta is more uneven"
    shown: ClassVar[tuple[str, ...]] = ("beta",)
    at_head, in_words, in_path = "Dir({beta:g})", "Dirichlet({beta:g})", "dirichlet{beta:g}"

    beta: Beta = 0.3
    min_classes: Count = 2  # of every client

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
    at_head = "Dir({beta:g}), IF {imbalance:g}"
    in_words = "long tail (IF {imbalance:g}), Dirichlet({beta:g})"
    in_path = "longtail{imbalance:g}-dir{beta:g}"

    imbalance: Annotated[float, Field(ge=1)] = 100.0  # IF: the largest class over the smallest

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


@dataclass(frozen=True)
class Iid(Drawn):
    """A random split into equal parts."""

    name = "iid"
    help = "equal parts at random"
    at_head = "IID"

    def _draw(self, labels: Indices, rng: np.random.Generator) -> list[Indices]:
        order = rng.permutation(len(labels))
        owner, each = np.empty(len(labels), np.int64), len(labels) // self.clients
        more = np.arange(self.clients) < len(labels) % self.clients  # these have one sample more
        owner[order] = np.repeat(np.arange(self.clients), each + more)
        return by_owner(owner, self.clients)


@dataclass(frozen=True)
class ClassesPerClient(Drawn):
    """Every client holds the same number of classes; a class is divided evenly among those who hold it."""

    name = "classes"
    help = "the same number of classes for every client (classes_per_client)"
    shown = ("classes_per_client",)
    at_head = "{classes_per_client} classes"

    classes_per_client: Count = 2  # of how many classes a client has samples

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
    at_head = "{shards_per_client} shards"

    shards_per_client: Count = 2  # pieces of the samples sorted by class

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
    at_head, in_words, in_path = "Dir sizes({beta:g})", "Dirichlet sizes({beta:g})", "quantity{beta:g}"

    beta: Beta = 0.3

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
    at_head, in_words = "sites", "natural sites"

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


PARTITIONS: dict[str, type[Partition]] = {
    kind.name: kind for kind in (Dirichlet, LongTail, Iid, ClassesPerClient, Shards, Quantity, BySite)
}


def settings() -> dict[str, tuple[Any, Any]]:
    """The settings of all kinds: name -> type with its range, and default."""
    return declared_settings(PARTITIONS.values(), "partition")


def uses(name: str, setting: str) -> bool:
    """Whether the partition `name` uses partition.`setting`."""
    return setting == "name" or setting in {field.name for field in fields(PARTITIONS[name])}
