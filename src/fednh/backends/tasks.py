"""What the clients of an exchange compute, wherever that is: in a thread of this process, or on another machine.

A `ClientTask` is what all clients of an exchange do: train a round, or have their personal models measured. It is a
value that can be sent, and calling it is a pure function of the `SimulatedData`, the clients and what they kept.
Clients come in batches: one client, or a block of small ones that are computed together. How clients are divided into
batches decides the last bits of a result; where and when a batch is computed does not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fednh.backends.private_vmap import private_update_block
from fednh.backends.vmap import Block, update_block
from fednh.config.schema import OWN, PersonalConfig
from fednh.data.batches import ClientData, Samples, subset
from fednh.data.partitions import Indices
from fednh.federated import checks, evaluate, similarity
from fednh.federated import client as clients
from fednh.federated.aggregate import ClientOverrides, SumRule, received
from fednh.federated.architectures import Architectures
from fednh.federated.client import ClientResult
from fednh.federated.compress import Compression
from fednh.federated.evaluate import Personal
from fednh.federated.setup import Federation, client_name
from fednh.interrupt import no_progress
from fednh.methods.base import Method
from fednh.methods.optimizers import FitSettings
from fednh.models.net import Net
from fednh.privacy.noise import SeededNoise
from fednh.privacy.private_data import Mechanisms
from fednh.text import one_line
from fednh.tree import Tree, canonical, has_prefix

ClientBatch = Sequence[int]  # the clients that are computed together
Tick = Callable[[int], None]


@dataclass(frozen=True)
class SimulatedData:
    """The part of a federation that clients work on."""

    train: Samples
    test: Samples
    parts: Sequence[Indices]  # client -> indices into `train`, to train on
    held_out: Sequence[Indices]  # client -> indices into `train`, to measure on
    architectures: Architectures
    dealt: tuple[str, ...]  # client -> the name of its network
    sites: tuple[str, ...] = ()

    @classmethod
    def of(cls, fed: Federation) -> SimulatedData:
        return cls(fed.train, fed.test, fed.parts, fed.held_out, fed.architectures, fed.dealt, fed.sites)

    @property
    def method(self) -> Method:
        return self.architectures.method

    def net(self, client: int) -> Net:
        return self.architectures.nets[self.dealt[client]]

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

    down: Tree  # what clients received, each the view of its own network ...
    records: ClientOverrides = field(default_factory=dict, kw_only=True)  # ... and what these received in place of it

    @abstractmethod
    def __call__(
        self, on: SimulatedData, batch: ClientBatch, kept: Sequence[Tree], tick: Tick = no_progress
    ) -> list[Any]:
        """The results of the batch's clients, in their order."""

    def received(self, on: SimulatedData, client: int) -> Tree:
        return received(on.architectures.view(self.down, on.dealt[client]), self.records, client)

    def samples(self, on: SimulatedData, client: int) -> int:
        """How many samples of a client the progress of an evaluation counts."""
        return 0


@dataclass(frozen=True)
class TrainTask(ClientTask):
    """One round of training."""

    settings: FitSettings
    seed: int
    round: int
    gradient_norm: bool = False
    together: bool = False  # a batch is a block for vmap
    mechanisms: Mechanisms | None = None  # noise in all that a client releases; None: there is none
    sums: SumRule | None = None  # only the sum of uploads is needed, by this rule; None: each of them is

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
                net, down = on.net(client), self.received(on, client)
                if self.mechanisms is None:
                    made.append(clients.update(on.method, net, mine, down, data, self.settings, self.gradient_norm))
                    continue
                noise, how = SeededNoise(self.seed, self.round, client), (self.settings, self.mechanisms)
                made.append(clients.private_update(on.method, net, mine, down, data, *how, noise))
            except Exception as error:  # anything a method, a model or a disk may raise; the caller reports it
                words = checks.error_sentence(on.method, error, f"{on.name(client)} failed in round {self.round}")
                made.append(ClientResult(status="failed", problem=words, error=error))
        if why and all(result.upload is not None for result in made):
            made = [replace(result, fallback_reason=why) for result in made]
        return made

    def _block(self, on: SimulatedData, batch: ClientBatch, kept: Sequence[Tree]) -> list[ClientResult]:
        # Clients of one network that kept the same names are computed together; new clients may have kept none.
        alike: dict[tuple[str, ...], dict[int, Tree]] = {}
        for client, mine in zip(batch, kept, strict=True):
            alike.setdefault((on.dealt[client], *sorted(mine)), {})[client] = mine
        done = {client: update for some in alike.values() for client, update in self._together(on, some).items()}
        return [done[client] for client in batch]

    def _together(self, on: SimulatedData, kept: dict[int, Tree]) -> dict[int, ClientResult]:
        members = list(kept)
        block = Block(on.train, [on.parts[k] for k in members], members, self.seed, self.round, "train")
        names = {name for k in members for name in self.records.get(k, ())}
        own = [{name: self.received(on, k)[name] for name in sorted(names)} for k in members]
        states, net = list(kept.values()), on.net(members[0])
        down = on.architectures.view(self.down, on.dealt[members[0]])
        if self.mechanisms is None:
            made = update_block(on.method, net, block, states, down, self.settings, own)
        else:
            noises = [SeededNoise(self.seed, self.round, k) for k in members]
            made = private_update_block(
                on.method, net, block, states, down, self.settings, own, self.mechanisms, noises
            )
        return dict(zip(members, made, strict=True))


@dataclass(frozen=True)
class CompressedTrainTask(TrainTask):
    """One round of training whose uploads are what is left of them after compression (federated/compress.py)."""

    compression: Compression = field(kw_only=True)

    def __call__(
        self, on: SimulatedData, batch: ClientBatch, kept: Sequence[Tree], tick: Tick = no_progress
    ) -> list[ClientResult]:
        bare = [
            {name: value for name, value in mine.items() if not has_prefix(name, (clients.UNSENT,))} for mine in kept
        ]
        made, spec = super().__call__(on, batch, bare, tick), on.method.upload
        return [
            self.compression.applied(result, mine, self.received(on, client), spec)
            for client, mine, result in zip(batch, kept, made, strict=True)
        ]


@dataclass(frozen=True)
class EvaluateTask(ClientTask):
    """Personal models as a round left them, measured; `final`: they are also returned, to be saved."""

    shared: Mapping[str, Tree]  # the global model of each network, where held-out samples measure it too
    settings: FitSettings
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
        held = len(on.held_out[client]) * (2 if self.shared else 1)
        saved = similarity.sample_count(on.method, len(on.parts[client])) if self.final else 0
        own = torch.bincount(on.train.y[torch.from_numpy(on.parts[client])], minlength=on.train.num_classes)
        tested = len(on.test) if self.final else len(clients.of_own_classes(on.test, own))
        return tested + held + saved

    def _one(self, on: SimulatedData, client: int, kept: Tree, tick: Tick) -> Measured:
        method, net, part, shared = on.method, on.net(client), on.parts[client], self.shared.get(on.dealt[client])
        with checks.with_context(method, f"the personal model of {on.name(client)} failed after round {self.round}"):
            data = ClientData(on.train, part, self.seed, self.round, client, "personal")
            down = self.received(on, client)
            model = clients.personal_model(method, net, kept, down, data, self.settings, tick, self.how)
            about = (
                similarity.similarity_quantiles(method, net, model, on.train, part, self.seed, tick)
                if self.final
                else None
            )
            held = subset(on.train, on.held_out[client])
            person = clients.measured(method, net, client, data, model, shared, on.test, held, tick, self.final)
            if self.final:
                trees = [canonical(tree) for tree in (model, shared) if tree is not None]
                person = evaluate.with_confidence(person, held, *(partial(method.scores, net, tree) for tree in trees))
        return Measured(person, model if self.final else None, about)
