"""FedPer: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", 2019.

The personalisation layer is the last linear one (FedNH paper, appendix): the body is shared, the head stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fednh.core.fit import Fit
from fednh.core.losses import cross_entropy
from fednh.core.tree import Tree, mean, select
from fednh.data.batches import ClientData
from fednh.methods.base import MODEL, Method
from fednh.models.net import Net


@dataclass(frozen=True)
class FedPer(Method):
    """The body is shared; every client keeps a head of its own, trained together with the body."""

    cite = "Arivazhagan et al., Federated Learning with Personalization Layers, arXiv:1912.00818, 2019"

    def enroll(self, initial: Tree) -> Tree:
        return select(initial, "head")

    def broadcast(self, server: Tree) -> Tree:
        return select(server, "body")

    def client_update(self, net: Net, own: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        own = fit(own, cross_entropy(net.logits), only=MODEL)
        return own, select(own, "body")

    def aggregate(self, server: Tree, uploads: Iterable[Tree]) -> Tree:
        return {**server, **mean(uploads)}
