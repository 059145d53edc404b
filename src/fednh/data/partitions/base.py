"""What a partition is: settings, and a rule that deals training samples to clients. One file a kind beside this one.

A new kind is such a file and a line in the registry, PARTITIONS in __init__.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fednh.data.dataset import Dataset
from fednh.errors import UserError

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

    min_samples: Count = 10  # of every client

    @abstractmethod
    def divide(self, data: Dataset, rng: np.random.Generator) -> list[Indices]:
        """Client -> the indices of its training samples; every sample lands in exactly one client."""

    def column(self) -> str:
        """At the head of a table's column."""
        return self.name

    def words(self) -> str:
        """In a sentence."""
        return self.name

    def slug(self) -> str:
        """In the name of a run folder."""
        return self.name


@dataclass(frozen=True)
class Drawn(Partition):
    """A partition that is drawn from the labels alone."""

    tries: ClassVar[int] = 1000  # draws before giving up

    clients: Count = 100

    def divide(self, data: Dataset, rng: np.random.Generator) -> list[Indices]:
        return self.draw(data.y_train, rng)

    def draw(self, labels: Indices, rng: np.random.Generator) -> list[Indices]:
        """The clients' indices, if there are enough samples for all."""
        if len(labels) < self.clients * self.min_samples:
            raise UserError(
                f"partition: {len(labels)} training samples cannot give {self.clients} clients at least "
                f"{self.min_samples} each; lower --clients or partition.min_samples"
            )
        return self._draw(labels, rng)

    @abstractmethod
    def _draw(self, labels: Indices, rng: np.random.Generator) -> list[Indices]: ...

    def _large_enough(self, parts: list[Indices]) -> list[Indices]:
        smallest = min(range(len(parts)), key=lambda k: len(parts[k]))
        if len(parts[smallest]) < self.min_samples:
            raise UserError(
                f"partition: client {smallest} gets only {len(parts[smallest])} samples, fewer than "
                f"{self.min_samples}; lower --clients or partition.min_samples"
            )
        return parts


def by_owner(owner: Indices, clients: int) -> list[Indices]:
    """Sample -> client turned round: client -> its samples, in their order."""
    order = np.argsort(owner, kind="stable")
    return list(np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1]))


def class_table(labels: Indices, owner: Indices, clients: int, width: int | None = None) -> NDArray[np.int64]:  # (K, C)
    """How many samples of each class every client holds; `width` is the number of classes, if not the labels' own."""
    width = width or int(labels.max()) + 1
    return np.bincount(owner * width + labels, minlength=clients * width).reshape(clients, width)
