"""GPFL: Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan, "GPFL: Simultaneously Learning Global and Personalized Feature
Information for Personalized Federated Learning", ICCV 2023, Algorithm 1.

All clients share an embedding C_c of every class (GCE) and a conditional valve (CoV), which turns features f = f(x) by
a condition into a global and a personal version, Eq. (1) and (2); n_c are the client's class counts of n samples:

    f^G = relu((gamma(g) + 1) * f + beta(g)),    g = mean over classes of C_c
    f^P = relu((gamma(p) + 1) * f + beta(p)),    p = sum_c n_c / n * C_c
    loss = cross-entropy(own head(f^P))
           - log softmax over c of cos(f^G, C_c), at y          angle-level guidance, Eq. (3)
           + lambda ||f^G - C^_y||                              magnitude-level guidance, Eq. (4)
           + mu/2 (||GCE||^2 + ||CoV||^2)                                                           -> client_update

gamma and beta are linear (D -> D), ReLU, LayerNorm. C^, g and p are of the embeddings received and do not move. Body,
GCE and CoV are averaged; heads stay. The global model predicts by the embedding that is nearest to f^G in angle; the
paper has none.
Deviations: the authors' code has g = p = 0 in the first round, and afterwards takes them from the embeddings that the
client trained itself (the text: from those received); its Eq. (4) is one norm over the whole mini-batch, here it is
the mean of the samples' norms. A personal model is the client's latest local one, with the p that it was trained with;
averages are uniform, not by size. lambda and mu are those of the authors' script for CNNs and MLPs; for a ResNet it
has 0.0001 and 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fednh.methods.base import (
    ClientData,
    Fit,
    Method,
    Net,
    Tree,
    cross_entropy,
    select,
    strip_prefix,
    uniform_weights,
    unit,
)

SHARED = ("body", "valve", "embedding")


@dataclass(frozen=True)
class GPFL(Method):
    """Features are guided by shared class embeddings, and turned for the client's own head by what it has of each."""

    cite = "Zhang et al., GPFL: Simultaneously Learning Global and Personalized Feature Information, ICCV 2023"
    look = ("#1e9687", 33)
    model = ("body", "head", "valve", "embedding", "condition")

    lam: Annotated[float, Field(ge=0)] = 0.01  # lambda, magnitude-level guidance
    mu: Annotated[float, Field(ge=0)] = 0.1  # the l2 penalty of embeddings and valve

    def init(self, net: Net, rng: torch.Generator) -> Tree:
        server, dim = net.init(rng), net.dim
        for part in ("gamma", "beta"):
            server |= {
                f"valve.{part}.weight": uniform_weights((dim, dim), dim, rng),
                f"valve.{part}.bias": uniform_weights((dim,), dim, rng),
                f"valve.{part}.gain": torch.ones(dim),  # of the LayerNorm
                f"valve.{part}.shift": torch.zeros(dim),
            }
        return {**server, "embedding": torch.randn(net.num_classes, dim, generator=rng)}

    def enroll(self, initial: Tree) -> Tree:
        return select(initial, "head")

    def broadcast(self, server: Tree) -> Tree:
        return select(server, *SHARED)

    def client_update(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> tuple[Tree, Tree]:
        frozen = received["embedding"]  # (C, D)
        g, p = frozen.mean(0), owned(data.share, frozen)

        def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
            f = net.features(params, x)
            f_g, f_p = valve(params, f, g), valve(params, f, p)
            task = cross_entropy(net.classify)(params, f_p, y)
            angle = cross_entropy(cosines)(params, f_g, y)
            magnitude: Tensor = torch.linalg.vector_norm(f_g - frozen[y], dim=1)
            squares = [value.square().sum() for value in select(params, "valve", "embedding").values()]
            return task + angle + self.lam * magnitude + self.mu / 2 * torch.stack(squares).sum()

        model = fit({**received, **select(kept, "head")}, loss, only=("head", *SHARED))
        return {**select(model, "body", "head", "valve"), "condition": p}, select(model, *SHARED)

    def global_model(self, server: Tree) -> Tree:
        return select(server, *SHARED)

    def personal_model(self, net: Net, kept: Tree, received: Tree, data: ClientData, fit: Fit) -> Tree:
        newcomer = {**received, "condition": owned(data.share, received["embedding"])}
        return select({**newcomer, **kept}, "body", "head", "valve", "condition")

    def logits(self, net: Net, params: Tree, x: Tensor) -> Tensor:
        f = net.features(params, x)
        if "condition" in params:
            return net.classify(params, valve(params, f, params["condition"]))
        return cosines(params, valve(params, f, params["embedding"].mean(0)))


def owned(share: Tensor, embedding: Tensor) -> Tensor:  # (C,), (C, D) -> (D,)
    """p: the mean of the class embeddings by what the client has of each."""
    return (share[:, None] * embedding).sum(0)


def valve(params: Tree, f: Tensor, condition: Tensor) -> Tensor:  # (B, D), (D,) -> (B, D)
    """CoV: features scaled and shifted by what the condition asks for."""

    def asked(part: str) -> Tensor:  # (1, D)
        layer = strip_prefix(params, f"valve.{part}")
        hidden = F.linear(condition[None], layer["weight"], layer["bias"]).relu()
        return F.layer_norm(hidden, hidden.shape[1:], layer["gain"], layer["shift"])

    return F.relu((asked("gamma") + 1) * f + asked("beta"))


def cosines(params: Tree, f: Tensor) -> Tensor:  # (B, D) -> (B, C)
    """Cosines of features to the class embeddings."""
    return unit(f) @ unit(params["embedding"]).T
