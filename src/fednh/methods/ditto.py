"""Ditto: Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.

Algorithm 1 with FedAvg as its global solver. The personal model v is pulled towards the model w *received* in the
round, as the paper has it (the FedNH authors' code pulls towards the locally trained one).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from fednh.core.fit import Fit
from fednh.core.losses import cross_entropy, squared_distance
from fednh.core.tree import Tree, below, mean, prefix, select
from fednh.data.batches import ClientData
from fednh.methods.base import MODEL, Method
from fednh.models.net import Net


@dataclass(frozen=True)
class Ditto(Method):
    """FedAvg beside a personal model of every client, which a proximal term ties to the global one."""

    cite = "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021"

    lam: Annotated[float, Field(ge=0)] = 0.75  # lambda, the strength of the tie, Eq. (2)

    def enroll(self, initial: Tree) -> Tree:
        return prefix("personal", initial)

    def broadcast(self, server: Tree) -> Tree:
        return server

    def client_update(self, net: Net, own: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        received, personal = select(own, *MODEL), below(own, "personal")
        loss = cross_entropy(net.logits)

        def proximal(v: Tree, x: Tensor, y: Tensor) -> Tensor:
            return loss(v, x, y) + self.lam / 2 * squared_distance(v, received)

        shared = fit(received, loss, only=MODEL)  # first, so that it sees the very batches that FedAvg's would
        return prefix("personal", fit(personal, proximal, only=MODEL)), shared

    def aggregate(self, server: Tree, uploads: Iterable[Tree]) -> Tree:
        return mean(uploads)

    def personal_model(self, net: Net, own: Tree, data: ClientData, fit: Fit) -> Tree:
        return below(own, "personal")
