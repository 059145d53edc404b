"""FedRep: Collins, Hassani, Mokhtari, Shakkottai,
"Exploiting Shared Representations for Personalized Federated Learning", ICML 2021, Algorithm 1.

Head first with the body fixed (tau = 10 epochs), then the body with the head fixed (train.epochs, 5 by default),
as in the authors' code and the FedNH paper's appendix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from fednh.methods.base import ClientData, Fit, Method, Net, Tree, cross_entropy, select


@dataclass(frozen=True)
class FedRep(Method):
    """As FedPer, but in turns: first the client's head with the body fixed, then the body with the head fixed."""

    cite = "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021"
    look = ("#6a9f3a", 7)
    headless = True

    head_epochs: Annotated[int, Field(ge=0)] = 10  # tau, epochs on the head

    def enroll(self, initial: Tree) -> Tree:
        return select(initial, "head")

    def broadcast(self, server: Tree) -> Tree:
        return select(server, "body")

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        model, loss = {**kept, **received}, cross_entropy(net.logits)  # the head kept, the body received
        model = fit(model, loss, only=("head",), epochs=self.head_epochs)
        model = fit(model, loss, only=("body",))
        return model, select(model, "body")
