"""FedCGS: Guan, Zhou, Gu, "Capture Global Feature Statistics for One-Shot Federated Learning", AAAI 2025.

Features h of a fixed body are taken to be Gaussian in every class, N(mu_c, Sigma), with one covariance. Clients send
    sum of h and number of samples of every class, sum h h' of all                      -> client_update
of which the server has mu_c, class shares p_c and Sigma of all samples in one place, for every division of them, and
by Bayes' rule a linear head,
    w_c = (Sigma + gamma t I)^-1 mu_c,   b_c = log p_c - w_c.mu_c / 2                   -> aggregate
where t is the mean of Sigma's diagonal, so that gamma has no unit.
Personal models: a client knows its own class shares, which take the place of p (`prior`). With `personal_epochs` it
also trains this model, the paper's personalised variant: clients receive the global means and are pulled to them,
    loss(x, y) = cross-entropy + lam ||h - mu_y||^2 / D                                 -> personal_model

From the authors' code: Sigma is the covariance of all features around their common mean, by N - 1
(`covariance = "total"`); their gamma is 0, which needs more samples than features.
Deviations: `covariance = "within"`, around the class means and by N - C, is what Bayes' rule asks for; a tenth of a
sample is added to every class's count in p, so that a class without samples has a finite bias. Text and code of the
personalised loss were not at hand: its form here follows the paper's summary, lam is ours, and training starts from the
Gaussian head.
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
    added,
    cross_entropy,
    feature_sums,
    log_share,
    not_gram,
    select,
    sent_once,
    unsent,
)


@dataclass(frozen=True)
class FedCGS(Method):
    """Gaussian classes with one covariance, from sums that clients send once; Bayes' rule makes them a linear head."""

    cite = "Guan et al., Capture Global Feature Statistics for One-Shot Federated Learning, AAAI 2025"
    doubles = True
    look = ("#b20911", 27)
    training_free = True
    kept_is_trained = False
    upload = UploadSpec(by_class=("sums",), summed=("sums", "counts", "gram"), class_counts=True, problem=not_gram)

    covariance: Literal["total", "within"] = "total"  # around the mean of all, as in the authors' code, or of the class
    gamma: Annotated[float, Field(gt=0)] = 1e-3  # added to the diagonal of Sigma, in units of its mean
    personal_epochs: Annotated[int, Field(ge=0)] = 0  # of a client's training of its personal model; 0: none
    lam: Annotated[float, Field(ge=0)] = 1.0  # lambda, the pull towards the global means while it trains

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        classes, dim, exact = net.num_classes, net.dim, torch.float64
        return {
            **select(net.init(rng), "body"),
            "head.weight": torch.zeros(classes, dim),
            "head.bias": torch.zeros(classes),
            "means": torch.zeros(classes, dim),
            "sums": torch.zeros(classes, dim, dtype=exact),
            "counts": torch.zeros(classes, dtype=exact),
            "gram": torch.zeros(dim, dim, dtype=exact),
        }

    def enroll(self, initial: Tree) -> Tree:
        return unsent(initial)

    def broadcast(self, server: Tree) -> Tree:
        return select(server, *MODEL, "means")

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        sums = feature_sums(lambda x: net.features(received, x), data.batches(), net.num_classes, gram=True)
        return sent_once(kept, sums)

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        total = added(server, uploads, "sums", "counts", "gram")
        means = total["sums"] / total["counts"].clamp(min=1)[:, None]
        sigma = self.sigma(total)
        ridge = self.gamma * sigma.diagonal().mean() * torch.eye(len(sigma)).to(sigma)
        weight = torch.linalg.pinv(sigma + ridge, hermitian=True) @ means.T  # (D, C)
        bias = log_share(total["counts"]) - (weight.T * means).sum(1) / 2
        head = {"head.weight": weight.T.float().contiguous(), "head.bias": bias.float(), "means": means.float()}
        return {**server, **total, **head}

    def sigma(self, total: Tree) -> Tensor:  # (D, D)
        """The covariance, from the server's sums."""
        sums, counts, number = total["sums"], total["counts"], total["counts"].sum()
        if self.covariance == "total":
            around, free = torch.outer(sums.sum(0), sums.sum(0)) / number.clamp(min=1), number - 1
        else:
            rows = sums / counts.clamp(min=1).sqrt()[:, None]  # sqrt(N_c) mu_c
            around, free = rows.T @ rows, number - (counts > 0).sum()
        return (total["gram"] - around) / free.clamp(min=1)

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        means, prior = received["means"], log_share(data.counts)
        known = (means != 0).any(1)  # (C,): nobody has sent samples of the others yet
        bias = -(received["head.weight"] * means).sum(1) / 2  # without the shares of all clients
        model = {**select(received, *MODEL), "head.bias": bias}

        def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
            h = net.features(params, x)
            pull = (h - means[y]).square().mean(1) * known[y]
            return cross_entropy(lambda p, z: linear(p, z) + prior)(params, h, y) + self.lam * pull

        if self.personal_epochs:
            model = fit(model, loss, only=MODEL, epochs=self.personal_epochs)
        return {**model, "prior": prior}

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:
        return linear(params, net.features(params, x))


def linear(params: Tree, features: Tensor) -> Tensor:  # (B, D) -> (B, C)
    """The head with its bias, which the network's own may lack."""
    return F.linear(features, params["head.weight"], params["head.bias"])
