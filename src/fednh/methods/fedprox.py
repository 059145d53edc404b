"""FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020, Algorithm 2.

Clients minimise h_k(w; w^t) = F_k(w) + mu/2 ||w - w^t||^2, Eq. (2), so that none drifts far from the model received.
Deviation: every client does all its epochs (the paper lets slow ones stop early, which the same term makes harmless).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from fednh.core.fit import Fit
from fednh.core.losses import cross_entropy, squared_distance
from fednh.core.tree import Tree, mean, select
from fednh.data.batches import ClientData
from fednh.methods.base import MODEL, Method
from fednh.models.net import Net


@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg whose local training is tied to the model received by a proximal term."""

    cite = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"

    mu: Annotated[float, Field(ge=0)] = 0.01  # the strength of the tie, Eq. (2); the paper tries 0.001 to 1

    def broadcast(self, server: Tree) -> Tree:
        return server

    def client_update(self, net: Net, own: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        received, loss = select(own, *MODEL), cross_entropy(net.logits)

        def proximal(w: Tree, x: Tensor, y: Tensor) -> Tensor:
            return loss(w, x, y) + self.mu / 2 * squared_distance(w, received)

        model = fit(received, proximal, only=MODEL)
        return model, model

    def aggregate(self, server: Tree, uploads: Iterable[Tree]) -> Tree:
        return mean(uploads)
