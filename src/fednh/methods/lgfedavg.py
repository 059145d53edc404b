"""LG-FedAvg: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency,
"Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020, Algorithm 1.

A client's model is a local representation l(x; theta_l) of its own, followed by a global model g(.; theta_g) on it.
In a round a client takes the server's theta_g, trains both with plain cross-entropy and sends theta_g back; the server
averages it. The representation never leaves the client, so networks may differ up to it.

Here theta_g is the head, the last linear layer, as in HtFLlib (the paper's networks for CIFAR-10 share their last two).
Deviations: the average is uniform, as for all methods here (paper: by numbers of samples); no auxiliary loss on the
representation (the paper's section 3.2 offers some), and no rounds of FedAvg before, with which the authors' code
starts. There is no global model: the paper lets the clients' own models vote on data of a new client.
"""

from __future__ import annotations

from dataclasses import dataclass

from fednh.methods.base import MODEL, ClientData, Fit, Method, Net, Tree, cross_entropy, select


@dataclass(frozen=True)
class LGFedAvg(Method):
    """The head is shared and averaged; every client keeps a representation of its own below it."""

    cite = "Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020"
    title = "LG-FedAvg"
    look = ("#6f03ff", 40)
    by_architecture = ("body",)

    def enroll(self, initial: Tree) -> Tree:
        return select(initial, "body")

    def broadcast(self, server: Tree) -> Tree:
        return select(server, "head")

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        model = fit({**select(kept, "body"), **received}, cross_entropy(net.logits), only=MODEL)
        return model, select(model, "head")

    def global_model(self, server: Tree) -> None:
        return None
