"""For people's own tests of a method: one round on two clients that are small enough to compute by hand.

>>> from fednh.methods.fedavg import FedAvg
>>> played = one_round(FedAvg())
>>> sorted(played.after) == sorted(played.before), len(played.results)
(True, 2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fednh.data.batches import ClientData, samples_of
from fednh.data.dataset import Dataset
from fednh.federated import client
from fednh.federated.aggregate import accumulator
from fednh.federated.client import ClientResult
from fednh.methods.base import Method
from fednh.methods.fit import Sgd
from fednh.models import Net, build_net
from fednh.tree import Tree

PLAIN = Sgd(lr=0.1, momentum=0.0, weight_decay=0.0, clip=0.0, batch_size=100, epochs=2)  # an epoch is one step


@dataclass(frozen=True)
class OneRound:
    """A round that was played: the server before and after it, and what the clients did."""

    method: Method
    net: Net
    clients: Sequence[ClientData]
    sgd: Sgd
    before: Tree
    after: Tree
    results: Sequence[ClientResult]  # each has `keep` and `upload`

    def personal(self, k: int) -> Tree:
        """The personal model of client `k` after the round."""
        down = self.method.broadcast(self.after)
        return client.personal_model(self.method, self.net, self.results[k].keep, down, self.clients[k], self.sgd)


def tiny_clients() -> tuple[Net, list[ClientData]]:
    """A network of one hidden layer and two clients with three samples each; neither has all three classes."""
    y = np.array([0, 0, 1, 1, 1, 2], np.int64)
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    samples = samples_of(Dataset("tiny", x, y, x, y, ("a", "b", "c"), (0.0,), (1.0,), scale=1.0), "train")
    clients = [ClientData(samples, np.arange(3), client=0), ClientData(samples, np.arange(3, 6), client=1)]
    return build_net("mlp", (4,), 3, {"hidden": [5]}), clients


def one_round(
    method: Method,
    net: Net | None = None,
    clients: Sequence[ClientData] | None = None,
    sgd: Sgd = PLAIN,
    aggregator: str = "mean",
    seed: int = 1,
) -> OneRound:
    """Play the first round of a method, by the functions that every backend calls.

    Without `net` and `clients` these are `tiny_clients()`. `PLAIN` is gradient descent without momentum, decay and
    clipping, two steps a round: easy to repeat with `torch.autograd.grad`.
    """
    tiny = tiny_clients()
    net, clients = net or tiny[0], tiny[1] if clients is None else clients
    before = method.init(net, torch.Generator().manual_seed(seed))
    kept, down = method.enroll(before), method.broadcast(before)
    results = [client.update(method, net, kept, down, data, sgd) for data in clients]
    uploads = accumulator(aggregator, before, 0.2, method)
    for result in results:
        uploads.add(result.upload or {}, result.samples or 0)
    return OneRound(method, net, clients, sgd, before, method.aggregate(before, uploads.uploads()), results)
