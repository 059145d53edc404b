"""FedAS: Yang, Huang, Ye, "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024, Algorithm 1:
FedPer, whose shared body and private head are brought together before training, and whose average weighs clients.

Parameter alignment. The body received does not know the client's head, and its features would spoil it. So it is first
trained to give the features of the client's own body of its last round, in the mean of each class: with m_c the class
means of these,

    align = sum over the classes c of a mini-batch of the mean over its samples of class c of (1/D) ||f(x) - m_c||^2

and only then body and head together, on cross-entropy.
Client synchronisation. A client that took part seldom should not drag the others along. Bodies are averaged with
weights in proportion to the trace of the client's Fisher information matrix after training,

    T_k = sum over mini-batches of || gradient over all parameters of the mean -log p(y | x) ||^2

as the authors' code computes it: not divided by the number of mini-batches, so clients with more samples weigh more.
Deviations: a client whose first round it is has no body of its own and is not aligned (authors' code: aligned to the
initial, random one). Each client aligns a copy of what it received (authors' code: a round's clients align one and the
same body, each what the one before has left). Alignment has the run's optimiser and batches (authors' code: plain SGD
at 0.01, 16 samples). The mini-batches of T_k have `fisher_batch` samples (authors' code: as many as a step of
training). An aggregator that withstands bad clients does not look at the weights, which these could choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.func import grad

from fednh.methods.base import (
    MODEL,
    ClientData,
    Fit,
    Method,
    Net,
    Tree,
    Uploads,
    UploadSpec,
    class_means,
    cross_entropy,
    is_statistic,
    select,
)


def negative(upload: Tree) -> str | None:
    """A sum of squares is not negative."""
    return "its Fisher trace is negative" if upload["fisher"] < 0 else None


@dataclass(frozen=True)
class FedAS(Method):
    """FedPer that aligns the received body with the client's last one, and averages by Fisher traces."""

    cite = "Yang et al., FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR 2024"
    look = ("#326e5f", 34)
    headless = True
    upload = UploadSpec(weight="fisher", problem=negative)

    align_epochs: Annotated[int, Field(ge=0)] = 1  # epochs of parameter alignment
    fisher_batch: Annotated[int, Field(ge=1)] = 64  # samples in a gradient of the Fisher trace

    def enroll(self, initial: Tree) -> Tree:
        return select(initial, "head")  # there is no body of its own until the client has trained

    def broadcast(self, server: Tree) -> Tree:
        return select(server, "body")

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        start = {**self.aligned(net, kept, received, data, fit), **select(kept, "head")}
        model = fit(start, cross_entropy(net.logits), only=MODEL)
        fisher = self.fisher_trace(net, model, data)
        return model, {**select(model, "body"), "fisher": fisher}

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        return {**server, **select(uploads.mean(), "body")}  # a mean by `upload.weight`

    def aligned(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        """The body received, brought near to the client's own of its last round, if it has one."""
        if not select(kept, "body"):
            return received
        means = class_means(lambda x: net.features(kept, x), data.batches(), data.counts)  # (C, D)

        def align(params: Tree, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tree]:
            distance = (net.features(params, x) - means[y]).square().mean(1)
            share = (weight[:, None] * F.one_hot(y, len(means))).sum(0)  # (C,), of the mini-batch
            return distance / share[y].clamp(min=1e-12), {}

        return fit.batchwise(received, align, only=("body",), epochs=self.align_epochs)

    def fisher_trace(self, net: Net, model: Tree, data: ClientData) -> Tensor:  # ()
        """T_k, on the client's samples as they are."""
        loss, total = cross_entropy(net.logits), torch.zeros_like(data.counts.sum())

        fixed = {name: value for name, value in model.items() if is_statistic(name)}
        moved = {name: value for name, value in model.items() if name not in fixed}

        def surprise(moved: Tree, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            return (loss({**fixed, **moved}, x, y) * weight).sum() / weight.sum().clamp(min=1)

        for x, y, weight in data.drawn(1.0, self.fisher_batch):
            slope = grad(surprise)(moved, x, y, weight)
            total = total + torch.stack([value.square().sum() for value in slope.values()]).sum()
        return total
