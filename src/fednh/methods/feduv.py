"""FedUV: Son, Kim, Chung, Huang, Liu, "FedUV: Uniformity and Variance for Heterogeneous Federated Learning", CVPR 2024.

A client with few classes makes the classifier name them, whatever it sees, and crowds its representations together.
Two penalties make local training look as if the client had all classes alike. Over a mini-batch with the softmax
outputs p_i of C classes and representations h_i:

L_V  (1/C) sum over classes c of max(0, gamma - std_i p_i(c)): each class's output should vary as that of a classifier
     which is right on samples of all classes alike, gamma = 1/sqrt(C)
L_U  mean over pairs i < j of exp(-||h_i - h_j||^2 / sigma): representations should spread evenly, as FedNH's
     prototypes do by construction; sigma is the median of these squared distances that are not zero
loss = cross-entropy + lambda L_V + mu L_U

In what the text leaves open this file follows the authors' code: the standard deviation divides by B - 1, h is not
scaled to unit length (sigma makes L_U blind to its length), sigma has a gradient, lambda is 2.5 and mu 0.5.
Deviations: h is what the head sees; a mini-batch of one sample has no pair and no variance (authors' code: not a
number); averages are uniform, not by size; the learning rate is the run's (authors' code: cosine over the rounds).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fednh.methods.base import MODEL, ClientData, Fit, Method, Net, Tree


@dataclass(frozen=True)
class FedUV(Method):
    """FedAvg whose clients keep their outputs varied and their representations spread, whatever classes they have."""

    cite = "Son et al., FedUV: Uniformity and Variance for Heterogeneous Federated Learning, CVPR 2024"
    look = ("#e1558c", 31)

    lam: Annotated[float, Field(ge=0)] = 2.5  # lambda, the weight of the classifier's variance
    mu: Annotated[float, Field(ge=0)] = 0.5  # the weight of the representations' uniformity

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        def loss(params: Tree, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tree]:
            h = net.features(params, x)
            z = net.classify(params, h)
            penalty = self.lam * too_steady(z.softmax(1), weight) + self.mu * crowded(h, weight)
            return F.cross_entropy(z, y, reduction="none") + penalty, {}

        model = fit.batchwise(received, loss, only=MODEL)
        return model, model


def too_steady(p: Tensor, weight: Tensor) -> Tensor:  # (B, C), (B,) -> ()
    """L_V: by how much the outputs of a class vary less over a batch than they would with all classes alike."""
    real, share = (weight > 0).sum(), weight[:, None]
    mean = (share * p).sum(0)  # (C,)
    variance = (share * (p - mean).square()).sum(0) * real / (real - 1).clamp(min=1)
    return F.relu(p.shape[1] ** -0.5 - variance.clamp(min=1e-12).sqrt()).mean()


def crowded(h: Tensor, weight: Tensor) -> Tensor:  # (B, D), (B,) -> ()
    """L_U: how near the representations of a batch are to each other, 0 to 1; 0 if it has no pair."""
    i, j = torch.triu_indices(len(h), len(h), 1, device=h.device)
    if len(i) == 0:
        return torch.zeros_like(weight.sum())
    distance, real = (h[i] - h[j]).square().sum(1), (weight[i] > 0) & (weight[j] > 0)
    apart = real & (distance > 0)
    ordered, middle = distance.masked_fill(~apart, torch.inf).sort().values, (apart.sum() - 1).clamp(min=0) // 2
    sigma = torch.where(apart.any(), ordered.gather(0, middle[None])[0], 1.0)
    return ((-distance / sigma).exp() * real).sum() / real.sum().clamp(min=1)
