"""MR-MTL: Liu, Hu, Wu, Smith, "On Privacy and Personalization in Cross-Silo Federated Learning", NeurIPS 2022: mean-
regularised multi-task learning, as few silos with privacy requirements of their own would use it.

Every client has a model w_k of its own, tied to the mean of all; lambda says how near to one shared model they are:

    min over w_1 .. w_K of the mean over k of  F_k(w_k) + lambda/2 ||w_k - w||^2,   w = mean(w_k)

In a round a client trains its own w_k on this, with w as received, and uploads it; nothing else is trained. lambda = 0
is training alone, a large one is close to FedAvg. The paper's algorithm makes w_k private by training with noise: a
matter of `fit`, not of this file.
Deviations: the paper's silos all take part in every round; where only some do, w is the mean of the round's clients,
and a client starts its first round from w and not from the initial model (in round 1 they are the same). Averages are
uniform, the paper's default; its l2 penalty is train.weight_decay. lambda is tuned in the paper, per data set and
level of privacy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fednh.methods.base import MODEL, ClientData, Fit, Method, Net, Tree, cross_entropy, select, squared_distance


@dataclass(frozen=True)
class MRMTL(Method):
    """Every client trains a model of its own, which a proximal term ties to the mean of all clients' models."""

    cite = "Liu et al., On Privacy and Personalization in Cross-Silo Federated Learning, NeurIPS 2022"
    title = "MR-MTL"
    look = ("#3246f0", 30)

    lam: Annotated[float, Field(ge=0)] = 0.1  # lambda, the strength of the tie

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        return {**net.init(rng), "joined": torch.zeros(())}

    def enroll(self, initial: Tree) -> Tree:
        return initial  # joined: 0 until the client has trained, then 1

    def broadcast(self, server: Tree) -> Tree:
        return select(server, *MODEL)

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        loss = cross_entropy(net.logits)

        def tied(w_k: Tree, x: Tensor, y: Tensor) -> Tensor:
            return loss(w_k, x, y) + self.lam / 2 * squared_distance(w_k, received)

        w_k = fit(own(kept, received), tied, only=MODEL)
        return {**w_k, "joined": torch.ones_like(kept["joined"])}, w_k

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        return own(kept, received)


def own(kept: Tree, received: Tree) -> Tree:
    """The client's own model; before it has trained, the mean that it received."""
    return {name: torch.where(kept["joined"] > 0, kept[name], value) for name, value in received.items()}
