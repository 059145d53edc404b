"""What the clients of an exchange compute, wherever that is: in a thread of this process, or on another machine.

A `ClientTask` is what all clients of an exchange do: train a round, or have their personal models measured. It is a
value that can be sent, and calling it is a pure function of the `SimulatedData`, the clients and what they kept.
Clients come in batches: one client, or a block of small ones that are computed together. How clients are divided into
batches decides the last bits of a result; where and when a batch is computed does not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fednh.backends.vmap import Block, update_block
from fednh.config.schema import OWN, PersonalConfig
from fednh.data.batches import ClientData, Samples, subset
from fednh.data.partitions import Indices
from fednh.federated import checks, evaluate, similarity
from fednh.federated import client as clients
from fednh.federated.aggregate import ClientOverrides, received
from fednh.federated.client import ClientResult
from fednh.federated.evaluate import Personal
from fednh.federated.setup import Federation, client_name
from fednh.interrupt import no_progress
from fednh.methods.base import Method
from fednh.methods.fit import Sgd
from fednh.models.net import Net
from fednh.text import one_line
from fednh.tree import Tree, canonical

ClientBatch = Sequence[int]  # the clients that are computed together
Tick = Callable[[int], None]


@dataclass(frozen=True)
class SimulatedData:
    """The part of a federation that clients work on."""

    train: Samples
    test: Samples
    parts: Sequence[Indices]  # client -> indices into `train`, to train on
    held_out: Sequence[Indices]  # client -> indices into `train`, to measure on
    net: Net
    method: Method
    sites: tuple[str, ...] = ()

    @classmethod
    def of(cls, fed: Federation) -> SimulatedData:
        return cls(fed.train, fed.test, fed.parts, fed.held_out, fed.net, fed.method, fed.sites)

    def name(self, client: int) -> str:
        return client_name(client, self.sites)


@dataclass(frozen=True)
class Measured:
    """A personal model's metrics; after the last round also the model, and what its file says about novelty."""

    person: Personal
    model: Tree | None = None
    novelty: dict[str, Any] | None = None


@dataclass(frozen=True)
class ClientTask:
    """What all clients of an exchange do."""

    down: Tree  # what every client received ...
    records: ClientOverrides = field(default_factory=dict, kw_only=True)  # ... and what these received in place of it

    @abstractmethod
    def __call__(
        self, on: SimulatedData, batch: ClientBatch, kept: Sequence[Tree], tick: Tick = no_progress
    ) -> list[Any]:
        """The results of the batch's clients, in their order."""

    def received(self, client: int) -> Tree:
        return received(self.down, self.records, client)

    def samples(self, on: SimulatedData, client: int) -> int:
        """How many samples of a client the progress of an evaluation counts."""
        return 0


@dataclass(frozen=True)
class TrainTask(ClientTask):
    """One round of training."""

    sgd: Sgd
    seed: int
    round: int
    gradient_norm: bool = False
    together: bool = False  # a batch is a block for vmap

    def __call__(
        self, on: SimulatedData, batch: ClientBatch, kept: Sequence[Tree], tick: Tick = no_progress
    ) -> list[ClientResult]:
        why = ""
        if self.together:
            try:
                return list(self._block(on, batch, kept))
            except Exception as error:  # one by one: the error names the client that fails, and the others succeed
                why = f"{type(error).__name__}: {one_line(str(error), 200)}"
        made = []
        for client, mine in zip(batch, kept, strict=True):
            try:
                data = ClientData(on.train, on.parts[client], self.seed, self.round, client, "train")
                checks.check_share(data.share, client)
                down = self.received(client)
                made.append(clients.update(on.method, on.net, mine, down, data, self.sgd, self.gradient_norm))
            except Exception as error:  # anything a method, a model or a disk may raise; the caller reports it
                words = checks.error_sentence(on.method, error, f"{on.name(client)} failed in round {self.round}")
                made.append(ClientResult(status="failed", problem=words, error=error))
        if why and all(result.upload is not None for result in made):
            made = [replace(result, fallback_reason=why) for result in made]
        return made

    def _block(self, on: SimulatedData, batch: ClientBatch, kept: Sequence[Tree]) -> list[ClientResult]:
        # Clients that kept the same names are computed together; new clients may have kept none.
        alike: dict[tuple[str, ...], dict[int, Tree]] = {}
        for client, mine in zip(batch, kept, strict=True):
            alike.setdefault(tuple(sorted(mine)), {})[client] = mine
        done = {client: update for some in alike.values() for client, update in self._together(on, some).items()}
        return [done[client] for client in batch]

    def _together(self, on: SimulatedData, kept: dict[int, Tree]) -> dict[int, ClientResult]:
        members = list(kept)
        block = Block(on.train, [on.parts[k] for k in members], members, self.seed, self.round, "train")
        names = {name for k in members for name in self.records.get(k, ())}
        own = [{name: self.received(k)[name] for name in sorted(names)} for k in members]
        made = update_block(on.method, on.net, block, list(kept.values()), self.down, self.sgd, own)
        return dict(zip(members, made, strict=True))


@dataclass(frozen=True)
class EvaluateTask(ClientTask):
    """Personal models as a round left them, measured; `final`: they are also returned, to be saved."""

    shared: Tree | None  # the global model, where held-out samples measure it too
    sgd: Sgd
    seed: int
    round: int
    final: bool = False
    how: PersonalConfig = field(default=OWN, kw_only=True)

    def __call__(
        self, on: SimulatedData, batch: ClientBatch, kept: Sequence[Tree], tick: Tick = no_progress
    ) -> list[Measured]:
        return [self._one(on, client, mine, tick) for client, mine in zip(batch, kept, strict=True)]

    def samples(self, on: SimulatedData, client: int) -> int:
        """How many samples pass forward through the network."""
        held = len(on.held_out[client]) * (1 if self.shared is None else 2)
        saved = similarity.sample_count(on.method, len(on.parts[client])) if self.final else 0
        own = torch.bincount(on.train.y[torch.from_numpy(on.parts[client])], minlength=on.train.num_classes)
        tested = len(on.test) if self.final else len(clients.of_own_classes(on.test, own))
        return tested + held + saved

    def _one(self, on: SimulatedData, client: int, kept: Tree, tick: Tick) -> Measured:
        method, net, part = on.method, on.net, on.parts[client]
        with checks.with_context(method, f"the personal model of {on.name(client)} failed after round {self.round}"):
            data = ClientData(on.train, part, self.seed, self.round, client, "personal")
            model = clients.personal_model(method, net, kept, self.received(client), data, self.sgd, tick, self.how)
            about = (
                similarity.similarity_quantiles(method, net, model, on.train, part, self.seed, tick)
                if self.final
                else None
            )
            held = subset(on.train, on.held_out[client])
            person = clients.measured(method, net, client, data, model, self.shared, on.test, held, tick, self.final)
            if self.final:
                trees = [canonical(tree) for tree in (model, self.shared) if tree is not None]
                person = evaluate.with_confidence(person, held, *(partial(method.scores, net, tree) for tree in trees))
        return Measured(person, model if self.final else None, about)
