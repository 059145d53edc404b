"""FedAvg: McMahan, Moore, Ramage, Hampson, Aguera y Arcas,
"Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1.

Clients train the model that they receive (ClientUpdate), the server averages what they send back: both are what
`Method` does by default, so `client_update` is all there is.
Deviation, as in the FedNH paper: the average is uniform over the round's clients, not weighted by their size.
"""

from __future__ import annotations

from dataclasses import dataclass

from fednh.methods.base import MODEL, ClientData, Fit, Method, Net, Tree, cross_entropy


@dataclass(frozen=True)
class FedAvg(Method):
    """One model for all, averaged; its latest local copy serves as the personal model."""

    cite = "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017"
    look = ("#e08a00", 3)

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        model = fit(received, cross_entropy(net.logits), only=MODEL)
        return model, model
