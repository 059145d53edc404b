"""FedPer: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", 2019.

The personalisation layer is the last linear one (FedNH paper, appendix): the body is shared, the head stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from fednh.methods.base import MODEL, ClientData, Fit, Method, Net, Tree, cross_entropy, select


@dataclass(frozen=True)
class FedPer(Method):
    """The body is shared; every client keeps a head of its own, trained together with the body."""

    cite = "Arivazhagan et al., Federated Learning with Personalization Layers, arXiv:1912.00818, 2019"
    look = ("#009e73", 10)
    headless = True

    def enroll(self, initial: Tree) -> Tree:
        return select(initial, "head")

    def broadcast(self, server: Tree) -> Tree:
        return select(server, "body")

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        model = fit({**kept, **received}, cross_entropy(net.logits), only=MODEL)  # the head kept, the body received
        return model, select(model, "body")
