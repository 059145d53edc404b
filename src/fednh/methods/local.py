"""Local: every client trains alone. The FedNH paper's lower reference, appendix "Choices of Hyper-Parameters".

A client trains in exactly the rounds in which FedAvg would have picked it, so both do the same amount of work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fednh.core.fit import Fit
from fednh.core.losses import cross_entropy
from fednh.core.tree import Tree
from fednh.data.batches import ClientData
from fednh.methods.base import MODEL, Method
from fednh.models.net import Net


@dataclass(frozen=True)
class Local(Method):
    """Nothing is shared: each client trains its own model on its own data."""

    cite = "Dai et al., Tackling Data Heterogeneity in Federated Learning with Class Prototypes, AAAI 2023 (baseline)"

    def enroll(self, initial: Tree) -> Tree:
        return initial

    def broadcast(self, server: Tree) -> Tree:
        return {}

    def client_update(self, net: Net, own: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        return fit(own, cross_entropy(net.logits), only=MODEL), {}

    def aggregate(self, server: Tree, uploads: Iterable[Tree]) -> Tree:
        for _ in uploads:  # each says only "I am done"
            pass
        return server

    def global_model(self, server: Tree) -> None:
        return None
