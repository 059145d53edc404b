"""FedDyn: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic
Regularization", ICLR 2021, Algorithm 1.

Every client k keeps g_k, the gradient of its own loss where it last stopped, and the server h, the mean of all g_k. A
client trains on its loss L_k with a linear and a quadratic term, Eq. (1); theta is the model that it received:

    theta_k = argmin  L_k(w) - <g_k, w> + alpha/2 ||w - theta||^2,   g_k <- g_k - alpha (theta_k - theta)
    h <- h - alpha/m * sum over the round's clients of (theta_k - theta),   theta <- mean(theta_k) - h / alpha

At the minimum g_k is the gradient of L_k again, so whatever moves all clients' models to one point minimises the sum of
their losses. That holds for any optimiser of the local problem, which `fit` solves as far as its steps reach; weight
decay counts as part of L_k.
Deviation: m counts the clients that have taken part so far, as N does in SCAFFOLD, so that sites may join at any time;
when all clients take part in every round, this is Algorithm 1. A site that lost its state joins anew, and its old g_k
stays in h. The authors' code divides alpha by the client's share of all samples, relative to the mean; here alpha is
the same for all, as in the text. With an optimiser of the server h follows its steps in place of the mean's. Running
statistics of batch normalisation have no gradient: they are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
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
    cross_entropy,
    is_statistic,
    prefix,
    select,
    squared_distance,
    strip_prefix,
)


@dataclass(frozen=True)
class FedDyn(Method):
    """Every client's loss is corrected by the gradient of its last round, so that clients agree where they all stop."""

    cite = "Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021"
    look = ("#b4693c", 29)
    upload = UploadSpec(marks=("newcomers",))

    alpha: Annotated[float, Field(gt=0)] = (
        0.01  # the strength of the tie to the model received; the paper: 0.001 to 0.1
    )

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        model = net.init(rng)
        zero = {name: torch.zeros_like(value) for name, value in model.items() if not is_statistic(name)}
        return {**model, **prefix("h", zero), "clients": torch.zeros(())}

    def enroll(self, initial: Tree) -> Tree:
        return {**prefix("g", strip_prefix(initial, "h")), "joined": torch.zeros_like(initial["clients"])}

    def broadcast(self, server: Tree) -> Tree:
        return select(server, *MODEL)

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        g, joined = strip_prefix(kept, "g"), kept["joined"]  # joined: 0 in the client's first round, then 1
        loss = cross_entropy(net.logits)

        def dynamic(w: Tree, x: Tensor, y: Tensor) -> Tensor:
            linear = torch.stack([(value * w[name]).sum() for name, value in g.items()]).sum()
            return loss(w, x, y) - linear + self.alpha / 2 * squared_distance(w, received)

        model = fit(received, dynamic, only=MODEL)
        g = {name: value - self.alpha * (model[name] - received[name]) for name, value in g.items()}
        return {**model, **prefix("g", g), "joined": torch.ones_like(joined)}, {**model, "newcomers": 1 - joined}

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        average, count, known = uploads.mean(), uploads.count, server["clients"]
        m = known + count * average["newcomers"]
        theta = select(server, *MODEL)
        h = {
            name: (known * value - self.alpha * count * (average[name] - theta[name])) / m
            for name, value in strip_prefix(server, "h").items()
        }
        moved = {name: average[name] - value / self.alpha for name, value in h.items()}
        return {**select(average, *MODEL), **moved, **prefix("h", h), "clients": m}
