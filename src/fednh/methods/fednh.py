"""FedNH: Dai, Chen, Li, Heinecke, Sun, Xu,
"Tackling Data Heterogeneity in Federated Learning with Class Prototypes", AAAI 2023, Algorithm 1.

Eq. (1)  the head starts as unit prototypes spread uniformly on the sphere             -> init
Eq. (2)  clients train the body against that fixed head, on s * W f(x), ||f(x)|| = 1   -> client_update
Eq. (3)  and report the mean unit representation of every class they own               -> client_update
Eq. (4)  the server moves every prototype a little towards those means, renormalised   -> aggregate

W is head.weight, s is scale, both models predict with s * W f(x) (`cosine`). s is trained and averaged with the body
(appendix); it starts at 20, where the text fixes it at 30.

`head_init = "means"`, for a pretrained body, is not in the paper: prototypes start as class means, as FedNCM's do
(fedncm.py). No method sees data before the first round, so round 1 trains nothing: clients report Eq. (3) of the body
that they received, and the server takes Eq. (4) with rho = 0. Later rounds are as usual. A class that nobody in round 1
owns starts from its uniform prototype. Uploads have the same parts in all rounds, so nothing more leaves a client. A
client keeps nothing of round 1: until it trains, its personal model is the global one.

`aggregation = "sum"` is not in the paper either. Clients send the sum of the unit representations of each class,
    S_k = sum_i e_{y_i} f(x_i)'   (C x D),
and the server takes the direction of the total in Eq. (4), mu_c = unit(sum_k S_kc): every sample counts alike. A sample
lies in one class and its representation has length 1, so adding or removing it moves S_k by the matrix e_y f(x)', whose
norm is exactly 1, whatever C is. Gaussian noise on all of S_k, at a standard deviation of m, is then a release with
noise multiplier m (privacy/): no clip to choose, and as every row is noised, neither which classes a client has nor how
many samples leaves any more. With a fixed body (`head_init = "means"`, one round) this is all that leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

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
    double,
    scaled_cosine,
    select,
    uniform_head,
    unit,
    unvmap_any,
)


@dataclass(frozen=True)
class FedNH(Method):
    """Uniform class prototypes as a fixed head; class semantics flow in by a moving average at the server."""

    cite = "Dai et al., Tackling Data Heterogeneity in Federated Learning with Class Prototypes, AAAI 2023"
    look = ("#0077bb", 0)
    patents = ("US 12,670,409 B2",)
    model = ("body", "head", "scale")
    cosine = True
    by_architecture = ("body", "scale")

    rho: Annotated[float, Field(gt=0, lt=1)] = 0.9  # prototype smoothing, Eq. (4)
    # alpha in Eq. (4): 1/|S|, the authors' code: class counts, or sums over samples, which noise can protect
    aggregation: Literal["uniform", "count", "sum"] = "uniform"
    scale: Annotated[float, Field(gt=0)] = 20.0  # s at the start, Eq. (2)
    train_scale: bool = True  # s moves with the body; false keeps it constant
    # Eq. (1), what the authors' code does, or class means of the body that a run starts from, found in its first round
    head_init: Literal["separated", "orthogonal", "means"] = "separated"

    @property
    def upload(self) -> UploadSpec:
        if self.aggregation != "uniform":
            sums = ("prototypes",) if self.aggregation == "sum" else ()
            return UploadSpec(by_class=("prototypes",), counted=("prototypes",), class_sums=sums)
        return UploadSpec(by_class=("prototypes",), problem=longer_than_a_mean)

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        body = select(net.init(rng), "body")
        form = "separated" if self.head_init == "means" else self.head_init
        head = uniform_head(net.num_classes, net.dim, form, rng)
        started = {"started": torch.zeros(())} if self.head_init == "means" else {}  # 1 once the head has its means
        return {**body, "head.weight": head, "scale": torch.tensor(self.scale), **started}

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        return self.trained(net, received, data, fit, cross_entropy(scaled_cosine(net)))  # Eq. (2)

    def trained(self, net: Net, received: Tree, data: ClientData, fit: Fit, loss: Loss) -> tuple[Tree, Tree]:
        """A client's round with this loss: its model, and its body, scale and class means to upload."""
        moving = ("body", "scale") if self.train_scale else ("body",)
        model, trains = select(received, *self.model), True
        if self.head_init == "means":
            trains = unvmap_any(received["started"] > 0)
        if trains:
            model = fit(model, loss, only=moving)
        mu = self.prototypes(lambda x: unit(net.features(model, x)), data)
        return (model if trains else {}), {**select(model, "body", "scale"), "prototypes": mu}

    def prototypes(self, features: Callable[[Tensor], Tensor], data: ClientData) -> Tensor:  # (C, D)
        """What a client reports of the unit representations of each class."""
        if self.aggregation == "sum":
            return data.class_sums(features).float()
        mu = class_means(features, data.batches(), data.counts)  # Eq. (3)
        if self.aggregation == "count":  # the mean's direction, times the number of samples behind it
            mu = unit(mu) * data.counts[:, None]
        return mu

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        average = uploads.mean()
        mu = average.pop("prototypes")  # (C, D): sum_k alpha_k mu_k
        if self.aggregation != "uniform":
            mu = unit(mu)
        head = server["head.weight"]
        rho = self.rho * server["started"] if self.head_init == "means" else self.rho
        moved = unit(rho * head + (1 - rho) * mu)  # Eq. (4)
        owned = mu.abs().sum(1, keepdim=True) > 0  # a class that nobody in the round owns keeps its prototype
        started = {"started": torch.ones_like(server["started"])} if self.head_init == "means" else {}
        return {**server, **average, **started, "head.weight": torch.where(owned, moved, head)}


def longer_than_a_mean(upload: Tree) -> str | None:
    """A mean of unit vectors has at most length 1."""
    longest = float(double(upload["prototypes"]).norm(dim=1).max())
    if longest > 1 + 1e-3:
        return f"a prototype has length {longest:.3g}, and a mean of unit vectors is no longer than 1"
    return None
