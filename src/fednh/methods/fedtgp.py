"""FedTGP: Zhang, Liu, Hua, Cao, "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning
for Data and Model Heterogeneity in Federated Learning", AAAI 2024, Algorithm 1.

As in FedProto (fedproto.py) clients send class means of their representations, are pulled towards the global
prototypes, and predict by the nearest. But the server does not average what they send. It trains its prototypes

    P_c = F(p_c; theta),  F two linear layers with ReLU between them                                       -> prototypes

to lie near the clients' means m of their own class and away from those of others, by a margin (Euclidean distance d):

    sum over m of class c of  -log  e^-(d(m, P_c) + delta) / (e^-(d(m, P_c) + delta) + sum_c' e^-d(m, P_c'))
                                                                                                           -> contrast
    delta = min(tau, the largest distance between two classes' average means)                              -> gap

Deviations. From the authors' code: its margin is the largest of the classes' distances to their nearest class; the
text's, taken here, is the largest of all (`margin = "nearest"` is the code's). It draws batches of ten means, and an
epoch there is some steps; here one step sees all means of the round, so nothing is drawn and `server_steps` counts
steps. The loss is the mean over means, as there. As there, the pull is lam times the mean squared distance over
dimensions, there are no prototypes and no pull before a round has trained them, and prediction is by the nearest of all
prototypes, whoever owns the class. `server_lr` is the authors' lr, which they set to the clients'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

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
    select,
)

TRAINED = ("start", "hidden.weight", "hidden.bias", "out.weight", "out.bias")  # p and theta, below "server"


@dataclass(frozen=True)
class FedTGP(Method):
    """FedProto with prototypes that the server trains to keep a margin, not averages that drift together."""

    cite = "Zhang et al., FedTGP: Trainable Global Prototypes for Data and Model Heterogeneity, AAAI 2024"
    look = ("#c605ff", 41)
    model = ("body", "head", "prototypes", "known")
    by_architecture = MODEL
    upload = UploadSpec(by_class=("means",), marks=("owned",), single=True)

    lam: Annotated[float, Field(ge=0)] = 10.0  # lambda, the pull towards the global prototypes
    tau: Annotated[float, Field(gt=0)] = 100.0  # the largest margin
    margin: Literal["largest", "nearest"] = "largest"  # of all distances, or of those to the nearest class: the code's
    server_steps: Annotated[int, Field(ge=1)] = 100  # in which the server trains the prototypes, each round
    server_lr: Annotated[float, Field(gt=0)] = 0.01  # of plain gradient descent there

    def numbers(self, classes: int, dim: int) -> int:
        return max(classes, dim) * dim

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        model, (classes, dim) = net.init(rng), (net.num_classes, net.dim)
        bound = dim**-0.5  # of a linear layer's first weights in PyTorch
        layers = {
            name: (torch.rand(shape, generator=rng) * 2 - 1) * bound
            for name, shape in (
                ("server.hidden.weight", (dim, dim)),
                ("server.hidden.bias", (dim,)),
                ("server.out.weight", (dim, dim)),
                ("server.out.bias", (dim,)),
            )
        }
        return {
            **model,
            "server.start": torch.randn(classes, dim, generator=rng),  # p
            **layers,
            "prototypes": torch.zeros(classes, dim),
            "known": torch.zeros(classes),  # 1 once there are prototypes
        }

    def enroll(self, initial: Tree) -> Tree:
        return select(initial, *MODEL)

    def broadcast(self, server: Tree) -> Tree:
        return select(server, "prototypes", "known")

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        prototypes, known = received["prototypes"], received["known"]  # (C, D), (C,)

        def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
            h = net.features(params, x)
            pull = (h - prototypes[y]).square().mean(1) * known[y]
            return cross_entropy(net.classify)(params, h, y) + self.lam * pull

        model = fit(select(kept, *MODEL), loss, only=MODEL)
        means = class_means(lambda x: net.features(model, x), data.batches(), data.counts)
        return model, {"means": means, "owned": (data.counts > 0).to(means.dtype)}

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        means = torch.stack([upload["means"] for upload in uploads.trees])  # (K, C, D)
        owned = torch.stack([upload["owned"] for upload in uploads.trees]) > 0  # (K, C)
        m, y = means[owned], owned.nonzero()[:, 1]  # (M, D), (M,)
        delta = self.gap(means, owned)
        trained = {f"server.{name}": server[f"server.{name}"] for name in TRAINED}
        for _ in range(self.server_steps):
            trained = {name: value.detach().requires_grad_() for name, value in trained.items()}
            slopes = torch.autograd.grad(contrast(m, y, prototypes(trained), delta), list(trained.values()))
            trained = {
                name: value - self.server_lr * slope
                for (name, value), slope in zip(trained.items(), slopes, strict=True)
            }
        trained = {name: value.detach() for name, value in trained.items()}
        known = torch.ones_like(server["known"])
        return {**server, **trained, "prototypes": prototypes(trained), "known": known}

    def gap(self, means: Tensor, owned: Tensor) -> Tensor:  # (K, C, D), (K, C) -> ()
        """delta: the distance of two classes' averages that is the margin, tau at most; 0 with a single class."""
        there = owned.any(0)
        average = (means * owned[..., None]).sum(0)[there] / owned.sum(0)[there, None]  # (C', D)
        if len(average) < 2:
            return means.new_zeros(())
        apart = torch.cdist(average, average, compute_mode="donot_use_mm_for_euclid_dist")  # (C', C')
        if self.margin == "nearest":
            apart = apart.masked_fill(torch.eye(len(apart), dtype=torch.bool, device=apart.device), torch.inf).amin(1)
        return apart.max().clamp(max=self.tau)

    def global_model(self, server: Tree) -> None:
        return None

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:
        h, mm = net.features(params, x), "use_mm_for_euclid_dist"  # the same for every batch size, so that it exports
        return -torch.cdist(h, params["prototypes"], compute_mode=mm)


def prototypes(trained: Tree) -> Tensor:  # (C, D)
    """P = F(p; theta)."""
    hidden = F.relu(F.linear(trained["server.start"], trained["server.hidden.weight"], trained["server.hidden.bias"]))
    return F.linear(hidden, trained["server.out.weight"], trained["server.out.bias"])


def contrast(m: Tensor, y: Tensor, centres: Tensor, delta: Tensor) -> Tensor:  # (M, D), (M,), (C, D), ()
    """The mean over clients' means m of class y of their cross-entropy, with `delta` added to the own distance."""
    distance = torch.cdist(m, centres, compute_mode="donot_use_mm_for_euclid_dist")
    return F.cross_entropy(-(distance + delta * F.one_hot(y, len(centres))), y)
