"""FedVLS: Guo, Ding, Liang, He, Wang, Tan, "Exploring Vacant Classes in Label-Skewed Federated Learning", AAAI 2025,
Algorithm 1 of its technical appendix. p is the client's class share, O are its vacant classes (p = 0), z its logits.

L_cal    line 14  cross-entropy on z + log p, the balanced softmax: minority classes are not outweighed
L_dis    line 15  KL divergence from the received model's softmax over O alone to the local one's: what the global model
                  knows of classes that the client never sees is not forgotten
L_logit  line 17  sum over classes c of p(c) log E[1(y != c) e^z_c], the mean over the mini-batch: logits of majority
                  classes are pushed down on samples of other classes
L        line 18  L_cal + lam L_dis + L_logit, whose weight is `suppression`

`suppression` is 0.005 as in the authors' code; line 18 has 1. Line 15 lacks the sign of the divergence.
Deviations: in L_logit a sample of class c counts 0 for c, as in line 16 (authors' code: e^0 = 1, and z - log p - log C
for z); log p is -inf for a vacant class, which leaves it out of L_cal (authors' code: log(p + 1e-9)); a class is left
out of L_logit where its mini-batch has no other. Clients count alike in the average (line 9: by size). The
teacher is the received model with the client's own dropout and normalisation, where a model has some.
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
class FedVLS(Method):
    """FedAvg that distils classes a client lacks from the global model, and holds down logits of other classes."""

    cite = "Guo et al., Exploring Vacant Classes in Label-Skewed Federated Learning, AAAI 2025"
    look = ("#9c7a2e", 15)

    lam: Annotated[float, Field(ge=0)] = 0.1  # lambda, the weight of vacant-class distillation, line 18
    suppression: Annotated[float, Field(ge=0)] = 0.005  # the weight of logit suppression

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        p = data.share  # (C,)

        def loss(params: Tree, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tree]:
            z = net.logits(params, x)
            with torch.no_grad():
                teacher = net.logits(received, x)
            calibrated = F.cross_entropy(z + p.log(), y, reduction="none")
            suppressed = (p * suppression(z, y, weight)).sum()
            return calibrated + self.lam * distillation(z, teacher, p == 0) + self.suppression * suppressed, {}

        model = fit.batchwise(received, loss, only=MODEL)
        return model, model


def distillation(z: Tensor, teacher: Tensor, vacant: Tensor) -> Tensor:  # (B, C), (B, C), (C,) -> (B,)
    """KL(teacher || z) of the softmax over the vacant classes; 0 if there are none, or one."""
    q, q_g = (scores.masked_fill(~vacant, -1e9).log_softmax(1) for scores in (z, teacher))
    return (q_g.exp() * (q_g - q)).sum(1)


def suppression(z: Tensor, y: Tensor, weight: Tensor) -> Tensor:  # (B, C), (B,), (B,) -> (C,)
    """log of the mean of 1(y != c) e^z_c over a batch, for each class c; 0 where the batch has no other class."""
    classes = torch.arange(z.shape[1], device=z.device)
    other = (y[:, None] != classes) * weight[:, None]  # (B, C)
    mean = (z + other.clamp(min=1e-30).log()).logsumexp(0)
    return torch.where(other.sum(0) > 0, mean, 0.0)
