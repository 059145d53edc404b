"""An independent way to the same numbers: plain nn.Modules, torch.optim, one full batch a step, no Trees.

Batches hold all of a client's samples, so the order of samples does not matter and an epoch is one step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednh.data.batches import ClientData, Samples
from fednh.federated import client
from fednh.federated.aggregate import accumulator
from fednh.methods import Method
from fednh.methods.fit import Sgd
from fednh.models import Net
from fednh.tree import Tree, Uploads, select
from tests.helpers.tiny import CLIENTS

SGD = Sgd(lr=0.2, momentum=0.9, weight_decay=0.01, clip=1.0, batch_size=100, epochs=3)


# Methods whose defaults are heavy for eleven samples, or show nothing in a round or two.
QUICK: dict[str, dict[str, int]] = {
    "creff": {"features_per_class": 5, "match_steps": 5, "retrain_epochs": 5},
    "fedetf": {"turns": 1, "turn_epochs": 1},
    "floco": {"endpoints": 3, "tau": 1},  # places from the first round on
}


class TwoPart(nn.Module):
    """body = linear + ReLU, head = linear without bias: the `net` fixture's network."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.head = nn.Linear(5, 4, bias=False)

    def features(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    @classmethod
    def of(cls, tree: Tree) -> TwoPart:
        module = cls()
        with torch.no_grad():
            module.linear.weight.copy_(tree["body.linear1.weight"])
            module.linear.bias.copy_(tree["body.linear1.bias"])
            module.head.weight.copy_(tree["head.weight"])
        return module

    def body_tree(self) -> Tree:
        return {
            "body.linear1.weight": self.linear.weight.detach().clone(),
            "body.linear1.bias": self.linear.bias.detach().clone(),
        }

    def tree(self) -> Tree:
        return {**self.body_tree(), "head.weight": self.head.weight.detach().clone()}


def train(
    parameters: list[nn.Parameter], loss: Callable[[], Tensor], epochs: int = SGD.epochs, plain: bool = False
) -> None:
    """`plain`: without momentum, weight decay and clipping."""
    more = {} if plain else {"momentum": SGD.momentum, "weight_decay": SGD.weight_decay}
    optimiser = torch.optim.SGD(parameters, SGD.lr, **more)
    for _ in range(epochs):
        optimiser.zero_grad()
        loss().backward()
        if not plain:
            nn.utils.clip_grad_norm_(parameters, SGD.clip)
        optimiser.step()


def trained(module: TwoPart, x: Tensor, y: Tensor, epochs: int = SGD.epochs) -> TwoPart:
    """A copy, trained as a whole with cross-entropy."""
    module = copy.deepcopy(module)
    train(list(module.parameters()), lambda: F.cross_entropy(module(x), y), epochs)
    return module


def average(trees: list[Tree]) -> Tree:
    return {name: sum(t[name] for t in trees) / len(trees) for name in trees[0]}  # type: ignore[misc]


class Play:
    """One round of a method on the two tiny clients, through the engine's own functions."""

    def __init__(self, method: Method, net: Net, samples: Samples):
        self.method, self.net = method, net
        self.data = [ClientData(samples, np.asarray(index), client=k) for k, index in enumerate(CLIENTS)]
        self.xy = [(samples.x[d.index], d.y) for d in self.data]
        self.initial = method.init(net, torch.Generator().manual_seed(5))
        self.kept = [method.enroll(self.initial) for _ in CLIENTS]
        self.server = self.initial
        self.records: list[Tree] = [{} for _ in CLIENTS]

    def round(self, clients: Sequence[int] = (0, 1)) -> list[client.ClientResult]:
        """Only some of the `clients` may take part; their results."""
        updates = [
            client.update(self.method, self.net, self.kept[k], self.received(k), self.data[k], SGD) for k in clients
        ]
        uploads = averaged_by("mean", [u.upload or {} for u in updates], self.server, self.method)
        self.server = self.method.aggregate(self.server, uploads)
        parts = [select(u.upload or {}, *self.method.upload.recorded) for u in updates]
        made = self.method.records(self.server, parts)
        self.kept, self.records = list(self.kept), list(self.records)
        for k, update, record in zip(clients, updates, made, strict=True):
            self.kept[k], self.records[k] = update.keep, record
        return updates

    def received(self, k: int) -> Tree:
        return {**self.method.broadcast(self.server), **self.records[k]}

    def personal(self, k: int) -> Tree:
        return client.personal_model(self.method, self.net, self.kept[k], self.received(k), self.data[k], SGD)


def averaged_by(
    name: str, trees: Iterable[Tree], server: Tree, method: Method, samples: Sequence[int] = (), trim: float = 0.2
) -> Uploads:
    """Uploads averaged by a rule, as the round loop does it: one by one into an accumulator."""
    into = accumulator(name, server, trim, method)
    for k, tree in enumerate(trees):
        into.add(tree, samples[k] if samples else 1)
    return into.uploads()
