"""FedBN: Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
ICLR 2021, Algorithm 1.

Everything is averaged except the parameters of normalisation layers, which every client keeps to itself. This works for
group and layer normalisation too. A model with batch normalisation needs model.norm = "local", which keeps parameters
and running statistics at the client for every method; FedAvg is then FedBN. Without normalisation layers it is FedAvg.
The global model has the averaged weights and the initial normalisation, which is never trained at the server.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fednh.methods.base import MODEL, ClientData, Fit, Method, Net, Tree, cross_entropy, prefix, select, strip_prefix


@dataclass(frozen=True)
class FedBN(Method):
    """FedAvg with normalisation layers of every client's own: they are neither sent nor averaged."""

    cite = "Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021"
    look = ("#c9a24b", 12)

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        model = net.init(rng)
        norm = {name: model.pop(name) for name in net.norms}
        return {**model, **prefix("norm", norm)}

    def enroll(self, initial: Tree) -> Tree:
        return select(initial, "norm")

    def broadcast(self, server: Tree) -> Tree:
        return select(server, *MODEL)

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        model = fit(whole({**kept, **received}), cross_entropy(net.logits), only=MODEL)  # the normalisation kept
        norm = {name: model.pop(name) for name in net.norms}
        return {**model, **prefix("norm", norm)}, model

    def global_model(self, server: Tree) -> Tree:
        return whole(server)

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        return whole({**received, **kept})


def whole(tree: Tree) -> Tree:
    """The model with the normalisation in its place."""
    return {**select(tree, *MODEL), **strip_prefix(tree, "norm")}
