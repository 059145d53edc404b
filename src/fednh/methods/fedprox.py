"""FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020, Algorithm 2.

Clients minimise h_k(w; w^t) = F_k(w) + mu/2 ||w - w^t||^2, Eq. (2), so that none drifts far from the model received.
Deviation: every client does all its epochs (the paper lets slow ones stop early, which the same term makes harmless).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from fednh.methods.base import MODEL, ClientData, Fit, Method, Net, Tree, cross_entropy, squared_distance


@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg whose local training is tied to the model received by a proximal term."""

    cite = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"
    look = ("#b8651b", 18)

    mu: Annotated[float, Field(ge=0)] = 0.01  # the strength of the tie, Eq. (2); the paper tries 0.001 to 1

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        loss = cross_entropy(net.logits)

        def proximal(w: Tree, x: Tensor, y: Tensor) -> Tensor:
            return loss(w, x, y) + self.mu / 2 * squared_distance(w, received)

        model = fit(received, proximal, only=MODEL)
        return model, model
