"""Partition: settings, and a rule that deals training samples to clients. A new kind derives from `Drawn` or from it.

PARTITIONS in kinds.py lists all kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fednh.data.dataset import Dataset
from fednh.errors import DataError, UserError

Indices = NDArray[np.int64]
Count = Annotated[int, Field(ge=1, le=10**9)]  # more is a typing error
Beta = Annotated[float, Field(gt=0)]  # of a Dirichlet distribution: smaller is more uneven


@dataclass(frozen=True)
class Partition(ABC):
    """A rule for which client holds what. Its fields are the settings below [partition] that it uses, with ranges."""

    name: ClassVar[str]  # partition.name
    help: ClassVar[str]  # one line for people
    natural: ClassVar[bool] = False  # the clients are the sites that the data names, not drawn
    shown: ClassVar[tuple[str, ...]] = ()  # the settings that `column` shows
    at_head: ClassVar[str] = ""  # what people call it, with its settings in braces: see `column`; empty: its name ...
    in_words: ClassVar[str] = ""  # ... as `words` has it ...
    in_path: ClassVar[str] = ""  # ... and as `slug` has it

    min_samples: Count = 10  # of every client

    @abstractmethod
    def divide(self, data: Dataset, rng: np.random.Generator) -> list[Indices]:
        """Client -> the indices of its training samples; a sample lands in one client, or is left out (`left_out`)."""

    def column(self) -> str:
        """At the head of a table's column."""
        return (self.at_head or self.name).format(**vars(self))

    def words(self) -> str:
        """In a sentence."""
        return (self.in_words or self.name).format(**vars(self))

    def slug(self) -> str:
        """In the name of a run folder."""
        return (self.in_path or self.name).format(**vars(self))


@dataclass(frozen=True)
class Drawn(Partition):
    """A partition that is drawn from the labels alone."""

    tries: ClassVar[int] = 1000  # draws before giving up

    clients: Count = 100

    def divide(self, data: Dataset, rng: np.random.Generator) -> list[Indices]:
        return self.draw(data.y_train, rng, data.group_train)

    def draw(self, labels: Indices, rng: np.random.Generator, groups: Indices | None = None) -> list[Indices]:
        """The clients' indices, if there are enough samples for all; samples of one group go to one client."""
        if len(labels) < self.clients * self.min_samples:
            raise DataError(
                f"partition: {len(labels)} training samples cannot give {self.clients} clients at least "
                f"{self.min_samples} each; lower partition.clients or partition.min_samples"
            )
        return self._draw(labels, rng) if groups is None else self._draw_groups(labels, groups, rng)

    @abstractmethod
    def _draw(self, labels: Indices, rng: np.random.Generator) -> list[Indices]: ...

    def _draw_groups(self, labels: Indices, groups: Indices, rng: np.random.Generator) -> list[Indices]:
        """Whole groups are dealt, each as one sample of the class that most of its samples have.

        They are dealt again until every client has the samples (and classes) that it needs.
        """
        group = np.unique(groups, return_inverse=True)[1].astype(np.int64)
        table = class_table(labels, group, int(group.max()) + 1)  # (G, C)
        whole = f"with data.group whole groups are dealt, and there are {len(table)}"
        if len(table) < self.clients:
            raise DataError(f"partition.clients = {self.clients} cannot each have a group: {whole}; lower it")
        for _ in range(self.tries):
            try:
                parts = self._easier()._draw(table.argmax(axis=1), rng)
            except UserError as error:
                raise DataError(f"{error} ({whole})") from error
            if not self._short(np.stack([table[part].sum(axis=0) for part in parts])).any():
                owner = np.empty(len(table), np.int64)
                owner[np.concatenate(parts)] = np.repeat(np.arange(self.clients), [len(part) for part in parts])
                return by_owner(owner[group], self.clients)
        raise DataError(
            f"partition: no draw in {self.tries} gave all {self.clients} clients what they need ({whole}, of up to "
            f"{table.sum(axis=1).max()} samples); lower partition.clients or partition.min_samples"
        )

    def _easier(self) -> Self:
        """The same partition without demands on what every client has: samples are not yet counted."""
        return replace(self, min_samples=1)

    def _short(self, table: NDArray[np.int64]) -> NDArray[np.bool_]:  # (K, C) -> (K,)
        """The clients that have not what they need, given how many samples of each class all have."""
        lacking: NDArray[np.bool_] = table.sum(axis=1) < self.min_samples
        return lacking

    def _large_enough(self, parts: list[Indices]) -> list[Indices]:
        smallest = min(range(len(parts)), key=lambda k: len(parts[k]))
        if len(parts[smallest]) < self.min_samples:
            raise DataError(
                f"partition: client {smallest} gets only {len(parts[smallest])} samples, fewer than "
                f"{self.min_samples}; lower partition.clients or partition.min_samples"
            )
        return parts


def left_out(kind: Partition, data: Dataset, parts: Sequence[Indices], held_out: Sequence[Indices]) -> list[str]:
    """A sentence, where a partition leaves training samples out."""
    total, used = len(data.y_train), sum(map(len, [*parts, *held_out]))
    words = f"{total - used:,} of {total:,} training samples are left out by the partition, {kind.words()}"
    return [f"{words}: no client has them"] if used < total else []


def by_owner(owner: Indices, clients: int) -> list[Indices]:
    """Sample -> client turned round: client -> its samples, in their order."""
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=clients)).tolist()
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def class_table(labels: Indices, owner: Indices, clients: int, width: int | None = None) -> NDArray[np.int64]:  # (K, C)
    """How many samples of each class every client holds; `width` is the number of classes, if not the labels' own."""
    width = width or int(labels.max()) + 1
    return np.bincount(owner * width + labels, minlength=clients * width).reshape(clients, width)
