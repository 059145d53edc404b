"""FedAvg: McMahan, Moore, Ramage, Hampson, Aguera y Arcas,
"Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1.

Deviation, as in the FedNH paper: the average is uniform over the round's clients, not weighted by their size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fednh.core.fit import Fit
from fednh.core.losses import cross_entropy
from fednh.core.tree import Tree, mean
from fednh.data.batches import ClientData
from fednh.methods.base import MODEL, Method
from fednh.models.net import Net


@dataclass(frozen=True)
class FedAvg(Method):
    """One model for all, averaged; its latest local copy serves as the personal model."""

    cite = "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017"

    def broadcast(self, server: Tree) -> Tree:
        return server

    def client_update(self, net: Net, own: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        own = fit(own, cross_entropy(net.logits), only=MODEL)
        return own, own

    def aggregate(self, server: Tree, uploads: Iterable[Tree]) -> Tree:
        return mean(uploads)
