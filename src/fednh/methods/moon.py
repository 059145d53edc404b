"""MOON: Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1.

The representation z of the model in training should be like that of the model received, z_glob, and unlike that of the
client's own model of its last round, z_prev. With sim the cosine, Eq. (2) and (3):

    l_con = -log exp(sim(z, z_glob) / tau) / (exp(sim(z, z_glob) / tau) + exp(sim(z, z_prev) / tau))
    loss = cross-entropy + mu * l_con

Only z has a gradient. Until a client has trained, its own model is the initial one: in round 1, where that is what it
received, l_con is log 2 whatever z is.
Deviations: z is what the head sees (the paper, and its code by default, put a projection of two layers between body and
head); averages are uniform, not by size. mu is tuned in the paper: 5 on CIFAR-10, 1 on CIFAR-100 and TinyImageNet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fednh.methods.base import MODEL, ClientData, Fit, Method, Net, Tree, cross_entropy, unit


@dataclass(frozen=True)
class MOON(Method):
    """FedAvg whose representations are pulled to the global model's and pushed from the client's last ones."""

    cite = "Li et al., Model-Contrastive Federated Learning, CVPR 2021"
    look = ("#5a5f5a", 28)

    mu: Annotated[float, Field(ge=0)] = 1.0  # the weight of the contrastive loss, Eq. (3)
    tau: Annotated[float, Field(gt=0)] = 0.5  # temperature, Eq. (2)

    def enroll(self, initial: Tree) -> Tree:
        return initial

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
            z = net.features(params, x)
            with torch.no_grad():
                z_glob, z_prev = (unit(net.features(model, x)) for model in (received, kept))
            near, far = ((unit(z) * other).sum(1) / self.tau for other in (z_glob, z_prev))  # (B,)
            return cross_entropy(net.classify)(params, z, y) + self.mu * F.softplus(far - near)

        model = fit(received, loss, only=MODEL)
        return model, model
