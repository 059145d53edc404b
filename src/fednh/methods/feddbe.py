"""FedDBE: Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, "Eliminating Domain Bias for Federated Learning in
Representation Space", NeurIPS 2023: FedAvg with the domain bias eliminator.

A client's data shift its representations. Every client keeps that shift to itself, in a vector that is trained with
the model (PRBM, the personalised representation bias memory), and a mean regularisation (MR) pulls what is left to
a mean that all clients agree on. With the batch's mean representation m_b and the consensus g,

    z <- (1 - mu) z + mu m_b                                          running mean, zero when a round starts
    loss = cross-entropy(head(f(x) + prbm), y) + kappa/2 * mean over dimensions of (z - g)^2      -> client_update

g is found in an initialisation period without PRBM and MR: it is the mean of the clients' z there, and stays.
The personal model adds the client's PRBM to the representation; the global one adds nothing.
Deviations: the initialisation is the run's first round, by the clients that take part in it and not by all, and its
model is kept (authors' code: discarded), so no message is wasted; means over clients are uniform, not by size; PRBM
moves by the run's optimiser; the personal model is the client's latest local one (authors' code measures the received
model with the client's PRBM); a short last batch counts (authors' code drops it), and with mu = 1 it alone is z.
The mean over dimensions, and z's zero start, are those of the authors' code, and mu is that of its script for a CNN.
The script's kappa is 50, which the preset `pfllib` has; where representations are long that is far too strong, so the
default is 1 (docs/methods.md has numbers). The consensus is a plain mean over clients with any aggregator that weighs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fednh.methods.base import MODEL, ClientData, Fit, Method, Net, Tree, Uploads, select


@dataclass(frozen=True)
class FedDBE(Method):
    """FedAvg in which a client's own shift of representations stays in a vector of its own, out of the shared body."""

    cite = "Zhang et al., Eliminating Domain Bias for Federated Learning in Representation Space, NeurIPS 2023"
    look = ("#3fae2a", 22)
    model = ("body", "head", "prbm")

    kappa: Annotated[float, Field(ge=0)] = 1.0  # how strongly a client's mean is pulled to the consensus
    mu: Annotated[float, Field(gt=0, le=1)] = 1.0  # the weight of a new batch in the running mean

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        return {**net.init(rng), "consensus": torch.zeros(net.dim), "known": torch.zeros(())}  # known: 0, then 1

    def enroll(self, initial: Tree) -> Tree:
        return {"prbm": torch.zeros_like(initial["consensus"])}  # (D,)

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        consensus, known = received["consensus"], received["known"]

        def loss(params: Tree, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tree]:
            h = net.features(params, x)
            z = (1 - self.mu) * params["mean"] + self.mu * (weight[:, None] * h).sum(0)
            pull = self.kappa / 2 * (z - consensus).square().mean()
            logits = net.classify(params, h + known * params["prbm"])
            return F.cross_entropy(logits, y, reduction="none") + known * pull, {"mean": z}

        start = {**select(received, *MODEL), "prbm": kept["prbm"], "mean": torch.zeros_like(consensus)}
        end = fit.batchwise(start, loss, only=(*MODEL, "prbm"))
        # The mean leaves the client in the initialisation only: zeros afterwards.
        return select(end, *self.model), {**select(end, *MODEL), "mean": (1 - known) * end["mean"]}

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        average = uploads.mean()
        mean = average.pop("mean")
        consensus = torch.where(server["known"] > 0, server["consensus"], mean)
        return {**server, **average, "consensus": consensus, "known": torch.ones_like(server["known"])}

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:
        h = net.features(params, x)
        return net.classify(params, h + params["prbm"] if "prbm" in params else h)
