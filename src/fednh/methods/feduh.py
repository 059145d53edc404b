"""FedUH ("FedAvg+UH" in the text): FedNH with a uniform head that never changes.

Dai, Chen, Li, Heinecke, Sun, Xu, "Tackling Data Heterogeneity in Federated Learning with Class Prototypes", AAAI 2023:
Eq. (1) for the head, Eq. (2) for local training, no Eq. (4). The paper uses it in Figure 2 to separate the effect of
a common, uniform goal from that of class semantics.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fednh.core.fit import Fit
from fednh.core.losses import cross_entropy, scaled_cosine
from fednh.core.tree import Tree, mean, select
from fednh.data.batches import ClientData
from fednh.methods.base import Method
from fednh.methods.prototypes import not_unit, uniform_head
from fednh.models.net import Net


@dataclass(frozen=True)
class FedUH(Method):
    """FedAvg with unit representations and a fixed head of uniformly spread prototypes ("FedAvg+UH")."""

    cite = "Dai et al., Tackling Data Heterogeneity in Federated Learning with Class Prototypes, AAAI 2023"
    patents = ("US 12,670,409 B2",)
    cosine = True

    scale: Annotated[float, Field(gt=0)] = 20.0  # s at the start, Eq. (2)
    train_scale: bool = True  # s moves with the body; false keeps it constant
    head_init: Literal["separated", "orthogonal"] = "separated"  # Eq. (1), or what the authors' code does

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        body = select(net.init(rng), "body")
        head = uniform_head(net.num_classes, net.dim, self.head_init, rng)
        return {**body, "head.weight": head, "scale": torch.tensor(self.scale)}

    def broadcast(self, server: Tree) -> Tree:
        return server

    def client_update(self, net: Net, own: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        moving = ("body", "scale") if self.train_scale else ("body",)
        own = fit(own, cross_entropy(scaled_cosine(net)), only=moving)
        return own, select(own, "body", "scale")

    def aggregate(self, server: Tree, uploads: Iterable[Tree]) -> Tree:
        return {**server, **mean(uploads)}

    def global_model(self, server: Tree) -> Tree:
        return server

    def personal_model(self, net: Net, own: Tree, data: ClientData, fit: Fit) -> Tree:
        return own

    def problem(self, server: Tree) -> str | None:
        return not_unit(server["head.weight"])

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:
        return scaled_cosine(net)(params, x)
