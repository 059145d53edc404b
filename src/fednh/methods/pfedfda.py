"""pFedFDA: Mclaughlin, Su, "Personalized Federated Learning via Feature Distribution Adaptation", NeurIPS 2024.

Features of class c are taken to be Gaussian, N(mu_c, Sigma), with one covariance for all classes. With class shares p
Bayes' rule then gives a linear classifier, w_c = Sigma^-1 mu_c and b_c = log p_c - w_c.mu_c / 2 (`classifier`).

Clients train the body against the classifier of the global Gaussians and their own p      -> client_update
estimate the Gaussians of their own features, and interpolate with the global ones,
    mu = beta mu_local + (1 - beta) mu_global, and Sigma likewise with a beta of its own,
    where both betas are those that predict held-out halves of the client's data best       -> adapted
The server averages body, mu and Sigma                                                     -> aggregate
The personal model is the averaged body with the classifier of the client's own mu, Sigma, p   -> personal_model
The global model has the global Gaussians and p = 1/C                                      -> global_model

From the authors' code: mu starts uniform in [0, 1) and Sigma as the identity; p is smoothed by 1e-4, Sigma shrunk by as
much towards a multiple of the identity; a client's covariance has 1 added to its diagonal (`ridge`); held-out halves
have the same classes.
The samples that decide about beta have trained the body, here as in the authors' code.
Deviations: beta is searched on a grid (authors' code: L-BFGS from 0.5); features are those of the trained body without
augmentation (authors' code: those that it had while training); clients count alike in the average (authors' code: by
size); a class has a mean of its own from one sample on (authors' code: from three on in the personal model, before that
the global one); nothing is added beside the diagonal (authors' code: 1e-4 to every entry).
The server raises eigenvalues of Sigma that no honest mean can have, so that it can be inverted with any `aggregator`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fednh.methods.base import ClientData, Fit, Method, Net, Tree, Uploads, UploadSpec, cross_entropy, select

TIE = 1e-6  # relative: losses this near the smallest count as equal
SMOOTH = 1e-4  # added to class shares, and the weight of the identity in a covariance that is inverted


@dataclass(frozen=True)
class PFedFDA(Method):
    """Gaussian models of every class's features, interpolated between a client and all; they are the classifier."""

    cite = "Mclaughlin & Su, Personalized Federated Learning via Feature Distribution Adaptation, NeurIPS 2024"
    doubles = True
    title = "pFedFDA"
    look = ("#2f8f4e", 13)
    kept_is_trained = False

    grid: Annotated[int, Field(ge=1)] = 10  # beta is one of 0, 1/grid, 2/grid, ..., 1
    single_beta: bool = False  # one beta for means and covariance; false: one for each
    ridge: Annotated[float, Field(gt=0)] = 1.0  # added to the diagonal of a client's covariance

    def passes(self, epochs: float) -> dict[str, float]:
        return {"train.epochs": epochs, "method.grid": self.grid}

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        body = select(net.init(rng), "body")
        means = torch.rand(net.num_classes, net.dim, generator=rng)
        return {**body, "means": means, "covariance": torch.eye(net.dim)}

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        fixed = classifier(received, data.share)
        loss = cross_entropy(lambda params, x: linear(net, {**params, **fixed}, x))
        body = fit(select(received, "body"), loss, only=("body",))
        return {}, {**body, **self.adapted(net, body, received, data)}

    def aggregate(self, server: Tree, uploads: Uploads) -> Tree:
        average = uploads.mean()
        return {**server, **average, "covariance": raised(average["covariance"], self.smallest)}

    @property
    def upload(self) -> UploadSpec:
        return UploadSpec(untrained=("means", "covariance"), problem=self.too_small)

    def too_small(self, upload: Tree) -> str | None:
        """A client's covariance is a mix of one with `ridge` on its diagonal and of the global one."""
        least = float(torch.linalg.eigvalsh(upload["covariance"].double())[0])
        if least < 0.99 * self.smallest:
            return f"the covariance has the eigenvalue {least:.3g}, and none can be less than {self.smallest:g}"
        return None

    def global_model(self, server: Tree) -> Tree:
        return {**select(server, "body"), **classifier(server, torch.ones_like(server["means"][:, 0]))}

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        body = select(received, "body")
        return {**body, **classifier(self.adapted(net, body, received, data), data.share)}

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:
        return linear(net, params, x)

    @property
    def smallest(self) -> float:
        """No eigenvalue of a covariance is smaller: the first one has 1, a client's own has `ridge` or more."""
        return min(1.0, self.ridge)

    @torch.no_grad()
    def adapted(self, net: Net, body: Tree, received: Tree, data: ClientData) -> Tree:
        """The client's `means` and `covariance`: its own, interpolated with those received."""
        batches = [(net.features(body, x), y, weight) for x, y, weight in data.batches()]
        h, y, real = (torch.cat(column) for column in zip(*batches, strict=True))
        member = F.one_hot(y, net.num_classes).to(h.dtype) * real[:, None]  # (n, C); padding is in no class
        half = halves(data.random(1)[0], y, real, data.counts)  # (n,)
        divided = member * (data.counts > 1)  # a class with one sample has no halves
        exact = [value.double() for value in (h, divided, received["means"], received["covariance"], data.share)]
        trials = [self.trial(half == k, *exact) for k in (0, 1)]
        losses = torch.stack([a + b for a, b in zip(*trials, strict=True)])
        tied = losses <= losses.min() * (1 + TIE)  # the first of these, whatever the engine's rounding
        tried = torch.tensor([(b, s) for s, others in self.betas() for b in others]).to(h)
        best = tried[tied.int().argmax()]  # (2,): of the means, of the covariance
        own = self.estimated(h, member, received["means"])
        return {name: mix(best[i], own[name], received[name]) for i, name in enumerate(("means", "covariance"))}

    def betas(self) -> Iterator[tuple[float, list[float]]]:
        """What is tried: of the covariance, and with it of the means; 0 first, which is taken if nothing decides."""
        steps = [i / self.grid for i in range(self.grid + 1)]
        yield from ((s, [s] if self.single_beta else steps) for s in steps)

    def trial(
        self, tested: Tensor, h: Tensor, member: Tensor, means: Tensor, covariance: Tensor, share: Tensor
    ) -> list[Tensor]:  # (n,), (n, D), (n, C), (C, D), (D, D), (C,)
        """For all betas, the mean loss on the samples `tested` with estimates from the others.

        In double precision: neighbouring betas often differ by less than what float32 rounds away.
        """
        train, test = member * ~tested[:, None], member * tested[:, None]
        own, losses = self.estimated(h, train, means), []
        for s, others in self.betas():
            mixed = mix(s, own["covariance"], covariance)
            ends = [weights(each, mixed) for each in (own["means"], means)]
            for b in others:
                weight = mix(b, *ends)  # linear in the means
                scores = F.linear(h, weight, bias(weight, mix(b, own["means"], means), share))
                losses.append(-(scores.log_softmax(1) * test).sum() / test.sum().clamp(min=1))
        return losses

    def estimated(self, h: Tensor, member: Tensor, otherwise: Tensor) -> Tree:  # (n, D), (n, C), (C, D)
        """Class means of the members, `otherwise` where a class has none, and the covariance around them."""
        counts = member.sum(0)  # (C,)
        means = torch.where(counts[:, None] > 0, member.T @ h / counts.clamp(min=1)[:, None], otherwise)
        apart = (h - member @ means) * member.sum(1, keepdim=True)  # (n, D)
        scatter = apart.T @ apart / (counts.sum() - 1).clamp(min=1)
        return {
            "means": means,
            "covariance": scatter + self.ridge * torch.eye(h.shape[1], dtype=h.dtype, device=h.device),
        }


def mix(beta: float | Tensor, own: Tensor, received: Tensor) -> Tensor:
    return beta * own + (1 - beta) * received


def classifier(gaussians: Tree, share: Tensor) -> Tree:  # share: (C,)
    """The linear head that Bayes' rule makes of `means` (C, D) and `covariance` (D, D)."""
    weight = weights(gaussians["means"], gaussians["covariance"])
    return {"head.weight": weight, "head.bias": bias(weight, gaussians["means"], share)}


def weights(means: Tensor, covariance: Tensor) -> Tensor:  # (C, D), (D, D) -> (C, D)
    """w_c = Sigma^-1 mu_c."""
    identity = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    shrunk = (1 - SMOOTH) * covariance + SMOOTH * covariance.diagonal().mean() * identity
    solved: Tensor = torch.linalg.solve(shrunk, means.T)
    return solved.T


def bias(weight: Tensor, means: Tensor, share: Tensor) -> Tensor:  # (C, D), (C, D), (C,) -> (C,)
    """b_c = log p_c - w_c.mu_c / 2, with smoothed shares p."""
    p = share + SMOOTH
    return (p / p.sum()).log() - (weight * means).sum(1) / 2


def linear(net: Net, params: Tree, x: Tensor) -> Tensor:  # (B, ...) -> (B, C)
    """The head with its bias, which the network's own may lack."""
    return F.linear(net.features(params, x), params["head.weight"], params["head.bias"])


def halves(keys: Tensor, y: Tensor, real: Tensor, counts: Tensor) -> Tensor:  # (n,), (n,), (n,), (C,) -> (n,)
    """0 or 1 for each sample: every other one of its class, in the order of the keys."""
    classes = len(counts)
    by_key = keys.argsort(stable=True)
    order = by_key[(y + (1 - real) * classes)[by_key].argsort(stable=True)]  # by class, then by key; padding last
    first = (counts.cumsum(0) - counts)[y]  # where the sample's class starts in that order
    return (order.argsort() - first) % 2


def raised(covariance: Tensor, smallest: float) -> Tensor:  # (D, D) -> (D, D)
    """The nearest symmetric matrix without eigenvalues that are too small; the same one if it has none."""
    symmetric = (covariance + covariance.T) / 2
    values, vectors = torch.linalg.eigh(symmetric)
    fine = bool(values[0] >= 0.99 * smallest)
    return symmetric if fine else (vectors * values.clamp(min=smallest)) @ vectors.T
