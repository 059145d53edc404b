"""Local: every client trains alone. The FedNH paper's baseline without sharing, appendix "Choices of Hyper-Parameters".

A client trains in exactly the rounds in which FedAvg would have picked it, so both do the same amount of work.
Nothing is shared: a client's upload is empty and only reports that it has trained.
"""

from __future__ import annotations

from dataclasses import dataclass

from fednh.methods.base import MODEL, ClientData, Fit, Method, Net, Tree, cross_entropy


@dataclass(frozen=True)
class Local(Method):
    """Nothing is shared: each client trains its own model on its own data."""

    cite = "Dai et al., Tackling Data Heterogeneity in Federated Learning with Class Prototypes, AAAI 2023 (baseline)"
    look = ("#8a8f98", 6)
    by_architecture = MODEL

    def enroll(self, initial: Tree) -> Tree:
        return initial

    def broadcast(self, server: Tree) -> Tree:
        return {}

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        return fit(kept, cross_entropy(net.logits), only=MODEL), {}

    def global_model(self, server: Tree) -> None:
        return None
