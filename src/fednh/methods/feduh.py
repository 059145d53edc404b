"""FedUH ("FedAvg+UH" in the text): FedNH with a uniform head that never changes.

Dai, Chen, Li, Heinecke, Sun, Xu, "Tackling Data Heterogeneity in Federated Learning with Class Prototypes", AAAI 2023:
Eq. (1) for the head, Eq. (2) for local training, no Eq. (4). The paper uses it in Figure 2 to separate the effect of
a common, uniform goal from that of class semantics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field

from fednh.methods.base import ClientData, Fit, Method, Net, Tree, cross_entropy, scaled_cosine, select, uniform_head


@dataclass(frozen=True)
class FedUH(Method):
    """FedAvg with unit representations and a fixed head of uniformly spread prototypes ("FedAvg+UH")."""

    cite = "Dai et al., Tackling Data Heterogeneity in Federated Learning with Class Prototypes, AAAI 2023"
    title = "FedAvg+UH"
    look = ("#33a6dd", 2)
    patents = ("US 12,670,409 B2",)
    model = ("body", "head", "scale")
    cosine = True
    by_architecture = ("body", "scale")

    scale: Annotated[float, Field(gt=0)] = 20.0  # s at the start, Eq. (2)
    train_scale: bool = True  # s moves with the body; false keeps it constant
    head_init: Literal["separated", "orthogonal"] = "separated"  # Eq. (1), or what the authors' code does

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        body = select(net.init(rng), "body")
        head = uniform_head(net.num_classes, net.dim, self.head_init, rng)
        return {**body, "head.weight": head, "scale": torch.tensor(self.scale)}

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        moving = ("body", "scale") if self.train_scale else ("body",)
        model = fit(received, cross_entropy(scaled_cosine(net)), only=moving)
        return model, select(model, "body", "scale")
