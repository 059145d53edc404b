"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh,
"SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, Algorithm 1 with option II.

Every client i keeps the direction c_i in which its own data pull, and the server their mean c. Local steps follow
g_i(y) - c_i + c (line 10), which is the gradient of the local loss plus the linear term <c - c_i, y>. Afterwards

    c_i <- c_i - c + (x - y_i) / (K eta_l)   option II, line 12                            -> client_update
    x <- x + eta_g * mean(y_i - x),  c <- mean over all clients of c_i, lines 16 and 17    -> aggregate

K eta_l is how far K steps move a parameter under a constant gradient of 1. With momentum they move it further, so
`fit.reach` replaces it; the two are the same without momentum. The gradient that is clipped is the corrected
one; weight decay counts as part of the client's loss.
Deviation: N, over which c averages, counts the clients that have taken part so far, and a client's first round has no
correction. So sites may join at any time; when all clients take part in every round, this is Algorithm 1. A site that
lost its state joins anew, and its old c_i stays in c. Changes of c_i are averaged plainly, also by `weighted_mean`.
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
    strip_prefix,
)


@dataclass(frozen=True)
class Scaffold(Method):
    """FedAvg whose local steps are corrected for the direction in which a client's own data pull."""

    cite = "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020"
    title = "SCAFFOLD"
    look = ("#4d6a8f", 9)
    sgd_only = True
    upload = UploadSpec(marks=("newcomers",))

    eta_g: Annotated[float, Field(gt=0)] = 1.0  # the server's step size

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        model = net.init(rng)
        zero = {name: torch.zeros_like(value) for name, value in model.items()}
        return {**model, **prefix("c", zero), "clients": torch.zeros(())}

    def enroll(self, initial: Tree) -> Tree:
        return {**prefix("c_i", strip_prefix(initial, "c")), "joined": torch.zeros_like(initial["clients"])}

    def broadcast(self, server: Tree) -> Tree:
        return select(server, *MODEL, "c")

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        x, c = select(received, *MODEL), strip_prefix(received, "c")
        c_i, joined = strip_prefix(kept, "c_i"), kept["joined"]  # joined: 0 in the client's first round, then 1
        correction = {name: joined * (c[name] - c_i[name]) for name in x}
        loss = cross_entropy(net.logits)

        def corrected(y_i: Tree, samples: Tensor, labels: Tensor) -> Tensor:
            trained = {name: value for name, value in y_i.items() if not is_statistic(name)}
            linear = torch.stack([(correction[name] * value).sum() for name, value in trained.items()]).sum()
            return loss(y_i, samples, labels) + linear

        y_i = fit(x, corrected, only=MODEL)
        new = {name: (x[name] - y_i[name]) / fit.reach() - correction[name] for name in x}  # option II
        change = {name: new[name] - c_i[name] for name in x}
        keep = {**y_i, **prefix("c_i", new), "joined": torch.ones_like(joined)}
        return keep, {**y_i, **prefix("change", change), "newcomers": 1 - joined}

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        average, count = uploads.mean(), uploads.count
        known = server["clients"]
        clients = known + count * average["newcomers"]
        x = {
            name: average[name] if is_statistic(name) else value + self.eta_g * (average[name] - value)
            for name, value in select(server, *MODEL).items()
        }
        c = {
            name: (known * value + count * average[f"change.{name}"]) / clients
            for name, value in strip_prefix(server, "c").items()
        }
        return {**x, **prefix("c", c), "clients": clients}
