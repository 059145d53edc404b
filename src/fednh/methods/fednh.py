"""FedNH: Dai, Chen, Li, Heinecke, Sun, Xu,
"Tackling Data Heterogeneity in Federated Learning with Class Prototypes", AAAI 2023, Algorithm 1.

Eq. (1)  the head starts as unit prototypes spread uniformly on the sphere             -> init
Eq. (2)  clients train the body against that fixed head, on s * W f(x), ||f(x)|| = 1   -> client_update
Eq. (3)  and report the mean unit representation of every class they own               -> client_update
Eq. (4)  the server moves every prototype a little towards those means, renormalised   -> aggregate

W is head.weight, s is scale, both models predict with s * W f(x) (`cosine`). s is trained and averaged with the body
(appendix); it starts at 20, where the text fixes it at 30.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field

from fednh.methods.base import (
    ClientData,
    Fit,
    Loss,
    Method,
    Net,
    Tree,
    Uploads,
    UploadSpec,
    class_means,
    cross_entropy,
    scaled_cosine,
    select,
    uniform_head,
    unit,
)


@dataclass(frozen=True)
class FedNH(Method):
    """Uniform class prototypes as a fixed head; class semantics flow in by a moving average at the server."""

    cite = "Dai et al., Tackling Data Heterogeneity in Federated Learning with Class Prototypes, AAAI 2023"
    look = ("#0077bb", 0)
    patents = ("US 12,670,409 B2",)
    model = ("body", "head", "scale")
    cosine = True

    rho: Annotated[float, Field(gt=0, lt=1)] = 0.9  # prototype smoothing, Eq. (4)
    aggregation: Literal["uniform", "count"] = "uniform"  # alpha in Eq. (4): 1/|S|, or the authors' code: class counts
    scale: Annotated[float, Field(gt=0)] = 20.0  # s at the start, Eq. (2)
    train_scale: bool = True  # s moves with the body; false keeps it constant
    head_init: Literal["separated", "orthogonal"] = "separated"  # Eq. (1), or what the authors' code does

    @property
    def upload(self) -> UploadSpec:
        if self.aggregation == "count":
            return UploadSpec(by_class=("prototypes",), counted=("prototypes",))
        return UploadSpec(by_class=("prototypes",), problem=longer_than_a_mean)

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        body = select(net.init(rng), "body")
        head = uniform_head(net.num_classes, net.dim, self.head_init, rng)
        return {**body, "head.weight": head, "scale": torch.tensor(self.scale)}

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        return self.trained(net, received, data, fit, cross_entropy(scaled_cosine(net)))  # Eq. (2)

    def trained(self, net: Net, received: Tree, data: ClientData, fit: Fit, loss: Loss) -> tuple[Tree, Tree]:
        """A client's round with this loss: its model, and its body, scale and class means to upload."""
        moving = ("body", "scale") if self.train_scale else ("body",)
        model = fit(received, loss, only=moving)
        mu = class_means(lambda x: unit(net.features(model, x)), data.batches(), data.counts)  # Eq. (3), (C, D)
        if self.aggregation == "count":  # the mean's direction, times the number of samples behind it
            mu = unit(mu) * data.counts[:, None]
        return model, {**select(model, "body", "scale"), "prototypes": mu}

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        average = uploads.mean()
        mu = average.pop("prototypes")  # (C, D): sum_k alpha_k mu_k
        if self.aggregation == "count":
            mu = unit(mu)
        head = server["head.weight"]
        moved = unit(self.rho * head + (1 - self.rho) * mu)  # Eq. (4)
        owned = mu.abs().sum(1, keepdim=True) > 0  # a class that nobody in the round owns keeps its prototype
        return {**server, **average, "head.weight": torch.where(owned, moved, head)}


def longer_than_a_mean(upload: Tree) -> str | None:
    """A mean of unit vectors has at most length 1."""
    longest = float(upload["prototypes"].double().norm(dim=1).max())
    if longest > 1 + 1e-3:
        return f"a prototype has length {longest:.3g}, and a mean of unit vectors is no longer than 1"
    return None
